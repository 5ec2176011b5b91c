"""Prefix caches and pools out of files."""

import os

from .loaded_model cimport LoadedModel

from .errors import FormatError
from .prefix_cache import PrefixCache
from .saved_pool import load_pool
from .saved_prefixes import load_prefixes


class Restoring:
    """Methods of Model."""

    __slots__ = ()

    def load_prefix_cache(LoadedModel self, path, *, rebuild=False):
        """What `PrefixCache.save` wrote, with the bits that were saved.

        The file must have been saved by a model of the same weights, config, KV mode and `numerics_id`. Nothing changes where
        it is refused.

        Parameters
        ----------
        path : str or path
            The file.
        rebuild : bool
            Where only KV mode or numerics differ (another processor, say), run the file's tokens again instead of refusing it.

        Returns
        -------
        PrefixCache

        Raises
        ------
        FileNotFoundError, FormatError
            There is no such file, or it is damaged or of another format; FormatError is a ValueError.
        ValueError
            It belongs to another model, or exceeds max_seq_len or max_loops; the text says what differs.
        RuntimeError
            The model is closed.
        OutOfMemoryError
            Memory or kv_budget does not suffice; a RuntimeError.
        """
        self.check_open("load_prefix_cache")
        _, prefixes, _ = load_prefixes(self, path, "prefix cache", bool(rebuild))
        if len(prefixes) != 1:
            raise FormatError(f"{os.fsdecode(path)}: a prefix cache's file has one entry, this one has {len(prefixes)}")
        [(tokens, prefix)] = prefixes
        tokens.flags.writeable = False
        return PrefixCache(self, prefix, tokens)

    def load_pool(LoadedModel self, path, *, rebuild=False):
        """A new PrefixPool as `PrefixPool.save` wrote it: arguments, entries, order of eviction, pins, hits and namespaces.

        A page that several entries share is in memory once, as it was. `stats()` starts anew.

        The arguments and errors are those of `load_prefix_cache`.

        Returns
        -------
        PrefixPool
        """
        self.check_open("load_pool")
        return load_pool(self, path, bool(rebuild))
