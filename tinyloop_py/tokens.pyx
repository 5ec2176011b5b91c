"""Token ids: any 1-D integer buffer or sequence as contiguous int32, and how two of them compare."""

from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.number cimport PyIndex_Check, PyNumber_Index
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, uint32_t
from libc.string cimport memcmp, memcpy

import numpy as np

# Tokens per step. A constant count lets the compiler vectorise the inner loop; memcmp is wider still, but a call.
cdef enum:
    N_STEP = 32
    N_MEMCMP = 256


cpdef const int32_t[::1] as_tokens(object obj, str name="tokens"):
    """Token ids as a contiguous int32 view.

    Parameters
    ----------
    obj : 1-D integer buffer or array, or a sequence of Python or NumPy integers
        A contiguous native int32 buffer (read-only too) is viewed, not copied; anything else is converted.
    name : str
        What an error calls `obj`.

    Returns
    -------
    memoryview of int32, shape (n_tokens,); read-only in Cython

    Raises
    ------
    TypeError
        Not integers: float, bool, text, bytes or other objects.
    ValueError
        Not one-dimensional, or an id outside int32.
    """
    cdef const int32_t[::1] view
    if obj is None:  # Cython takes None for a view
        raise TypeError(f"{name} must be a 1-D buffer or sequence of integers, got None")
    try:
        view = obj
    except (TypeError, ValueError, BufferError):
        view = _converted(obj, name)
    return view


cdef const int32_t[::1] own_tokens(object obj, str name):
    """`as_tokens` as a copy, which no one else can change while a call runs on it."""
    cdef const int32_t[::1] view = as_tokens(obj, name)
    cdef int32_t[::1] own = np.empty(view.shape[0], np.int32)
    if view.shape[0] > 0:
        memcpy(&own[0], &view[0], view.shape[0] * sizeof(int32_t))
    return own


cdef object _converted(object obj, str name):
    """A new int32 array with the ids of `obj`, which isn't a contiguous int32 buffer."""
    if isinstance(obj, (str, bytes, bytearray)):
        raise TypeError(f"{name} must be token ids (integers), got {type(obj).__name__}; encode text with a tokenizer first")
    if isinstance(obj, (list, tuple, range)):
        return _from_integers(obj, name)
    if hasattr(obj, "__array__") or _has_buffer(obj):
        return _from_array(np.asarray(obj), name)
    if hasattr(obj, "__len__") and hasattr(obj, "__getitem__") and not isinstance(obj, dict):
        return _from_integers(list(obj), name)
    raise TypeError(f"{name} must be a 1-D buffer or sequence of integers, got {type(obj).__name__}")


cdef bint _has_buffer(object obj):
    try:
        memoryview(obj)
    except TypeError:
        return False
    return True


cdef object _from_array(object array, str name):
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must have an integer dtype, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    wide = array.dtype.itemsize >= 4 and array.dtype.newbyteorder("=") != np.int32
    if wide and array.size and not (INT32_MIN <= array.min() and array.max() <= INT32_MAX):
        index = int(np.argmax((array < INT32_MIN) | (array > INT32_MAX)))
        raise ValueError(f"{name}[{index}] must fit int32, got {array[index]}")
    return np.ascontiguousarray(array, dtype=np.int32)


cdef object _from_integers(object items, str name):
    cdef Py_ssize_t i, n
    cdef int overflow = 0
    cdef long long value
    if isinstance(items, range) and abs(items.stop - items.start) // abs(items.step) > INT32_MAX:  # more than could be listed
        raise ValueError(f"{name} has more tokens than any model takes")
    items = tuple(items)  # an item's __index__ may change a list, and a subclass may misstate its length
    n = len(items)
    out = np.empty(n, dtype=np.int32)
    cdef int32_t[::1] ids = out
    for i in range(n):
        item = items[i]
        if type(item) is not int:
            if isinstance(item, (list, tuple)) or getattr(item, "ndim", 0):
                raise ValueError(f"{name} must be one-dimensional, got a {type(item).__name__} at index {i}")
            if isinstance(item, (bool, np.bool_)) or not PyIndex_Check(item):
                raise TypeError(f"{name} must hold integers, got {type(item).__name__} at index {i}")
            item = PyNumber_Index(item)
        value = PyLong_AsLongLongAndOverflow(item, &overflow)
        if overflow or not INT32_MIN <= value <= INT32_MAX:
            raise ValueError(f"{name}[{i}] must fit int32, got {item}")
        ids[i] = <int32_t>value
    return out


def common_prefix_len(const int32_t[::1] a not None, const int32_t[::1] b not None):
    """How many leading tokens of `a` and `b` are equal."""
    cdef Py_ssize_t n = min(a.shape[0], b.shape[0])
    return c_common_prefix_len(&a[0], &b[0], n) if n > 0 else 0


def check_vocab(const int32_t[::1] tokens not None, int32_t vocab_size):
    """Index of the first id outside 0..vocab_size-1, or -1 where there is none."""
    return c_check_vocab(&tokens[0], tokens.shape[0], vocab_size) if tokens.shape[0] > 0 else -1


def compare_tokens(const int32_t[::1] a not None, const int32_t[::1] b not None):
    """-1, 0 or 1: the lexicographic order of `a` and `b`, a prefix before what it begins."""
    return c_compare_tokens(
        &a[0] if a.shape[0] > 0 else NULL, a.shape[0], &b[0] if b.shape[0] > 0 else NULL, b.shape[0])


cdef Py_ssize_t c_common_prefix_len(const int32_t *a, const int32_t *b, Py_ssize_t n) noexcept nogil:
    """How many of the first `n` tokens of `a` and `b` agree, counted from the start."""
    cdef Py_ssize_t i = 0
    cdef int j
    cdef uint32_t differ
    while i < n and i < 4:  # most comparisons of a search end here
        if a[i] != b[i]:
            return i
        i += 1
    while n - i >= N_MEMCMP and memcmp(a + i, b + i, N_MEMCMP * sizeof(int32_t)) == 0:
        i += N_MEMCMP
    while n - i >= N_STEP:
        differ = 0
        for j in range(N_STEP):
            differ |= <uint32_t>(a[i + j] ^ b[i + j])
        if differ:
            break
        i += N_STEP
    while i < n and a[i] == b[i]:
        i += 1
    return i


cdef Py_ssize_t c_check_vocab(const int32_t *tokens, Py_ssize_t n, int32_t vocab_size) noexcept nogil:
    """Index of the first of `n` ids outside 0..vocab_size-1, or -1."""
    cdef Py_ssize_t i = 0
    cdef int j
    cdef uint32_t token, outside, last = <uint32_t>vocab_size - 1
    while n - i >= N_STEP and vocab_size > 0:
        outside = 0
        for j in range(N_STEP):
            token = <uint32_t>tokens[i + j]
            outside |= token | (last - token)  # the top bit is set for a negative id, and for one above last
        if outside >> 31:
            break
        i += N_STEP
    while i < n:
        if not 0 <= tokens[i] < vocab_size:
            return i
        i += 1
    return -1


cdef int c_compare_tokens(const int32_t *a, Py_ssize_t n_a, const int32_t *b, Py_ssize_t n_b) noexcept nogil:
    """-1, 0 or 1: lexicographic order, a prefix before what it begins."""
    cdef Py_ssize_t n = min(n_a, n_b)
    cdef Py_ssize_t i = c_common_prefix_len(a, b, n)
    if i < n:
        return -1 if a[i] < b[i] else 1
    return (n_a > n_b) - (n_a < n_b)
