"""Beam search: equal to a plain reference, pages shared by what beams have in common, nothing lost when something fails."""

import math
import threading

import beam_reference
import pytest
from faults import PageFault
from models import CONFIGS, random_model, random_tokens
from runtime import open_model

import tinyloop_py as tl

PROMPT = random_tokens(CONFIGS["shipped"], 40)
PENALTIES = (0.0, 0.5, 1.0, 2.0, -1.0)

pytestmark = pytest.mark.filterwarnings("ignore:loops = .* is deeper")


@pytest.fixture
def model(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as model:
        yield model


@pytest.fixture(scope="module")
def tied_file(tmp_path_factory):
    """A model whose tokens come in pairs of equal embeddings, so that every logit ties with another."""
    config = tl.ModelConfig(vocab_size=12, dim=32, ffn_dim=48, n_heads=2, n_kv_heads=1, head_dim=16, n_core=1, default_loops=2, max_loops=4)
    tensors = random_model(config, 3)
    tensors["embed.weight"][1::2] = tensors["embed.weight"][::2]
    path = tmp_path_factory.mktemp("tied") / "tied.tinyloop"
    tl.save_model(path, config, tensors)
    return path


def nothing_held(model):
    return model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def assert_equal(got, want):
    assert [(b.tokens, b.finish_reason) for b in got] == [(b.tokens, b.finish_reason) for b in want]
    assert [b.score for b in got] == [b.score for b in want]


# ---- against the reference


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("num_beams", [1, 2, 3, 8])
def test_against_the_reference(model, num_beams, penalty):
    for n, seed in ((3, 1), (16, 2), (31, 3)):
        prompt = random_tokens(model.config, n, seed)
        likely = model.logits(prompt, last_only=True)[0].argsort()[::-1]
        stops = tuple(int(t) for t in likely[1:40])  # some beams stop at once, others later
        got = model.beam_search(prompt, num_beams, 7, length_penalty=penalty, stop_tokens=stops)
        assert_equal(got, beam_reference.beam_search(model, prompt, num_beams, 7, length_penalty=penalty, stop_tokens=stops))
        assert len(got) == num_beams
        if num_beams > 1:
            assert {b.finish_reason for b in got} <= {"stop", "length"} and any(b.finish_reason == "stop" for b in got)
    assert nothing_held(model)


@pytest.mark.parametrize("name", ["huginn", "mixed_windows", "olmo2", "nanbeige"])
def test_families_depths_and_windows_against_the_reference(backend, name):
    with open_model(backend, name, max_seq_len=128) as model:
        prompt = random_tokens(model.config, 25)
        for loops, window in ((1, 0), (2, 9), (2, 64)):
            got = model.beam_search(prompt, 4, 12, loops, window, stop_tokens=())
            assert_equal(got, beam_reference.beam_search(model, prompt, 4, 12, loops, window))
        assert nothing_held(model)


@pytest.mark.parametrize("kv_mode", ["bf16", "fp32", "int8", "int4", "h"])
def test_kv_modes_against_the_reference(backend, kv_mode):
    with open_model(backend, "ouro", "bf16", max_seq_len=128, kv_mode=kv_mode) as model:
        prompt = random_tokens(model.config, 25)
        pool = tl.PrefixPool()
        model.register_prefix(pool, prompt[:20], 2)
        held = model.kv_nbytes
        want = beam_reference.beam_search(model, prompt, 4, 12, 2)
        assert_equal(model.beam_search(prompt, 4, 12, 2, stop_tokens=()), want)
        assert_equal(model.beam_search(prompt, 4, 12, 2, stop_tokens=(), pool=pool), want)
        assert pool.stats().hits == 1 and model.kv_nbytes == held


@pytest.mark.parametrize("num_beams", [13, 30, 200])
def test_more_beams_than_tokens_and_than_rows_of_a_step(backend, tied_file, num_beams):
    with tl.Model(tied_file, 40, device=backend) as model:
        got = model.beam_search([1, 2, 3], num_beams, 3, stop_tokens=(4,))
        assert_equal(got, beam_reference.beam_search(model, [1, 2, 3], num_beams, 3, stop_tokens=(4,)))
        assert nothing_held(model)


def test_ties_go_to_the_lower_id(backend, tied_file):
    with tl.Model(tied_file, 40, device=backend) as model:
        beams = model.beam_search([5, 0, 7], 4, 2, stop_tokens=())
        assert beams[0].score == beams[1].score == beams[2].score == beams[3].score
        first, second = (min(b.tokens[i] for b in beams) for i in (3, 4))
        assert first % 2 == 0 and second % 2 == 0
        assert [b.tokens[3:] for b in beams] == [[first + i, second + j] for i in (0, 1) for j in (0, 1)]
        assert_equal(beams, beam_reference.beam_search(model, [5, 0, 7], 4, 2))


def test_one_beam_is_greedy(model):
    for seed in range(4):
        prompt = random_tokens(model.config, 20, seed)
        want = model.generate(prompt, 30, temperature=0.0, stop_tokens=())
        (beam,) = model.beam_search(prompt, 1, 30, stop_tokens=())
        assert (beam.tokens, beam.finish_reason) == (want, "length")
        stop = want[25]
        want = model.generate(prompt, 30, temperature=0.0, stop_tokens=(stop,))
        (beam,) = model.beam_search(prompt, 1, 30, stop_tokens=(stop,))
        assert (beam.tokens, beam.finish_reason) == (want, "stop")


def test_scores_are_the_sums_that_the_logits_give(model):
    beams = model.beam_search(PROMPT, 5, 10, length_penalty=0.7, stop_tokens=())
    for beam in beams:
        logits = model.logits(beam.tokens)[39:-1]
        total = math.fsum(beam_reference.log_softmax(row)[token] for row, token in zip(logits, beam.tokens[40:], strict=True))
        assert beam.score == pytest.approx(total / 10**0.7, rel=1e-12)
    assert [b.score for b in beams] == sorted((b.score for b in beams), reverse=True)
    assert len({tuple(b.tokens) for b in beams}) == 5


def test_the_same_call_twice_and_with_other_threads(backend):
    results = set()
    for threads in (1, 2):
        with open_model(backend, "shipped", "bf16", threads=threads) as model:
            results |= {repr(model.beam_search(PROMPT, 6, 20, stop_tokens=())) for _ in range(2)}
    assert len(results) == 1


def test_stop_tokens_none_are_the_files(model):
    assert repr(model.beam_search(PROMPT, 3, 6)) == repr(model.beam_search(PROMPT, 3, 6, stop_tokens=model.stop_ids))


def test_max_tokens_0_returns_the_prompt(model):
    assert model.beam_search(PROMPT, 4, 0) == [tl.Beam(PROMPT.tolist(), 0.0, "length")]
    assert nothing_held(model)


def test_two_prompts_long_enough_for_several_steps(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=700) as model:
        prompt = random_tokens(model.config, 600)
        (beam,) = model.beam_search(prompt, 1, 5, stop_tokens=())
        assert beam.tokens == model.generate(prompt, 5, temperature=0.0, stop_tokens=())


def test_a_logit_that_overflows_ranks_as_when_a_token_is_drawn(backend, tmp_path):
    config = tl.ModelConfig(vocab_size=12, dim=32, ffn_dim=48, n_heads=2, n_kv_heads=1, head_dim=16, n_core=1)
    tensors = random_model(config, 3)
    tensors["final_norm.weight"] *= 1e6
    tensors["embed.weight"][5] = 3e38
    tensors["embed.weight"][5, ::2] = -3e38
    tl.save_model(tmp_path / "m.tinyloop", config, tensors, dtype="f32")
    with tl.Model(tmp_path / "m.tinyloop", 64, device=backend) as model:
        assert not math.isfinite(model.logits([1, 2, 3])[-1, 5])
        drawn = model.generate([1, 2, 3], 1, temperature=0.0, stop_tokens=())
        beams = model.beam_search([1, 2, 3], 4, 1, stop_tokens=())
        assert beams[0].tokens == drawn and len(beams) == 4
        assert len({tuple(beam.tokens) for beam in beams}) == 4 and not any(math.isnan(beam.score) for beam in beams)


# ---- memory


def stage_nbytes(model):
    """Bytes of one page of every stage of a sequence."""
    return sum(s.page_nbytes * (model.config.default_loops if part == 2 else 1) for part, s in enumerate(model._engine.plan.store.spaces) if s)


def test_beams_share_their_stem(model):
    """Eight beams on 160 tokens: ten pages of the prompt once, and for each beam what it differs by."""
    prompt = random_tokens(model.config, 160)
    store = model._engine.plan.store
    store.reset_peak()
    model.beam_search(prompt, 8, 16, stop_tokens=())
    assert store.peak_nbytes == (10 + 8) * stage_nbytes(model)
    assert nothing_held(model)


def test_a_long_search_holds_far_less_than_its_beams_apart(model):
    store = model._engine.plan.store
    store.reset_peak()
    beams = model.beam_search(PROMPT[:5], 8, 200, stop_tokens=())
    apart = 8 * 13 * stage_nbytes(model)
    assert store.peak_nbytes < apart
    assert len(beams) == 8 and nothing_held(model)


def test_a_beam_that_ends_frees_its_pages(backend, tied_file):
    """All but one of eight beams stop early; the last goes on with the pages of one."""
    with tl.Model(tied_file, 512, device=backend) as model:
        prompt = [1, 2, 3]
        store = model._engine.plan.store
        likely = model.logits(prompt, last_only=True)[0].argsort(kind="stable")[::-1]
        stops = tuple(int(t) for t in likely[:7])
        store.reset_peak()
        beams = model.beam_search(prompt, 8, 100, stop_tokens=stops)
        assert sum(b.finish_reason == "stop" and len(b.tokens) == 4 for b in beams) == 7
        n_longest = max(len(b.tokens) for b in beams)
        assert store.peak_nbytes == -(-(n_longest - 1) // 16) * stage_nbytes(model)
        assert nothing_held(model)


def test_windows_bound_the_pages_of_long_searches(model):
    store = model._engine.plan.store
    store.reset_peak()
    model.beam_search(PROMPT, 4, 200, cache_window=16, stop_tokens=())
    assert store.peak_nbytes <= (3 + 4 * 8) * stage_nbytes(model)
    assert nothing_held(model)


def test_a_budget_that_suffices_by_sharing_does(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as plain:
        page = stage_nbytes(plain)
        want = plain.beam_search(PROMPT, 4, 24, stop_tokens=())
    with open_model(backend, "shipped", "bf16", max_seq_len=256, kv_budget=(2 + 4 * 2) * page) as model:  # 40 tokens: two full pages
        assert_equal(model.beam_search(PROMPT, 4, 24, stop_tokens=()), want)
        with PageFault(model) as count, pytest.raises(tl.OutOfMemoryError, match=r"^out of memory: .* kv_budget"):
            model.beam_search(PROMPT, 5, 24)
        assert count.taken == 0 and nothing_held(model)


# ---- the pool


@pytest.mark.parametrize("split", [1, 16, 30, 40])
def test_a_pools_hit_gives_the_same_beams(model, split):
    pool = tl.PrefixPool()
    model.register_prefix(pool, PROMPT[:split])
    held = model.kv_nbytes
    want = model.beam_search(PROMPT, 4, 12, stop_tokens=())
    assert_equal(model.beam_search(PROMPT, 4, 12, stop_tokens=(), pool=pool), want)
    stats = pool.stats()
    assert (stats.hits, stats.matched_tokens, stats.prefilled_tokens) == (1, split, 40 - split)
    assert_equal(model.beam_search(PROMPT, 4, 12, stop_tokens=(), pool=pool, namespace="a"), want)
    assert pool.stats().misses == 1
    assert model.kv_nbytes == held and pool.match(model, PROMPT) == split


def test_under_lru_a_pool_makes_room(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as plain:
        page = stage_nbytes(plain)
    with open_model(backend, "shipped", "bf16", max_seq_len=256, kv_budget=12 * page) as model:
        pool = tl.PrefixPool(eviction="lru")
        for seed in range(3):
            model.register_prefix(pool, random_tokens(model.config, 48, seed=seed))
        assert len(model.beam_search(PROMPT, 4, 16, stop_tokens=(), pool=pool)) == 4
        assert pool.size() < 3 and pool.stats().evictions > 0


# ---- errors


def test_arguments_are_checked(model):
    for error, text, arguments, named in (
        (ValueError, "num_beams must be at least 1, got 0", (PROMPT, 0), {}),
        (TypeError, "num_beams", (PROMPT, 1.5), {}),
        (ValueError, "num_beams", (PROMPT, 5000), {}),
        (ValueError, "max_tokens", (PROMPT, 2, -1), {}),
        (ValueError, "empty", ([], 2), {}),
        (ValueError, "loops", (PROMPT, 2, 5, 99), {}),
        (RuntimeError, "max_seq_len", (PROMPT, 2, 300), {}),
        (TypeError, "length_penalty is str", (PROMPT,), {"length_penalty": "1"}),
        (TypeError, "length_penalty is bool", (PROMPT,), {"length_penalty": True}),
        (ValueError, "length_penalty is nan", (PROMPT,), {"length_penalty": math.nan}),
        (ValueError, "length_penalty is 33", (PROMPT,), {"length_penalty": 33}),
        (ValueError, "stop_tokens", (PROMPT,), {"stop_tokens": (999,)}),
        (TypeError, "pool must be a PrefixPool or None, got str", (PROMPT,), {"pool": "p"}),
        (TypeError, "namespace", (PROMPT,), {"namespace": 3}),
    ):
        with pytest.raises(error, match=text):
            model.beam_search(*arguments, **named)
    assert nothing_held(model)


def test_a_closed_model_raises(backend):
    model = open_model(backend)
    model.close()
    with pytest.raises(RuntimeError, match=r"tinyloop\.Model is closed; cannot call beam_search"):
        model.beam_search(PROMPT)


@pytest.mark.parametrize("window", [0, 20])
def test_a_failure_at_every_page_loses_nothing(model, window):
    pool = tl.PrefixPool()
    model.register_prefix(pool, PROMPT[:20])
    held, store = model.kv_nbytes, model._engine.plan.store
    want = model.beam_search(PROMPT, 3, 20, None, window, stop_tokens=())
    with PageFault(model) as count:
        model.beam_search(PROMPT, 3, 20, None, window, stop_tokens=())
    assert count.taken > 10
    for nth in range(1, count.taken + 1):
        with PageFault(model, nth), pytest.raises(tl.OutOfMemoryError):
            model.beam_search(PROMPT, 3, 20, None, window, stop_tokens=())
        assert model.kv_nbytes == held and store.reserved_nbytes == 0
    assert_equal(model.beam_search(PROMPT, 3, 20, None, window, stop_tokens=()), want)
    assert pool.match(model, PROMPT) == 20


def test_a_hit_that_fails_falls_back(model):
    pool = tl.PrefixPool()
    model.register_prefix(pool, PROMPT[:20])
    want = model.beam_search(PROMPT, 3, 5, stop_tokens=())
    with PageFault(model, 1):
        assert_equal(model.beam_search(PROMPT, 3, 5, stop_tokens=(), pool=pool), want)
    assert pool.stats().fallbacks == 1


def test_a_model_closed_in_mid_search_raises_there(backend):
    model = open_model(backend, "shipped", "bf16", max_seq_len=512)
    caught, started = [], threading.Event()
    model._engine.plan.store.fault = lambda part: started.set()

    def work():
        try:
            model.beam_search(PROMPT, 4, 400, stop_tokens=())
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    model.close()
    thread.join()
    assert len(caught) == 1 and "closed" in caught[0]


def test_threads_search_at_once(model):
    prompts = [random_tokens(model.config, 20 + i, seed=i) for i in range(6)]
    want = [model.beam_search(p, 3, 12, stop_tokens=()) for p in prompts]
    got, errors = {}, []

    def work(i):
        try:
            got[i] = model.beam_search(prompts[i], 3, 12, stop_tokens=())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and [got[i] for i in range(6)] == want
    assert nothing_held(model)
