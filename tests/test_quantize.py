"""bfloat16 and int8: exact against plain definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyloop_py.quantize import bf16_from_float32, check_group_size, dequantize_rows, float32_from_bf16, quantize_rows, row_blocks


def test_bf16_equals_torch_on_every_upper_half_and_near_ties():
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | lower).view(np.float32)
        ours, theirs = bf16_from_float32(x), torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
        nan = np.isnan(x)
        assert np.array_equal(ours[~nan], theirs[~nan])
        assert np.isnan(float32_from_bf16(ours[nan])).all()


def test_float32_from_bf16_is_exact_for_all_bits():
    bits = np.arange(1 << 16, dtype=np.uint16)
    theirs = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    assert np.array_equal(float32_from_bf16(bits), theirs, equal_nan=True)
    finite = np.isfinite(theirs)
    assert np.array_equal(bf16_from_float32(theirs)[finite], bits[finite])


def _quantize_plainly(row: np.ndarray) -> tuple[list[int], np.float32]:
    """One row or group, value by value."""
    scale = np.float32(max(abs(w) for w in row)) / np.float32(127)
    return [0 if scale == 0 else int(min(127, max(-127, round(float(np.float32(w) / scale))))) for w in row], scale


@given(st.integers(1, 7), st.integers(1, 200), st.sampled_from([None, 64, 128]), st.integers(0, 2**31))
def test_int8_equals_the_definition(n_out, n_in, group_size, seed):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((n_out, n_in)) * 10.0 ** rng.integers(-30, 30, (n_out, 1))).astype(np.float32)
    x[rng.random((n_out, n_in)) < 0.2] = 0
    x[rng.integers(n_out)] = 0
    q, scales = quantize_rows(x, group_size)
    step = group_size or n_in
    assert q.dtype == np.int8 and q.shape == x.shape and scales.dtype == np.float32
    assert scales.shape == ((n_out,) if group_size is None else (n_out, -(-n_in // step)))
    for i in range(n_out):
        for g, start in enumerate(range(0, n_in, step)):
            values, scale = _quantize_plainly(x[i, start : start + step])
            assert scales.reshape(n_out, -1)[i, g] == scale
            assert q[i, start : start + step].tolist() == values
    back = dequantize_rows(q, scales, group_size)
    bound = np.repeat(scales.reshape(n_out, -1), step, axis=1)[:, :n_in]
    assert (np.abs(back - x) <= 0.5001 * bound).all()


def test_int8_rounds_half_to_even_and_never_reaches_minus_128():
    x = np.array([[127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], dtype=np.float32)
    q, scales = quantize_rows(x)
    assert scales.tolist() == [1.0] and q.tolist() == [[127, -127, 0, 2, 2, 0, -2, -2]]


def test_int8_of_subnormal_and_huge_rows_stays_in_range():
    tiny, huge = np.float32(1e-45), np.float32(3.4e38)
    q, scales = quantize_rows(np.array([[tiny, -tiny], [huge, -huge]], dtype=np.float32))
    assert np.isfinite(scales).all() and (np.abs(q.astype(int)) <= 127).all()
    assert q[1].tolist() == [127, -127]


@pytest.mark.parametrize("bad", [0, -64, 32, 65, 64.0, True, "64"])
def test_group_size_must_be_a_multiple_of_64(bad):
    with pytest.raises(ValueError, match="multiple of 64"):
        check_group_size(bad)


@given(st.integers(0, 1000), st.integers(0, 1 << 23))
def test_row_blocks_cover_every_row_once(n_rows, n_cols):
    rows = [i for block in row_blocks(n_rows, n_cols) for i in range(n_rows)[block]]
    assert rows == list(range(n_rows))
