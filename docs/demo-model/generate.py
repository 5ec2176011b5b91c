"""Sample continuations of many prompts at once with `looped.py`."""

from __future__ import annotations

import math

import torch
from looped import KVCache, Weights, head, hidden_states
from torch import Tensor

from tinyloop_py.config import ModelConfig


def draw(logits: Tensor, temperature: float, min_p: float) -> Tensor:
    """A token per row, among those at least `min_p` times as likely as the likeliest; temperature 0 is greedy."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    logits -= logits.amax(-1, keepdim=True)
    if min_p > 0:
        logits.masked_fill_(logits < math.log(min_p), float("-inf"))
    return logits.sub_(torch.empty_like(logits).exponential_().log_()).argmax(-1)  # Gumbel noise: -log of an exponential draw


@torch.inference_mode()
def generate(
    c: ModelConfig, weights: Weights, prompts: list[list[int]], *, loops: int, max_tokens: int, stop_ids: list[int], temperature: float = 0.0,
    min_p: float = 0.0, penalty: float = 0.0, keep_unfinished: bool = False, give_up: float = 0.0, prefill_rows: int = 512,
) -> list[list[int] | None]:  # fmt: skip
    """The new tokens of each prompt without the stop token; None where none came within `max_tokens`, unless `keep_unfinished`.

    A token's logit falls by `penalty` for each time that it was drawn. Once no more than the share `give_up` of the
    sequences is still running, these count as unfinished.
    """
    device, dtype = weights["embed.weight"].device, weights["embed.weight"].dtype
    n_prompt = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(n_prompt.max())
    tokens = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
    new = torch.zeros((len(prompts), max_tokens), dtype=torch.int64, device=device)
    n_new = torch.full((len(prompts),), -1, device=device)
    stops = torch.tensor(stop_ids, device=device)

    # Prefill, some rows of like length at a time: padding stands to the right, where causal attention never looks.
    cache = KVCache(c, loops, len(prompts), longest + max_tokens, dtype, device)
    last = torch.empty((len(prompts), c.dim), device=device)
    for rows in n_prompt.argsort().split(prefill_rows):
        n_tokens = int(n_prompt[rows[-1]])
        cache.rows = rows[:, None]
        pos = torch.arange(n_tokens, device=device).expand(len(rows), -1)
        *_, x = hidden_states(c, weights, tokens[rows, :n_tokens], loops, pos=pos, cache=cache, dtype=dtype)
        last[rows] = x[torch.arange(len(rows), device=device), n_prompt[rows] - 1]
    x = last

    # Decode; `running` maps the rows of the cache to prompts and shrinks when a quarter of them have stopped.
    running = torch.arange(len(prompts), device=device)
    cache.rows = running[:, None]
    n_drawn = torch.zeros((len(prompts), c.vocab_size), dtype=torch.uint8 if penalty else torch.bool, device=device)
    for n in range(max_tokens):
        logits = head(c, weights, x, dtype)
        if penalty:
            logits -= penalty * n_drawn[running]
        token = draw(logits, temperature, min_p)
        if penalty:
            n_drawn[running, token] += 1
        stopped = torch.isin(token, stops) & (n_new[running] < 0)
        n_new[running[stopped]] = n
        new[running, n] = token
        if n % 8 == 7:
            alive = n_new[running] < 0
            n_alive = int(alive.sum())
            if n_alive <= give_up * len(prompts):
                break
            if n_alive <= 0.75 * len(running):
                keep = alive.nonzero().flatten()
                cache.keep(keep)
                running, token = running[keep], token[keep]
        pos = (n_prompt[running] + n)[:, None]
        cache.seq_len = longest + n + 1
        *_, x = hidden_states(c, weights, token[:, None], loops, pos=pos, cache=cache, dtype=dtype)
        x = x[:, 0]
    if keep_unfinished:
        n_new[n_new < 0] = max_tokens
    return [row[:n] if n >= 0 else None for row, n in zip(new.tolist(), n_new.tolist(), strict=True)]
