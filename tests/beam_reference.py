"""Beam search in its plain form: whole sequences through `Model.logits`, all extensions in one sorted list."""

from __future__ import annotations

import numpy as np

import tinyloop_py as tl


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64 log-probabilities of one row."""
    x = logits.astype(np.float64)
    x -= x.max()
    return x - np.log(np.exp(x).sum())


def beam_search(
    model: tl.Model, prompt: np.ndarray, num_beams: int, max_tokens: int, loops: int | None = None, window: int = 0, *,
    length_penalty: float = 1.0, stop_tokens: tuple[int, ...] = (),
) -> list[tl.Beam]:  # fmt: skip
    """What `Model.beam_search` has to return."""
    prompt = [int(t) for t in prompt]
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tl.Beam] = []
    for step in range(max_tokens):
        extensions = []
        for rank, (total, new) in enumerate(live):
            logp = log_softmax(model.logits(np.array(prompt + new, np.int32), loops, window, last_only=True)[0])
            extensions += [(-(total + float(logp[token])), rank, token) for token in range(len(logp))]
        extensions.sort()
        best = extensions[: num_beams - len(ended)]
        extended = [(-minus, [*live[rank][1], token]) for minus, rank, token in best]
        live = []
        for total, new in extended:
            if new[-1] in stop_tokens:
                ended.append(tl.Beam(prompt + new, total / len(new) ** length_penalty, "stop"))
            elif step == max_tokens - 1:
                ended.append(tl.Beam(prompt + new, total / len(new) ** length_penalty, "length"))
            else:
                live.append((total, new))
        if not live:
            break
    return sorted(ended, key=lambda beam: -beam.score)
