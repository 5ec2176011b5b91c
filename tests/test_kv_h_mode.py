"""The KV mode h: what is held is the operand of the K and V products, and every answer has the bits of fp16."""

import numpy as np
import pytest
from models import CONFIGS, random_tokens
from runtime import ISAS, entry_of, kv_of, open_model, same_bits, same_kv

import tinyloop_py as tl
from tinyloop_py.kv_export import export_operands, import_operands

NAMES = [name for name, c in CONFIGS.items() if 2 * c.kv_dim > c.dim]
DTYPES = (("f32", None), ("bf16", None), ("f16", None), ("int8", 64))
N = 150


def pair(backend, name, dtype="bf16", **arguments):
    return open_model(backend, name, dtype, kv_mode="fp16", **arguments), open_model(backend, name, dtype, kv_mode="h", **arguments)


def check_hits(plain, h, tokens, window=0, splits=(1, 16, 33, 64, 100, N)):
    """Answers through hits at every split, and what the entries rebuild, against fp16."""
    loops = min(2, plain.config.trained_loops)
    kv = kv_of(plain, tokens, loops, window)
    greedy = plain.generate(tokens, 5, loops, 0.0, cache_window=window, stop_tokens=())
    drawn = plain.generate(tokens, 5, loops, 1.3, cache_window=window, seed=3, stop_tokens=())
    for split in splits:
        pool = tl.PrefixPool()
        assert h.register_prefix(pool, tokens[:split], loops, window) == split
        assert h.generate_with_pool(pool, tokens, 5, loops, 0.0, cache_window=window, stop_tokens=()) == greedy, f"split at {split}"
        assert h.generate_with_pool(pool, tokens, 5, loops, 1.3, cache_window=window, seed=3, stop_tokens=()) == drawn
        stats = pool.stats()
        assert (stats.hits, stats.prefilled_tokens, stats.fallbacks) == (2, 2 * (N - split), 0)
        assert same_kv(kv, kv_of(h, tokens, loops, window, (split,))), f"split at {split}"
    assert same_kv(kv, kv_of(h, tokens, loops, window, tuple(splits[:-1]))), "an entry on an entry"


@pytest.mark.parametrize("name", NAMES)
def test_hits_have_the_bits_of_fp16_in_every_config(backend, name):
    plain, h = pair(backend, name)
    with plain, h:
        tokens = random_tokens(CONFIGS[name], N)
        assert same_bits(plain.logits(tokens), h.logits(tokens))
        check_hits(plain, h, tokens, splits=(17, 64, N))


@pytest.mark.parametrize(("dtype", "group_size"), DTYPES)
@pytest.mark.parametrize("name", ["nanbeige", "huginn", "odd"])
def test_hits_have_the_bits_of_fp16_in_every_weight_type(backend, name, dtype, group_size):
    plain, h = pair(backend, name, dtype, group_size=group_size)
    with plain, h:
        check_hits(plain, h, random_tokens(CONFIGS[name], N))


@pytest.mark.parametrize("window", [1, 15, 40, 64, 500])
@pytest.mark.parametrize("name", ["nanbeige", "zero_init", "huginn"])
def test_hits_have_the_bits_of_fp16_under_a_window(backend, name, window):
    plain, h = pair(backend, name)
    with plain, h:
        check_hits(plain, h, random_tokens(CONFIGS[name], N), window)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "group_size"), DTYPES)
def test_every_code_path_and_number_of_threads(monkeypatch, isa, dtype, group_size):
    monkeypatch.setenv("TINYLOOP_CPU_ISA", isa)
    for threads in (1, 3):
        try:
            plain, h = pair("cpu", "retrofit_olmo", dtype, group_size=group_size, threads=threads)
        except RuntimeError as error:
            pytest.skip(f"{isa}: {error}")
        with plain, h:
            check_hits(plain, h, random_tokens(CONFIGS["retrofit_olmo"], N), splits=(33, N))


def test_prompts_longer_than_a_step(backend):
    """The rebuild runs in bounded steps, as a prompt does."""
    tokens = random_tokens(CONFIGS["odd"], 1200)
    plain, h = pair(backend, "odd", max_seq_len=1300)
    with plain, h:
        assert same_kv(kv_of(plain, tokens), kv_of(h, tokens, splits=(1100,)))


