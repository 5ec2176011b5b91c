"""Hidden rows: the x of every token of a prompt at one loop boundary, from which further loops go on.

They lie in one run of the backend's memory, not in pages: a step reads the rows of its tokens as they lie, and a prompt's rows
come and go as a whole.
"""

cimport cython
from libc.stdint cimport int64_t

from .abi cimport tl_batch
from .context cimport Context
from .memory cimport Buffer
from .pages cimport KvStore


@cython.final
@cython.no_gc_clear  # the store must outlive the rows
cdef class HiddenRows:
    """Float32 rows of `n_tokens` tokens, counted by the store like its pages.

    Parameters
    ----------
    with_e
        Keep the prelude's output too: where loops inject it and the prelude has layers. Without layers it is a look-up in
        the embedding, done again in no time; else the prelude would have to run again, and write keys that others read.
    e
        Rows to share instead of own ones.
    """

    def __cinit__(self, Context context, KvStore store, int n_tokens, int dim, bint with_e=False, Buffer e=None):
        cdef int64_t one = <int64_t>n_tokens * dim * 4
        self.store = store
        self.n_tokens = n_tokens
        self.dim = dim
        self.nbytes = one * 2 if with_e and e is None else one
        store.hold(self.nbytes)
        self._counted = True
        self.x = context.alloc(one, "the hidden rows of a resume handle")
        self.e = context.alloc(one, "the hidden rows of a resume handle") if with_e and e is None else e

    def __dealloc__(self):
        if self._counted:
            self.store.let_go(self.nbytes)

    cdef void write(self, tl_batch *want, int first) noexcept:
        """Has a step whose first row is token `first` leave its rows here."""
        cdef int64_t at = <int64_t>first * self.dim
        want.x_out = <float *>self.x.pointer + at
        if self.e is not None:
            want.e_out = <float *>self.e.pointer + at

    cdef void read(self, tl_batch *want, int first) noexcept:
        """Has a step whose first row is token `first` go on from here."""
        cdef int64_t at = <int64_t>first * self.dim
        want.x_in = <const float *>self.x.pointer + at
        if self.e is not None:
            want.e_in = <const float *>self.e.pointer + at
