"""How tokens are drawn, through the public API: draws follow the exact distribution, and extreme settings have their limits' results.

Seeds are fixed, so a test that passes goes on passing; the bounds would fail a correct sampler once in some thousand sets of seeds.
"""

import math

import numpy as np
import pytest
from models import CONFIGS, random_tokens
from runtime import open_model
from sampling_reference import sample, softmax

CONFIG = CONFIGS["capped"]  # logits within 5, so that many tokens can be drawn
V = CONFIG.vocab_size
PROMPT = random_tokens(CONFIG, 24)
INF = float("inf")
OFF = {"temperature": 1.0, "top_k": 0, "stop_tokens": ()}
N = 3000

SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "warm": {"temperature": 2.5},
    "top_k": {"temperature": 1.5, "top_k": 7},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "penalty": {"temperature": 1.5, "repetition_penalty": 2.0},
    "bias": {"temperature": 1.5, "logit_bias": {3: 4.0, 17: -INF, 80: 3.0, 4: -2.5}},
    "all": {
        "temperature": 1.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3, "logit_bias": {3: 3.0, 17: -INF, 90: 2.0},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def models():
    """Open models by device: what they are asked for leaves nothing behind."""
    opened = {}
    yield opened
    for model in opened.values():
        model.close()


@pytest.fixture
def model(backend, models):
    if backend not in models:
        models[backend] = open_model(backend, "capped", "f32", max_seq_len=4096)
    return models[backend]


def draws(model, seeds, **how):
    """The token that each seed draws after PROMPT; the prompt runs once."""
    with model.build_prefix_cache(PROMPT) as cache:
        return np.array([model.generate_from_prefix_cache(cache, 1, seed=int(s), **{**OFF, **how})[-1] for s in seeds])


def exact(model, **how):
    """The probabilities (vocab_size,) of the token after PROMPT, from the model's logits by the reference."""
    draw = sample(model.logits(PROMPT, last_only=True)[0], 0, 0, context=PROMPT, **how)
    probs = np.zeros(V)
    probs[draw.kept] = draw.probs
    return probs


def assert_follows(counts, expected):
    """Chi-square with the rare classes taken together, five standard deviations above its mean at most."""
    assert counts[expected == 0].sum() == 0, "a token that cannot be drawn was"
    common = expected >= 8
    seen, want = [*counts[common], counts[~common].sum()], [*expected[common], expected[~common].sum()]
    pairs = [(s, w) for s, w in zip(seen, want, strict=True) if w >= 1]
    chi_square, df = sum((s - w) ** 2 / w for s, w in pairs), max(1, len(pairs) - 1)
    assert chi_square < df + 5 * math.sqrt(2 * df), f"chi-square {chi_square:.1f} with {df} degrees of freedom"


# ---- distributions


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_over_seeds_follow_the_exact_distribution(model, name):
    counts = np.bincount(draws(model, range(N), **SETTINGS[name]), minlength=V)
    probs = exact(model, **SETTINGS[name])
    assert (probs > 0).sum() > 2 and probs.max() < 0.98  # or nothing is tested
    assert_follows(counts, N * probs)


def test_neighbouring_seeds_draw_independently(model):
    drawn, probs = draws(model, range(20_000, 20_000 + N), temperature=2.5), exact(model, temperature=2.5)
    order = np.argsort(-probs)
    classes = np.empty(V, int)
    classes[order] = np.minimum((np.cumsum(probs[order]) * 4).astype(int), 3)
    p = np.bincount(classes, probs, 4)
    pairs = np.bincount(4 * classes[drawn[:-1]] + classes[drawn[1:]], minlength=16)
    assert_follows(pairs, (N - 1) * np.outer(p, p).ravel())


@pytest.mark.parametrize("name", ["plain", "warm", "all"])
def test_successive_draws_of_one_seed_follow_their_distributions(model, name):
    """Each token takes a random part of the unit interval, of its probability's length: its middle is uniform over many tokens."""
    how = {**OFF, **SETTINGS[name]}
    out = np.array(model.generate(PROMPT, 2000, seed=99, **how))
    logits = model.logits(out)
    settings = {k: v for k, v in how.items() if k != "stop_tokens"}
    places, rng = [], np.random.default_rng(0)
    for n in range(len(PROMPT), len(out)):
        draw = sample(logits[n - 1], 0, 0, context=out[:n], **settings)
        i = int(np.flatnonzero(draw.kept == out[n])[0])  # it was among those kept
        places.append(draw.probs[:i].sum() + rng.random() * draw.probs[i])
    assert_follows(np.histogram(places, 20, (0, 1))[0], np.full(20, len(places) / 20))
    steps = np.array(places)  # and a place says nothing of the next one
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1]) < 4 / math.sqrt(len(steps))


def test_a_batch_draws_from_the_same_distribution(model):
    seeds = list(range(50_000, 50_000 + 1500))
    out = model.generate_batch([PROMPT[:3]] * len(seeds), 1, seed=seeds, **{**OFF, "temperature": 1.5, "top_k": 12})
    draw = sample(model.logits(PROMPT[:3], last_only=True)[0], 0, 0, temperature=1.5, top_k=12)
    expected = np.zeros(V)
    expected[draw.kept] = len(seeds) * draw.probs
    assert_follows(np.bincount([o[-1] for o in out], minlength=V), expected)


# ---- limits


@pytest.fixture
def greedy(model):
    return int(model.logits(PROMPT, last_only=True).argmax())


