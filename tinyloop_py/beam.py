"""What Model.beam_search returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Beam:
    """One continuation of a prompt.

    Attributes
    ----------
    tokens : list of int
        Prompt and new tokens.
    score : float
        Sum of the new tokens' log-probabilities / n_new ** length_penalty.
    finish_reason : {"stop", "length"}
        Whether a stop token came, or `max_tokens` were drawn.
    """

    tokens: list[int]
    score: float
    finish_reason: Literal["stop", "length"]


def score(total: float, n_new: int, length_penalty: float) -> float:
    """What ranks a beam whose `n_new` log-probabilities add up to `total`."""
    return float(total / n_new**length_penalty)
