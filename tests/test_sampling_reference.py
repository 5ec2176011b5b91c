"""The sampling reference against cases worked by hand, against transformers, and against its own probabilities."""

import numpy as np
import pytest
from philox import gumbel
from sampling_reference import sample

LOGITS = np.log([0.1, 0.4, 0.2, 0.2, 0.1])


def kept(logits=LOGITS, **options):
    return sample(logits, 0, 0, **options).kept.tolist()


def test_order_is_by_probability_then_id():
    draw = sample(LOGITS, 0, 0)
    assert draw.kept.tolist() == [1, 2, 3, 0, 4]
    assert draw.probs == pytest.approx([0.4, 0.2, 0.2, 0.1, 0.1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 2}, [1, 2]),  # 2 and 3 tie at the edge
        ({"top_k": 4}, [1, 2, 3, 0]),
        ({"top_k": 0}, [1, 2, 3, 0, 4]),
        ({"top_k": 99}, [1, 2, 3, 0, 4]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 2]),
        ({"top_p": 0.79}, [1, 2, 3]),
        ({"top_p": 0.99999}, [1, 2, 3, 0, 4]),
        ({"min_p": 0.49}, [1, 2, 3]),
        ({"min_p": 0.51}, [1]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.65}, [1]),  # 0.4 / 0.6 reaches it: over what top_k kept
        ({"top_k": 3, "top_p": 0.6, "min_p": 0.4}, [1, 2]),
        ({"logit_bias": {4: 5.0}, "top_k": 2}, [4, 1]),
        ({"logit_bias": {1: -np.inf}}, [2, 3, 0, 4]),
        ({"logit_bias": {1: -np.inf}, "top_k": 5}, [2, 3, 0, 4]),
        ({"temperature": 0}, [1]),
        ({"temperature": 0, "logit_bias": {1: -np.inf}}, [2]),  # a tie: the lower id
        ({"temperature": 0, "logit_bias": {3: 5.0}, "top_k": 1}, [3]),
    ],
)
def test_kept(options, expected):
    assert kept(**options) == expected


def test_an_exact_tie_at_min_p_is_kept():
    assert kept(np.log([0.5, 0.25, 0.25]), min_p=0.5) == [0, 1, 2]


def test_penalty_counts_an_id_once_and_comes_after_the_bias():
    draw = sample(np.array([1.0, -1.0, 2.0]), 0, 0, context=[0, 1, 0, 0], repetition_penalty=2.0, logit_bias={0: 1.0})
    scores = np.exp([(1.0 + 1.0) / 2, -1.0 * 2, 2.0])
    assert draw.probs[np.argsort(draw.kept)] == pytest.approx(scores / scores.sum())


def test_temperature_scales_after_the_penalty_and_before_top_p():
    logits = np.array([2.0, 1.0, 0.0])
    assert kept(logits, temperature=0.25, top_p=0.9) == [0]
    assert kept(logits, temperature=4.0, top_p=0.9) == [0, 1, 2]
    draw = sample(logits, 0, 0, temperature=0.5)
    assert draw.probs == pytest.approx(np.exp([4, 2, 0]) / np.exp([4, 2, 0]).sum())


def test_the_draw_is_the_argmax_of_logits_and_noise():
    logits = np.random.default_rng(0).normal(size=500)
    for position in range(50):
        draw = sample(logits, 9, position, temperature=0.7)
        assert draw.token == (logits / 0.7 + gumbel(9, position, np.arange(500))).argmax()
        assert draw.margin >= 0
        assert sample(logits, 9, position, temperature=0.7, top_k=20).token in kept(logits, top_k=20)


def test_a_filter_that_keeps_the_winner_does_not_change_it():
    logits = 3 * np.random.default_rng(1).normal(size=200)
    for position in range(100):
        free = sample(logits, 3, position)
        narrowed = sample(logits, 3, position, top_p=0.8)
        assert (free.token == narrowed.token) == (free.token in narrowed.kept)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"temperature": 0.6, "top_p": 0.9}, {"min_p": 0.1, "repetition_penalty": 1.3}])
def test_draws_follow_the_probabilities(options):
    """Chi-square over 8,000 positions, with at most 8 kept ids: below 30 but for two cases in ten thousand."""
    logits = 1.5 * np.random.default_rng(2).normal(size=8)
    draws = [sample(logits, 12345, position, context=[1, 2], **options) for position in range(8000)]
    counts = np.bincount([d.token for d in draws], minlength=8)
    expected = 8000 * draws[0].probs
    assert counts.sum() == counts[draws[0].kept].sum()
    assert ((counts[draws[0].kept] - expected) ** 2 / expected).sum() < 30


@pytest.mark.parametrize("seed", range(20))
def test_against_transformers(seed):
    """The same rules as transformers' processors in the same order, on logits without ties."""
    torch = pytest.importorskip("torch")
    generation = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(seed)
    logits, context = 3 * rng.normal(size=101), rng.integers(0, 101, 30)
    options = {
        "temperature": rng.uniform(0.3, 2), "top_k": int(rng.integers(1, 101)), "top_p": rng.uniform(0.2, 1),
        "min_p": rng.uniform(0, 0.3), "repetition_penalty": rng.uniform(0.8, 1.5),
    }  # fmt: skip
    scores, ids = torch.tensor(logits)[None], torch.tensor(context)[None]
    for processor in (
        generation.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]),
        generation.TemperatureLogitsWarper(options["temperature"]),
        generation.TopKLogitsWarper(options["top_k"]),
        generation.TopPLogitsWarper(options["top_p"]),
        generation.MinPLogitsWarper(options["min_p"]),
    ):
        scores = processor(ids, scores)
    probs = scores.softmax(-1)[0].numpy()
    draw = sample(logits, seed, 0, context=context, **options)
    assert set(draw.kept.tolist()) == set(np.flatnonzero(probs).tolist())
    assert draw.probs == pytest.approx(probs[draw.kept], rel=1e-9)
