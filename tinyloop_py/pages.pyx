"""KV pages: one space of equal pages per part (prelude, coda, core), handed out by index, counted in bytes."""

from libc.stdint cimport int32_t, int64_t, uintptr_t

from libc.string cimport memcpy

from .errors import OutOfMemoryError

cdef int64_t LARGE_NBYTES = 256 << 20  # without a budget, calls that need more look at what the system has free first


cdef class PageSpace:
    """Pages of `page_nbytes` in one address range. A page is its index; kernels find it at base + index * page_nbytes."""

    def __init__(self, AddressRange address_range, int64_t page_nbytes):
        self._range = address_range
        self.page_nbytes = page_nbytes
        self.capacity = min(address_range.nbytes // page_nbytes, 2**31 - 1)
        self.n_used = 0
        self._n_seen = 0
        self._warm = []
        self._cold = []
        self._warm_limit = max(1, address_range.warm_nbytes // page_nbytes)

    @property
    def n_seen(self):
        """Pages handed out at least once: those that may hold memory."""
        return self._n_seen

    @property
    def base(self):
        """Address of page 0."""
        return self._range.pointer

    cdef int32_t take(self) except -1:
        cdef int32_t page
        if self._warm:
            page = self._warm.pop()
        elif self._cold:
            page = self._cold[len(self._cold) - 1]
            self._range.restore(page * self.page_nbytes, self.page_nbytes)
            self._cold.pop()
        else:
            self._range.commit((self._n_seen + 1) * self.page_nbytes)
            page = <int32_t>self._n_seen
            self._n_seen += 1
        self.n_used += 1
        return page

    cdef void give(self, int32_t page) noexcept:
        self.n_used -= 1
        if len(self._warm) < self._warm_limit:
            self._warm.append(page)
        else:
            self.cool(page)

    cdef void cool(self, int32_t page) noexcept:
        """Lets the memory of a free page go."""
        try:
            self._range.discard(page * self.page_nbytes, self.page_nbytes)
        finally:
            self._cold.append(page)

    cdef int64_t warm_nbytes(self) noexcept:
        """Bytes of free pages that keep their memory."""
        return len(self._warm) * self.page_nbytes

    def close(self):
        self._range.close()


cdef class KvStore:
    """All KV memory of one model.

    Parameters
    ----------
    spaces
        The page spaces of prelude, coda and core, then, where operands are kept, of their operands; None for a part without layers.
    budget
        Bytes of pages that may be in use or promised at any time; None for what the system gives.
    free_nbytes
        Called without a budget before a large promise: bytes that the system has free, or None.
    copy
        Called with (to, source, nbytes) to copy a page where pages are no host memory.
    """

    def __init__(self, tuple spaces, budget=None, free_nbytes=None, copy=None):
        self.spaces = spaces
        self.budget = budget
        self._free_nbytes = free_nbytes
        self._copy = copy
        self.closed = False
        self.used_nbytes = 0
        self.peak_nbytes = 0
        self.reserved_nbytes = 0
        self.fault = None
        self.owner = lambda: None

    cdef int64_t page_nbytes(self, int part) noexcept:
        space = self.spaces[part]
        return 0 if space is None else (<PageSpace>space).page_nbytes

    cdef uintptr_t page_pointer(self, int part, int32_t page) noexcept:
        cdef PageSpace space = self.spaces[part]
        return space._range.pointer + page * space.page_nbytes

    cpdef int reserve(self, int64_t nbytes) except -1:
        """Promises `nbytes` of pages to a call; OutOfMemoryError where the budget has no room, with nothing changed."""
        if self.budget is not None and self.used_nbytes + self.reserved_nbytes + nbytes > self.budget:
            held = self.used_nbytes + self.reserved_nbytes
            raise OutOfMemoryError(
                f"out of memory: the call needs {nbytes:,} bytes of KV pages, and {max(0, self.budget - held):,} of the kv_budget of "
                f"{self.budget:,} bytes are free; shorten the call, evict pool entries or raise kv_budget"
            )
        if self.budget is None and nbytes > LARGE_NBYTES and self._free_nbytes is not None:
            free = self._free_nbytes()
            if free is not None and nbytes > free + self.warm_nbytes():
                raise OutOfMemoryError(f"out of memory: the call needs {nbytes:,} bytes of KV pages, and the system has {free:,} bytes free")
        self.reserved_nbytes += nbytes
        return 0

    cdef void unreserve(self, int64_t nbytes) noexcept:
        self.reserved_nbytes -= nbytes

    cdef int32_t take(self, int part) except -1:
        """A page of a part, with unspecified finite content; the caller has reserved its bytes."""
        cdef PageSpace space = self.spaces[part]
        if self.closed:
            raise RuntimeError("tinyloop.Model is closed; its KV cache cannot grow")
        if self.fault is not None:
            self.fault(part)
        cdef int32_t page
        try:
            page = space.take()
        except OutOfMemoryError:
            if not self.warm_nbytes():
                raise
            self.cool()  # what the other parts keep for later calls
            page = space.take()
        self.used_nbytes += space.page_nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        return page

    cdef int64_t warm_nbytes(self) noexcept:
        """Bytes of free pages that keep their memory, of all parts."""
        cdef int64_t n = 0
        for space in self.spaces:
            if space is not None:
                n += (<PageSpace>space).warm_nbytes()
        return n

    cdef void cool(self) noexcept:
        """Lets the memory of all free pages go."""
        cdef PageSpace space
        for each in self.spaces:
            if each is not None:
                space = each
                while space._warm:
                    space.cool(space._warm.pop())

    cdef void give(self, int part, int32_t page) noexcept:
        if self.closed:
            return
        cdef PageSpace space = self.spaces[part]
        space.give(page)
        self.used_nbytes -= space.page_nbytes

    cdef int hold(self, int64_t nbytes) except -1:
        """Counts memory that someone keeps beside the pages (hidden rows); OutOfMemoryError where the budget has no room."""
        if self.closed:
            raise RuntimeError("tinyloop.Model is closed; its KV cache cannot grow")
        if self.fault is not None:
            self.fault(-1)
        self.reserve(nbytes)
        self.unreserve(nbytes)
        self.used_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        return 0

    cdef void let_go(self, int64_t nbytes) noexcept:
        """The counterpart of `hold`."""
        if not self.closed:
            self.used_nbytes -= nbytes

    cdef int copy_page(self, int part, int32_t source, int32_t target) except -1:
        """Copies a whole page; both belong to the caller."""
        if self._copy is not None:
            self._copy(self.page_pointer(part, target), self.page_pointer(part, source), self.page_nbytes(part))
            return 0
        memcpy(<void *>self.page_pointer(part, target), <const void *>self.page_pointer(part, source), self.page_nbytes(part))
        return 0

    def reset_peak(self):
        """Starts `peak_nbytes` again from what is in use."""
        self.peak_nbytes = self.used_nbytes

    def close(self):
        """Gives all memory back; pages still held by anyone are gone with it."""
        if self.closed:
            return
        self.closed = True
        self.used_nbytes = 0
        for space in self.spaces:
            if space is not None:
                space.close()
