"""Relations between calls that hold whatever the inputs, on the kernels of an emitted package, every path of it.

Bit for bit: what exact arithmetic commutes with (order of batches and heads, powers of two, signs), and what the
kernels promise (a row does not feel its neighbours; a masked key is absent). Within bounds: what changes the order of
the sums. Problems are drawn by verify.strategies; codegen/templates/cpu/README.md states the promises.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.running import DTYPES, draw, each_isa, run, same_bits
from verify import compare, devices, judge, strategies
from verify.cases import ROOM
from verify.formats import FORMATS

dtypes = pytest.mark.parametrize("dtype", DTYPES)
quick = settings(max_examples=15, deadline=None, derandomize=True, database=None)
drawn = strategies.descriptions(d=16, dv=16, dtypes=("float32",), br=32, bc=96)  # the tile of `small`


def arguments(description, dtype, **changes):
    """Arguments of `attention`; K and V beyond a key length are NaN."""
    return dataclasses.replace(description, dtype=dtype, **changes).case().tensors()


@dtypes
@quick
@given(drawn)
def test_the_order_of_batches_and_heads_changes_no_bit(small, dtype, description):
    words = arguments(description, dtype)
    for _ in each_isa(small, dtype):
        want = run(small, **words)
        for dim in (0, 1):  # reversed K/V heads come with their reversed groups of query heads
            turned = {**words, **{name: words[name].flip(dim) for name in "qkv"}}
            if dim == 0 and words["key_lengths"] is not None:
                turned["key_lengths"] = words["key_lengths"].flip(0)
            assert same_bits(run(small, **turned), tuple(x.flip(dim) for x in want))


@pytest.mark.field("R078")
@dtypes
@quick
@given(drawn)
def test_a_batch_entry_or_a_head_alone_has_the_bits_that_it_has_among_others(small, dtype, description):
    words = arguments(description, dtype)
    group = description.group
    for _ in each_isa(small, dtype):
        want = run(small, **words)
        b, h = description.batch - 1, description.kv_heads - 1
        one, heads = slice(b, b + 1), slice(h * group, (h + 1) * group)
        alone = {**words, "q": words["q"][one, heads], "k": words["k"][one, h:], "v": words["v"][one, h:]}
        if words["key_lengths"] is not None:
            alone["key_lengths"] = words["key_lengths"][one]
        assert same_bits(run(small, **alone), tuple(x[one, heads] for x in want))


@pytest.mark.field("R033")
@dtypes
@quick
@given(drawn, st.integers(0, 2**16), st.integers(0, 2**16))
def test_rows_alone_have_the_bits_that_they_have_among_others(small, dtype, description, a, b):
    """Any rows without a mask, the first under top-left, the last under bottom-right: their keys stay the same."""
    words = arguments(description, dtype)
    nq = description.nq
    first, last = sorted((a % nq, b % nq))
    if words["causal"] == "top_left":
        first = 0
    elif words["causal"] == "bottom_right":
        last = nq - 1
    rows = slice(first, last + 1)
    for _ in each_isa(small, dtype):
        want = run(small, **words)
        assert same_bits(run(small, **{**words, "q": words["q"][:, :, rows]}), tuple(x[:, :, rows] for x in want))


@pytest.mark.field("R033")
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("nk", [16, 257, 3000])
def test_one_query_equals_the_same_query_among_300(d64_dv128, dtype, nk):
    """The report's sizes. A decode step and a prefill use different paths of the kernels, and must not differ."""
    q, k, v = draw(dtype, (1, 4, 300, 64), (1, 2, nk, 64), (1, 2, nk, 128))
    for _ in each_isa(d64_dv128, dtype):
        want = run(d64_dv128, q, k, v)
        for i in (0, 31, 95, 96, 299):
            one = slice(i, i + 1)
            assert same_bits(run(d64_dv128, q[:, :, one], k, v), tuple(x[:, :, one] for x in want))


@dtypes
@quick
@given(drawn)
def test_doubling_and_negating_v(small, dtype, description):
    """Rounding commutes with powers of two, except in the subnormal range: there each store is off by half a step."""
    words = arguments(description, dtype, values="normal", overrides=())
    form = FORMATS[dtype]
    normal, step = 2.0**form.emin, 2.0 ** (form.emin - form.precision + 1)
    for _ in each_isa(small, dtype):
        o, lse = run(small, **words)
        twice, lse_twice = run(small, **{**words, "v": words["v"] * 2})
        minus, lse_minus = run(small, **{**words, "v": -words["v"]})
        assert same_bits((lse, lse), (lse_twice, lse_minus))
        assert torch.equal(minus, -o)
        want, got = 2 * o.double(), twice.double()
        assert torch.equal(got[o.abs() >= normal], want[o.abs() >= normal])
        assert ((got - want).abs() <= 1.5 * step)[o.abs() < normal].all()


