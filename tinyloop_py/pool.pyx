"""PrefixPool: which registered prefix a prompt starts with, and which one goes when room is short.

It knows no device: a model puts payloads in and takes them by reference. Threads: every change is made in one stretch that
neither runs Python code nor allocates what the garbage collector tracks, so the interpreter's lock (GIL) is never given up
and no finaliser runs inside it; what a change lets go is freed after it. So no lock of its own, and nothing to deadlock on
when freeing a payload calls back into the pool.
"""

cimport cython
from cpython.ref cimport Py_REFCNT
from libc.stdint cimport int32_t, int64_t

from .arguments cimport int_argument
from .pool_client cimport PoolClient, as_client
from .pool_ledger cimport PoolEntry, PoolLedger
from .prefix_index cimport PrefixIndex
from .tokens cimport as_tokens

import sys

from .errors import PoolFullError
from .pool_report import PoolStats, PrefixEntry


@cython.final
cdef class PrefixPool:
    """PrefixPool(capacity=16, *, max_cached_tokens=None, max_bytes=None, eviction="shortest")\n--\n
    Prefixes with ready caches; a prompt continues from the longest one that it starts with.

    Making a pool allocates no KV memory; `Model.register_prefix` does. An entry matches only calls of the model that built
    it, with the same loops, cache_window and namespace.

    Parameters
    ----------
    capacity : int
        Most entries held; 0 is taken as 1. A further prefix evicts the next entry in the order of `eviction`.
    max_cached_tokens : int, optional
        Most tokens held, over all entries.
    max_bytes : int, optional
        Most bytes held; a page that several entries share counts once.
    eviction : {"shortest", "lru"}
        What goes first: the shortest entry (of equals the oldest), or the one that was registered or hit least recently.
        Pinned entries never go.

    Raises
    ------
    TypeError, ValueError
        An argument is not of that kind or out of range.
    """

    def __cinit__(self, capacity=16, *, max_cached_tokens=None, max_bytes=None, eviction="shortest"):
        if not isinstance(eviction, str):
            raise TypeError(f"eviction must be a str, got {type(eviction).__name__}")
        if eviction not in ("shortest", "lru"):
            raise ValueError(f"eviction must be 'shortest' or 'lru', got {eviction!r}")
        self._ledger = PoolLedger(
            max(int_argument(capacity, "capacity", 0, sys.maxsize), 1),
            sys.maxsize if max_cached_tokens is None else int_argument(max_cached_tokens, "max_cached_tokens", 1, sys.maxsize),
            sys.maxsize if max_bytes is None else int_argument(max_bytes, "max_bytes", 1, sys.maxsize),
            eviction == "lru")
        self._indexes = {}

    def __len__(self):
        return len(self._ledger.order)

    def __bool__(self):
        return True  # an empty pool is still a pool

    def __reduce_ex__(self, protocol):
        raise TypeError("a tinyloop.PrefixPool can't be copied or pickled; save writes it into a file that Model.load_pool takes")

    def __repr__(self):
        return (f"PrefixPool(capacity={self.capacity}, size={self.size()}, total_cached_tokens={self.total_cached_tokens()}, "
                f"nbytes={self.nbytes}, eviction={self.eviction!r})")

    @property
    def capacity(self):
        """Most entries held."""
        return self._ledger.capacity

    @property
    def max_cached_tokens(self):
        """Most tokens held, or None."""
        return None if self._ledger.max_tokens == sys.maxsize else self._ledger.max_tokens

    @property
    def max_bytes(self):
        """Most bytes held, or None."""
        return None if self._ledger.max_nbytes == sys.maxsize else self._ledger.max_nbytes

    @property
    def eviction(self):
        """"shortest" or "lru"."""
        return "lru" if self._ledger.by_use else "shortest"

    @property
    def nbytes(self):
        """Bytes of all payloads; what several entries share counts once."""
        return self._ledger.nbytes

    def size(self):
        """Number of entries."""
        return len(self._ledger.order)

    def total_cached_tokens(self):
        """Sum of the lengths of all entries, in tokens."""
        return self._ledger.n_tokens

    def match(self, model, prompt, loops=None, cache_window=0, *, namespace=None):
        """How many tokens of a prompt the pool would serve, without side effect.

        Parameters
        ----------
        model : Model
            Open; only its own entries match.
        prompt : 1-D integer buffer or sequence
            Token ids; int32 arrays are read without a copy.
        loops : int, optional
            Depth of the call, the model's default for None.
        cache_window : int
            Window of the call, 0 for none.
        namespace : str, optional
            Only entries registered under the same one match; None is one.

        Returns
        -------
        int
            Length of the longest entry that `prompt` starts with, 0 for none.

        Raises
        ------
        RuntimeError
            The model is closed.
        TypeError, ValueError
            An argument is not of that kind or out of range.
        """
        cdef PoolClient client = as_client(model)
        cdef tuple key = client.pool_key("match", loops, cache_window, namespace)
        cdef PoolEntry entry = self._find(key, as_tokens(prompt, "prompt"))
        return 0 if entry is None else entry.n_tokens

    def discard(self, model, tokens, loops=None, cache_window=0, *, namespace=None):
        """Remove exactly this entry, pinned or not, and say whether it was there; arguments as in `match`."""
        cdef PoolClient client = as_client(model)
        cdef list dropped = []
        cdef tuple key = client.pool_key("discard", loops, cache_window, namespace)
        cdef PoolEntry entry = self._get(key, as_tokens(tokens))
        if entry is None:
            return False
        self._remove(entry, dropped)
        return True

    def unpin(self, model, tokens, loops=None, cache_window=0, *, namespace=None):
        """Let exactly this entry be evicted again, and say whether it was there and pinned; arguments as in `match`."""
        cdef PoolClient client = as_client(model)
        cdef tuple key = client.pool_key("unpin", loops, cache_window, namespace)
        cdef PoolEntry entry = self._get(key, as_tokens(tokens))
        if entry is None or not entry.pinned:
            return False
        self._ledger.unpin(entry)
        return True

    def clear(self):
        """Remove all entries, pinned ones too; the counts of `stats` go on."""
        self._remove_all(list(self._ledger.order))

    def entries(self):
        """What is registered: a list of PrefixEntry, longest first, of equals the oldest first."""
        cdef PoolEntry entry
        listed = [(-(<PoolEntry>entry).n_tokens, (<PoolEntry>entry).serial, entry) for entry in list(self._ledger.order)]
        return [
            PrefixEntry(entry.n_tokens, entry.tokens, *entry.key[1:], entry.pinned, entry.hits, entry.nbytes)
            for _, _, entry in sorted(listed)
        ]

    def stats(self):
        """What happened since the pool was made, as PoolStats."""
        return PoolStats(**self._counts)

    def save(self, path):
        """Write all entries into a file that `Model.load_pool` takes back, in another process too.

        Arguments, order of eviction, pins, hits and namespaces are kept; pages that entries share are written once. The file
        takes its name when it is complete. Calls may go on meanwhile.

        Raises
        ------
        ValueError
            The entries belong to several models.
        OSError, RuntimeError
            The file can't be written, or the model was closed.
        """
        from .saved_pool import save_pool

        save_pool(self, path)

    # What a model calls. A key is PoolClient.pool_key(...); a payload has parts() -> (object, nbytes) pairs, where an object is
    # compared by identity or is an int or str, and an object that several payloads hold is held once.

    cpdef PoolEntry _find(self, tuple key, const int32_t[::1] tokens):
        """The longest entry under `key` that `tokens` start with, or None; no side effect."""
        cdef PrefixIndex index = self._indexes.get(key)
        if index is None or tokens.shape[0] == 0:
            return None
        return <PoolEntry>index.c_find(&tokens[0], tokens.shape[0])

    cpdef PoolEntry _get(self, tuple key, const int32_t[::1] tokens):
        """The entry under `key` of exactly `tokens`, or None; no side effect."""
        entry = self._find(key, tokens)
        return entry if entry is not None and entry.n_tokens == tokens.shape[0] else None

    cpdef _plan(self, Py_ssize_t n_tokens, int64_t nbytes, object shared=()):
        """Before a prefix is built: refuse it, or make the room that the token and byte budgets demand.

        What the build takes over from an entry must be held by the caller, as that entry may be evicted here.

        Parameters
        ----------
        n_tokens : int
            Its length.
        nbytes : int
            Bytes that the build is going to add.
        shared : pairs of (object, nbytes)
            Parts, as a payload names them, that it will take over from an entry it extends.

        Raises
        ------
        PoolFullError
            It never fits, or only pinned entries are left to evict. Nothing changed but `stats().refusals`.
        """
        cdef list dropped = []
        cdef list parts = self._ledger.new_parts(shared)
        self._check_room(n_tokens, parts, nbytes)
        self._make_room(n_tokens, parts, nbytes, False, dropped)

    cpdef PoolEntry _insert(self, tuple key, const int32_t[::1] tokens, object payload, bint pin=False):
        """Register a built prefix (`tokens` are copied), evicting what capacity and budgets demand now.

        Returns its entry, or the one that another thread registered meanwhile. Raises PoolFullError as `_plan` does.
        """
        cdef list dropped = []
        cdef PoolEntry existing, entry = PoolEntry(tokens, key, payload, self._ledger.new_parts(payload.parts()))
        cdef PrefixIndex index = PrefixIndex()
        index = self._indexes.get(key, index)
        existing = <PoolEntry>index.c_get(entry.ids, entry.n_tokens)
        if existing is not None:
            self._touch(existing, pin)
            return existing
        self._check_room(entry.n_tokens, entry.parts, 0)
        self._make_room(entry.n_tokens, entry.parts, 0, True, dropped)
        index.c_add(entry)
        try:
            self._indexes[key] = index  # its last entry may have been a victim
            self._ledger.add(entry)
        except MemoryError:
            self._unindex(index, entry)
            raise
        if pin:
            self._ledger.pin(entry)
        self._counts.insertions += 1
        return entry

    cpdef bint _touch(self, PoolEntry entry, bint pin=False) except -1:
        """Registered again: refresh its recency under "lru", pin it if asked. False where it has left the pool."""
        if entry is None or not entry.resident:
            return False
        self._ledger.touch(entry)
        if pin:
            self._ledger.pin(entry)
        return True

    cpdef _record(self, PoolEntry entry, Py_ssize_t prompt_len, Py_ssize_t n_prefilled):
        """Count one query that was used: `entry` is what the call continued from (None: a miss), which refreshes its recency."""
        self._counts.queries += 1
        self._counts.prefilled_tokens += n_prefilled
        if entry is None:
            self._counts.misses += 1
            return
        entry.hits += 1
        self._counts.hits += 1
        self._counts.full_hits += entry.n_tokens == prompt_len
        self._counts.matched_tokens += entry.n_tokens
        self._touch(entry)

    cpdef _record_fallback(self):
        """Count a hit that failed while it was prepared; the plain generate after it is recorded as a miss."""
        self._counts.fallbacks += 1

    cpdef bint _evict_idle(self, object model_key) except -1:
        """Evict a model's least recently used entry that is neither pinned nor held by a call.

        False where there is none, and always under "shortest", where only capacity and budgets evict.
        """
        cdef list dropped = []
        cdef PoolEntry entry
        if not self._ledger.by_use:
            return False
        for entry in self._ledger.order:
            # Nobody uses it: the ledger, its index and this loop hold the only references.
            if not entry.pinned and entry.key[0] is model_key and Py_REFCNT(entry) == 3:
                self._remove(entry, dropped)
                self._counts.evictions += 1
                return True
        return False

    cpdef _drop_model(self, object model_key):
        """Remove all entries of a model that closes."""
        cdef PoolEntry entry
        dropped = [entry for entry in list(self._ledger.order) if (<PoolEntry>entry).key[0] is model_key]
        self._remove_all(dropped)

    cdef int _check_room(self, Py_ssize_t n_tokens, list parts, int64_t nbytes) except -1:
        try:
            return self._ledger.check_room(n_tokens, parts, nbytes)
        except PoolFullError:
            self._counts.refusals += 1
            raise

    cdef int _make_room(self, Py_ssize_t n_tokens, list parts, int64_t nbytes, bint for_entry, list dropped) except -1:
        """Evict in order until the budgets hold with these, and for an entry capacity too; `check_room` said that it is possible."""
        cdef PoolLedger ledger = self._ledger
        while not ledger.fits(n_tokens, parts, nbytes) or (for_entry and len(ledger.order) >= ledger.capacity):
            self._remove(ledger.victim(), dropped)
            self._counts.evictions += 1
        return 0

    cdef int _remove_all(self, list entries) except -1:
        cdef PoolEntry entry
        cdef list dropped = []
        for entry in entries:
            if entry.resident:  # a finaliser may have removed it since the list was made
                self._remove(entry, dropped)
        return 0

    cdef int _remove(self, PoolEntry entry, list dropped) except -1:
        """Take an entry out; `dropped` keeps it until the caller is done, as freeing its payload may run anything."""
        dropped.append(entry)
        self._ledger.remove(entry)
        self._unindex(self._indexes[entry.key], entry)
        return 0

    cdef int _unindex(self, PrefixIndex index, PoolEntry entry) except -1:
        index.c_remove(entry)
        if index.c_size() == 0:
            self._indexes.pop(entry.key, None)
        return 0

    def _check(self):
        """Assert the invariants of the pool and its parts."""
        cdef PoolEntry entry
        self._ledger._check()
        stored = []
        for key, index in self._indexes.items():
            index._check()
            assert len(index) > 0, "an empty index stays"
            stored += [(key, id(prefix)) for prefix in (<PrefixIndex>index)._stored]
        listed = [((<PoolEntry>entry).key, id(entry)) for entry in self._ledger.order]
        assert len(stored) == len(listed) and set(stored) == set(listed), "indexes and ledger disagree"
