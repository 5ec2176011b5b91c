"""Log-probabilities of drawn tokens under the model's own distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenLogprobs:
    """A drawn token among its likeliest alternatives, natural logarithms.

    They are of softmax(logits) as the model gives them: before bias, penalty, temperature and filters, so they do not depend
    on how the token was drawn, and equal those of `Model.logits`.

    Attributes
    ----------
    token : int
        The drawn token.
    logprob : float
        Its log-probability.
    top : tuple of (int, float)
        The likeliest tokens and their log-probabilities, likeliest first, the lower id on a tie.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """The record of a token drawn from `logits` (vocab_size,), computed in float64."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    n_top = min(n_top, len(values))
    # Everything as large as the n-th largest, so that ties at the edge fall by id and not by the partition's order.
    edge = np.partition(values, len(values) - n_top)[len(values) - n_top] if n_top else np.inf
    near = np.flatnonzero(values >= edge)
    best = near[np.lexsort((near, -values[near]))[:n_top]]
    return TokenLogprobs(token, float(values[token]), tuple((int(i), float(values[i])) for i in best))
