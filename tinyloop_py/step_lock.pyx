"""StepLock: the lock around one step of a model."""

cimport cython
from cpython.pythread cimport PyThread_get_thread_ident

import threading

from .signals cimport mark_signal


@cython.final
cdef class StepLock:
    """A lock that knows its holder, and raises RuntimeError where that asks for it again.

    A finaliser or a signal's handler may run inside a step and call the model: it would wait for itself.
    """

    def __cinit__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        if self.is_mine():
            raise RuntimeError(
                "the model was called from inside one of its own steps, by a signal's handler or a finaliser; have it note what to do, and call later"
            )
        try:
            self._lock.acquire()
        except BaseException as error:  # a handler's, while another thread holds the lock
            mark_signal(error)
            raise
        self._holder = PyThread_get_thread_ident()

    def __exit__(self, kind, error, trace):
        self._holder = 0
        self._lock.release()

    cdef bint is_mine(self) noexcept:
        """Whether this thread holds it."""
        return self._holder == <unsigned long>PyThread_get_thread_ident()
