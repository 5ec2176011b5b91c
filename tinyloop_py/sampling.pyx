"""How a call draws its tokens: the sampling arguments of every generating method, validated once."""

import math
import operator
import os

import numpy as np

from libc.stdint cimport int32_t, uint64_t

from .abi cimport tl_sampling
from .arguments cimport real_argument

# What is out of float32's sight counts as these: a distribution is uniform or greedy long before.
cdef double SMALL = 1e-30
cdef double LARGE = 1e30


cdef int _int(object value, str name, long long low, long long high) except? -1:
    """An integer argument, as a C int."""
    if isinstance(value, (bool, np.bool_)):  # older NumPy: its bools are indices
        raise TypeError(f"{name} is {value!r}, expected an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {type(value).__name__}, expected an integer") from None
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}, expected {low} to {high}" if high < 2**31 - 1 else f"{name} is {number}, expected {low} or more")
    return number


cdef double _fraction(object value, str name, bint zero) except? -1.0:
    cdef double number = real_argument(value, name)
    if not (number >= 0.0 if zero else number > 0.0) or number > 1.0:
        raise ValueError(f"{name} is {number:g}, expected {'0 to 1' if zero else 'more than 0, and at most 1'}")
    return number


cdef uint64_t fresh_seed() except? 0:
    return int.from_bytes(os.urandom(8), "little")


cdef class Sampling:
    """One call's sampling.

    Parameters
    ----------
    temperature
        0 is greedy.
    top_k, top_p, min_p
        Keep the k likeliest tokens (0: all), the fewest that reach probability top_p (1: all), and those with at least
        min_p times the largest probability (0: all). They apply in this order; ties at an edge go to the lower id.
    repetition_penalty
        Logits of tokens in prompt and output are divided by it where positive, else multiplied (1: off).
    logit_bias
        Token id -> value added to its logit; -inf bans it.
    seed
        0 to 2**64 - 1; None takes a fresh one. A draw depends on (seed, position, token id) alone.
    stop_tokens
        Ids that end the output, the stop token included in it; None takes `own_stops`, the model's.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what was expected.
    """

    def __init__(
        self, temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed, stop_tokens, int vocab_size,
        frozenset own_stops=frozenset(),
    ):
        cdef double t = real_argument(temperature, "temperature")
        if t < 0.0:
            raise ValueError(f"temperature is {t:g}, expected 0 (greedy) or more")
        self.c.size = sizeof(tl_sampling)
        self.c.temperature = t if t < LARGE else LARGE
        self.c.top_k = _int(top_k, "top_k", 0, 2**31 - 1)
        self.c.top_p = 1.0 if type(top_p) is float and top_p == 1.0 else max(_fraction(top_p, "top_p", False), SMALL)
        self.c.min_p = 0.0 if type(min_p) is float and min_p == 0.0 else _fraction(min_p, "min_p", True)
        cdef double penalty = real_argument(repetition_penalty, "repetition_penalty")
        if penalty <= 0.0:
            raise ValueError(f"repetition_penalty is {penalty:g}, expected more than 0 (1 is off)")
        self.c.repetition_penalty = min(max(penalty, SMALL), LARGE)
        if seed is None:
            self.c.seed = fresh_seed() if t > 0.0 else 0
        else:
            self.c.seed = self._seed(seed)
        self.c.n_bias = 0
        if logit_bias is not None:
            self._set_bias(logit_bias, vocab_size)
        if stop_tokens is None:
            self.stop_tokens = own_stops
        else:
            self.stop_tokens = frozenset(_int(t, "stop_tokens", 0, vocab_size - 1) for t in self._iterate(stop_tokens))

    @staticmethod
    def _iterate(stop_tokens):
        if isinstance(stop_tokens, (str, bytes)):
            raise TypeError(f"stop_tokens is {type(stop_tokens).__name__}, expected token ids")
        try:
            return iter(stop_tokens)
        except TypeError:
            raise TypeError(f"stop_tokens is {type(stop_tokens).__name__}, expected a collection of token ids") from None

    @staticmethod
    def _seed(seed):
        if isinstance(seed, (bool, np.bool_)):
            raise TypeError(f"seed is {seed!r}, expected an integer or None")
        try:
            number = operator.index(seed)
        except TypeError:
            raise TypeError(f"seed is {type(seed).__name__}, expected an integer or None") from None
        if not 0 <= number < 2**64:
            raise ValueError(f"seed is {number}, expected 0 to 2**64 - 1")
        return number

    cdef int _set_bias(self, object bias, int vocab_size) except -1:
        try:
            items = sorted((_int(k, "a logit_bias id", 0, vocab_size - 1), v) for k, v in bias.items())
        except AttributeError:
            raise TypeError(f"logit_bias is {type(bias).__name__}, expected a mapping of token id to value") from None
        if any(items[i][0] == items[i - 1][0] for i in range(1, len(items))):
            raise ValueError("logit_bias names a token id twice")
        values = [-math.inf if isinstance(v, (float, np.floating)) and v == -math.inf else real_argument(v, "a logit_bias value") for _, v in items]
        if not items:
            return 0
        self._bias_ids = np.array([k for k, _ in items], np.int32)
        if values.count(-math.inf) == vocab_size:
            raise ValueError("logit_bias bans every token, expected at least one that may be drawn")
        values = [v if v == -math.inf else min(max(v, -3e38), 3e38) for v in values]
        self._bias_values = np.array(values, np.float32)
        self.c.n_bias = len(items)
        self.c.bias_ids = &self._bias_ids[0]
        self.c.bias_values = &self._bias_values[0]
        return 0

    @property
    def seed(self):
        """The seed in use."""
        return self.c.seed

    cdef bint stops(self, int32_t token) noexcept:
        return bool(self.stop_tokens) and token in self.stop_tokens
