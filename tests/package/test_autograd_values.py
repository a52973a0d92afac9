"""Masks and special values in the backward pass: who gives to whom, exact zeros, NaN where it belongs, large logits."""

from __future__ import annotations

import math

import pytest
import torch

from tests.package import autograd_calls
from tests.package.autograd_calls import DTYPES, Shape, draw, draw_dlse, gradients, same_bits
from tests.package.autograd_judged import OutsideDomain, assert_right

CAUSAL = [False, "bottom_right", "top_left"]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def attn():
    return autograd_calls.package("small")


@pytest.mark.field("R006", "R021")
@dtypes
@pytest.mark.parametrize("causal", CAUSAL)
def test_padding_has_exactly_zero_gradients_and_no_influence(attn, dtype, causal):
    shape = Shape(4, 4, 2, 37, 101)
    q, k, v, dout = draw(shape, dtype)
    lengths = torch.tensor([101, 0, 1, 97])
    want = gradients(attn, q, k, v, dout, causal=causal, key_lengths=lengths)
    for i, n in enumerate(lengths.tolist()):
        assert not want[1][i, :, n:].any() and not want[2][i, :, n:].any()
        if n > 1:
            assert want[1][i, :, :n].any() and want[2][i, :, :n].any()
        k[i, :, n:] = v[i, :, n:] = math.nan
    assert same_bits(gradients(attn, q, k, v, dout, causal=causal, key_lengths=lengths), want)


@dtypes
def test_rows_that_see_no_key_have_and_give_no_gradient(attn, dtype):
    """Nq > Nk aligned at the bottom right: 60 rows are empty, and what their dO, dLSE and Q hold is absent."""
    shape = Shape(2, 4, 2, 100, 40)
    q, k, v, dout = draw(shape, dtype)
    dlse = draw_dlse(shape, dtype)
    got = gradients(attn, q, k, v, dout, dlse, causal=True)
    assert not got[0][:, :, :60].any() and got[0][:, :, 60:].any()
    for x in (q, dout, dlse):
        x[:, :, :60] = math.nan
    assert same_bits(gradients(attn, q, k, v, dout, dlse, causal=True), got)


@pytest.mark.field("R013")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_backward_pass_uses_the_mask_of_the_forward_pass(attn, dtype):
    """The sizes of the report. Keys that a row cannot see get nothing from it, and the others something."""
    q, k, v, dout = draw(Shape(1, 4, 2, 64, 160), dtype)
    for causal, first in (("bottom_right", 96), ("top_left", 0)):
        for row in (0, 17, 63):
            only = torch.zeros_like(dout)
            only[:, :, row] = dout[:, :, row]
            dq, dk, dv = gradients(attn, q, k, v, only, causal=causal)
            seen = first + row + 1
            assert dk[:, :, :seen].any(-1).all() or row + first == 0
            assert dv[:, :, :seen].any(-1).all()
            assert not dk[:, :, seen:].any() and not dv[:, :, seen:].any()
            assert not dq[:, :, :row].any() and not dq[:, :, row + 1 :].any()


@pytest.mark.field("R027", "R028")
@dtypes
@pytest.mark.parametrize("nq", [1, 76, 146])
def test_one_key_and_large_values(attn, dtype, nq):
    """P is 1, and dP - D is 0 up to rounding: dQ and dK are rounding errors, dV is a sum of dO. Nothing is NaN."""
    q, k, v, dout = (3 * x for x in draw(Shape(3, 2, 1, nq, 1), dtype))
    for causal in CAUSAL:
        got = gradients(attn, q, k, v, dout, causal=causal)
        assert_right(attn, q, k, v, dout, None, got, causal=causal)
        if causal == "bottom_right":  # only the last row sees the key
            assert not got[0][:, :, :-1].any()


@pytest.mark.field("R037")
@dtypes
@pytest.mark.parametrize("causal", CAUSAL)
def test_nan_and_infinity_show_in_the_gradients_that_depend_on_them_and_in_no_other(attn, dtype, causal):
    shape = Shape(1, 2, 1, 5, 7)
    tensors = [*draw(shape, dtype), draw_dlse(shape, dtype)]
    for index, x in enumerate(tensors):
        for value in (math.nan, math.inf, -math.inf):
            bad = x.clone()
            bad[0, 0, 3] = value  # a row; of K and V, a key
            changed = [*tensors[:index], bad, *tensors[index + 1 :]]
            got = gradients(attn, *changed, causal=causal)
            assert any(g.isnan().any() or g.isinf().any() for g in got) or (index == 1 and value == -math.inf)
            assert_right(attn, *changed, got, causal=causal)


@pytest.mark.field("R071")
def test_more_than_2_to_the_31_scores(attn):
    """Keys beyond the lengths cost no time: the bits are those of a call without them."""
    n, length = 50_000, 100
    q, k, v, dout = draw(Shape(1, 1, 1, n, length), torch.bfloat16)
    want = gradients(attn, q, k, v, dout, causal="top_left")
    longer = [torch.nn.functional.pad(x, (0, 0, 0, n - length), value=math.nan) for x in (k, v)]
    got = gradients(attn, q, *longer, dout, causal="top_left", key_lengths=torch.tensor([length]))
    assert same_bits([got[0], *(x[:, :, :length] for x in got[1:])], want)
    assert not any(x[:, :, length:].any() for x in got[1:])


@pytest.mark.field("R029")
def test_the_range_of_logits_in_which_gradients_are_accurate(attn):
    """P is made again from a rounded LSE. The domain of the bound says how far that goes: to base-2 logits of 2^21."""
    q, k, v, dout = draw(Shape(1, 2, 1, 17, 51))
    inside = []
    for exponent in range(0, 31, 2):
        q_, k_ = q * 2.0 ** (exponent // 2), k * 2.0 ** (exponent - exponent // 2)
        for causal in CAUSAL:
            got = gradients(attn, q_, k_, v, dout, causal=causal)
            try:
                assert_right(attn, q_, k_, v, dout, None, got, causal=causal)
                inside.append(exponent)
            except OutsideDomain as reason:
                assert "logits reach" in str(reason)
    assert set(range(0, 17, 2)) <= set(inside) <= set(range(24)), inside
