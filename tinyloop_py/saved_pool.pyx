"""A pool's entries to and from a file: their order, pins, counts and namespaces, and their KV."""

import os

from .loaded_model cimport LoadedModel
from .pool cimport PrefixPool
from .pool_ledger cimport PoolEntry

from .errors import FormatError, PoolFullError
from .saved_prefixes import load_prefixes, save_prefixes

ARGUMENTS = ("capacity", "max_cached_tokens", "max_bytes", "eviction")


def save_pool(PrefixPool pool, path, notes=None):
    """`PrefixPool.save`. `notes` is a text of the caller's that `fill_pool` gives back."""
    cdef PoolEntry entry
    held = list(pool._ledger.order)  # from here on, evictions don't matter: the entries are held
    models = {(<PoolEntry>entry).payload.store.owner() for entry in held}
    if len(models) > 1:
        raise ValueError(f"the pool holds prefixes of {len(models)} models, and a file is for one; save pools of one model each")
    model = models.pop() if models else None
    if held and model is None:
        raise RuntimeError("the model of the pool's prefixes is gone")
    places = [{"namespace": entry.key[3], "pinned": bool(entry.pinned), "hits": entry.hits, "serial": (<PoolEntry>entry).serial} for entry in held]
    prefixes = [(entry.tokens, entry.payload) for entry in held]
    save_prefixes(model, path, "pool", prefixes, places, {name: getattr(pool, name) for name in ARGUMENTS}, notes)


def load_pool(LoadedModel model, path, bint rebuild):
    """`Model.load_pool`."""
    cdef PrefixPool pool
    cdef PoolEntry entry
    contents, prefixes, _ = load_prefixes(model, path, "pool", rebuild)
    try:
        capacity = contents.pool["capacity"]
        pool = PrefixPool(capacity, **{name: contents.pool[name] for name in ARGUMENTS[1:]})
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{os.fsdecode(path)}: the pool's arguments are not valid: {error}") from None
    model._depend(pool)
    entries = {}
    try:
        for i in sorted(range(len(prefixes)), key=lambda i: contents.entries[i].serial):  # as they were registered
            saved, (tokens, prefix) = contents.entries[i], prefixes[i]
            key = model.pool_key("load_pool", saved.loops, saved.cache_window, saved.namespace)
            entry = pool._insert(key, tokens, prefix, saved.pinned)
            entry.hits = saved.hits
            entries[i] = entry
        if pool.size() != len(prefixes):
            raise PoolFullError("one was evicted, or is there twice")
    except PoolFullError as error:
        raise FormatError(f"{os.fsdecode(path)}: the pool's entries do not fit it: {error}") from None
    for i in range(len(prefixes)):  # then as they were used
        pool._touch(entries[i])
    if model.closed:  # meanwhile, by another thread
        pool._drop_model(model.model_key)
        model.check_open("load_pool")
    return pool


def fill_pool(LoadedModel model, path, PrefixPool pool):
    """Adds a file's entries to a pool that has arguments of its own, which may evict some; returns the notes of `save_pool`.

    They are added in the order of their use, with their pins and hits. Raises what `Model.load_pool` does, or PoolFullError
    where pinned entries alone are too many; then the pool has some of them.
    """
    cdef PoolEntry entry
    contents, prefixes, notes = load_prefixes(model, path, "pool", False)
    model._depend(pool)
    for saved, (tokens, prefix) in zip(contents.entries, prefixes):
        entry = pool._insert(model.pool_key("load_pool", saved.loops, saved.cache_window, saved.namespace), tokens, prefix, saved.pinned)
        entry.hits = saved.hits
    if model.closed:  # meanwhile, by another thread
        pool._drop_model(model.model_key)
        model.check_open("load_pool")
    return notes
