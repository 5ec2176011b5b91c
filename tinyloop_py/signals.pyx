"""Signals inside a call: what a handler raises is told apart from a failure of the work that it came in on."""

from cpython.exc cimport PyErr_CheckSignals

from .errors import BackendError, OutOfMemoryError

cdef tuple FAILURES = (OutOfMemoryError, BackendError, MemoryError)


cdef int check_signals() except -1:
    """Raises what a signal's handler raises."""
    try:
        PyErr_CheckSignals()
    except BaseException as error:
        mark_signal(error)
        raise
    return 0


cdef int mark_signal(BaseException error) except -1:
    """Has `is_failure` know an exception for a handler's."""
    try:
        error._tinyloop_signal = True
    except Exception:  # of a class that takes no attributes
        pass
    return 0


cdef bint is_failure(BaseException error) except -1:
    """Whether work failed: memory or the backend did, and it is not what a handler raised.

    A handler may also raise where Python code runs inside a call (CUDA's bindings are such), unmarked; so all other kinds count as a handler's.
    """
    return isinstance(error, FAILURES) and not getattr(error, "_tinyloop_signal", False)
