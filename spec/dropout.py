"""Dropout factors from a counter: Z(i, j) is a pure function of (seed, offset, b, h, i, j).

Z multiplies P and never l: the row sum is taken before dropping, so m, l, LSE and every merge are those of the
undropped problem. Tile sizes, loop order and split count play no part, hence forward and backward agree.

Generator: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key
of a (seed, offset) is the Philox image of the counter (offset, 0, 0) under the key `seed`; the pair (i, j) of head h of
batch b then owns word j mod 4 of the counter (j div 4, i, h, b): four neighbouring keys share one evaluation.

Threshold: 32 bits. An element is kept when its word is below T = round((1 - p) 2^32), and Z = 2^32 / T there: the scale
is that of the probability actually used, so E[Z] = 1 exactly. p below 2^-33 gives T = 2^32, which is no dropout;
p = 1 gives T = 0, which is Z = 0 everywhere and no division.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spec.errors import DropoutError

Array = npt.NDArray[Any]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # multipliers of a Philox round
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Weyl increments of the key
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """Ten rounds of Philox4x32. Words are uint64 arrays that hold 32-bit values; they broadcast."""
    c0, c1, c2, c3 = counter
    for r in range(10):
        k0, k1 = np.uint64((key[0] + r * _W0) & 0xFFFFFFFF), np.uint64((key[1] + r * _W1) & 0xFFFFFFFF)
        p0, p1 = _M0 * c0, _M1 * c2  # 32 x 32 -> 64 bits, exact in uint64
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
    return c0, c1, c2, c3


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Dropout of one head. p is the probability to drop; seed and offset are 64-bit, b, h, i below 2^32."""

    p: float
    seed: int
    offset: int = 0
    b: int = 0
    h: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:  # NaN fails too
            raise DropoutError(f"dropout probability {self.p}: want 0 <= p <= 1")
        for name, bits in (("seed", 64), ("offset", 64), ("b", 32), ("h", 32)):
            value = getattr(self, name)
            if not 0 <= value < 2**bits:
                raise DropoutError(f"dropout {name}={value}: want 0 <= {name} < 2^{bits}")

    @property
    def threshold(self) -> int:
        """T: an element is kept when its 32-bit word is below this."""
        return round((1.0 - self.p) * 2**32)

    @property
    def keep(self) -> float:
        """The probability to keep that is actually used, T / 2^32."""
        return self.threshold / 2**32

    @property
    def scale(self) -> float:
        """Z of a kept element: 1 / keep, or 0 where nothing is kept."""
        return 2**32 / self.threshold if self.threshold else 0.0

    def words(self, i: Array, j: Array) -> Array:
        """The 32-bit word of each pair in the broadcast of rows i and keys j, as uint64."""
        key = _words_of_key(self.seed, self.offset)
        i, j = np.asarray(i, dtype=np.uint64), np.asarray(j, dtype=np.uint64)
        quads = np.unique(j >> np.uint64(2))  # one evaluation serves four neighbouring keys
        shape = np.broadcast_shapes(i.shape, j.shape)
        rows, row_index = np.unique(i, return_inverse=True)
        high = np.uint64(self.h), np.uint64(self.b)
        out = philox4x32((quads[None, :], rows[:, None], np.asarray(high[0]), np.asarray(high[1])), key)
        table = np.stack(np.broadcast_arrays(*out), axis=-1)  # (rows, quads, 4)
        r = np.broadcast_to(row_index.reshape(i.shape), shape)
        c = np.broadcast_to(np.searchsorted(quads, j >> np.uint64(2)), shape)
        return table[r, c, np.broadcast_to((j & np.uint64(3)).astype(np.int64), shape)]

    def z(self, i: Array, j: Array) -> Array:
        """Z over the broadcast of rows i and keys j, float64: 0 where dropped, `scale` where kept."""
        return np.where(self.words(i, j) < np.uint64(self.threshold), self.scale, 0.0)


def _words_of_key(seed: int, offset: int) -> tuple[int, int]:
    words = (offset & 0xFFFFFFFF, offset >> 32, 0, 0)
    c = tuple(np.asarray(w, dtype=np.uint64) for w in words)
    k0, k1, _, _ = philox4x32((c[0], c[1], c[2], c[3]), (seed & 0xFFFFFFFF, seed >> 32))
    return int(k0), int(k1)
