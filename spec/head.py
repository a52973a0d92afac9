"""One attention head: its checked inputs, and the masked score tile from which every algorithm starts.

    S = softcap(scale Q K^T) + bias where the pair is visible, exactly -inf elsewhere        softcap(s) = c tanh(s / c)

The order is fixed: scale, soft cap, bias, mask. Special values, for all algorithms of this package:

* Masked is absent. A masked key is selected away, not multiplied by zero: NaN or inf in it has no influence, in K and
  in V, forward and backward. (Kernels promise this of V only where no row of a tile sees the key.)
* A row that sees no key, or only keys with a score of -inf, is empty: O = 0, LSE = -inf, all gradients 0. The test is
  l == 0, because a NaN row must not pass for an empty one.
* NaN is never hidden: NaN in q_i or in a visible k_j gives a NaN row and a NaN LSE, NaN in a visible v_jc gives NaN in
  column c of the rows that see it. A score of +inf gives a NaN row (inf - inf).
* Nq = 0 and Nk = 0 are ordinary problems. A scale that is not positive and finite is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spec.dropout import Dropout
from spec.errors import FormatError, MaskError, ScaleError, ShapeError
from spec.masks import Explicit, Mask, NoMask, TileClass
from spec.rounding import Rounding

Array = npt.NDArray[Any]


class Output(NamedTuple):
    """o (Nq, dv) and lse (Nq,), natural log of the scaled scores; an empty row has o = 0 and lse = -inf."""

    o: Array
    lse: Array


class Gradients(NamedTuple):
    """dq (Nq, d), dk (Nk, d), dv (Nk, dv), and dbias in the shape of the bias (None without one)."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None


