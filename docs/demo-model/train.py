"""Train the demo model on documents from make_text.py: tokenizer, looped model at random depths, `.tinyloop` file.

    python train.py text --out demo.tinyloop --minutes 5

Needs PyTorch and tokenizers beside tinyloop. The learning rate falls to zero at the end of the time given, so a faster device trains on more tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from documents import CHAT_TEMPLATE, STOP_IDS, encode, pack, read_documents, train_tokenizer
from evaluate import depth_losses
from looped import Weights, check_supported, head, hidden_states, run_loop
from tokenizers import Tokenizer
from torch import Tensor

from tinyloop_py.config import ModelConfig
from tinyloop_py.layout import matrix_shapes, tensor_shapes
from tinyloop_py.model_writer import save_model

MODEL = {
    "vocab_size": 4096, "dim": 512, "ffn_dim": 1344, "n_heads": 8, "n_kv_heads": 4, "head_dim": 64, "n_core": 2, "default_loops": 8,
    "trained_loops": 8, "max_loops": 32, "trained_seq_len": 1024, "block_norm": "pre", "norm_eps": 1e-5, "loop_norm": "every",
    "final_norm": False, "inject": "add", "state_init": "zero", "rope_theta": 10000.0, "embed_scale": 16.0,
    "extra": {"name": "tinyloop demo", "license": "Apache-2.0", "source": "text written by SmolLM2-135M-Instruct (Apache-2.0), docs/demo-model"},
}  # fmt: skip


def initial_weights(c: ModelConfig, device: str) -> Weights:
    """Normal matrices of deviation 1/sqrt(n_in), smaller for the embedding and what writes to the residual stream; norms at one."""
    weights = {}
    for name, shape in tensor_shapes(c).items():
        if name in matrix_shapes(c):
            std = 0.02 if name == "embed.weight" else shape[1] ** -0.5
            if name.endswith(("attn.o.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * c.n_core)
            weights[name] = torch.randn(shape, device=device) * std
        else:
            weights[name] = torch.ones(shape, device=device)
    return {name: w.requires_grad_() for name, w in weights.items()}


def optimizers(weights: Weights, muon_lr: float, adam_lr: float, fused: bool) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the core, AdamW for the embedding and the norms."""
    core = [w for name, w in weights.items() if name.startswith("core") and w.ndim == 2]
    rest = [w for name, w in weights.items() if not (name.startswith("core") and w.ndim == 2)]
    return [
        torch.optim.Muon(core, lr=muon_lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]


def batches(documents: list, batch: int, n_tokens: int, rng: random.Random, device: str):
    """Yield (epoch, token ids (batch, n_tokens)) for ever, packed anew each epoch."""
    epoch = 0
    while True:
        sequences = torch.from_numpy(pack(documents, n_tokens, rng))
        if len(sequences) < batch:
            raise ValueError(f"{len(sequences)} sequences of {n_tokens} tokens are too few for a batch of {batch}")
        for first in range(0, len(sequences) - batch + 1, batch):
            yield epoch + first / len(sequences), sequences[first : first + batch].to(device, torch.int64, non_blocking=True)
        epoch += 1


def save(path: Path, c: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> None:
    tensors = {name: w.detach().cpu().numpy() for name, w in weights.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_model(path, c, tensors, tokenizer, chat_template=CHAT_TEMPLATE, stop_ids=STOP_IDS, dtype="bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="folder with train.txt and heldout.txt")
    parser.add_argument("--out", type=Path, default=Path("demo.tinyloop"))
    parser.add_argument("--minutes", type=float, default=5, help="of the whole run, tokenizer and compilation included")
    parser.add_argument("--batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--muon-lr", type=float, default=0.006)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--shallow", type=float, default=0.1, help="weight of the loss at a shallower depth of the same pass")
    parser.add_argument("--evals", type=int, default=5, help="looks at the held-out text, each with a checkpoint")
    parser.add_argument("--model", type=json.loads, default={}, help="changes to the config, as a JSON object")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    c = ModelConfig(**{**MODEL, **args.model})
    check_supported(c)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    # Text to tokens
    start = time.monotonic()
    end = start + 60 * args.minutes
    texts = read_documents(args.text / "train.txt")
    tokenizer = train_tokenizer(texts[:: max(1, len(texts) // 20_000)], c.vocab_size)
    documents, heldout = encode(tokenizer, texts), encode(tokenizer, read_documents(args.text / "heldout.txt"))
    n_text, n_bytes = sum(map(len, documents)), sum(map(len, texts))
    print(f"{len(texts)} documents, {n_text / 1e6:.1f} M tokens of {n_bytes / n_text:.2f} bytes, in {time.monotonic() - start:.0f} s", flush=True)

    def loss_of(x: Tensor, embed: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(c, {"embed.weight": embed}, x, dtype).float().flatten(0, 1), targets.flatten())

    compiled = torch.compile if args.compile else lambda f: f
    step_loop, step_loss = compiled(run_loop), compiled(loss_of)

    # Training
    weights = initial_weights(c, device)
    optims = optimizers(weights, args.muon_lr, args.adam_lr, fused=device == "cuda")
    peak = [o.param_groups[0]["lr"] for o in optims]
    start, next_eval = time.monotonic(), 1
    n_compile = 20  # steps after which everything has been compiled, and the clock of the learning rate starts
    for n_steps, (epoch, tokens) in enumerate(batches(documents, args.batch, c.trained_seq_len + 1, rng, device)):
        progress = min(1.0, (time.monotonic() - start) / max(end - start, 1.0)) if n_steps >= n_compile else 0.0
        if progress * args.evals >= next_eval or progress >= 1:
            losses = depth_losses(c, weights, heldout, c.trained_loops, dtype)
            print(f"{n_steps} steps, epoch {epoch:.1f}: held-out " + " ".join(f"{x:.4f}" for x in losses), flush=True)
            c.extra["training"] = {
                "steps": n_steps, "tokens": n_steps * args.batch * c.trained_seq_len, "epochs": round(epoch, 1), "text_bytes": n_bytes,
                "text_tokens": n_text,
            }  # fmt: skip
            save(args.out, c, weights, tokenizer)
            next_eval += 1
            if progress >= 1:
                break
        for o, lr in zip(optims, peak, strict=True):
            o.param_groups[0]["lr"] = lr * min(1.0, n_steps / 60) * (1 - progress)
        # The depth of this step, deeper ones more often, and a shallower one that learns from the same pass
        (loops,) = rng.choices(range(1, c.trained_loops + 1), [r**3 for r in range(1, c.trained_loops + 1)])
        states = list(hidden_states(c, weights, tokens[:, :-1], loops, dtype=dtype, step=step_loop))
        loss = step_loss(states[-1], weights["embed.weight"], tokens[:, 1:])
        if loops > 1 and args.shallow > 0:
            loss = loss + args.shallow * step_loss(rng.choice(states[:-1]), weights["embed.weight"], tokens[:, 1:])
        loss.backward()
        for o in optims:
            o.step()
            o.zero_grad()
        if n_steps + 1 == n_compile:
            loss.item()  # waits for the device
            print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
            start = time.monotonic()
        elif n_steps % 200 == 199:
            speed = (n_steps + 1 - n_compile) * args.batch * c.trained_seq_len / (time.monotonic() - start)
            print(f"step {n_steps + 1}, epoch {epoch:.2f}: loss {loss.item():.4f} at {loops} loops, {speed / 1e3:.0f} k tokens/s", flush=True)


if __name__ == "__main__":
    main()
