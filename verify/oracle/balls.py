"""Tier T1: attention in ball arithmetic: every value comes with a radius that is proven, not estimated.

Needs python-flint (an optional extra); `AVAILABLE` says whether it is there. Scores are exact integer matrix
products, one `arb.exp` per key, P V one `arb_mat` product. Shares nothing with tier T2 but the conversion to integers.

Source: Johansson, "Arb: efficient arbitrary-precision midpoint-radius interval arithmetic" (IEEE Trans. Comput. 66(8)).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from verify.oracle.exact import to_integers
from verify.oracle.reference import Reference, checked_inputs

AVAILABLE = importlib.util.find_spec("flint") is not None


@dataclass(frozen=True)
class Enclosure(Reference):
    """A Reference that also keeps the balls."""

    o_balls: list[list[Any]]  # arb
    lse_balls: list[Any]
    digits: int


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    visible: np.ndarray | None = None,
    rows: Iterable[int] | None = None,
    digits: int = 50,
) -> Enclosure:
    """Enclose attention of the given query rows (all for None).

    Arguments as in `float64.attention`; inputs must be finite where a listed row can see them. o and lse are the
    midpoints in float64, o_err and lse_err cover the balls' radii and that conversion.

    Raises:
        ImportError: python-flint is missing.
        ValueError: shapes disagree, or a visible input is not finite.
    """
    import flint

    q, k, v, visible = checked_inputs(q, k, v, scale, visible)
    index = np.arange(len(q)) if rows is None else np.asarray(list(rows), dtype=np.int64)
    used = np.asarray(visible[index].any(axis=0))
    q, k, v, visible = q[index], k[used], v[used], visible[index][:, used]
    if not (np.isfinite(q).all() and np.isfinite(k).all() and np.isfinite(v).all()):
        raise ValueError("balls.attention needs finite inputs; float64.attention knows the special values")
    precision = flint.ctx.prec
    flint.ctx.prec = math.ceil(digits * math.log2(10)) + 40
    try:
        o, lse = _enclose(flint, q, k, v, scale, visible)
        o_mid, o_err = _to_float([ball for row in o for ball in row])
        lse_mid, lse_err = _to_float(lse)
    finally:
        flint.ctx.prec = precision
    shape = (len(index), v.shape[1])
    return Enclosure(
        o=o_mid.reshape(shape),
        lse=lse_mid,
        o_err=np.where(np.isfinite(lse_mid)[:, None], o_err.reshape(shape), 0.0),
        lse_err=lse_err,
        rows=index,
        o_balls=o,
        lse_balls=lse,
        digits=digits,
    )


def _enclose(
    flint: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, visible: np.ndarray
) -> tuple[list[list[Any]], list[Any]]:
    """Balls of O and LSE; an empty row gives exact zeros and -inf."""
    dv = v.shape[1]
    if len(q) == 0 or len(k) == 0:
        return [[flint.arb(0)] * dv for _ in q], [-flint.arb("inf")] * len(q)
    q_int, q_exp = to_integers(q)
    k_int, k_exp = to_integers(k)
    scores = (flint.fmpz_mat(q_int.tolist()) * flint.fmpz_mat(k_int.T.tolist())).tolist()
    unit = flint.arb(scale) * flint.arb(2) ** (q_exp + k_exp)
    weights, totals, lse = [], [], []
    for row, seen in zip(scores, visible, strict=True):
        if not seen.any():
            weights.append([flint.arb(0)] * len(row))
            totals.append(flint.arb(1))
            lse.append(-flint.arb("inf"))
            continue
        top = max(s for s, keep in zip(row, seen, strict=True) if keep)
        p = [(flint.arb(s - top) * unit).exp() if keep else flint.arb(0) for s, keep in zip(row, seen, strict=True)]
        total = sum(p, flint.arb(0))
        weights.append(p)
        totals.append(total)
        lse.append(flint.arb(top) * unit + total.log())
    product = flint.arb_mat(weights) * flint.arb_mat(v.tolist())
    return [[product[i, j] / totals[i] for j in range(dv)] for i in range(len(q))], lse


def _to_float(balls: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Midpoints rounded to float64, and radius plus rounding: twice 2**-53 covers float() of a midpoint."""
    mid = np.array([float(b.mid()) if b.is_finite() else -math.inf for b in balls])
    radius = np.array([float(b.rad()) if b.is_finite() else 0.0 for b in balls])
    finite = np.isfinite(mid)
    err = 2.0**-52 * np.abs(np.where(finite, mid, 0.0)) + 1.001 * radius + 2.0**-1074
    return mid, np.where(finite, err, 0.0)
