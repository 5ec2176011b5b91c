"""The sampling pipeline in float64: bias, repetition penalty, temperature, top_k, top_p, min_p, then a Gumbel draw.

An id is kept or not by these rules, each over what the rule before it kept, in the order of falling logits with ties to the
lower id:

- bias is added; the penalty divides a positive logit and multiplies another one, once for each distinct id in the prompt
  or among the generated tokens (as transformers does it);
- temperature 0 is greedy: the largest logit, the lowest id on a tie, and no rule after it;
- top_k keeps the first k (0: all); top_p the shortest run whose probability reaches top_p (1: all), at least one; min_p
  those with at least min_p times the largest probability. Both take probabilities over what top_k kept.

The token is the argmax of log-probability + gumbel(seed, position, id) over the kept ids: a draw from exactly `probs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from philox import gumbel


@dataclass(frozen=True)
class Draw:
    """The outcome of one step.

    Attributes
    ----------
    kept : ids that can be drawn, most likely first.
    probs : their probabilities, sum 1.
    token : the id drawn.
    margin : how far the nearest decision (an edge of top_k, top_p or min_p, or the argmax) was from falling otherwise, in
        logits or in probability; below a backend's error the backend may decide otherwise and still be right.
    """

    kept: np.ndarray
    probs: np.ndarray
    token: int
    margin: float


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def gap(falling: np.ndarray, n: int) -> float:
    """The step down from the n-th value to the next; exact ties are decided by id, so they are no risk: inf."""
    step = falling[n - 1] - falling[n] if n < len(falling) else 0.0
    return float(step) or np.inf


def sample(
    logits: np.ndarray,
    seed: int,
    position: int,
    *,
    context: Iterable[int] = (),
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
) -> Draw:
    """Draw the token that will stand at `position`, from the logits (vocab_size,) of the row before it.

    `context` is the prompt and what was generated, for the penalty. A bias of -inf bans an id.
    """
    scores = np.array(logits, np.float64)
    for token, bias in (logit_bias or {}).items():
        scores[token] += bias
    seen = sorted(set(context))
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / repetition_penalty, scores[seen] * repetition_penalty)

    order = np.argsort(-scores, kind="stable")  # falling, ties to the lower id
    order = order[scores[order] > -np.inf]
    if temperature == 0:
        return Draw(order[:1], np.ones(1), int(order[0]), gap(scores[order], 1))
    scores = scores / temperature

    margin = gap(scores[order], top_k) if top_k else np.inf
    kept = order[: top_k or None]
    probs = softmax(scores[kept])
    n = len(kept)
    if top_p < 1:
        total = np.cumsum(probs)
        n = min(int(np.searchsorted(total, top_p)) + 1, n)
        margin = min(margin, *np.abs(total - top_p))
    if min_p > 0:
        n = min(n, int((probs >= min_p * probs[0]).sum()))
        margin = min(margin, *np.abs(probs - min_p * probs[0]))
    kept = kept[:n]

    noisy = scores[kept] + gumbel(seed, position, kept)
    winner = np.lexsort((kept, -noisy))
    return Draw(kept, softmax(scores[kept]), int(kept[winner[0]]), min(margin, gap(noisy[winner], 1)))
