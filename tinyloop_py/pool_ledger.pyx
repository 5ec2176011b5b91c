"""PoolLedger: the entries of a pool in the order of their eviction, what they add up to, and what still fits.

Sums are kept step by step, bytes over the distinct parts of all payloads, so that a part that several entries share counts
once. The ledger decides and counts; the pool acts.
"""

cimport cython
from cpython.list cimport PyList_Insert
from cpython.object cimport Py_TYPE, PyTypeObject
from libc.stdint cimport int32_t, int64_t

from .arguments cimport int_argument
from .prefix_index cimport Prefix

from .errors import PoolFullError

cdef int64_t MAX_PART_NBYTES = 281474976710656  # 256 TiB, so that sums of sizes stay far inside int64


@cython.final
cdef class Part:
    """One object that payloads hold (a span of pages, say) and its size, with the number of resident entries that hold it."""

    def __cinit__(self, owner, int64_t nbytes):
        self.owner = owner
        self.nbytes = nbytes


@cython.final
cdef class PoolEntry(Prefix):
    """A registered prefix and its payload, immutable but for its marks; whoever holds it keeps the payload alive, evicted or not."""

    def __cinit__(self, const int32_t[::1] tokens, tuple key not None, payload, list parts not None):
        cdef Part part
        self.key = key
        self.payload = payload
        self.parts = parts
        for part in parts:
            self.nbytes += part.nbytes


cdef bint _hashes_quietly(object owner):
    """Whether hashing and comparing `owner` runs no Python code: compared by identity, or a plain int or str."""
    cdef type base = object
    cdef PyTypeObject *plain = <PyTypeObject *>base
    cdef PyTypeObject *kind = Py_TYPE(owner)
    if type(owner) is int or type(owner) is str:
        return True
    return kind.tp_hash == plain.tp_hash and kind.tp_richcompare == plain.tp_richcompare


