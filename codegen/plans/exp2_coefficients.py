"""Coefficients of the exp2 polynomials that the CPU kernels print.

p(r) = 1 + c1 r + ... + cn r^n approximates 2^r on [-1/2, 1/2], minimax in relative error with p(0) = 1 pinned: the
weight of the largest score is then exactly 1. Degree 6 for float32 and 11 for float64: one less costs a factor of 70
(15) in the error, and an odd degree gains little from its last term when p(0) is pinned.

`python tests/cpu/test_exp2_coefficients.py` regenerates the literals (Remez exchange at 40 digits, then rounded to the
format), and as a test compares them with these.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exp2:
    """One polynomial. `hexadecimal`: exact values of cn, ..., c1, in Horner's order."""

    hexadecimal: tuple[str, ...]
    relative_error: float  # maximum on [-1/2, 1/2] with the rounded coefficients, before evaluation
    suffix: str  # of a C++ literal of the format

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(float.fromhex(h) for h in self.hexadecimal)

    @property
    def literals(self) -> tuple[str, ...]:
        """C++17 literals, exact."""
        return tuple(h + self.suffix for h in self.hexadecimal)

    @property
    def error_text(self) -> str:
        return f"relative error {self.relative_error:.1e}"

    @property
    def degree(self) -> int:
        return len(self.hexadecimal)


FLOAT32 = Exp2(
    hexadecimal=(
        "0x1.470b48p-13",
        "0x1.5f7276p-10",
        "0x1.3b270ep-7",
        "0x1.c6ae72p-5",
        "0x1.ebfbe2p-3",
        "0x1.62e432p-1",
    ),
    relative_error=2.122e-08,
    suffix="f",
)

FLOAT64 = Exp2(
    hexadecimal=(
        "0x1.c063841f3a21dp-32",
        "0x1.e605f964b639dp-28",
        "0x1.b54167a1b0034p-24",
        "0x1.62bfd49ededd3p-20",
        "0x1.ffcbee3b0a61cp-17",
        "0x1.43091309610fcp-13",
        "0x1.5d87fe7bbbe09p-10",
        "0x1.3b2ab6fba1e1cp-7",
        "0x1.c6b08d7048f31p-5",
        "0x1.ebfbdff82c598p-3",
        "0x1.62e42fefa39f3p-1",
    ),
    relative_error=4.242e-17,
    suffix="",
)
