"""The keys and values of a prefix in the canonical layout, the same for every backend."""

import numpy as np

from libc.stdint cimport uint64_t

from .abi cimport TL_BF16, TL_F16, TL_F32, TL_PAGE_POSITIONS, TL_STAGE_CORE
from .engine cimport Engine
from .sequence cimport KvPrefix


def export_kv(Engine engine, KvPrefix prefix):
    """Keys and values of every stage of a prefix; of one that holds operands, as they are rebuilt.

    Returns
    -------
    dict
        Stage (0 prelude, 1 coda, 2 + loop) -> (first position, keys, values): arrays (n_layers, n_kv_heads, n, head_dim)
        of the KV type (bf16 as uint16) from the first position that is still held on; int8 and int4 as the bytes of each
        token's row, which tinyloop.h describes.
    """
    prefix = engine.with_kv(prefix)
    pages = {}
    for span in (*prefix.spans, *(() if prefix.tail is None else (prefix.tail,))):
        for stage, page, index in span.held():
            pages.setdefault(stage, {})[index] = export_page(engine, stage, page)
    out = {}
    for stage, held in pages.items():
        first = max(held)
        while first - 1 in held:  # before a gap, a shared span holds what no later position reads
            first -= 1
        keys, values = (np.concatenate([held[i][which] for i in range(first, max(held) + 1)], axis=2) for which in range(2))
        n = prefix.n_tokens - first * TL_PAGE_POSITIONS
        out[stage] = (first * TL_PAGE_POSITIONS, keys[:, :, :n], values[:, :, :n])
    return out


def export_page(Engine engine, int stage, int page):
    """(keys, values) of one page, (n_layers, n_kv_heads, 16, values or bytes of a row) each."""
    cdef uint64_t k_row, v_row
    cdef int part = min(stage, TL_STAGE_CORE)
    c = engine.config
    n_layers = (c.n_prelude, c.n_coda, c.n_core)[part]
    dtype = np.dtype({TL_F32: np.float32, TL_BF16: np.uint16, TL_F16: np.float16}.get(engine.plan.desc.kv_dtype, np.uint8))
    engine.plan.context.library.check(engine.plan.context.library.f.plan_row_nbytes(&engine.plan.desc, &k_row, &v_row), "sizing KV rows")
    keys, values = (np.empty((n_layers, c.n_kv_heads, TL_PAGE_POSITIONS, n // dtype.itemsize), dtype) for n in (k_row, v_row))
    cdef unsigned char[::1] k_bytes = keys.reshape(-1).view(np.uint8)
    cdef unsigned char[::1] v_bytes = values.reshape(-1).view(np.uint8)
    with engine._lock:
        engine.check_open()
        engine.runner.read_page(part, page, &k_bytes[0], &v_bytes[0])
    return keys, values


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