@cython.final
cdef class PoolLedger:
    """Bookkeeping of one pool. From `check_room` on, no method runs Python code or allocates what the garbage collector tracks."""

    def __cinit__(self, Py_ssize_t capacity, Py_ssize_t max_tokens, Py_ssize_t max_nbytes, bint by_use):
        self.capacity = capacity
        self.max_tokens = max_tokens
        self.max_nbytes = max_nbytes
        self.by_use = by_use
        self.order = []
        self._parts = {}

    cdef list new_parts(self, object pairs):
        """A Part for each distinct object among (object, nbytes) pairs, none of them counted yet."""
        cdef dict parts = {}
        cdef Part part, known
        for owner, nbytes in pairs:
            if not _hashes_quietly(owner):
                raise TypeError(f"a part must be compared by identity, or be an int or str; got {type(owner).__name__}")
            part = Part(owner, int_argument(nbytes, "nbytes of a part", 0, MAX_PART_NBYTES))
            known = parts.setdefault(owner, self._parts.get(owner, part))
            if known.nbytes != part.nbytes:
                raise ValueError(f"a part of {known.nbytes} bytes was given again with {part.nbytes} bytes")
            parts[owner] = part
        return list(parts.values())

    cdef int check_room(self, Py_ssize_t n_tokens, list parts, int64_t nbytes) except -1:
        """PoolFullError unless evicting what isn't pinned makes room for `n_tokens`, for `parts` and for `nbytes` beside them."""
        cdef Part part, held
        cdef int64_t alone = nbytes, beside_pinned = nbytes
        for part in parts:
            held = self._parts.get(part.owner)
            alone += part.nbytes
            if held is None or held.n_pinned == 0:
                beside_pinned += part.nbytes
        if n_tokens > self.max_tokens:
            raise PoolFullError(f"a prefix of {n_tokens} tokens exceeds the pool's max_cached_tokens of {self.max_tokens}")
        if alone > self.max_nbytes:
            raise PoolFullError(f"a prefix of {n_tokens} tokens takes {alone} bytes and exceeds the pool's max_bytes of {self.max_nbytes}")
        if self.n_pinned < self.capacity:
            if n_tokens <= self.max_tokens - self.n_pinned_tokens and beside_pinned <= self.max_nbytes - self.pinned_nbytes:
                return 0
        raise PoolFullError(
            f"no room for a prefix of {n_tokens} tokens ({beside_pinned} bytes more): only pinned entries are left to evict "
            f"({self.n_pinned} of them, {self.n_pinned_tokens} tokens, {self.pinned_nbytes} bytes); unpin or discard one, or allow more")

    cdef bint fits(self, Py_ssize_t n_tokens, list parts, int64_t nbytes):
        """Whether the token and byte budgets hold with `n_tokens`, `parts` and `nbytes` beside them added now."""
        cdef Part part
        for part in parts:
            if part.owner not in self._parts:
                nbytes += part.nbytes
        return n_tokens <= self.max_tokens - self.n_tokens and nbytes <= self.max_nbytes - self.nbytes

    cdef PoolEntry victim(self):
        """The next entry to evict: the first in order that isn't pinned; `check_room` made sure of one."""
        cdef PoolEntry entry
        for entry in self.order:
            if not entry.pinned:
                return entry
        raise AssertionError("no entry is left to evict")

    cdef int add(self, PoolEntry entry) except -1:
        """Count a new entry, unpinned, which takes over the parts that others hold already; nothing has changed on an error."""
        cdef Part part, known
        self._clock += 1
        entry.serial = self._clock
        entry.rank = self._clock if self.by_use else entry.n_tokens
        try:
            for i in range(len(entry.parts)):
                part = entry.parts[i]
                known = self._parts.get(part.owner)
                if known is None:
                    self._parts[part.owner] = part  # setdefault in Python 3.13.0 goes on where memory fails
                else:
                    entry.parts[i] = known
            PyList_Insert(self.order, self._n_before(entry), entry)
        except MemoryError:
            for part in entry.parts:
                if part.n_entries == 0 and self._parts.get(part.owner) is part:  # there may be another's, which this one did not reach
                    del self._parts[part.owner]
            raise
        for part in entry.parts:
            if part.n_entries == 0:
                self.nbytes += part.nbytes
            part.n_entries += 1
        self.n_tokens += entry.n_tokens
        entry.resident = True
        return 0

    cdef int remove(self, PoolEntry entry) except -1:
        """Forget a resident entry, which the caller holds."""
        cdef Part part
        del self.order[self._n_before(entry)]
        if entry.pinned:
            self.unpin(entry)
        for part in entry.parts:
            part.n_entries -= 1
            if part.n_entries == 0:
                self.nbytes -= part.nbytes
                del self._parts[part.owner]
        self.n_tokens -= entry.n_tokens
        entry.resident = False
        return 0

    cdef int pin(self, PoolEntry entry) except -1:
        """Keep a resident entry from eviction; nothing where it is pinned."""
        cdef Part part
        if entry.pinned:
            return 0
        entry.pinned = True
        self.n_pinned += 1
        self.n_pinned_tokens += entry.n_tokens
        for part in entry.parts:
            if part.n_pinned == 0:
                self.pinned_nbytes += part.nbytes
            part.n_pinned += 1
        return 0

    cdef int unpin(self, PoolEntry entry) except -1:
        """Let a pinned entry be evicted again."""
        cdef Part part
        entry.pinned = False
        self.n_pinned -= 1
        self.n_pinned_tokens -= entry.n_tokens
        for part in entry.parts:
            part.n_pinned -= 1
            if part.n_pinned == 0:
                self.pinned_nbytes -= part.nbytes
        return 0

    cdef int touch(self, PoolEntry entry) except -1:
        """A resident entry was used: last in order where the order is by use."""
        cdef Py_ssize_t at
        if self.by_use:
            at = self._n_before(entry)
            self.order.append(entry)
            del self.order[at]
            self._clock += 1
            entry.rank = self._clock
        return 0

    cdef Py_ssize_t _n_before(self, PoolEntry entry):
        """How many entries stand before `entry` in the order of eviction: (rank, serial) ascending."""
        cdef Py_ssize_t low = 0, mid, high = len(self.order)
        cdef PoolEntry other
        while low < high:
            mid = (low + high) // 2
            other = self.order[mid]
            if other.rank < entry.rank or (other.rank == entry.rank and other.serial < entry.serial):
                low = mid + 1
            else:
                high = mid
        return low

    def _check(self):
        """Assert that order and sums are what the entries say."""
        cdef PoolEntry entry
        cdef Part part
        held = {}
        for entry in self.order:
            assert entry.resident and entry.nbytes == sum([(<Part>part).nbytes for part in entry.parts])
            for part in entry.parts:
                assert self._parts[part.owner] is part, "two Parts for one object"
                held.setdefault(part.owner, []).append(entry)
        ranks = [((<PoolEntry>entry).rank, (<PoolEntry>entry).serial) for entry in self.order]
        assert ranks == sorted(set(ranks)), "order"
        pinned = [entry for entry in self.order if (<PoolEntry>entry).pinned]
        assert self.n_pinned == len(pinned) and self.n_pinned_tokens == sum([entry.n_tokens for entry in pinned])
        assert self.n_tokens == sum([entry.n_tokens for entry in self.order])
        assert held.keys() == self._parts.keys(), "a part is counted that nobody holds"
        for owner, part in self._parts.items():
            assert part.n_entries == len(held[owner])
            assert part.n_pinned == sum([(<PoolEntry>entry).pinned for entry in held[owner]])
        parts = self._parts.values()
        assert self.nbytes == sum([(<Part>part).nbytes for part in parts])
        assert self.pinned_nbytes == sum([(<Part>part).nbytes for part in parts if (<Part>part).n_pinned])
        assert len(self.order) <= self.capacity and self.n_tokens <= self.max_tokens and self.nbytes <= self.max_nbytes
