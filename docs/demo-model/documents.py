"""The training format: what a document looks like, its tokenizer, and how documents become token sequences."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, END = "<|endoftext|>", "<|end|>"
SPECIAL = [END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", END]  # token ids 0 to 4
STOP_IDS = [0, 4]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat(system: str, exchanges: list[tuple[str, str]], question: str | None = None) -> str:
    """The text of a dialogue, as CHAT_TEMPLATE writes it; with a question it ends where the answer begins."""
    text = f"<|system|>{system}{END}" + "".join(f"<|user|>{q}{END}<|assistant|>{a}{END}" for q, a in exchanges)
    return text if question is None else f"{text}<|user|>{question}{END}<|assistant|>"


def read_documents(path: Path) -> list[str]:
    """The documents of a text file, each with its END_OF_TEXT."""
    return [d + END_OF_TEXT for d in path.read_text().split(END_OF_TEXT) if d]


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)  # so that training does not see inside them
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )  # fmt: skip
    pieces = (piece for d in documents for piece in _without_special(d))
    tokenizer.train_from_iterator(pieces, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"too little text for a vocabulary of {vocab_size}: got {tokenizer.get_vocab_size()}")
    return tokenizer


def _without_special(text: str) -> list[str]:
    for token in SPECIAL:
        text = text.replace(token, "\0")
    return [piece for piece in text.split("\0") if piece]


def encode(tokenizer: Tokenizer, documents: list[str]) -> list[np.ndarray]:
    return [np.array(encoding.ids, dtype=np.int32) for encoding in tokenizer.encode_batch_fast(documents)]


def pack(documents: list[np.ndarray], n_tokens: int, rng: random.Random) -> np.ndarray:
    """Shuffle the documents into sequences (n, n_tokens). Each begins where a document begins; what does not fit at its end is cut off."""
    order = rng.sample(range(len(documents)), len(documents))
    sequences, parts, room = [], [], n_tokens
    for i in order:
        parts.append(documents[i][:room])
        room -= len(parts[-1])
        if room == 0:
            sequences.append(np.concatenate(parts))
            parts, room = [], n_tokens
    return np.stack(sequences)
