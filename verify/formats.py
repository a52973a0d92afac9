"""The four number formats, as constants and as a rounding function on float64 arrays.

Source: IEEE 754-2019 table 3.5 (binary16, 32, 64); bfloat16 has binary32's exponent and 8 bits of precision.
`precision` counts the hidden bit, so the unit roundoff of round-to-nearest is 2**-precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """One binary floating-point format with subnormals."""

    name: str
    precision: int  # significant bits, hidden bit included
    emin: int  # exponent of the smallest normal number
    emax: int  # exponent of the largest finite number

    @property
    def unit(self) -> float:
        """Largest relative error of one rounding to nearest in the normal range."""
        return 2.0**-self.precision

    @property
    def half_subnormal(self) -> float:
        """Largest absolute error of one rounding to nearest in the subnormal range.

        For float64 that is 2**-1075, which float64 cannot hold; the next number up stands for it.
        """
        return max(2.0 ** (self.emin - self.precision), 2.0**-1074)

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.emin

    @property
    def largest(self) -> float:
        return (2.0 - 2.0 ** (1 - self.precision)) * 2.0**self.emax


FORMATS = {
    "float32": Format("float32", 24, -126, 127),
    "float64": Format("float64", 53, -1022, 1023),
    "bf16": Format("bf16", 8, -126, 127),
    "fp16": Format("fp16", 11, -14, 15),
}


def round_to(x: np.ndarray | float, name: str, *, toward_zero: bool = False) -> np.ndarray:
    """Round float64 values once to a format; the result is float64 again.

    Ties go to even. Overflow gives infinity, or the largest finite number when rounding toward zero.
    Subnormals, infinities and NaN are kept.
    """
    x = np.asarray(x, dtype=np.float64)
    if name == "float64":
        return x.copy()
    f = FORMATS[name]
    _, exponent = np.frexp(x)
    spacing = np.ldexp(1.0, np.maximum(exponent - 1, f.emin) - (f.precision - 1))
    with np.errstate(over="ignore", invalid="ignore"):
        steps = x / spacing
        y = (np.trunc(steps) if toward_zero else np.rint(steps)) * spacing
        limit = f.largest if toward_zero else np.inf
        y = np.where(np.abs(y) > f.largest, np.copysign(limit, x), y)
    return np.where(np.isfinite(x), y, x)
