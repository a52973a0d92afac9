"""Rounding to the low-precision formats is single, to nearest even, subnormals and overflow included."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from spec import flash1, flash2, invariants, standard
from spec.errors import FormatError
from spec.rounding import FORMATS, Rounding, round_to
from tests.spec.problems import random_problem


def nearest(x: float, name: str) -> float:
    """By definition, in exact rationals."""
    fmt, value = FORMATS[name], abs(Fraction(x))
    exponent = fmt.emin
    while value >= Fraction(2) ** (exponent + 1):
        exponent += 1
    spacing = Fraction(2) ** (exponent - fmt.precision + 1)
    rounded = round(value / spacing) * spacing  # Fraction rounds half to even
    largest_exponent = {"bf16": 127, "fp16": 15, "float32": 127}[name]
    overflow = rounded >= Fraction(2) ** (largest_exponent + 1)
    return float(np.copysign(np.inf if overflow else float(rounded), x))


@pytest.mark.parametrize("name", ["bf16", "fp16", "float32"])
def test_rounding_is_the_nearest_value_of_the_format(name):
    rng = np.random.default_rng(0)
    u = FORMATS[name].unit
    x = np.concatenate(
        [
            rng.normal(size=200) * 2.0 ** rng.integers(-150, 120, 200),
            FORMATS[name].eta * rng.integers(-9, 10, 50),  # ties between subnormals
            (1 + u) * (1 + 2.0**-40 * rng.integers(-1, 2, 50)),  # at and beside a midpoint: double rounding fails here
            [0.0, 65504.0, 65519.999, 65520.0, 3.4e38, 3.3953e38, 1e300],
        ]
    )
    assert round_to(x, name).tolist() == [nearest(v, name) for v in x]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_special_values_survive_rounding(name):
    x = round_to(np.array([np.nan, np.inf, -np.inf, -0.0]), name)
    assert np.isnan(x[0]) and x[1] == np.inf and x[2] == -np.inf and np.signbit(x[3])
    assert round_to(np.array([1.5], np.float32), name).dtype == np.float32


def test_an_unknown_format_is_refused():
    with pytest.raises(FormatError, match="bf16"):
        Rounding(p="fp8")


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("seed", range(24))
def test_the_invariants_hold_with_rounded_inputs_p_and_o(seed, name):
    problem = random_problem(seed)
    for algorithm in (flash1.forward, flash2.forward):
        out = invariants.check(
            algorithm, *problem.inputs, br=problem.br, bc=problem.bc, rounding=Rounding.all(name), **problem.options
        )
        assert (round_to(out.o, name) == out.o).all()


def test_l_and_lse_do_not_see_the_rounding_of_p():
    rng = np.random.default_rng(3)
    q, k, v = rng.normal(size=(6, 8)), rng.normal(size=(20, 8)), rng.normal(size=(20, 5))
    exact = flash2.forward(q, k, v, br=4, bc=8)
    rounded = flash2.forward(q, k, v, br=4, bc=8, rounding=Rounding(p="bf16"))
    assert (exact.lse == rounded.lse).all() and (exact.o != rounded.o).any()


def test_equal_p_at_a_midpoint_is_a_one_sided_error():
    """One key at the maximum, the others with P just under a rounding midpoint, V = 1: exact O is 1, bf16 gives less.

    Independent of N, because the mismatch is between rounded P above and unrounded P below the fraction line.
    """
    for n in (64, 1024):
        p = 0.5 + 0.98 * 2.0**-9
        q, k = np.array([[1.0]]), np.full((n, 1), np.log(p))
        k[0] = 0.0
        out = flash2.forward(q, k, np.ones((n, 1)), br=1, bc=16, scale=1.0, rounding=Rounding(p="bf16", o="bf16"))
        assert out.o[0, 0] == 0.99609375
        assert abs(standard.forward(q, k, np.ones((n, 1)), scale=1.0).o[0, 0] - 1.0) <= 2.0**-50 * n