@pytest.mark.field("R005", "R006")
@dtypes
@quick
@given(drawn, st.integers(1, 130))
def test_what_lies_beyond_the_key_length_changes_no_bit(small, dtype, description, more):
    """NaN there, zeros there, more keys there, and nothing there at all are the same."""
    lengths = description.lengths or (description.nk,) * description.batch
    words = arguments(description, dtype, lengths=lengths)

    def zeros_beyond(x):
        x = x.clone()
        for i, n in enumerate(lengths):
            x[i, :, n:] = 0
        return x

    def longer(x):
        tail = torch.full((*x.shape[:2], more, x.shape[3]), torch.nan, dtype=x.dtype)
        return torch.cat([x, tail], dim=2)

    for _ in each_isa(small, dtype):
        want = run(small, **words)
        assert not any(x.isnan().any() for x in want)
        assert same_bits(run(small, **{**words, **{n: zeros_beyond(words[n]) for n in "kv"}}), want)
        if words["causal"] == "bottom_right":
            continue  # its diagonal hangs on the size of the tensor
        assert same_bits(run(small, **{**words, **{n: longer(words[n]) for n in "kv"}}), want)
        for i, n in enumerate(lengths):
            one = {x: words[x][i : i + 1] for x in "qkv"}
            trimmed = {**words, **one, "k": one["k"][:, :, :n], "v": one["v"][:, :, :n], "key_lengths": None}
            assert same_bits(run(small, **trimmed), tuple(x[i : i + 1] for x in want))


@pytest.mark.field("R005")
@dtypes
@quick
@given(drawn, st.integers(0, 2**16))
def test_a_key_hidden_by_the_causal_mask_changes_no_bit(small, dtype, description, j):
    """NaN in key j, with a huge value, reaches the rows that see it and no other. (A value that is not a number is
    outside the contract while a row of the tile sees its key.)"""
    if description.nk == 0:
        return
    j %= description.nk
    for causal in ("top_left", "bottom_right"):
        case = dataclasses.replace(description, dtype=dtype, mask=causal, lengths=None).case()
        words = case.tensors()
        hidden = torch.from_numpy(~case.visible(0)[:, j])
        bad = {name: words[name].clone() for name in "kv"}
        bad["k"][:, :, j], bad["v"][:, :, j] = torch.nan, ROOM[dtype]
        for _ in each_isa(small, dtype):
            want, got = run(small, **words), run(small, **{**words, **bad})
            assert same_bits(tuple(x[:, :, hidden] for x in got), tuple(x[:, :, hidden] for x in want))
            assert all(x[:, :, ~hidden].isnan().all() for x in got)


@dtypes
@quick
@given(drawn, st.randoms(use_true_random=False))
def test_the_order_of_keys_changes_a_result_within_its_bound(small, dtype, description, random):
    order = list(range(description.nk))
    random.shuffle(order)
    case = dataclasses.replace(description, dtype=dtype, mask="none", lengths=None).case()
    turned = dataclasses.replace(case, k=case.k[:, :, order], v=case.v[:, :, order])
    _assert_close(small, case, small, turned)


@pytest.mark.field("R092", "R099", "R110")
@dtypes
@quick
@given(drawn)
def test_two_tilings_differ_by_no_more_than_their_bounds(small, small_retiled, dtype, description):
    case = dataclasses.replace(description, dtype=dtype).case()
    _assert_close(small, case, small_retiled, case)


def _assert_close(attn, case, other, other_case):
    """Both are within their own bound of one truth, so they are within the sum of each other, on each path."""
    device = devices.Cpu()
    for path, other_path in zip(
        device.paths(attn, case.dtype, case), device.paths(other, case.dtype, other_case), strict=True
    ):
        assert path.isa == other_path.isa and (attn is other or path.bc != other_path.bc)
        got, again = device.run(attn, case, path), device.run(other, other_case, other_path)
        known = judge.Truth(case, with_balls=False)
        known_again = judge.Truth(other_case, with_balls=False)
        for head, (b, h) in enumerate(known.keys):
            bound, bound_again = known.bound(head, path), known_again.bound(head, other_path)
            for x, y, name in ((got[0], again[0], "o"), (got[1], again[1], "lse")):
                room = np.asarray(getattr(bound, name)) + getattr(bound_again, name)
                compare.assert_within(x[b, h], y[b, h], room, name=f"{name} of {path}", tile=(path.br, path.bc))
