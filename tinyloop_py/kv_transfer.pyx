"""Pages of a span between the store and canonical arrays, many at a time."""

import numpy as np

from libc.stdint cimport int32_t, uint64_t

from .abi cimport TL_BF16, TL_F16, TL_F32, TL_PAGE_POSITIONS, TL_STAGE_CORE, tl_plan, tl_status
from .engine cimport Engine
from .library cimport Library
from .sequence cimport PAGES_OPERANDS, Span

CANONICAL = {TL_F32: ("F32", 4), TL_BF16: ("BF16", 2), TL_F16: ("F16", 2)}


cdef dict canonical_page(Engine engine, int stage):
    """What a page of a stage is made of: name -> (safetensors type, shape), as tinyloop.h lays it out.

    Keys and values of a float type are values, quantised ones rows of bytes. In h mode what is held is operands, bytes.
    """
    cdef uint64_t k_row, v_row
    cdef int part = min(stage, TL_STAGE_CORE)
    c = engine.config
    if engine.plan.keeps_operands:
        return {"operands": ("U8", (engine.plan.store.page_nbytes(part + 3),))}
    dtype, size = CANONICAL.get(engine.plan.desc.kv_dtype, ("U8", 1))
    engine.plan.context.library.check(engine.plan.context.library.f.plan_row_nbytes(&engine.plan.desc, &k_row, &v_row), "sizing KV rows")
    shape = ((c.n_prelude, c.n_coda, c.n_core)[part], c.n_kv_heads, TL_PAGE_POSITIONS)
    return {"keys": (dtype, (*shape, k_row // size)), "values": (dtype, (*shape, v_row // size))}


cdef int export_pages(Engine engine, Span span, int stage, int first, list arrays) except -1:
    """Copies pages first, first + 1, ... of a stage out, one a row of the arrays: one for each name of `canonical_page`."""
    cdef unsigned char[:, ::1] a = as_bytes(arrays[0]), b = as_bytes(arrays[len(arrays) - 1])
    cdef Library library = engine.plan.context.library
    cdef tl_plan *plan
    cdef int i, part = min(stage, TL_STAGE_CORE)
    cdef bint operands = span.kind == PAGES_OPERANDS
    cdef int32_t page
    cdef tl_status status
    with engine._lock:
        engine.check_open()
        plan = engine.plan.handle
        for i in range(a.shape[0]):
            page = span.page(stage, first + i)
            with nogil:
                if operands:
                    status = library.f.plan_export_operands(plan, part, page, &a[i, 0], NULL)
                else:
                    status = library.f.plan_export_page(plan, part, page, &a[i, 0], &b[i, 0], NULL)
            library.check(status, "reading a KV page")
    return 0


cdef int import_pages(Engine engine, Span span, int stage, int first, list arrays) except -1:
    """Takes a page for every row of the arrays and fills it; the caller holds the store's promise of them."""
    cdef const unsigned char[:, ::1] a = as_bytes(arrays[0]), b = as_bytes(arrays[len(arrays) - 1])
    cdef Library library = engine.plan.context.library
    cdef tl_plan *plan
    cdef int i, part = min(stage, TL_STAGE_CORE)
    cdef bint operands = span.kind == PAGES_OPERANDS
    cdef int space = part + 3 * span.kind
    cdef int32_t page
    cdef tl_status status
    with engine._lock:
        engine.check_open()
        plan = engine.plan.handle
        for i in range(a.shape[0]):
            page = engine.plan.store.take(space)
            span.pages[(stage - span.first_stage) * span.n_pages + first + i] = page
            span.nbytes += engine.plan.store.page_nbytes(space)
            with nogil:
                if operands:
                    status = library.f.plan_import_operands(plan, part, page, &a[i, 0], NULL)
                else:
                    status = library.f.plan_import_page(plan, part, page, &a[i, 0], &b[i, 0], NULL)
            library.check(status, "writing a KV page")
    return 0


cdef object as_bytes(object pages):
    return pages.reshape(len(pages), -1).view(np.uint8)