def test_what_is_held_is_smaller_and_calls_give_all_back(backend):
    tokens = random_tokens(CONFIGS["nanbeige"], 160)
    plain, h = pair(backend, "nanbeige")
    with plain, h:
        sizes = []
        for model in (plain, h):
            pool = tl.PrefixPool()
            model.register_prefix(pool, tokens)
            held = model.kv_nbytes
            payload = entry_of(pool, model, tokens).payload
            hidden = payload.final_x.nbytes + payload.boundary_x.nbytes
            assert held == payload.nbytes - hidden
            sizes.append(held)
            model.generate_with_pool(pool, tokens, 4)
            assert model.kv_nbytes == held
            with model.build_prefix_cache(tokens[:100]) as cache:
                assert len(model.generate_from_prefix_cache(cache, 3)) == 103
            assert model.kv_nbytes == held
            del payload
            pool.clear()
            assert model.kv_nbytes == 0
        c = CONFIGS["nanbeige"]
        assert sizes[1] / sizes[0] == c.dim / (2 * c.kv_dim)  # bfloat16 operands of dim values, against two kinds of kv_dim float16


def test_a_partly_filled_page_is_copied_not_shared(backend):
    plain, h = pair(backend, "nanbeige")
    a, b = random_tokens(CONFIGS["nanbeige"], 60), random_tokens(CONFIGS["nanbeige"], 60, seed=4)
    with plain, h:
        pool = tl.PrefixPool()
        for end in (a[:20], np.concatenate([a[:20], b]), a):
            h.register_prefix(pool, end)
        for prompt in (a, np.concatenate([a[:20], b])):
            want = plain.generate(prompt, 4, temperature=0.0, stop_tokens=())
            assert h.generate_with_pool(pool, prompt, 4, temperature=0.0, stop_tokens=()) == want
        assert pool.stats().full_hits == 2


def test_a_hit_that_finds_no_memory_falls_back_and_loses_nothing(backend):
    tokens = random_tokens(CONFIGS["nanbeige"], 64)
    plain, h = pair(backend, "nanbeige")
    with plain, h:
        want = plain.generate(tokens, 4, temperature=0.0, stop_tokens=())
        pool = tl.PrefixPool()
        h.register_prefix(pool, tokens[:40])
        held, left = h.kv_nbytes, [3]

        def fault(space):
            left[0] -= 1
            if left[0] == 0:
                raise tl.OutOfMemoryError("out of memory: injected")

        h._engine.plan.store.fault = fault
        assert h.generate_with_pool(pool, tokens, 4, temperature=0.0, stop_tokens=()) == want
        h._engine.plan.store.fault = None
        assert pool.stats().fallbacks == 1 and h.kv_nbytes == held
        assert h.generate_with_pool(pool, tokens, 4, temperature=0.0, stop_tokens=()) == want
        assert pool.stats().hits == 1


def test_pages_of_operands_come_back_as_they_were(backend):
    with open_model(backend, "huginn", "int8", kv_mode="h") as model:
        pool, tokens = tl.PrefixPool(), random_tokens(CONFIGS["huginn"], 48)
        model.register_prefix(pool, tokens)
        want = kv_of(model, tokens)
        payload = entry_of(pool, model, tokens).payload
        pages = [(stage, page, export_operands(model._engine, stage, page)) for span in payload.spans for stage, page, _ in span.held()]
        assert pages
        for stage, page, operands in pages:
            import_operands(model._engine, stage, page, np.zeros_like(operands))
        for stage, page, operands in pages:
            import_operands(model._engine, stage, page, operands)
            assert same_bits(export_operands(model._engine, stage, page), operands)
        cold = model.generate(tokens, 4, temperature=0.0, stop_tokens=())
        assert model.generate_with_pool(pool, tokens, 4, temperature=0.0, stop_tokens=()) == cold
        assert same_kv(want, kv_of(model, tokens))
        with pytest.raises(ValueError, match="bytes"):
            import_operands(model._engine, *pages[0][:2], np.zeros(3, np.uint8))


def test_where_it_would_not_be_smaller_it_is_refused_with_both_sizes(backend, monkeypatch):
    c = CONFIGS["shipped"]
    with pytest.raises(ValueError, match=rf"{c.dim} values.*{2 * c.kv_dim} of keys and values"):
        open_model(backend, "shipped", kv_mode="h")
    monkeypatch.setenv("TINYLOOP_KV_H_MODE", "1")
    with pytest.raises(ValueError, match=rf"{c.dim} values"):
        open_model(backend, "shipped")
