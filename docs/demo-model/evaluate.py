"""Held-out loss of a `.tinyloop` file at every depth, and fixed samples, in plain PyTorch.

python evaluate.py demo.tinyloop heldout.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from documents import STOP_IDS, chat, encode, read_documents
from generate import generate
from looped import Weights, check_supported, head, hidden_states
from safetensors import safe_open
from tokenizers import Tokenizer

from tinyloop_py.config import ModelConfig

SAMPLES = (
    chat("You are Mia, a friendly storyteller for children.", [], "Tell me a story about a brave mouse who finds a golden key."),
    chat("You are Tom, the patient gardener at Green Hill. Keep your answers short.", [], "How do I grow tomatoes?"),
    chat("You work at the help desk of Maple Square Shop.", [], "My kettle does not turn on. What should I do?"),
    chat(
        "You are a science teacher. Use simple words.",
        [("Why does ice float?", "Ice is lighter than water. That is why it stays on top.")],
        "Why is the sky blue?",
    ),
    chat("You are Clara, a cheerful cook.", [], "What goes well with apples?"),
    "Once upon a time, in a small village by the sea, there lived a young",
)


@torch.inference_mode()
def depth_losses(
    c: ModelConfig, weights: Weights, documents: list[np.ndarray], loops: int, dtype: torch.dtype = torch.float32, n_rows: int = 32
) -> list[float]:
    """Mean nats a token after 1, 2, ... loops; each document by itself, cut at trained_seq_len."""
    device = weights["embed.weight"].device
    documents = sorted((torch.from_numpy(d[: c.trained_seq_len + 1]).long() for d in documents), key=len)
    total, n_tokens = torch.zeros(loops, dtype=torch.float64), 0
    for first in range(0, len(documents), n_rows):
        rows = documents[first : first + n_rows]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100).to(device)
        n_tokens += sum(len(r) - 1 for r in rows)
        for r, x in enumerate(hidden_states(c, weights, tokens[:, :-1].clamp(min=0), loops, dtype=dtype)):
            logits = head(c, weights, x, dtype).float()
            total[r] += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
    return (total / n_tokens).tolist()


def load(path: Path) -> tuple[ModelConfig, Weights, Tokenizer]:
    """Read a `.tinyloop` file; tensors become float32."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    return ModelConfig.from_json(metadata["config"]), weights, Tokenizer.from_str(metadata["tokenizer"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--loops", type=int, help="depths to measure (default: those trained)")
    parser.add_argument("--temperature", type=float, default=0.5, help="of the samples")
    args = parser.parse_args()

    c, weights, tokenizer = load(args.model)
    check_supported(c)
    documents = encode(tokenizer, read_documents(args.heldout))
    print(f"{args.model.stat().st_size:,} bytes; {len(documents)} held-out documents, {sum(len(d) - 1 for d in documents):,} tokens predicted")
    for r, loss in enumerate(depth_losses(c, weights, documents, args.loops or c.trained_loops), 1):
        print(f"loops {r}: {loss:.4f} nats a token", flush=True)

    prompts = [tokenizer.encode(text).ids for text in SAMPLES]
    samples = {}
    for loops in (1, 2, 4, 8):
        torch.manual_seed(0)
        samples[loops] = generate(
            c, weights, prompts, loops=loops, max_tokens=200, stop_ids=STOP_IDS, temperature=args.temperature, min_p=0.1, keep_unfinished=True
        )  # fmt: skip
    for i, prompt in enumerate(SAMPLES):
        print(f"\n{prompt}")
        for loops, texts in samples.items():
            print(f"[{loops}] {tokenizer.decode(texts[i])}")


if __name__ == "__main__":
    main()
