"""Last steps of the demo model: full depth, on text that training has not seen, and the scale of its logits.

    python finish.py demo.tinyloop fresh.txt --out finished.tinyloop

After several epochs over its text the model is surer of itself than it should be, the deeper the more. A few small steps
on fresh text lower the loss at full depth, and that of half the depth may not lie below it; then the scale of the logits
is the one that suits the fresh text best. Minutes on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from documents import encode, pack, read_documents
from evaluate import load
from looped import Weights, head, hidden_states
from torch import Tensor
from train import save

from tinyloop_py.config import ModelConfig

N_TOKENS = 512  # of a sequence
MARGIN = 0.004  # nats by which the loss at full depth should lie below that at half
SCALES = [s / 100 for s in range(80, 103)]


def loss_of(c: ModelConfig, weights: Weights, x: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    return F.cross_entropy(head(c, weights, x, dtype).float().flatten(0, 1), targets.flatten())


def train(c: ModelConfig, weights: Weights, sequences: list[Tensor], lr: float, dtype: torch.dtype) -> None:
    """One AdamW step per batch, the learning rate falling to zero."""
    optimizer = torch.optim.AdamW([w.requires_grad_() for w in weights.values()], lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    for i, tokens in enumerate(sequences):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (i + 1) / 3) * (1 - i / len(sequences))
        states = list(hidden_states(c, weights, tokens[:, :-1], c.trained_loops, dtype=dtype))
        full, half = (loss_of(c, weights, states[r - 1], tokens[:, 1:], dtype) for r in (c.trained_loops, c.trained_loops // 2))
        (full + 2 * F.relu(full - half + MARGIN)).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {i + 1} of {len(sequences)}: loss {full.item():.4f}, at half the depth {half.item() - full.item():+.4f}", flush=True)


@torch.inference_mode()
def best_scale(c: ModelConfig, weights: Weights, sequences: list[Tensor], dtype: torch.dtype) -> float:
    """The scale of the logits with the lowest loss at full depth."""
    total = dict.fromkeys(SCALES, 0.0)
    for tokens in sequences:
        *_, x = hidden_states(c, weights, tokens[:, :-1], c.trained_loops, dtype=dtype)
        logits = head(dataclasses.replace(c, logit_scale=1.0), weights, x, dtype).float().flatten(0, 1)
        for scale in SCALES:
            total[scale] += F.cross_entropy(scale * logits, tokens[:, 1:].flatten()).item()
    return min(total, key=total.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, help="fresh documents from make_text.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--lr", type=float, default=5e-5)
    args = parser.parse_args()

    c, weights, tokenizer = load(args.model)
    dtype = torch.bfloat16
    documents, rng = encode(tokenizer, read_documents(args.text)), random.Random(0)
    sequences: list[Tensor] = []
    while len(sequences) < args.steps:
        sequences += torch.from_numpy(pack(documents, N_TOKENS + 1, rng)).long().split(args.batch)
    c = dataclasses.replace(c, logit_scale=best_scale(c, weights, sequences[: args.steps], dtype))
    train(c, weights, sequences[: args.steps], args.lr, dtype)
    c = dataclasses.replace(c, logit_scale=best_scale(c, weights, sequences[: args.steps], dtype))
    save(args.out, c, weights, tokenizer)
    print(f"{args.out}: logit_scale {c.logit_scale}")


if __name__ == "__main__":
    main()
