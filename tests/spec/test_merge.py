"""Merging partial results: the stated error, associativity, the identity, and splits of any number of parts."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from spec import flash2, merge, roundoff, split, standard
from spec.errors import ShapeError, TileError
from spec.head import Head, Output
from spec.rounding import Rounding, round_to
from tests.spec.problems import assert_attention, random_problem

U = 2.0**-53


def partial(rng, rows=6, dv=3, spread=10.0):
    return Output(rng.normal(size=(rows, dv)), spread * rng.normal(size=rows))


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0, 700.0])
def test_the_error_of_a_merge_is_the_stated_one(spread):
    """|o - exact| <= 8u max(|o_a|, |o_b|), the number in the docstring, against 50 digits."""
    rng = np.random.default_rng(int(spread * 10))
    a, b = partial(rng, 40, spread=spread), partial(rng, 40, spread=spread)
    got = merge.merge_partials(*a, *b)
    with mpmath.workdps(50):
        for r in range(40):
            w_a, w_b = mpmath.exp(mpmath.mpf(a.lse[r])), mpmath.exp(mpmath.mpf(b.lse[r]))
            for c in range(3):
                exact = (w_a * mpmath.mpf(a.o[r, c]) + w_b * mpmath.mpf(b.o[r, c])) / (w_a + w_b)
                room = merge.MERGE_ROUNDOFFS * U * max(abs(a.o[r, c]), abs(b.o[r, c]))
                assert abs(mpmath.mpf(got.o[r, c]) - exact) <= room
            lse = mpmath.log(w_a + w_b)
            # exp and log within 4 ulp, one sum inside the log (at least 1), one outside
            assert abs(mpmath.mpf(got.lse[r]) - lse) <= U * (8 + 2 + 8 * mpmath.log(2) + abs(lse))


def test_a_merge_is_commutative_bit_for_bit():
    rng = np.random.default_rng(0)
    a, b = partial(rng), partial(rng)
    one, other = merge.merge_partials(*a, *b), merge.merge_partials(*b, *a)
    assert (one.o == other.o).all() and (one.lse == other.lse).all()


def test_a_merge_is_associative_to_within_its_error():
    """Two merges each way. An inner LSE is off by at most `inner`, which moves the weights by exp(inner)."""
    rng = np.random.default_rng(1)
    a, b, c = (partial(rng, 50) for _ in range(3))
    left = merge.merge_partials(*merge.merge_partials(*a, *b), *c)
    right = merge.merge_partials(*a, *merge.merge_partials(*b, *c))
    largest = np.abs([a.o, b.o, c.o]).max(axis=0)
    inner = U * (16 + np.abs([a.lse, b.lse, c.lse]).max(axis=0) + np.log(3))
    room = 2 * (2 * merge.MERGE_ROUNDOFFS * U + 2 * np.expm1(inner))[:, None] * largest
    assert (np.abs(left.o - right.o) <= room).all()
    assert (np.abs(left.lse - right.lse) <= 4 * inner).all()


@pytest.mark.field("R026")
def test_an_empty_part_changes_no_bit():
    rng = np.random.default_rng(2)
    a = partial(rng)
    identity = Output(np.zeros_like(a.o), np.full_like(a.lse, -np.inf))
    for got in (merge.merge_partials(*a, *identity), merge.merge_partials(*identity, *a)):
        assert (got.o == a.o).all() and (got.lse == a.lse).all()
    nothing = merge.merge_partials(*identity, *identity)
    assert (nothing.o == 0).all() and np.isneginf(nothing.lse).all()


def test_nan_in_a_part_is_not_hidden():
    rng = np.random.default_rng(3)
    a, b = partial(rng), partial(rng)
    b.lse[2], b.o[2] = np.nan, np.nan
    got = merge.merge_partials(*a, *b)
    assert np.isnan(got.lse).tolist() == [r == 2 for r in range(6)] and np.isnan(got.o[2]).all()


def test_batched_parts_merge_as_single_ones():
    rng = np.random.default_rng(4)
    a, b = (Output(rng.normal(size=(2, 3, 5, 4)), rng.normal(size=(2, 3, 5))) for _ in range(2))
    whole = merge.merge_partials(*a, *b)
    one = merge.merge_partials(a.o[1, 2], a.lse[1, 2], b.o[1, 2], b.lse[1, 2])
    assert (whole.o[1, 2] == one.o).all() and (whole.lse[1, 2] == one.lse).all()


def test_parts_of_different_shapes_are_refused():
    with pytest.raises(ShapeError, match="lse_b"):
        merge.merge_partials(np.zeros((3, 2)), np.zeros(3), np.zeros((3, 2)), np.zeros(2))
    with pytest.raises(ShapeError, match="no part"):
        merge.merge_all([])
    with pytest.raises(ShapeError, match="parts, Nq"):
        merge.merge_states(np.zeros((2, 3)), np.zeros((2, 4)), np.zeros((2, 3, 1)))


@pytest.mark.parametrize("parts", [1, 2, 7, 60])
@pytest.mark.parametrize("seed", range(8))
def test_a_split_of_any_number_of_parts_is_attention(parts, seed):
    p = random_problem(seed)
    out = split.forward(*p.inputs, parts=parts, br=p.br, bc=p.bc, **p.options)
    assert_attention(out, p, parts=parts)


def test_key_ranges_are_a_partition():
    for nk in (0, 1, 5, 6, 7, 100):
        for parts in (1, 2, 3, 7, 200):
            ranges = split.key_ranges(nk, parts)
            assert len(ranges) == parts
            assert [k for start, stop in ranges for k in range(start, stop)] == list(range(nk))
    with pytest.raises(TileError, match="at least 1"):
        split.key_ranges(5, 0)
    with pytest.raises(ShapeError, match=r"keys 3\.\.9"):
        flash2.forward(np.ones((2, 2)), np.ones((8, 2)), np.ones((8, 2)), br=2, bc=2, keys=(3, 9))


@pytest.mark.parametrize("scale", [1.0, 2.0**20])
def test_states_merge_without_an_lse(scale):
    """(m, l, U) of disjoint tiles give the whole, at any size of the scores: within the bound of one pass."""
    rng = np.random.default_rng(5)
    q, k, v = rng.integers(-8, 9, (5, 4)) * 1.0, rng.integers(-8, 9, (24, 4)) * 1.0, rng.normal(size=(24, 3))
    states = []
    for keys in split.key_ranges(24, 3):
        flash2.forward(q, k, v, br=5, bc=8, keys=keys, scale=scale, on_tile=states.append)
    m, l, u = merge.merge_states(*(np.stack([getattr(s, name) for s in states]) for name in ("m", "l", "o")))
    want, bound = standard.forward(q, k, v, scale=scale), roundoff.forward(Head.of(q, k, v, scale=scale), 3)
    assert (np.abs(u / l[:, None] - want.o) <= 2 * bound.o).all()
    assert (np.abs(m + np.log(l) - want.lse) <= 2 * bound.lse).all()


def test_the_output_of_a_split_is_rounded_once():
    rng = np.random.default_rng(6)
    q, k, v = rng.normal(size=(5, 4)), rng.normal(size=(24, 4)), rng.normal(size=(24, 3))
    exact = split.forward(q, k, v, parts=3, br=4, bc=8)
    rounded = split.forward(q, k, v, parts=3, br=4, bc=8, rounding=Rounding(o="bf16"))
    assert (rounded.o == round_to(exact.o, "bf16")).all() and (rounded.lse == exact.lse).all()
