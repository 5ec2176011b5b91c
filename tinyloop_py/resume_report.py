"""What ResumeHandle.stats() returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ResumeStats:
    """What the uses of a resume handle ran over its prompt; building it is not counted.

    Attributes
    ----------
    resumes : int
        Calls that continued from it.
    prefilled_tokens : int
        Prompt tokens run again from the embedding.
    extended_tokens : int
        Prompt tokens over which only further loops ran.
    token_loops : int
        Core loops run over prompt tokens, tokens x loops.
    """

    resumes: int = 0
    prefilled_tokens: int = 0
    extended_tokens: int = 0
    token_loops: int = 0
