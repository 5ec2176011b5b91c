"""Token ids: what is taken without a copy, what is converted, what is refused; and comparisons."""

from __future__ import annotations

import array
import collections
import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyloop_py.tokens import as_tokens, check_vocab, common_prefix_len, compare_tokens

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def shares(view: memoryview, owner: object) -> bool:
    return np.shares_memory(np.asarray(view), np.asarray(owner))


def test_int32_array_is_not_copied() -> None:
    tokens = np.arange(5, dtype=np.int32)
    view = as_tokens(tokens)
    assert shares(view, tokens)
    tokens[0] = 99
    assert view[0] == 99


def test_read_only_and_other_int32_buffers_are_not_copied() -> None:
    read_only = np.arange(5, dtype=np.int32)
    read_only.flags.writeable = False
    buffers = [read_only, array.array("i", [1, 2, 3]), (ctypes.c_int32 * 3)(1, 2, 3), memoryview(array.array("i", [4])), as_tokens(read_only)]
    for buffer in buffers:
        view = as_tokens(buffer)
        assert shares(view, buffer)
        assert list(view) == list(buffer)


def test_view_of_a_read_only_array_refuses_writes() -> None:
    tokens = np.arange(5, dtype=np.int32)
    tokens.flags.writeable = False
    view = as_tokens(tokens)
    assert not np.asarray(view).flags.writeable
    with pytest.raises(TypeError):
        view[0] = 1


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i8", "u8", ">i4", ">i8", "<i4"])
def test_integer_dtypes_are_converted(dtype: str) -> None:
    assert list(as_tokens(np.array([0, 1, 127], dtype=dtype))) == [0, 1, 127]


def test_strided_arrays_are_copied_in_order() -> None:
    tokens = np.arange(10, dtype=np.int32)
    assert list(as_tokens(tokens[::3])) == [0, 3, 6, 9]
    assert list(as_tokens(tokens[::-1])) == list(range(9, -1, -1))
    assert list(as_tokens(np.arange(6, dtype=np.int32).reshape(2, 3)[:, 1])) == [1, 4]


@pytest.mark.parametrize(
    "tokens",
    [[1, 2], (1, 2), range(1, 3), [np.int64(1), np.uint8(2)], collections.deque([1, 2]), array.array("q", [1, 2]), memoryview(b"\1\2")],
    ids=lambda tokens: type(tokens).__name__,
)
def test_sequences_of_integers(tokens: object) -> None:
    assert list(as_tokens(tokens)) == [1, 2]


def test_objects_with_an_array_method() -> None:
    class Tensor:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.array([3, 4], dtype=np.int64)

    assert list(as_tokens(Tensor())) == [3, 4]


@pytest.mark.parametrize("empty", [[], (), np.array([], dtype=np.int32), np.array([], dtype=np.int64)])
def test_empty_is_empty(empty: object) -> None:
    assert len(as_tokens(empty)) == 0


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        5,
        1.5,
        np.array([1.0, 2.0]),
        np.array([], dtype=np.float32),
        np.array([1, 2], dtype=np.float16),
        np.array([True, False]),
        np.array([1, 2], dtype=object),
        np.array([1], dtype="m8[s]"),
        [1.0],
        [True],
        [np.bool_(True)],
        ["1"],
        [None],
        "text",
        b"text",
        bytearray(b"text"),
        {1: 2},
        {1, 2},
        (i for i in (1, 2)),
        object(),
    ],
    ids=repr,
)
def test_other_types_are_type_errors_that_name_the_argument(tokens: object) -> None:
    with pytest.raises(TypeError, match=r"^prompt must"):
        as_tokens(tokens, "prompt")


@pytest.mark.parametrize("tokens", [np.zeros((2, 2), np.int32), np.zeros((1, 4), np.int64), np.array(3), np.int32(3), [[1, 2]], [np.array([1])]])
def test_other_shapes_are_value_errors(tokens: object) -> None:
    with pytest.raises(ValueError, match=r"^prompt must be one-dimensional"):
        as_tokens(tokens, "prompt")


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 2**64])
def test_ids_outside_int32_are_value_errors_with_their_place(value: int) -> None:
    with pytest.raises(ValueError, match=rf"prompt\[1\] must fit int32, got {value}"):
        as_tokens([0, value], "prompt")
    if value < 2**63:
        with pytest.raises(ValueError, match=rf"prompt\[1\] must fit int32, got {value}"):
            as_tokens(np.array([0, value], dtype=np.int64), "prompt")


def test_extreme_ids_fit() -> None:
    for tokens in ([INT32_MIN, INT32_MAX], np.array([INT32_MIN, INT32_MAX], dtype=np.int64)):
        assert list(as_tokens(tokens)) == [INT32_MIN, INT32_MAX]
    with pytest.raises(ValueError, match="4294967295"):
        as_tokens(np.array([2**32 - 1], dtype=np.uint32))


@pytest.mark.parametrize("n", [1, 3, 4, 5, 31, 32, 33, 36, 255, 256, 260, 261, 292, 600, 2048])
def test_common_prefix_len_at_every_place_of_a_difference(n: int) -> None:
    tokens = np.random.default_rng(n).integers(INT32_MIN, INT32_MAX, n, dtype=np.int32)
    assert common_prefix_len(tokens, tokens) == n
    assert common_prefix_len(tokens, np.append(tokens, tokens)) == n
    for at in range(n):
        for bit in (0, 31):
            other = tokens.copy()
            other[at] ^= np.int32(1 << bit) if bit < 31 else np.int32(INT32_MIN)
            assert common_prefix_len(tokens, other) == at
            assert compare_tokens(tokens, other) == (-1 if tokens[at] < other[at] else 1)


@given(st.lists(st.integers(-1, 1), max_size=8), st.lists(st.integers(-1, 1), max_size=8))
def test_compare_tokens_is_the_order_of_lists(a: list[int], b: list[int]) -> None:
    assert compare_tokens(as_tokens(a), as_tokens(b)) == (a > b) - (a < b)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("vocab_size", [1, 7, INT32_MAX])
def test_check_vocab_finds_the_first_bad_id(n: int, vocab_size: int) -> None:
    tokens = np.random.default_rng(n).integers(0, vocab_size, n, dtype=np.int32)
    assert check_vocab(tokens, vocab_size) == -1
    for at in range(n):
        for bad in {vocab_size, INT32_MAX, -1, INT32_MIN} - ({INT32_MAX} if vocab_size > INT32_MAX else set()):
            other = tokens.copy()
            other[at] = bad
            other[at + 1 :] = -1
            assert check_vocab(other, vocab_size) == at


def test_check_vocab_of_nothing() -> None:
    assert check_vocab(as_tokens([]), 10) == -1
    assert check_vocab(as_tokens([0]), 0) == 0
