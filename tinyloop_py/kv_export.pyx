"""The keys and values of a prefix in the canonical layout, the same for every backend."""

import numpy as np

from .abi cimport TL_PAGE_POSITIONS, TL_STAGE_CORE
from .engine cimport Engine
from .kv_prefix cimport KvPrefix, Span
from .kv_transfer cimport canonical_page, export_pages

from .tensor_file import NUMPY_TYPES


def export_kv(Engine engine, KvPrefix prefix):
    """Keys and values of every stage of a prefix; of one that holds operands, as they are rebuilt.

    Returns
    -------
    dict
        Stage (0 prelude, 1 coda, 2 + loop) -> (first position, keys, values): arrays (n_layers, n_kv_heads, n, head_dim)
        of the KV type (bf16 as uint16) from the first position that is still held on; int8 and int4 as the bytes of each
        token's row, which tinyloop.h describes.
    """
    cdef Span span
    prefix = engine.with_kv(prefix)
    pages = {}
    for span in (*prefix.spans, *(() if prefix.tail is None else (prefix.tail,))):
        for stage, _, index in span.held():
            pages.setdefault(stage, {})[index] = export_page(engine, span, stage, index - span.first_page)
    out = {}
    for stage, held in pages.items():
        first = max(held)
        while first - 1 in held:  # before a gap, a shared span holds what no later position reads
            first -= 1
        keys, values = (np.concatenate([held[i][which] for i in range(first, max(held) + 1)], axis=2) for which in range(2))
        n = prefix.n_tokens - first * TL_PAGE_POSITIONS
        out[stage] = (first * TL_PAGE_POSITIONS, keys[:, :, :n], values[:, :, :n])
    return out


cdef list export_page(Engine engine, Span span, int stage, int index):
    """[keys, values] of one page of a span, (n_layers, n_kv_heads, 16, values or bytes of a row) each."""
    page = canonical_page(engine, stage, span.kind)
    arrays = [np.empty((1, *shape), NUMPY_TYPES[dtype]) for dtype, shape in page.values()]
    export_pages(engine, span, stage, index, arrays)
    return [array[0] for array in arrays]


def export_operands(Engine engine, int stage, int page):
    """One page of operands as bytes, as tinyloop.h lays them out."""
    cdef int part = min(stage, TL_STAGE_CORE)
    cdef unsigned char[::1] view
    out = np.empty(engine.plan.store.page_nbytes(part + 3), np.uint8)
    view = out
    with engine._lock:
        engine.check_open()
        engine.runner.read_operands(part, page, &view[0])
    return out


def import_operands(Engine engine, int stage, int page, operands):
    """Writes what `export_operands` gave into a page."""
    cdef int part = min(stage, TL_STAGE_CORE)
    cdef const unsigned char[::1] view = np.ascontiguousarray(operands, np.uint8)
    if view.shape[0] != engine.plan.store.page_nbytes(part + 3):
        raise ValueError(f"the page has {view.shape[0]} bytes, expected {engine.plan.store.page_nbytes(part + 3)}")
    with engine._lock:
        engine.check_open()
        engine.runner.write_operands(part, page, &view[0])
