"""Philox4x32-10 and the two streams tinyloop draws from it: initial states and Gumbel noise. Float64 definitions.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11. A stream is a pure function of
(seed, position, index): key = (seed's low word, its high word), counter = (index // 4, position, domain, 0), and of the four
words that come out, word index % 4. No state, no order, so rows, batches, threads and backends cannot change a draw.

The uniform is u = ((word >> 8) + 1/2) * 2**-24, inside (0, 1). It has 25 significant bits: above 1/2 a float32 cannot hold
it, and the largest one would round to 1. Where double is too slow, take 1 - u from the complement, which float32 holds
exactly there: 1 - u = ((0xffffff - (word >> 8)) + 1/2) * 2**-24. Then -log(u) = -log1p(-(1 - u)).
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

DOMAIN_INIT = 0x746C6E69  # "tlni": state_init = "normal"
DOMAIN_GUMBEL = 0x746C676D  # "tlgm": sampling

TAIL = 0.5 * math.erfc(3 / math.sqrt(2))  # Phi(-3) = 0.00134989803163009...; the interval is [Phi(-3), Phi(3)]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds on `counter` (..., 4) with a key of two words; (..., 4) uint32."""
    c0, c1, c2, c3 = (np.asarray(counter)[..., i].astype(np.uint64) for i in range(4))
    for i in range(10):
        k0, k1 = (np.uint64((key[j] + i * _WEYL[j]) & 0xFFFFFFFF) for j in range(2))
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
    return np.stack([c0, c1, c2, c3], -1).astype(np.uint32)


def words(seed: int, position: int, indices: np.ndarray, domain: int) -> np.ndarray:
    """The word of every index (n,), as uint32."""
    indices = np.asarray(indices, np.int64)
    counter = np.zeros((len(indices), 4), np.uint32)
    counter[:, 0] = indices // 4
    counter[:, 1:3] = position, domain
    block = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return block[np.arange(len(indices)), indices % 4]


def uniform(seed: int, position: int, indices: np.ndarray, domain: int) -> np.ndarray:
    """Float64 in (0, 1), exact."""
    return ((words(seed, position, indices, domain) >> 8) + 0.5) * 2.0**-24


def truncated_normal(seed: int, position: int, n: int, std: float) -> np.ndarray:
    """The initial state (n,) at an absolute position: normal, truncated at 3 sigma *before* scaling by `std`.

    With a = Phi(-3), b = Phi(3) it is std * Phi^-1(a + u * (b - a)), so `std` is that of the untruncated normal, as in
    torch's trunc_normal_(std=std, a=-3*std, b=3*std); the result's own is 0.98658 * std.
    """
    u = TAIL + uniform(seed, position, np.arange(n), DOMAIN_INIT) * (1 - 2 * TAIL)
    inverse = NormalDist().inv_cdf  # Wichura's AS 241, good to 1e-15
    return std * np.array([inverse(p) for p in u])


def gumbel(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """Gumbel noise -log(-log(u)) of every token id, for the draw of the token at `position`; float64, always finite."""
    return -np.log(-np.log(uniform(seed, position, token_ids, DOMAIN_GUMBEL)))