@pytest.mark.parametrize("temperature", [1e-20, 1e-30, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_no_temperature_to_speak_of_is_greedy(model, greedy, temperature, filters):
    assert set(draws(model, range(20), temperature=temperature, **filters)) == {greedy}


@pytest.mark.parametrize("temperature", [1e20, 1e30, 1e38, 1e300, 1.7e308])
def test_a_boundless_temperature_is_uniform(model, temperature):
    uniform = np.full(V, 1 / V)
    assert_follows(np.bincount(draws(model, range(N), temperature=temperature), minlength=V), N * uniform)
    banned = dict.fromkeys(range(0, V, 2), -INF)
    assert all(t % 2 for t in draws(model, range(300), temperature=temperature, logit_bias=banned))
    assert all(t % 2 for t in draws(model, range(300), temperature=temperature, logit_bias=banned, top_p=0.9))
    best = np.argsort(-model.logits(PROMPT, last_only=True)[0], kind="stable")[:5]
    assert set(draws(model, range(200), temperature=temperature, top_k=5)) == set(best.tolist())
    assert len(set(draws(model, range(300), temperature=temperature, top_p=0.5))) <= V // 2 + 1


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-30}, {"top_p": 1e-300}, {"top_p": 5e-324}, {"min_p": 1.0}, {"top_k": 3, "top_p": 1e-9, "min_p": 1}],
)
def test_filters_that_leave_one(model, greedy, filters):
    assert set(draws(model, range(20), temperature=3.0, **filters)) == {greedy}


def test_filters_that_leave_all(model):
    free = draws(model, range(50), temperature=2.0)
    for filters in ({"top_k": V}, {"top_k": V + 1}, {"top_k": 2**31 - 1}, {"top_p": 1}, {"min_p": 0}, {"min_p": 5e-324}, {"top_p": 1 - 1e-12}):
        assert np.array_equal(draws(model, range(50), temperature=2.0, **filters), free), filters


@pytest.mark.parametrize("penalty", [1e-30, 1e-10, 1e10, 1e30])
def test_extreme_penalties(model, penalty):
    logits = model.logits(PROMPT, last_only=True)[0]
    want = sample(logits, 0, 0, context=PROMPT, temperature=0, repetition_penalty=penalty).token
    assert set(draws(model, range(3), temperature=0.0, repetition_penalty=penalty)) == {want}
    drawn = draws(model, range(300), repetition_penalty=penalty)
    if penalty < 1:  # what was seen and was likely is certain
        assert set(drawn) == {want}
    else:  # what was seen and was likely is as likely as a logit of 0
        probs = softmax(np.where(np.isin(np.arange(V), PROMPT), np.where(logits > 0, 0.0, -INF), logits.astype(float)))
        assert_follows(np.bincount(drawn, minlength=V), 300 * np.where(probs > 1e-9, probs, 0))


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300])
def test_penalties_beyond_float32_are_those_at_its_end(model, penalty):
    nearest = 1e-30 if penalty < 1 else 1e30
    assert np.array_equal(draws(model, range(50), repetition_penalty=penalty), draws(model, range(50), repetition_penalty=nearest))


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.3}, {"temperature": 1e30}])
def test_extreme_biases(model, greedy, filters):
    for bias in (1e30, 1e38, 1e300):
        if filters.get("temperature") != 1e30 or bias > 1e32:
            assert set(draws(model, range(10), logit_bias={greedy - 1: bias}, **filters)) == {greedy - 1}
    if filters.get("temperature") != 1e30:
        assert greedy not in draws(model, range(50), logit_bias={greedy: -1e30}, **filters)
    assert greedy not in draws(model, range(50), logit_bias={greedy: -INF}, **filters)
    only = {i: -INF for i in range(V) if i != 7}
    assert set(draws(model, range(10), logit_bias=only, **filters)) == {7}
    assert set(draws(model, range(10), logit_bias={**only, 7: -1e300}, **filters)) == {7}
    assert set(draws(model, range(10), logit_bias={**only, 7: -1e30}, repetition_penalty=1e-3, **filters)) == {7}


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.3}, {"temperature": 1e30}])
def test_what_bias_and_penalty_drive_out_of_range_is_not_banned(model, filters):
    seen, unseen = int(max(PROMPT)), next(i for i in range(V) if i not in PROMPT)
    for penalty in (2.0, 1e30):
        banned = {i: -INF for i in range(V) if i != seen}
        assert set(draws(model, range(10), logit_bias={**banned, seen: -1e300}, repetition_penalty=penalty, **filters)) == {seen}
    banned = {i: -INF for i in range(V) if i not in (seen, unseen)}
    both = {**banned, seen: -3e38, unseen: -3e38}
    assert set(draws(model, range(10), logit_bias=both, repetition_penalty=2.0, **filters)) == {unseen}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"logit_bias": dict.fromkeys(range(V), -INF)}, "logit_bias bans every token"),
        ({"logit_bias": {3: INF}}, "a logit_bias value is inf, expected a finite number"),
        ({"logit_bias": {3: math.nan}}, "a logit_bias value is nan"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": -1e-300}, "temperature is -1e-300"),
        ({"top_p": 0.0}, "top_p is 0, expected more than 0"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_p": 1 + 1e-9}, "top_p is 1, expected more than 0, and at most 1"),
        ({"min_p": 1.0001}, "min_p"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0, expected more than 0"),
        ({"repetition_penalty": INF}, "repetition_penalty is inf"),
        ({"repetition_penalty": -2}, "repetition_penalty is -2"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2**31}, "top_k"),
    ],
)
def test_what_has_no_meaning_is_refused(model, arguments, text):
    with pytest.raises(ValueError, match=text):
        model.generate(PROMPT, 1, **arguments)


def test_an_empty_bias_is_none(model):
    assert np.array_equal(draws(model, range(10), logit_bias={}), draws(model, range(10)))
