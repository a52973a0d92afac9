"""The exp2 polynomials of the CPU kernels are the ones that a Remez exchange gives, rounded to their format.

Run as a script, it prints the literals that `codegen/plans/exp2_coefficients.py` holds.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
from mpmath import mp

sys.path.insert(0, str(Path(__file__).parents[2]))  # as a script
from codegen.plans import exp2_coefficients

DIGITS = 40
GRID = 2000  # points per scan for extrema; the error curve has at most 12 of them


def remez(degree):
    """Minimax in relative error of 2^r on [-1/2, 1/2] among the polynomials with p(0) = 1.

    Returns: coefficients of r, r^2, ..., r^degree, and the maximum relative error.
    The error vanishes at 0 whatever the coefficients, so it equioscillates at degree + 1 points.
    """
    n = degree + 1
    nodes = [mp.cos(mp.pi * (n - 1 - i) / (n - 1)) / 2 for i in range(n)]
    nodes = [x if abs(x) > mp.mpf("1e-6") else mp.mpf("1e-3") for x in nodes]
    for _ in range(40):
        rows, right = mp.matrix(n, n), mp.matrix(n, 1)
        for i, x in enumerate(nodes):
            for k in range(1, n):
                rows[i, k - 1] = x**k / mp.power(2, x)
            rows[i, n - 1] = (-1) ** i
            right[i] = 1 - 1 / mp.power(2, x)
        c = list(mp.lu_solve(rows, right))[:degree]
        extrema = _alternating_extrema(c)
        while len(extrema) > n:
            extrema.pop(0 if abs(extrema[0][1]) < abs(extrema[-1][1]) else -1)
        assert len(extrema) == n, "the exchange lost a point"
        moved = max(abs(x - y) for x, (y, _) in zip(nodes, extrema, strict=True))
        nodes = [x for x, _ in extrema]
        if moved < mp.mpf(1) / (2 * GRID):
            break
    return c, max(abs(e) for _, e in extrema)


def relative_error(c, x):
    return (1 + x * mp.polyval(list(reversed(c)), x)) / mp.power(2, x) - 1


def _alternating_extrema(c):
    """The largest |error| of each stretch of one sign, left to right."""
    grid = [mp.mpf(i) / GRID - mp.mpf(1) / 2 for i in range(GRID + 1)]
    found = []
    for x in grid:
        e = relative_error(c, x)
        if e == 0:
            continue
        if found and (found[-1][1] > 0) == (e > 0):
            if abs(e) > abs(found[-1][1]):
                found[-1] = (x, e)
        else:
            found.append((x, e))
    return found


def generate(degree, dtype):
    """(coefficients rounded to `dtype`, highest power first; relative error of the polynomial with these)."""
    with mp.workdps(DIGITS):
        c, _ = remez(degree)
        rounded = [float(dtype(mp.nstr(x, 25))) for x in c]
        exact = [mp.mpf(x) for x in rounded]
        error = max(abs(relative_error(exact, mp.mpf(i) / (2 * GRID))) for i in range(-GRID, GRID + 1))
    return tuple(reversed(rounded)), float(error)


POLYNOMIALS = [(exp2_coefficients.FLOAT32, np.float32), (exp2_coefficients.FLOAT64, np.float64)]


@pytest.mark.parametrize(("polynomial", "dtype"), POLYNOMIALS, ids=["float32", "float64"])
def test_the_coefficients_are_the_rounded_minimax_ones(polynomial, dtype):
    coefficients, error = generate(polynomial.degree, dtype)
    assert polynomial.coefficients == coefficients
    assert f"{polynomial.relative_error:.3e}" == f"{error:.3e}"


@pytest.mark.parametrize(("polynomial", "dtype"), POLYNOMIALS, ids=["float32", "float64"])
def test_the_error_is_below_half_an_ulp_and_one_degree_less_would_not_do(polynomial, dtype):
    unit = float(np.finfo(dtype).eps) / 2
    with mp.workdps(DIGITS):
        assert polynomial.relative_error < unit / 2
        _, best = remez(polynomial.degree - 1)
        assert best > unit


if __name__ == "__main__":
    for polynomial, dtype in POLYNOMIALS:
        coefficients, error = generate(polynomial.degree, dtype)
        print(f"degree {polynomial.degree}, error {error:.3e}", *(x.hex() for x in coefficients), sep="\n    ")
