"""Low-precision formats, and where a tiled algorithm rounds to them.

Rounding is to nearest, ties to even, in one step from the value given: subnormals are kept, overflow gives infinity.
(`ml_dtypes` converts float64 to bf16 through float32, which rounds twice: 1 + 2^-8 + 2^-40 becomes 1 instead of
1 + 2^-7. So float64 values first go to float32 by rounding to odd, after which the second rounding is the right one:
Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Trans. Computers 57(4), 2008.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from spec.errors import FormatError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: `precision` counts the hidden bit, 2^emin is the smallest normal."""

    name: str
    precision: int
    emin: int
    dtype: Any

    @property
    def unit(self) -> float:
        """Unit roundoff: the largest relative error of a rounding in the normal range."""
        return 2.0**-self.precision

    @property
    def eta(self) -> float:
        """Half the subnormal spacing: the largest absolute error of a rounding below the normal range."""
        return 2.0 ** (self.emin - self.precision)


FORMATS = {
    f.name: f
    for f in (
        Format("bf16", 8, -126, ml_dtypes.bfloat16),
        Format("fp16", 11, -14, np.float16),
        Format("float32", 24, -126, np.float32),
        Format("float64", 53, -1022, np.float64),
    )
}


def format_named(name: str) -> Format:
    if name not in FORMATS:
        raise FormatError(f"format {name!r}: known are {', '.join(FORMATS)}")
    return FORMATS[name]


def round_to(x: Array, name: str) -> Array:
    """x rounded to the format, in the dtype of x (which must be able to hold it)."""
    fmt = format_named(name)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        y = _to_odd_float32(x) if fmt.name == "bf16" and x.dtype == np.float64 else x
        return y.astype(fmt.dtype).astype(x.dtype)


def _to_odd_float32(x: Array) -> Array:
    """float64 to float32, rounding to odd: an inexact result gets the neighbour with an odd last bit."""
    y = x.astype(np.float32)
    even = (y.view(np.uint32) & np.uint32(1)) == 0
    other = np.nextafter(y, np.where(x > y, np.float32(np.inf), np.float32(-np.inf)))
    return np.where(even & (y != x) & ~np.isnan(x), other, y)


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Where to round, each to a format name or not at all.

    inputs: Q, K, V (and dO) as they are loaded.   p: P, after l has taken the unrounded value.
    o: the output O, once, at the end. LSE, m and l are never rounded.
    """

    inputs: str | None = None
    p: str | None = None
    o: str | None = None

    def __post_init__(self) -> None:
        for name in (self.inputs, self.p, self.o):
            if name is not None:
                format_named(name)

    @classmethod
    def all(cls, name: str) -> Rounding:
        """What a kernel with one 16-bit format does: inputs, P and O in it."""
        return cls(inputs=name, p=name, o=name)

    def of_inputs(self, x: Array) -> Array:
        return x if self.inputs is None else round_to(x, self.inputs)

    def of_p(self, x: Array) -> Array:
        return x if self.p is None else round_to(x, self.p)

    def of_o(self, x: Array) -> Array:
        return x if self.o is None else round_to(x, self.o)
