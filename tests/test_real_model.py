"""A real model: SmolLM2-135M-Instruct, dequantised to float32, against transformers running the same weights.

The only skip is by name: where no package registry answers, the model cannot be had (see `smollm2_gguf`).
"""

import numpy as np
import pytest
from smollm2 import transformers_model

import tinyloop_py as tl
from tinyloop_py.cli import main
from tinyloop_py.model_file import open_model_file

PROMPTS = [
    "The history of the lighthouse begins in ancient Egypt, where fires were lit on hills to guide ships into the harbour. Later, towers "
    "were built, the most famous of them at Alexandria. Sailors could see its light from far away, and it stood for more than a thousand "
    "years before earthquakes brought it down. Today, most lighthouses are run by",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nWrite a short "
    "story about a cat who learns to swim, and say what the cat learned from it in the end.<|im_end|>\n<|im_start|>assistant\n",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n        return n\n    a, b = 0, 1\n    for _ in '
    'range(n - 1):\n        a, b = b, a + b\n    return b\n\n\ndef factorial(n):\n    """Return n!."""\n',
    "Ingredients for a simple tomato soup: two pounds of ripe tomatoes, one onion, two cloves of garlic, a tablespoon of olive oil, salt, "
    "pepper and a few leaves of basil. First, chop the onion and the garlic. Then heat the oil in a large pot and",
    "Photosynthesis is the process by which green plants use sunlight to make their own food. It takes place in the leaves, in small "
    "parts of the cells called chloroplasts. The plant takes in carbon dioxide from the air and water from the soil, and",
    "Question: What is 12 times 11? Answer: 132. Question: What is the capital of France? Answer: Paris. Question: Which planet is "
    "closest to the Sun? Answer: Mercury. Question: How many days are there in a leap year? Answer:",
]
N = 64


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf, tmp_path_factory):
    path = tmp_path_factory.mktemp("smollm2") / "smollm2-f32.tinyloop"
    assert main(["convert", str(smollm2_gguf), str(path), "--dtype", "f32"]) == 0
    return path


def test_greedy_continuations_equal_those_of_transformers(backend, smollm2):
    import torch

    with open_model_file(smollm2) as file:
        theirs = transformers_model(file)
    with tl.Model(smollm2, 512, device=backend, kv_mode="fp32") as model:
        for prompt in PROMPTS:
            ids = model.tokenizer.encode(prompt).ids[:N]
            want = theirs.generate(torch.tensor([ids]), max_new_tokens=N, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
            got = model.generate(ids, N, temperature=0.0, stop_tokens=())
            assert len(got) == len(ids) + N
            if got != want:
                at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
                top = np.sort(model.logits(got[:at], last_only=True)[0])[-2:]
                pytest.fail(f"{prompt[:30]!r}: token {at} differs; the two best logits there are {top[1] - top[0]:.2e} apart")


def test_logits_are_within_the_table_of_transformers(backend, smollm2):
    import torch
    from tolerances import assert_close

    with open_model_file(smollm2) as file, torch.no_grad():
        theirs = transformers_model(file)
        with tl.Model(smollm2, 512, device=backend, kv_mode="fp32") as model:
            ids = model.tokenizer.encode(PROMPTS[0]).ids
            assert_close(model.logits(ids), theirs(torch.tensor([ids])).logits[0].numpy(), "f32", "f32", rounded=False)


def test_a_pool_hit_on_a_real_model_changes_nothing(backend, smollm2):
    with tl.Model(smollm2, 512, device=backend) as model:
        pool = tl.PrefixPool()
        ids = model.tokenizer.encode(PROMPTS[1]).ids
        want = model.generate(ids, 32, temperature=0.0)
        for n in (1, 17, 33, len(ids)):
            model.register_prefix(pool, ids[:n])
            assert model.generate_with_pool(pool, ids, 32, temperature=0.0) == want
        assert pool.stats().hits == 4
