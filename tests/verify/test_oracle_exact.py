"""Integers and scores are exact: compared with rational arithmetic."""

from fractions import Fraction

import numpy as np
import pytest

from verify import inputs
from verify.oracle.exact import exact_scores, to_integers


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "float32", "float64"])
@pytest.mark.parametrize("family", ["gaussian", "mixed_scales", "subnormal_values"])
def test_integers_times_a_power_of_two_are_the_numbers(family, dtype):
    x = inputs.FAMILIES[family](5, 7, 8, dtype=dtype, seed=3)
    for a in x:
        n, e = to_integers(a)
        assert n.shape == a.shape
        assert all(
            Fraction(int(i)) * Fraction(2) ** e == Fraction(float(y)) for i, y in zip(n.flat, a.flat, strict=True)
        )


def test_integers_are_as_short_as_possible():
    n, e = to_integers(np.array([12.0, 0.0, -20.0]))
    assert (list(n), e) == ([3, 0, -5], 2)
    assert to_integers(np.zeros(3))[1] == 0


def test_integers_of_a_nan_are_refused():
    with pytest.raises(ValueError, match="finite"):
        to_integers(np.array([1.0, np.nan]))


def exact_products(q, k):
    rows, columns = ([[Fraction(float(x)) for x in row] for row in a] for a in (q, k))
    return [[sum((a * b for a, b in zip(i, j, strict=True)), Fraction(0)) for j in columns] for i in rows]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "float32", "float64"])
@pytest.mark.parametrize("family", ["gaussian", "mixed_scales", "huge_logits", "subnormal_scores", "late_max"])
def test_scores_are_within_their_stated_error(family, dtype):
    x = inputs.FAMILIES[family](4, 9, 24, dtype=dtype, seed=5)
    scores = exact_scores(x.q, x.k)
    for i, row in enumerate(exact_products(x.q, x.k)):
        for j, exact in enumerate(row):
            error = abs(Fraction(float(scores.hi[i, j])) + Fraction(float(scores.lo[i, j])) - exact)
            assert error <= Fraction(float(scores.err[i, j]))


def test_bf16_products_are_certified_exact_and_float32_ones_are_not():
    bf16 = inputs.FAMILIES["gaussian"](16, 64, 64, dtype="bf16")
    assert (exact_scores(bf16.q, bf16.k).err == 0).all()
    wide = inputs.FAMILIES["gaussian"](16, 64, 64, dtype="float32")
    scores = exact_scores(wide.q, wide.k)
    assert (scores.err > 0).all()
    assert (scores.err < 2.0**-66 * scores.magnitude.max() * 64).all()


def test_a_certificate_is_refused_when_one_unit_is_lost():
    q = np.array([[2.0**53, 1.0]])
    k = np.array([[1.0, 1.0]])
    scores = exact_scores(q, k)
    assert scores.hi[0, 0] + scores.lo[0, 0] == 2.0**53 and scores.lo[0, 0] == 1.0  # 2^53 + 1 is not a float64
