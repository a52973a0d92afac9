"""Coefficients of the exp2 polynomials that the AMX kernels print.

p(r) = 1 + c1 r + ... + cn r^n approximates 2^r on [0, 1], minimax in relative error with p(0) = 1 pinned. AVX-512
gives r = t - floor(t) in one instruction and multiplies by 2^floor(t) in another, so this interval costs less than
[-1/2, 1/2], and a pin at the end of the interval takes next to nothing from the degree.

Degree 4 for bf16, where a weight keeps 8 bits; degree 5 for fp16, where it keeps 16 and the LSE has float32 accuracy.
`python tests/cpu/test_amx_exp2.py` regenerates the literals (Remez exchange at 40 digits, then rounded to float32).
As a test it compares them with these, and tries the emitted function on every float32 of (-1, 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.plans.exp2_coefficients import Exp2


@dataclass(frozen=True)
class Exp2Floor:
    """One emitted function 2^t."""

    polynomial: Exp2
    # Largest relative error of the emitted function, rounding included. Outside (-1, 1) r is one of the values inside,
    # and the power of two is exact down to 2^-126.
    measured_error: float

    @property
    def degree(self) -> int:
        return self.polynomial.degree

    @property
    def stated_error(self) -> str:
        """`measured_error`, rounded up: "3.0e-6"."""
        power = math.floor(math.log10(self.measured_error))
        return f"{math.ceil(self.measured_error / 10.0 ** (power - 1)) / 10}e{power}"

    @property
    def name(self) -> str:
        return f"exp2_degree{self.degree}"


DEGREE4 = Exp2Floor(
    Exp2(
        hexadecimal=(
            "0x1.b7f730p-7",
            "0x1.abf868p-5",
            "0x1.ee2450p-3",
            "0x1.62d6c6p-1",
        ),
        relative_error=2.902e-06,
        suffix="f",
    ),
    measured_error=2.975e-06,
)
DEGREE5 = Exp2Floor(
    Exp2(
        hexadecimal=(
            "0x1.e974fap-10",
            "0x1.277856p-7",
            "0x1.c91ce6p-5",
            "0x1.ebdb56p-3",
            "0x1.62e4bap-1",
        ),
        relative_error=9.377e-08,
        suffix="f",
    ),
    measured_error=1.831e-07,
)
