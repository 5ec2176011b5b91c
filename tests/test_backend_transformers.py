"""The runtime against transformers: random models of every plain family, converted, in float32."""

import numpy as np
import pytest
import torch
from samples import build
from tolerances import assert_close

import tinyloop_py as tl
from tinyloop_py.convert import convert

FAMILIES = {
    "Llama MHA": ("Llama", {"num_key_value_heads": 4}),
    "Llama GQA": ("Llama", {"num_key_value_heads": 2}),
    "Llama MQA": ("Llama", {"num_key_value_heads": 1}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {}),
    "Mistral, window 24": ("Mistral", {"sliding_window": 24}),
    "SmolLM3": ("SmolLM3", {}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """The model in transformers, and the file that it was converted to."""
    family, fields = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("model")
    theirs = build(folder, family, std=0.2, **fields).eval()
    convert(folder, folder / "m.tinyloop", tokenizer=False)
    return theirs, folder / "m.tinyloop"


def test_logits(backend, pair):
    theirs, path = pair
    tokens = np.random.default_rng(1).integers(0, 320, 150)
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
    with tl.Model(path, 256, device=backend, kv_mode="fp32") as model:
        assert_close(model.logits(tokens), want, "f32", "f32", rounded=False)


def test_greedy_tokens(backend, pair):
    theirs, path = pair
    with tl.Model(path, 256, device=backend, kv_mode="fp32") as model:
        for seed in range(3):
            prompt = np.random.default_rng(seed).integers(0, 320, 40).tolist()
            ids = torch.tensor([prompt])
            want = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)[
                0
            ].tolist()
            assert model.generate(prompt, 40, temperature=0.0, stop_tokens=()) == want
            pool = tl.PrefixPool()
            model.register_prefix(pool, prompt[:33])
            assert model.generate_with_pool(pool, prompt, 40, temperature=0.0, stop_tokens=()) == want
            assert pool.stats().hits == 1
