"""Pages of a span between the store and canonical arrays, many at a time."""

import numpy as np

from libc.stdint cimport int32_t, uint64_t

from .abi cimport TL_BF16, TL_F16, TL_F32, TL_PAGE_POSITIONS, TL_STAGE_CORE
from .engine cimport Engine
from .kv_prefix cimport PAGES_OPERANDS, Span

CANONICAL = {TL_F32: ("F32", 4), TL_BF16: ("BF16", 2), TL_F16: ("F16", 2)}


cdef dict canonical_page(Engine engine, int stage, int kind):
    """What a page of a stage is made of: name -> (safetensors type, shape), as tinyloop.h lays it out.

    Keys and values of a float type are values, quantised ones rows of bytes; operands are bytes.
    """
    cdef uint64_t k_row, v_row
    cdef int part = min(stage, TL_STAGE_CORE)
    c = engine.config
    if kind == PAGES_OPERANDS:
        return {"operands": ("U8", (engine.plan.store.page_nbytes(part + 3),))}
    dtype, size = CANONICAL.get(engine.plan.desc.kv_dtype, ("U8", 1))
    engine.plan.context.library.check(engine.plan.context.library.f.plan_row_nbytes(&engine.plan.desc, &k_row, &v_row), "sizing KV rows")
    shape = ((c.n_prelude, c.n_coda, c.n_core)[part], c.n_kv_heads, TL_PAGE_POSITIONS)
    return {"keys": (dtype, (*shape, k_row // size)), "values": (dtype, (*shape, v_row // size))}


cdef int export_pages(Engine engine, Span span, int stage, int first, list arrays) except -1:
    """Copies pages first, first + 1, ... of a stage out, one a row of the arrays: one for each name of `canonical_page`."""
    cdef unsigned char[:, ::1] a = as_bytes(arrays[0]), b = as_bytes(arrays[len(arrays) - 1])
    cdef int i, part = min(stage, TL_STAGE_CORE)
    with engine._lock:
        engine.check_open()
        for i in range(a.shape[0]):
            if span.kind == PAGES_OPERANDS:
                engine.runner.read_operands(part, span.page(stage, first + i), &a[i, 0])
            else:
                engine.runner.read_page(part, span.page(stage, first + i), &a[i, 0], &b[i, 0])
    return 0


cdef int import_pages(Engine engine, Span span, int stage, int first, list arrays) except -1:
    """Takes a page for every row of the arrays and fills it; the caller holds the store's promise of them."""
    cdef const unsigned char[:, ::1] a = as_bytes(arrays[0]), b = as_bytes(arrays[len(arrays) - 1])
    cdef int i, part = min(stage, TL_STAGE_CORE)
    cdef int space = part + 3 * span.kind
    cdef int32_t page
    with engine._lock:
        engine.check_open()
        for i in range(a.shape[0]):
            page = engine.plan.store.take(space)
            span.pages[(stage - span.first_stage) * span.n_pages + first + i] = page
            span.nbytes += engine.plan.store.page_nbytes(space)
            if span.kind == PAGES_OPERANDS:
                engine.runner.write_operands(part, page, &a[i, 0])
            else:
                engine.runner.write_page(part, page, &a[i, 0], &b[i, 0])
    return 0


cdef object as_bytes(object pages):
    return pages.reshape(len(pages), -1).view(np.uint8)
