"""The gradients that an oracle answers with, the checked problem that it answers, and heads that share one K/V head.

The loss is sum(dO o O) + sum(dLSE o LSE). With P the weights, dP = dO V^T and D_i = sum_c dO_ic O_ic,

    dS = P o (dP - D + dLSE)      dQ = scale dS K      dK = scale dS^T Q      dV = P^T dO.

Two questions can be asked. End to end: O and LSE are those of exact attention. Stage-wise: `given` = (o, lse) are what
a kernel read, P = exp(s - lse) and D = rowsum(dO o o) follow from them, and the forward pass's errors play no part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from verify.oracle.reference import checked_inputs

Given = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Gradients:
    """dq (R, d) at the query rows `rows`; dk (C, d) and dv (C, dv) at the keys `keys`.

    `_err` bound the distance from the exact value; 0 where the value is not finite. A row without a visible key, or
    whose given LSE is -inf, has gradient 0 and adds nothing; so has a key that no row sees.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dq_err: np.ndarray
    dk_err: np.ndarray
    dv_err: np.ndarray
    rows: np.ndarray
    keys: np.ndarray


@dataclass(frozen=True)
class Problem:
    """One head, all float64: q (Nq, d), k (Nk, d), v (Nk, dv), do (Nq, dv), dlse (Nq,), visible (Nq, Nk) bool."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    dlse: np.ndarray
    visible: np.ndarray
    scale: float
    given: Given | None

    @classmethod
    def of(
        cls,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        do: np.ndarray,
        *,
        scale: float,
        visible: np.ndarray | None,
        dlse: np.ndarray | None,
        given: Given | None,
    ) -> Problem:
        """Check and convert. A given LSE of -inf hides its row: the row is empty for the kernel that read it.

        Raises:
            ValueError: shapes disagree, an input is wider than float64, or scale is not finite and positive.
        """
        q, k, v, visible = checked_inputs(q, k, v, scale, visible)
        nq, dv = len(q), v.shape[1]
        do = _float64(do, "do", (nq, dv))
        dlse = np.zeros(nq) if dlse is None else _float64(dlse, "dlse", (nq,))
        if given is not None:
            given = _float64(given[0], "given o", (nq, dv)), _float64(given[1], "given lse", (nq,))
            visible = visible & ~np.isneginf(given[1])[:, None]
        return cls(q, k, v, do, dlse, visible, scale, given)

    def finite(self, tier: str) -> Problem:
        """The same with zeros where nobody looks. Raises: ValueError if something that matters is not finite."""
        rows, keys = np.asarray(self.visible.any(axis=1)), np.asarray(self.visible.any(axis=0))
        given = None
        if self.given is not None:
            given = _masked(self.given[0], rows), _masked(self.given[1], rows)
        clean = Problem(
            q=_masked(self.q, rows),
            k=_masked(self.k, keys),
            v=_masked(self.v, keys),
            do=_masked(self.do, rows),
            dlse=_masked(self.dlse, rows),
            visible=self.visible,
            scale=self.scale,
            given=given,
        )
        arrays = (clean.q, clean.k, clean.v, clean.do, clean.dlse, *(given or ()))
        if not all(np.isfinite(x).all() for x in arrays):
            raise ValueError(
                f"{tier}.gradients needs finite inputs; backward_float64.gradients knows the special values"
            )
        return clean

    def part(self, *, rows: np.ndarray | None = None, keys: np.ndarray | None = None) -> Problem:
        """The same with these rows or keys only. Rows keep their dq; with a given LSE, keys keep their dk and dv."""
        i, j = chosen(rows, len(self.q)), chosen(keys, len(self.k))
        given = None if self.given is None else (self.given[0][i], self.given[1][i])
        q, k, v, visible = self.q[i], self.k[j], self.v[j], self.visible[i][:, j]
        return Problem(q, k, v, self.do[i], self.dlse[i], visible, self.scale, given)


def chosen(index: Iterable[int] | None, n: int) -> np.ndarray:
    """The chosen indices as an array; all of n for None."""
    return np.arange(n) if index is None else np.asarray(list(index), dtype=np.int64)


def stack_group(*arrays: np.ndarray | None) -> list[np.ndarray | None]:
    """Query heads of one K/V head as one problem: (G, Nq, ...) arrays (q, do, dlse, visible, o, lse) as (G Nq, ...).

    dK and dV of a K/V head are sums over its query heads, that is over the stacked rows; dQ of head g is rows
    g Nq .. (g + 1) Nq - 1 of the stacked dQ. None stays None.
    """
    return [None if x is None else x.reshape(-1, *x.shape[2:]) for x in arrays]


def _float64(x: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    x = np.asarray(x)
    if x.shape != shape or x.dtype.kind != "f" or x.dtype.itemsize > 8:
        raise ValueError(f"{name}: want at most float64 of shape {shape}, got {x.dtype} of shape {x.shape}")
    return x.astype(np.float64)


def _masked(x: np.ndarray, keep: np.ndarray) -> np.ndarray:
    return np.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)
