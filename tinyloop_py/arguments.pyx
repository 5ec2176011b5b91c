"""Integer arguments of public calls: anything with ``__index__`` but no bool, inside stated bounds."""

from cpython.number cimport PyIndex_Check, PyNumber_Index

import numpy as np


cdef Py_ssize_t int_argument(object value, str name, Py_ssize_t low, Py_ssize_t high) except? -1:
    """`value` as a C integer; TypeError for a bool or a non-integer, ValueError outside `low`..`high`."""
    cdef Py_ssize_t number = 0
    cdef bint fits = True
    if type(value) is not int:
        if isinstance(value, (bool, np.bool_)) or not PyIndex_Check(value):  # older NumPy: its bools are indices
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
        value = PyNumber_Index(value)
    try:
        number = value
    except OverflowError:
        fits = False
    if not (fits and low <= number <= high):
        expected = f"at least {low}" if value < low else f"at most {high}"
        raise ValueError(f"{name} must be {expected}, got {value}")
    return number
