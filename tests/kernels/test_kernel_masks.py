"""Masks from the field reports: the readable reference against a dense softmax, and the kernels of emitted packages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spec import flash1, flash2, masks, merge, roundoff, standard
from spec.head import Head
from tests.kernels.running import DTYPES, draw, each_isa, judged, problem, run, same_bits
from verify.compare import assert_within

dtypes = pytest.mark.parametrize("dtype", DTYPES)


def _dense(q, k, v, seen):
    """softmax over the visible keys of each row, written out: (O, LSE)."""
    s = np.where(seen, q @ k.T / math.sqrt(q.shape[1]), -np.inf)
    m = s.max(axis=1, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(m), 0.0, m)[:, None])
    total = p.sum(axis=1)
    with np.errstate(divide="ignore"):
        return p @ v / np.where(total == 0, 1.0, total)[:, None], m + np.log(total)


def _assert_equals_dense(q, k, v, mask, seen, *, br, bc):
    head = Head.of(q, k, v, mask=mask)
    bound = roundoff.forward(head, -(-len(k) // bc))
    want = _dense(q, k, v, seen)  # one tile: no worse than the bound of the tiled algorithm
    for name, got in (
        ("standard", standard.forward(q, k, v, mask=mask)),
        ("flash1", flash1.forward(q, k, v, br=br, bc=bc, mask=mask)),
        ("flash2", flash2.forward(q, k, v, br=br, bc=bc, mask=mask)),
    ):
        assert_within(got.o, want[0], 2 * bound.o, name=f"{name} O")
        assert_within(got.lse, want[1], 2 * bound.lse, name=f"{name} LSE")


@pytest.mark.field("R015")
@pytest.mark.parametrize("lengths", [(13, 27), (5, 40, 19), (1, 1, 62)], ids=str)
@pytest.mark.parametrize("br, bc", [(16, 16), (8, 32), (64, 7)])
def test_documents_equal_the_dense_masked_softmax(lengths, br, bc):
    """4 heads of width 16; two or three documents whose lengths are no multiple of a tile."""
    rng = np.random.default_rng(sum(lengths))
    document = np.repeat(np.arange(len(lengths)), lengths)
    for _ in range(4):
        q, k, v = rng.standard_normal((3, len(document), 16))
        seen = document[:, None] == document
        _assert_equals_dense(q, k, v, masks.Documents(document), seen, br=br, bc=bc)
        causal = seen & np.tri(len(document), dtype=bool)
        mask = masks.Documents(document) & masks.Causal(masks.BOTTOM_RIGHT)
        _assert_equals_dense(q, k, v, mask, causal, br=br, bc=bc)


@pytest.mark.field("R018", "R019")
@pytest.mark.parametrize("b", range(1, 13))
def test_any_mask_equals_the_dense_softmax_when_widths_differ(b):
    """The report's sizes: 37 rows, 54 keys, 4 heads, widths 192 and 128, a random mask for each batch entry."""
    rng = np.random.default_rng(b)
    seen = rng.random((37, 54)) < rng.uniform(0.05, 0.95)
    seen[b] = False
    for _ in range(4):
        q, k, v = (rng.standard_normal(s) for s in ((37, 192), (54, 192), (54, 128)))
        _assert_equals_dense(q, k, v, seen, seen, br=16, bc=8)


def test_an_inverted_mask_does_not_pass():
    """The comparison above notices the wrong polarity."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 20, 16))
    seen = rng.random((20, 20)) < 0.5
    with pytest.raises(AssertionError, match="outside the bound"):
        _assert_equals_dense(q, k, v, ~seen, seen, br=8, bc=8)


@pytest.mark.field("R012", "R019")
@dtypes
def test_which_keys_a_row_sees(small, dtype):
    """The report's sizes; V one-hot shows the visible keys, so a swapped corner or polarity cannot pass."""
    expected = {
        (1, 8): {"bottom_right": [8], "top_left": [1]},
        (2, 6): {"bottom_right": [5, 6], "top_left": [1, 2]},
        (5, 2): {"bottom_right": [0, 0, 0, 1, 2], "top_left": [1, 2, 2, 2, 2]},
    }
    for (nq, nk), counts in expected.items():
        q, k = draw(dtype, (1, 1, nq, 16), (1, 1, nk, 16))
        v = torch.eye(nk, 16, dtype=q.dtype)[None, None]
        for _ in each_isa(small, dtype):
            for causal, count in counts.items():
                o, _ = run(small, q, k, v, causal=causal)
                seen = [[j for j in range(16) if row[j] != 0] for row in o[0, 0].tolist()]
                assert seen == [list(range(n)) for n in count]


@pytest.mark.field("R026", "R001")
@dtypes
def test_empty_causal_rows_are_neutral_in_a_merge(small, dtype):
    """More queries than keys, 33 of 44 rows empty; merged with another part they leave it as it was."""
    case = problem(small, dtype, 2, 2, 1, 44, 11, causal="bottom_right")
    other = (
        np.random.default_rng(0).standard_normal((2, 2, 44, 16)),
        np.random.default_rng(1).standard_normal((2, 2, 44)),
    )
    for o, lse in judged(small, case).values():
        assert (o[:, :, :33] == 0).all() and (lse[:, :, :33] == -np.inf).all() and np.isfinite(lse[:, :, 33:]).all()
        merged = merge.merge_partials(o, lse, *other)
        assert np.array_equal(merged[0][:, :, :33], other[0][:, :, :33])
        assert np.array_equal(merged[1][:, :, :33], other[1][:, :, :33])


@pytest.mark.field("R006")
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_lengths_in_a_longer_cache_equal_the_trimmed_call(d64_dv128, dtype):
    """A cache of 128 keys, lengths 32, 64, 96, 48, NaN behind them; and q = 0.5 with lengths 1 and 3."""
    for lengths, nk, q_value in (((32, 64, 96, 48), 128, None), ((1, 3), 4, 0.5)):
        q, k, v = draw(dtype, (len(lengths), 3, 1, 64), (len(lengths), 3, nk, 64), (len(lengths), 3, nk, 128))
        if q_value is not None:
            q.fill_(q_value)
        for i, n in enumerate(lengths):
            k[i, :, n:] = v[i, :, n:] = torch.nan
        for _ in each_isa(d64_dv128, dtype):
            got = run(d64_dv128, q, k, v, key_lengths=torch.tensor(lengths))
            for i, n in enumerate(lengths):
                one = slice(i, i + 1)
                assert same_bits(tuple(x[one] for x in got), run(d64_dv128, q[one], k[one, :, :n], v[one, :, :n]))


@pytest.mark.field("R007", "R110", "R111")
@dtypes
def test_nothing_is_left_from_an_earlier_call(small, small_retiled, dtype):
    """A full tile of NaN first, then one key less than a tile; another package in between; lengths 712 then 1478."""
    q, k, v = draw(dtype, (1, 2, 40, 16), (1, 2, 95, 16), (1, 2, 95, 16))
    bad = [torch.full((1, 2, 96, 16), torch.nan, dtype=q.dtype)] * 2
    first, second = (draw(dtype, *[(1, 1, n, 16)] * 3) for n in (712, 1478))
    for _ in each_isa(small, dtype):
        want, want_second = run(small, q, k, v), run(small, *second, causal=True)
        run(small, q, *bad)
        assert same_bits(run(small, q, k, v), want)
        run(small_retiled, q, *bad)
        run(small, *first, causal=True)
        assert same_bits(run(small, *second, causal=True), want_second)
