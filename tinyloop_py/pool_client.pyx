"""PoolClient: what a prefix pool has to know of a model, so that it can name the model's entries and no others."""

from cpython.number cimport PyNumber_Index
from cpython.unicode cimport PyUnicode_FromObject
from libc.stdint cimport INT32_MAX

from .arguments cimport int_argument


cdef class PoolClient:
    """Base class of Model: its identity in pools, and the depths that it accepts.

    `model_key` is a new object for every instance, so the entries of a closed and reopened model never match again.
    """

    def __cinit__(self, *args, **kwargs):
        self.model_key = object()

    def __init__(self, default_loops, max_loops):
        self.default_loops = default_loops
        self.max_loops = max_loops

    def close(self):
        """Refuse calls from now on; closing again does nothing."""
        self.closed = True

    cdef int check_open(self, str method) except -1:
        if self.closed:
            raise RuntimeError(f"tinyloop.Model is closed; cannot call {method}")
        return 0

    cdef tuple pool_key(self, str method, object loops, object cache_window, object namespace):
        """(model_key, loops, cache_window, namespace): what an entry must equal besides its tokens.

        The parts are plain objects, exact str and int, so that hashing the key runs no foreign code.

        Raises
        ------
        RuntimeError
            The model is closed; the text names `method`.
        TypeError, ValueError
            `loops` (None is the model's default), `cache_window` or `namespace` isn't valid.
        """
        cdef Py_ssize_t depth = self.default_loops
        cdef Py_ssize_t window
        self.check_open(method)
        if loops is not None:
            depth = depth_argument(loops, self.max_loops)
        window = int_argument(cache_window, "cache_window", 0, INT32_MAX)
        if namespace is not None and type(namespace) is not str:
            if not isinstance(namespace, str):
                raise TypeError(f"namespace must be a str or None, got {type(namespace).__name__}")
            namespace = PyUnicode_FromObject(namespace)
        return (self.model_key, depth, window, namespace)

    def _pool_key(self, loops=None, cache_window=0, namespace=None):
        """`pool_key` for callers in Python."""
        return self.pool_key("_pool_key", loops, cache_window, namespace)


cdef Py_ssize_t depth_argument(object loops, Py_ssize_t max_loops) except -1:
    """`loops` as a C integer; the error of one that is too deep says where the bound comes from."""
    try:
        return int_argument(loops, "loops", 1, max_loops)
    except ValueError as error:
        if PyNumber_Index(loops) < 1:
            raise
        raise ValueError(f"{error}; the model file's max_loops is {max_loops}") from None


cdef PoolClient as_client(object model):
    """`model` as a PoolClient; TypeError for another kind of object."""
    if not isinstance(model, PoolClient):
        raise TypeError(f"model must be a tinyloop.Model, got {type(model).__name__}")
    return <PoolClient>model