@dataclass(frozen=True, eq=False)
class Head:
    """The checked problem. q (Nq, d), k (Nk, d), v (Nk, dv), all of one float dtype."""

    q: Array
    k: Array
    v: Array
    scale: float
    mask: Mask
    bias: Array | None
    softcap: float | None
    dropout: Dropout | None
    rounding: Rounding

    @classmethod
    def of(
        cls,
        q: npt.ArrayLike,
        k: npt.ArrayLike,
        v: npt.ArrayLike,
        *,
        scale: float | None = None,
        mask: Mask | Array | None = None,
        bias: npt.ArrayLike | None = None,
        softcap: float | None = None,
        dropout: Dropout | None = None,
        rounding: Rounding | None = None,
        dtype: npt.DTypeLike = np.float64,
    ) -> Head:
        """Check and convert the arguments that every algorithm takes.

        Args:
            q, k, v: (Nq, d), (Nk, d), (Nk, dv); any real dtype, converted to `dtype` exactly or by one rounding.
            scale: factor of QK^T; default 1/sqrt(d).
            mask: a Mask, a boolean array (Nq, Nk) with True = may attend, or None for no mask.
            bias: added to the scores; broadcasts to (Nq, Nk).
            softcap: c of c tanh(s/c), before the bias.
            dtype: float64 or float32, the precision of all arithmetic.
        Raises:
            ShapeError, ScaleError, MaskError, FormatError: the request is wrong; the message says how.
        """
        if np.dtype(dtype) not in (np.dtype(np.float64), np.dtype(np.float32)):
            raise FormatError(f"dtype {np.dtype(dtype)}: the specification computes in float64 or float32")
        rounding = rounding or Rounding()
        q, k, v = (rounding.of_inputs(np.asarray(x, dtype=dtype)) for x in (q, k, v))
        if q.ndim != 2 or k.ndim != 2 or v.ndim != 2 or q.shape[1] != k.shape[1] or len(k) != len(v):
            raise ShapeError(f"q{q.shape}, k{k.shape}, v{v.shape}: want (Nq, d), (Nk, d), (Nk, dv)")
        nq, nk, d = len(q), len(k), q.shape[1]
        if d == 0 or v.shape[1] == 0:
            raise ShapeError(f"q{q.shape}, v{v.shape}: d and dv must be at least 1")
        if scale is None:
            scale = 1.0 / math.sqrt(d)
        if not (math.isfinite(scale) and scale > 0.0):
            raise ScaleError(f"scale {scale}: want a positive, finite number")
        if softcap is not None and not (math.isfinite(softcap) and softcap > 0.0):
            raise ScaleError(f"softcap {softcap}: want a positive, finite number")
        if isinstance(mask, np.ndarray):
            mask = Explicit(mask)
        mask = NoMask() if mask is None else mask
        if not isinstance(mask, Mask):
            raise MaskError(f"mask {mask!r}: want a spec.masks.Mask, a boolean array or None")
        mask.allowed(np.zeros((0, 1), np.int64), np.zeros((1, 0), np.int64), nq, nk)  # a mask of another size fails now
        if bias is not None:
            bias = np.asarray(bias, dtype=dtype)
            try:
                np.broadcast_to(bias, (nq, nk))
            except ValueError:
                raise ShapeError(f"bias{bias.shape} does not broadcast to (Nq, Nk) = ({nq}, {nk})") from None
        return cls(q, k, v, float(scale), mask, bias, softcap, dropout, rounding)

    @property
    def nq(self) -> int:
        return len(self.q)

    @property
    def nk(self) -> int:
        return len(self.k)

    @property
    def d(self) -> int:
        return self.q.shape[1]

    @property
    def dv(self) -> int:
        return self.v.shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.q.dtype

    def tile_class(self, rows: slice, cols: slice) -> TileClass:
        return self.mask.tile_class(rows, cols, self.nq, self.nk)

    def visible(self, rows: slice, cols: slice, tile: TileClass | None = None) -> Array | None:
        """The mask of one tile, boolean (rows, cols); None for a full tile, which needs no mask code."""
        tile = self.tile_class(rows, cols) if tile is None else tile
        return None if tile == TileClass.FULL else self.mask.visible(rows, cols, self.nq, self.nk)

    def scores(self, rows: slice, cols: slice, visible: Array | None) -> Array:
        """S of one tile, (rows, cols)."""
        s = self.scale * (self.q[rows] @ self.k[cols].T)
        if self.softcap is not None:
            s = self.softcap * np.tanh(s / self.softcap)
        if self.bias is not None:
            s = s + np.broadcast_to(self.bias, (self.nq, self.nk))[rows, cols]
        s = s.astype(self.dtype, copy=False)
        return s if visible is None else np.where(visible, s, -np.inf).astype(self.dtype, copy=False)

    def score_slope(self, rows: slice, cols: slice) -> Array | None:
        """d S / d (scale QK^T) of one tile: 1 - tanh^2 under a soft cap, None (meaning 1) without."""
        if self.softcap is None:
            return None
        t = np.tanh(self.scale * (self.q[rows] @ self.k[cols].T) / self.softcap)
        return 1.0 - t * t

    def z(self, rows: slice, cols: slice) -> Array | None:
        """The dropout factor of one tile, (rows, cols); None without dropout."""
        if self.dropout is None:
            return None
        i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(cols.start, cols.stop)[None, :]
        return self.dropout.z(i, j).astype(self.dtype, copy=False)

    def bias_gradient(self, ds: Array) -> Array | None:
        """dS (Nq, Nk) summed over the dimensions along which the bias was broadcast."""
        if self.bias is None:
            return None
        shape = (1,) * (2 - self.bias.ndim) + self.bias.shape
        axes = tuple(a for a in range(2) if shape[a] == 1 and ds.shape[a] != 1)
        return ds.sum(axis=axes, keepdims=True).reshape(self.bias.shape)


def sum_over_visible(w: Array, x: Array, visible: Array | None) -> Array:
    """sum_k w[i, k] x[k] over the visible pairs only, (rows, columns of x): absent is absent, 0 * NaN included."""
    finite = np.isfinite(x).all(axis=1)
    if visible is None or finite.all():
        return w @ x
    total = w[:, finite] @ x[finite]
    for k in np.flatnonzero(~finite):
        total += np.where(visible[:, k, None], w[:, k, None] * x[k], 0.0)
    return total


def times(p: Array, z: Array | None) -> Array:
    """P o Z, where None stands for a Z of ones."""
    return p if z is None else p * z


def finite_or_zero(m: Array) -> Array:
    """m with 0 in place of -inf, for exponents: keeps (-inf) - (-inf) = NaN out of exp. NaN and +inf stay."""
    return np.where(np.isneginf(m), 0.0, m).astype(m.dtype, copy=False)


def divide_rows(o: Array, l: Array) -> Array:
    """diag(l)^-1 o with 0 for the empty rows, which are those with l == 0 (a NaN row stays NaN)."""
    return o / np.where(l == 0.0, 1.0, l).astype(l.dtype, copy=False)[:, None]


def log_sum(m: Array, l: Array) -> Array:
    """LSE = m + ln l, -inf for the empty rows."""
    empty = l == 0.0
    lse = finite_or_zero(m) + np.log(np.where(empty, 1.0, l))
    return np.where(empty, -np.inf, lse).astype(m.dtype, copy=False)
