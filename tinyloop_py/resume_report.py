"""What ResumeHandle.stats() returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ResumeStats:
    """What the uses of a resume handle ran over its prompt; building it is not counted."""

    resumes: int = 0  # calls that continued from it
    prefilled_tokens: int = 0  # prompt tokens run again from the embedding
    extended_tokens: int = 0  # prompt tokens over which only further loops ran
    token_loops: int = 0  # core loops run over prompt tokens, tokens x loops
