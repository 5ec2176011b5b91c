"""Pages of a span between the store and canonical arrays, many at a time."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from .abi cimport TL_BF16, TL_F16, TL_F32, TL_PAGE_POSITIONS, TL_STAGE_CORE, tl_status
from .engine cimport Engine
from .sequence cimport Span

CANONICAL = {TL_F32: ("F32", 4), TL_BF16: ("BF16", 2), TL_F16: ("F16", 2)}


cdef tuple canonical_page(Engine engine, int stage):
    """(safetensors type, shape) of the keys, or of the values, of one page; quantised ones are rows of bytes (tinyloop.h)."""
    cdef uint64_t row
    c = engine.config
    n_layers = (c.n_prelude, c.n_coda, c.n_core)[min(stage, TL_STAGE_CORE)]
    dtype, size = CANONICAL.get(engine.plan.desc.kv_dtype, ("U8", 1))
    engine.plan.context.library.check(engine.plan.context.library.f.plan_row_nbytes(&engine.plan.desc, &row), "sizing KV rows")
    return dtype, (n_layers, c.n_kv_heads, TL_PAGE_POSITIONS, row // size)


cdef int export_pages(Engine engine, Span span, int stage, int first, unsigned char[:, ::1] keys, unsigned char[:, ::1] values) except -1:
    """Copies pages first, first + 1, ... of a stage out, one a row of `keys` and `values`."""
    cdef int i
    cdef int part = min(stage, TL_STAGE_CORE)
    cdef int32_t page
    cdef tl_status status = 0
    with engine._lock:
        engine.check_open()
        for i in range(keys.shape[0]):
            page = span.page(stage, first + i)
            with nogil:
                status = engine.plan.context.library.f.plan_export_page(engine.plan.handle, part, page, &keys[i, 0], &values[i, 0], NULL)
            engine.plan.context.library.check(status, "reading a KV page")
    return 0


cdef int import_pages(
    Engine engine, Span span, int stage, int first, const unsigned char[:, ::1] keys, const unsigned char[:, ::1] values
) except -1:
    """Takes a page for every row of `keys` and `values` and fills it; the caller holds the store's promise of them."""
    cdef int i
    cdef int part = min(stage, TL_STAGE_CORE)
    cdef int64_t nbytes = engine.plan.store.page_nbytes(part)
    cdef int32_t page
    cdef tl_status status = 0
    with engine._lock:
        engine.check_open()
        for i in range(keys.shape[0]):
            page = engine.plan.store.take(part)
            span.pages[(stage - span.first_stage) * span.n_pages + first + i] = page
            span.nbytes += nbytes
            with nogil:
                status = engine.plan.context.library.f.plan_import_page(engine.plan.handle, part, page, &keys[i, 0], &values[i, 0], NULL)
            engine.plan.context.library.check(status, "writing a KV page")
    return 0
