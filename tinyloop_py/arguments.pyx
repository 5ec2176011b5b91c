"""Numbers as arguments of public calls: integers are what has ``__index__``, real ones what has ``__float__``, and bools are neither."""

import math

from cpython.number cimport PyIndex_Check, PyNumber_Index

import numpy as np


cdef Py_ssize_t int_argument(object value, str name, Py_ssize_t low, Py_ssize_t high) except? -1:
    """`value` as a C integer; TypeError for a bool or a non-integer, ValueError outside `low`..`high`."""
    cdef Py_ssize_t number = 0
    cdef bint fits = True
    if type(value) is not int:
        if isinstance(value, (bool, np.bool_)) or not PyIndex_Check(value):  # older NumPy: its bools are indices
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
        if getattr(value, "ndim", 0):
            raise TypeError(f"{name} must be an integer, got an array of shape {value.shape}")
        value = PyNumber_Index(value)
    try:
        number = value
    except OverflowError:
        fits = False
    if not (fits and low <= number <= high):
        expected = f"at least {low}" if value < low else f"at most {high}"
        raise ValueError(f"{name} must be {expected}, got {value}")
    return number


cdef double real_argument(object value, str name) except? -1.0:
    """`value` as a finite C double; TypeError for a bool or what is no number, ValueError where it is not finite."""
    cdef double number
    if isinstance(value, (bool, np.bool_, str, bytes)) or not hasattr(type(value), "__float__") or getattr(value, "ndim", 0):
        raise TypeError(f"{name} is {type(value).__name__}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} is an integer beyond floating point, expected a finite number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, expected a finite number")
    return number
