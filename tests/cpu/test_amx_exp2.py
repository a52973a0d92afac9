"""The exp2 of the AMX kernels: coefficients as a Remez exchange gives them, error as stated, on every float32.

Run as a script, it prints the literals that `codegen/plans/exp2_floor_coefficients.py` holds.
"""

import functools

import numpy as np
import pytest
from mpmath import mp

from codegen.plans.cpu_amx import UNIT_FLAGS
from codegen.plans.exp2_floor_coefficients import DEGREE4, DEGREE5
from tests.cpu import amx_unit, units

DIGITS = 40
GRID = 2000  # points per scan for extrema

PROBE = """
#include <math.h>
#include <stdio.h>

#include "forward_amx.h"

// Largest relative errors over the floats of (-1, -2^-30] and [2^-30, 1); between them 2^t is 1 to 30 bits.
void worst(double (&most)[2]) {
  for (uint32_t sign = 0; sign < 2; ++sign)
    for (uint32_t bits = 97u << 23; bits < 127u << 23; bits += 16) {
      alignas(64) float t[16], four[16], five[16];
      for (uint32_t i = 0; i < 16; ++i) {
        const uint32_t b = bits + i | sign << 31;
        memcpy(t + i, &b, 4);
      }
      _mm512_store_ps(four, exp2_degree4(_mm512_load_ps(t)));
      _mm512_store_ps(five, exp2_degree5(_mm512_load_ps(t)));
      for (int i = 0; i < 16; ++i) {
        const double inverse = 1 / exp2(double(t[i]));
        most[0] = fmax(most[0], fabs(four[i] * inverse - 1));
        most[1] = fmax(most[1], fabs(five[i] * inverse - 1));
      }
    }
}

float of(__m512 (*f)(__m512), float t) { return _mm512_cvtss_f32(f(_mm512_set1_ps(t))); }

int main() {
  __m512 (*const four)(__m512) = [](__m512 t) { return exp2_degree4(t); };
  __m512 (*const five)(__m512) = [](__m512 t) { return exp2_degree5(t); };
  double errors[2] = {};
  worst(errors);
  printf("%.4e %.4e\\n", errors[0], errors[1]);
  const float special[] = {0.0f, -0.0f, -INFINITY, NAN, -126.0f, -127.0f, 5.0f, -200.0f, 127.0f, 128.0f};
  for (int f = 0; f < 2; ++f) {
    for (float t : special) printf("%a ", of(f ? five : four, t));
    printf("\\n");
  }
  // log_sum against log, relative to max(|LSE|, 1/2): l from 1 to 2^30, references of either sign.
  double most = 0;
  const float references[] = {0.0f, -1.0f, 7.0f, -300.0f, 1e6f};
  for (float m : references)
    for (uint32_t bits = 127u << 23; bits < 157u << 23; bits += 1613) {
      float l;
      memcpy(&l, &bits, 4);
      const double want = log(double(l)) + double(m) * M_LN2;
      const float got = _mm512_cvtss_f32(log_sum(_mm512_set1_ps(m), _mm512_setzero_ps(), _mm512_set1_ps(l)));
      most = fmax(most, fabs(got - want) / fmax(fabs(want), 0.5));
    }
  printf("%.4e\\n", most);
}
"""


def remez(degree):
    """Minimax in relative error of 2^r on [0, 1] among the polynomials with p(0) = 1: its coefficients of r, r^2, ...

    The error vanishes at 0 whatever the coefficients, so it equioscillates at degree + 1 points, 1 among them.
    """
    n = degree + 1
    nodes = [(1 - mp.cos(mp.pi * (2 * i + 1) / (2 * n))) / 2 for i in range(n)]
    for _ in range(40):
        rows, right = mp.matrix(n, n), mp.matrix(n, 1)
        for i, x in enumerate(nodes):
            for k in range(1, n):
                rows[i, k - 1] = x**k / mp.power(2, x)
            rows[i, n - 1] = (-1) ** i
            right[i] = 1 - 1 / mp.power(2, x)
        c = list(mp.lu_solve(rows, right))[:degree]
        extrema = []
        for i in range(1, GRID + 1):
            x = mp.mpf(i) / GRID
            e = relative_error(c, x)
            if extrema and (extrema[-1][1] > 0) == (e > 0):
                extrema[-1] = max(extrema[-1], (x, e), key=lambda found: abs(found[1]))
            else:
                extrema.append((x, e))
        assert len(extrema) == n, "the exchange lost a point"
        moved = max(abs(x - y) for x, (y, _) in zip(nodes, extrema, strict=True))
        nodes = [x for x, _ in extrema]
        if moved < mp.mpf(1) / (2 * GRID):
            return c
    raise AssertionError("the exchange does not settle")


def relative_error(c, x):
    return (1 + x * mp.polyval(list(reversed(c)), x)) / mp.power(2, x) - 1


def literals(degree):
    """(coefficients highest power first, rounded to float32; relative error of the rounded polynomial)."""
    with mp.workdps(DIGITS):
        rounded = [float(np.float32(mp.nstr(x, 25))) for x in remez(degree)]
        error = max(abs(relative_error([mp.mpf(x) for x in rounded], mp.mpf(i) / GRID)) for i in range(GRID + 1))
    return tuple(reversed(rounded)), float(error)


@pytest.mark.parametrize("exp2", [DEGREE4, DEGREE5], ids=lambda e: e.name)
def test_coefficients_are_those_of_the_remez_exchange(exp2):
    coefficients, error = literals(exp2.degree)
    # The grid of the exchange moves the optimum by less than one unit in the last place.
    for ours, theirs in zip(exp2.polynomial.coefficients, coefficients, strict=True):
        assert abs(ours - theirs) <= np.spacing(np.float32(theirs))
    assert error == pytest.approx(exp2.polynomial.relative_error, rel=0.02)


@functools.cache
def probe():
    """The lines that the probe prints: it includes the emitted header."""
    problem = units.make_problem(64, 64, dtypes=("bf16", "fp16"))
    files = {**amx_unit.sources(problem), "probe.cpp": PROBE.encode()}
    flags = [f for f in UNIT_FLAGS if f not in ("-fPIC", "-fvisibility=hidden")]
    quiet = ["-Wno-unused-function", "-Wno-unused-const-variable", "-Wno-parentheses"]
    program = units.build(files, "probe.cpp", [*flags, *quiet], shared=False, name="exp2_probe")
    return units.output(program).splitlines()


needs_amx = pytest.mark.skipif(bool(amx_unit.machine_lacks()), reason=f"this machine lacks {amx_unit.machine_lacks()}")


@needs_amx
def test_the_stated_error_is_the_largest_over_every_float32():
    for exp2, measured in zip((DEGREE4, DEGREE5), map(float, probe()[0].split()), strict=True):
        assert 0.99 * exp2.measured_error <= measured <= exp2.measured_error


@needs_amx
def test_exp2_is_exact_where_it_must_be():
    for line in probe()[1:3]:
        zero, negative_zero, lowest, nan, least, subnormal, five, tiny, large, over = map(float.fromhex, line.split())
        assert zero == negative_zero == 1 and lowest == 0 and np.isnan(nan)
        assert least == 2.0**-126 and subnormal == 2.0**-127 and five == 32 and tiny == 0
        assert large == 2.0**127 and over == np.inf


@needs_amx
def test_the_log_of_the_row_sum_is_within_two_ulp():
    assert float(probe()[3]) <= 2 * 2.0**-23


if __name__ == "__main__":
    for d in (4, 5):
        c, e = literals(d)
        print(d, *(x.hex() for x in c), f"error {e:.3e}", sep="\n    ")
