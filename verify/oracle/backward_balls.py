"""Tier T1 of the backward pass: gradients in ball arithmetic, each value with a proven radius.

Needs python-flint. S = Q K^T and dP = dO V^T are exact integer products, P takes one `arb.exp` per visible pair, D is
the row sum of P o dP (which equals dO . O), and the three gradients are `arb_mat` products. With a given O and LSE,
P = exp(s - lse) and D = dO . o instead.

Source: Johansson, "Arb: efficient arbitrary-precision midpoint-radius interval arithmetic" (IEEE Trans. Comput. 66(8)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from verify.oracle.backward_reference import Given, Gradients, Problem, chosen
from verify.oracle.exact import to_integers

Balls = list[list[Any]]  # arb


@dataclass(frozen=True)
class GradientEnclosure(Gradients):
    """Gradients that also keep the balls."""

    dq_balls: Balls
    dk_balls: Balls
    dv_balls: Balls
    digits: int


def gradients(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    *,
    scale: float,
    visible: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    given: Given | None = None,
    rows: Iterable[int] | None = None,
    keys: Iterable[int] | None = None,
    digits: int = 50,
) -> GradientEnclosure:
    """Enclose dq at `rows`, dk and dv at `keys` (all for None). Others as in `backward_float64.gradients`.

    What is visible must be finite. dq, dk, dv are the midpoints in float64; the `_err` cover the radii and that
    conversion. A row costs one exponential per key; a key one per row with a given LSE, without one those of all rows.

    Raises:
        ImportError: python-flint is missing.
        ValueError: shapes disagree, or an input that matters is not finite.
    """
    import flint

    x = Problem.of(q, k, v, do, scale=scale, visible=visible, dlse=dlse, given=given).finite("backward_balls")
    row_index, key_index = chosen(rows, len(x.q)), chosen(keys, len(x.k))
    precision = flint.ctx.prec
    flint.ctx.prec = math.ceil(digits * math.log2(10)) + 40
    try:
        if (rows is None and keys is None) or (given is None and len(key_index)):
            whole = _enclose(flint, x)
            dq_balls = [whole[0][i] for i in row_index]
            dk_balls, dv_balls = ([part[j] for j in key_index] for part in whole[1:])
        else:
            dq_balls = _enclose(flint, x.part(rows=row_index))[0]
            dk_balls, dv_balls = _enclose(flint, x.part(keys=key_index))[1:]
        dq, dq_err = _to_float(dq_balls, x.q.shape[1])
        dk, dk_err = _to_float(dk_balls, x.k.shape[1])
        dv, dv_err = _to_float(dv_balls, x.v.shape[1])
    finally:
        flint.ctx.prec = precision
    return GradientEnclosure(
        *(dq, dk, dv, dq_err, dk_err, dv_err, row_index, key_index),
        dq_balls=dq_balls,
        dk_balls=dk_balls,
        dv_balls=dv_balls,
        digits=digits,
    )


def _enclose(flint: Any, x: Problem) -> tuple[Balls, Balls, Balls]:
    arb, zero = flint.arb, flint.arb(0)
    if not x.visible.any():
        dq, dk, dv = ([[zero] * a.shape[1] for _ in a] for a in (x.q, x.k, x.v))
        return dq, dk, dv
    scores, score_exp = _exact_product(flint, x.q, x.k)
    products, product_exp = _exact_product(flint, x.do, x.v)
    unit, dp_unit = arb(x.scale) * arb(2) ** score_exp, arb(2) ** product_exp
    weights, ds = [], []
    for i, seen in enumerate(x.visible):
        if not seen.any():
            weights.append([zero] * len(seen))
            ds.append([zero] * len(seen))
            continue
        if x.given is None:
            p = _softmax(flint, scores[i], seen, unit)
        else:
            lse = arb(float(x.given[1][i]))
            p = [(arb(s) * unit - lse).exp() if keep else zero for s, keep in zip(scores[i], seen, strict=True)]
        dp = [arb(a) * dp_unit for a in products[i]]
        if x.given is None:
            D = sum((a * b for a, b in zip(p, dp, strict=True)), zero)
        else:
            D = sum((arb(float(a)) * arb(float(b)) for a, b in zip(x.do[i], x.given[0][i], strict=True)), zero)
        D -= arb(float(x.dlse[i]))
        weights.append(p)
        ds.append([a * (b - D) if keep else zero for a, b, keep in zip(p, dp, seen, strict=True)])
    P, dS = flint.arb_mat(weights), flint.arb_mat(ds)
    Q, K, dO = (flint.arb_mat(a.tolist()) for a in (x.q, x.k, x.do))
    scale = arb(x.scale)
    dQ, dK, dV = dS * K * scale, dS.transpose() * Q * scale, P.transpose() * dO
    return _rows(dQ, x.q.shape), _rows(dK, x.k.shape), _rows(dV, x.v.shape)


def _exact_product(flint: Any, a: np.ndarray, b: np.ndarray) -> tuple[list[list[Any]], int]:
    """a b^T as integers and one exponent."""
    (a_int, a_exp), (b_int, b_exp) = to_integers(a), to_integers(b)
    return (flint.fmpz_mat(a_int.tolist()) * flint.fmpz_mat(b_int.T.tolist())).tolist(), a_exp + b_exp


def _softmax(flint: Any, scores: list[Any], seen: np.ndarray, unit: Any) -> list[Any]:
    zero = flint.arb(0)
    top = max(s for s, keep in zip(scores, seen, strict=True) if keep)
    w = [(flint.arb(s - top) * unit).exp() if keep else zero for s, keep in zip(scores, seen, strict=True)]
    inverse = 1 / sum(w, zero)
    return [a * inverse for a in w]


def _rows(matrix: Any, shape: tuple[int, ...]) -> Balls:
    return [[matrix[i, j] for j in range(shape[1])] for i in range(shape[0])]


def _to_float(rows: Balls, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Midpoints rounded to float64, and radius plus rounding: twice 2**-53 covers float() of a midpoint."""
    mid = np.array([float(b.mid()) for row in rows for b in row]).reshape(len(rows), columns)
    radius = np.array([float(b.rad()) for row in rows for b in row]).reshape(mid.shape)
    err = np.where((mid == 0) & (radius == 0), 0.0, 2.0**-52 * np.abs(mid) + 1.001 * radius + 2.0**-1074)
    return mid, err
