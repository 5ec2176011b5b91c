"""The longest stored prefix, against brute force and in the shapes that make searches slow or wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_fakes import ids

from tinyloop_py.prefix_index import Prefix, PrefixIndex

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

# Few distinct ids, so that prefixes of each other, long common beginnings and near misses are the rule.
sequences = st.lists(st.sampled_from([0, 1, INT32_MAX]), min_size=1, max_size=7).map(tuple)
prompts = st.lists(st.sampled_from([INT32_MIN, 0, 1, INT32_MAX]), max_size=9).map(tuple)


def longest(stored: set[tuple[int, ...]], prompt: tuple[int, ...]) -> tuple[int, ...] | None:
    return max((s for s in stored if prompt[: len(s)] == s), key=len, default=None)


def assert_finds(index: PrefixIndex, stored: set[tuple[int, ...]], prompt: tuple[int, ...]) -> None:
    expected = longest(stored, prompt)
    found = index.find(ids(prompt))
    assert (None if found is None else tuple(found.tokens)) == expected
    exact = index.get(ids(prompt))
    assert (exact is not None) == (prompt in stored)
    assert exact is None or tuple(exact.tokens) == prompt


@settings(max_examples=400)
@given(st.sets(sequences, max_size=25), st.lists(prompts, max_size=10))
def test_finds_the_longest(stored: set[tuple[int, ...]], asked: list[tuple[int, ...]]) -> None:
    index = PrefixIndex()
    for tokens in stored:
        index.add(ids(tokens))
    index._check()
    for prompt in [*asked, *stored, *((*s, 0) for s in stored), *(s[:-1] for s in stored)]:
        assert_finds(index, stored, prompt)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), sequences), max_size=60))
def test_adding_and_removing(steps: list[tuple[bool, tuple[int, ...]]]) -> None:
    index, stored = PrefixIndex(), set()
    for add, tokens in steps:
        if add:
            prefix = index.add(ids(tokens))
            assert tuple(prefix.tokens) == tokens
            assert index.add(ids(tokens)) is prefix
            stored.add(tokens)
        else:
            assert index.remove(ids(tokens)) == (tokens in stored)
            stored.discard(tokens)
        index._check()
        assert len(index) == len(stored)
        assert_finds(index, stored, (*tokens, 0, 1))


def adversarial(shape: str, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(n)
    base = rng.integers(0, 1000, 300).astype(np.int32)
    if shape == "nested":
        return [base[: i + 1] for i in range(min(n, 300))]
    if shape == "nested from the long end":
        return [base[: 300 - i] for i in range(min(n, 300))]
    if shape == "last token differs":
        return [np.append(base, 2 * i).astype(np.int32) for i in rng.permutation(n)]
    if shape == "comb":
        return [np.append(base[: 1 + i % 300], 2000 + i if i % 2 else -1 - i).astype(np.int32) for i in range(n)]
    if shape == "nested twice":  # a chain, and another that leaves it in the middle
        other = base.copy()
        other[150] = 5000
        return [chain[: i + 1] for i in range(min(n // 2, 150)) for chain in (base[150 - i :], other[150 - i :])]
    raise AssertionError(shape)


@pytest.mark.parametrize("shape", ["nested", "nested from the long end", "last token differs", "comb", "nested twice"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 15, 16, 17, 64, 300])
def test_adversarial_shapes(shape: str, n: int) -> None:
    entries = adversarial(shape, n)
    stored = {tuple(entry.tolist()) for entry in entries}
    index = PrefixIndex()
    for entry in entries:
        index.add(entry)
    index._check()
    tails = [(), (-(2**31),), (7,), (2**31 - 1,)]
    for entry in entries[:: max(1, len(entries) // 20)]:
        tokens = tuple(entry.tolist())
        for cut in {0, 1, len(tokens) // 2, len(tokens) - 1, len(tokens)}:
            for tail in tails:
                assert_finds(index, stored, tokens[:cut] + tail)
    for entry in entries[::2]:
        assert index.remove(entry)
        stored.discard(tuple(entry.tolist()))
    index._check()
    for entry in entries:
        assert_finds(index, stored, (*entry.tolist(), 1))


def test_prefix_is_a_copy() -> None:
    tokens = ids(1, 2, 3)
    prefix = Prefix(tokens)
    tokens[:] = 9
    assert prefix.tokens.tolist() == [1, 2, 3]
    prefix.tokens[:] = 9
    assert prefix.tokens.tolist() == [1, 2, 3]
    assert prefix.n_tokens == 3


def test_prefix_refuses_nothing_at_all() -> None:
    with pytest.raises(ValueError, match="from 1 to"):
        Prefix(ids([]))
    with pytest.raises(TypeError):
        Prefix(None)


def test_empty_prompt_and_empty_index() -> None:
    index = PrefixIndex()
    assert index.find(ids(1, 2)) is None
    index.add(ids(1))
    assert index.find(ids([])) is None
    assert index.get(ids([])) is None
    assert index.remove(ids(1))
    assert not index.remove(ids(1))
    assert index.find(ids(1, 2)) is None


def test_many_added_and_removed_leave_a_small_index() -> None:
    index = PrefixIndex()
    for i in range(2000):
        index.add(ids(i, i + 1))
    for i in range(1999):
        assert index.remove(ids(i, i + 1))
    index._check()
    assert len(index) == 1
    assert index.find(ids(1999, 2000, 5)).n_tokens == 2
