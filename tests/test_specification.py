"""The examples of the prefix pool's specification, as they stand there."""

import shutil

import numpy as np
import pytest

import tinyloop_py as tl


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """A folder that holds the page's model.tinyloop."""
    shutil.copy(tl.demo_model(), tmp_path / "model.tinyloop")
    monkeypatch.chdir(tmp_path)


def ids(text):
    with tl.Model(tl.demo_model()) as model:
        return np.array(model.tokenizer.encode(text).ids, np.int32)


def test_quick_start(in_folder):
    system_prompts = system_prompts_tokens = [ids(f"<|system|>You are {name}.<|end|>") for name in ("Mia", "Tom", "Clara")]
    conversation_tokens = np.concatenate([system_prompts_tokens[1], ids("<|user|>How do I grow tomatoes?<|end|><|assistant|>")])

    with tl.Model("model.tinyloop", max_seq_len=2048) as model:
        pool = tl.PrefixPool(capacity=16)

        for system_prompt_tokens in system_prompts:
            model.register_prefix(pool, system_prompt_tokens, loops=8)

        tokens = model.generate_with_pool(
            pool, conversation_tokens,
            max_tokens=128, loops=8, temperature=0.0, top_k=50,
        )  # fmt: skip

        assert tokens == model.generate(conversation_tokens, max_tokens=128, loops=8, temperature=0.0, top_k=50)
        assert tokens[: len(conversation_tokens)] == conversation_tokens.tolist()
        assert pool.stats().hits == 1 and pool.stats().matched_tokens == len(system_prompts[1])


def test_tenants_templates_and_inspection(in_folder, capsys):
    tenants = {name: ids(f"<|system|>You are {name}.<|end|>") for name in ("Mia", "Tom")}
    with tl.Model("model.tinyloop", max_seq_len=4096) as model:
        pool = tl.PrefixPool(capacity=64)
        for tenant_id, sys_tokens in tenants.items():
            n = model.register_prefix(pool, sys_tokens, loops=8)
            print(f"tenant {tenant_id}: {n} prefix tokens cached")
            assert n == len(sys_tokens)

        def answer(request_tokens: np.ndarray) -> list[int]:
            return model.generate_with_pool(
                pool, request_tokens, max_tokens=256, loops=8, temperature=0.0,
            )  # fmt: skip

        request = np.concatenate([tenants["Tom"], ids("<|user|>What is gravity?<|end|><|assistant|>")])
        assert answer(request) == model.generate(request, max_tokens=256, loops=8, temperature=0.0)

        one_shot_tokens = ids("Q: one? A: 1. ")
        three_shot_tokens = np.concatenate([one_shot_tokens, ids("Q: two? A: 2. Q: three? A: 3. ")])
        templates = tl.PrefixPool(capacity=8)
        for _name, tmpl_tokens in [("one_shot", one_shot_tokens), ("three_shot", three_shot_tokens)]:
            model.register_prefix(templates, tmpl_tokens, loops=8)
        full_prompt_tokens = np.concatenate([three_shot_tokens, ids("Q: four?")])
        assert templates.size() == 2 and templates.total_cached_tokens() == len(one_shot_tokens) + len(three_shot_tokens)
        model.generate_with_pool(templates, full_prompt_tokens, max_tokens=128, loops=8)
        assert templates.stats().matched_tokens == len(three_shot_tokens)

    with pytest.raises(RuntimeError, match=r"^tinyloop\.Model is closed; cannot call register_prefix$"):
        model.register_prefix(pool, tenants["Mia"], loops=8)
