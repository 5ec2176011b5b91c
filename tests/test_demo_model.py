"""The model that comes with the package: it is what docs/demo-model says, and reads as English."""

import re
from pathlib import Path

import numpy as np
import pytest

import tinyloop_py as tl

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def model():
    with tl.Model(tl.demo_model(), max_seq_len=1100) as model:
        yield model


def heldout_documents(model):
    text = (DATA / "heldout.txt").read_text()
    return [np.array(model.tokenizer.encode(d + "<|endoftext|>").ids, np.int32)[:1025] for d in text.split("<|endoftext|>") if d]


def loss(model, documents, loops):
    """Mean nats a token, each document by itself."""
    total = 0.0
    for tokens in documents:
        logits = model.logits(tokens[:-1], loops).astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        total += (np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), tokens[1:]]).sum()
    return total / sum(len(tokens) - 1 for tokens in documents)


def test_file_is_small_and_looped(model):
    c = model.config
    assert tl.demo_model().stat().st_size <= 16 * 1024 * 1024
    assert (c.n_prelude, c.n_core, c.n_coda) == (0, 2, 0) and (c.default_loops, c.trained_loops) == (8, 8)
    assert c.vocab_size == model.tokenizer.get_vocab_size() == 4096
    assert c.extra["license"] == "Apache-2.0"
    assert model.chat_template and model.stop_ids


def test_loss_on_heldout_text_falls_with_depth(model):
    documents = heldout_documents(model)
    assert len(documents) > 200
    losses = {loops: loss(model, documents, loops) for loops in (1, 2, 4, 8)}
    assert losses[1] > losses[2] > losses[4] >= losses[8]
    assert losses[1] - losses[8] >= 0.05 and losses[8] < 1.65


def test_text_reads_as_english(model):
    """Most of the words that it writes occur in the held-out text, and they are not one word over and over."""
    known = set(re.findall(r"[a-z']+", (DATA / "heldout.txt").read_text().lower()))
    prompts = [
        "<|system|>You are a science teacher. Use simple words.<|end|><|user|>What is gravity?<|end|><|assistant|>",
        "<|system|>You are Mia, a friendly storyteller.<|end|><|user|>Tell me a story about a little boat.<|end|><|assistant|>",
        "Once upon a time, in a small village by the sea, there lived a young",
    ]
    words = []
    for seed, prompt in enumerate(prompts):
        ids = model.tokenizer.encode(prompt).ids
        tokens = model.generate(ids, 64, temperature=0.7, seed=seed, stop_tokens=())
        words += re.findall(r"[a-z']+", model.tokenizer.decode(tokens[len(ids) :]).lower())
    assert len(words) > 100
    assert sum(word in known for word in words) / len(words) > 0.9
    assert len(set(words)) / len(words) > 0.3


def test_chat_template_is_the_format_it_was_trained_on(model):
    jinja2 = pytest.importorskip("jinja2")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is gravity?"}]
    text = jinja2.Template(model.chat_template).render(messages=messages, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|end|><|user|>What is gravity?<|end|><|assistant|>"
    assert model.tokenizer.encode(text).ids[0] == model.tokenizer.token_to_id("<|system|>")
