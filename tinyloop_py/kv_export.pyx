"""The keys and values of a prefix in the canonical layout, the same for every backend."""

import numpy as np

from .abi cimport TL_BF16, TL_F32, TL_PAGE_POSITIONS, TL_STAGE_CORE
from .engine cimport Engine
from .sequence cimport KvPrefix


def export_kv(Engine engine, KvPrefix prefix):
    """Keys and values of every stage of a prefix.

    Returns
    -------
    dict
        Stage (0 prelude, 1 coda, 2 + loop) -> (first position, keys, values): arrays (n_layers, n_kv_heads, n, head_dim)
        of the KV type (bf16 as uint16) from the first position that is still held on.
    """
    pages = {}
    for span in (*prefix.spans, *(() if prefix.tail is None else (prefix.tail,))):
        for stage, page, index in span.held():
            pages.setdefault(stage, {})[index] = export_page(engine, stage, page)
    out = {}
    for stage, held in pages.items():
        first = min(held)
        keys, values = (np.concatenate([held[i][which] for i in sorted(held)], axis=2) for which in range(2))
        n = prefix.n_tokens - first * TL_PAGE_POSITIONS
        out[stage] = (first * TL_PAGE_POSITIONS, keys[:, :, :n], values[:, :, :n])
    return out


def export_page(Engine engine, int stage, int page):
    """(keys, values) of one page, (n_layers, n_kv_heads, 16, head_dim) each."""
    cdef int part = min(stage, TL_STAGE_CORE)
    c = engine.config
    n_layers = (c.n_prelude, c.n_coda, c.n_core)[part]
    dtype = np.float32 if engine.plan.desc.kv_dtype == TL_F32 else np.uint16 if engine.plan.desc.kv_dtype == TL_BF16 else np.float16
    out = np.empty((2, n_layers, c.n_kv_heads, TL_PAGE_POSITIONS, c.head_dim), dtype)
    cdef unsigned char[::1] view = out.reshape(-1).view(np.uint8)
    cdef size_t half = view.shape[0] // 2
    with engine._lock:
        engine.check_open()
        engine.runner.read_page(part, page, &view[0], &view[half], half)
    return out[0], out[1]
