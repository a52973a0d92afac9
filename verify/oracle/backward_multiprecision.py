"""Tier T2 of the backward pass: dQ of chosen rows, dK and dV of chosen keys, to 50 digits with mpmath alone.

Inputs, scores, dP and the given values are exact integers, each array with one exponent. A weight is a fixed-point
exponential relative to the largest of its row, within WEIGHT_ULPS units of 2**-wp (see `multiprecision`), divided by
their sum in the same units; with a given O and LSE it is exp(s_k - lse) itself. From there on everything is exact:

    D = sum_k P_k dP_k  or  dO . o        dS_k = P_k (dP_k - D + dLSE)        dQ, dK, dV sums of integers

`textbook` is the literal formula, for tiny shapes: an independent transcription for the fast forms to agree with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpmath.ctx_mp import MPContext

from verify.oracle.backward_reference import Given, Gradients, Problem, chosen
from verify.oracle.exact import to_integers
from verify.oracle.multiprecision import WEIGHT_ULPS, _fixed_exp, precision_bits

Digits = list[list[Any]]  # mpf


@dataclass(frozen=True)
class GradientDigits(Gradients):
    """Gradients that also keep the values themselves."""

    dq_digits: Digits
    dk_digits: Digits
    dv_digits: Digits
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
) -> GradientDigits:
    """dq at `rows`, dk and dv at `keys` (all for None). Other arguments as in `backward_float64.gradients`.

    A key costs the weights of every row that sees it; with a given LSE, one weight per row. The `_err` bound the
    distance of the float64 values from the exact ones: their own rounding, and what the fixed-point weights carry into
    a gradient.

    Raises:
        ValueError: shapes disagree, or an input that matters is not finite.
    """
    x = Problem.of(q, k, v, do, scale=scale, visible=visible, dlse=dlse, given=given).finite("backward_multiprecision")
    (nq, nk), d, dv = x.visible.shape, x.q.shape[1], x.v.shape[1]
    row_index = chosen(rows, nq)
    key_index = chosen(keys, nk)
    wp = precision_bits(digits)
    weigh = _Weights(x, wp)
    ctx = MPContext()
    ctx.prec = wp + 40
    to_mpf: Callable[[Any, int], Any] = lambda n, e: ctx.ldexp(ctx.mpf(int(n)), e)  # noqa: E731
    q_int, q_exp = to_integers(x.q)
    do_int, do_exp = to_integers(x.do)
    dq = {int(i): [ctx.mpf(0)] * d for i in row_index}
    wanted_keys = {int(j): n for n, j in enumerate(key_index)}
    of_keys: list[tuple[int, np.ndarray, np.ndarray, np.ndarray, int]] = []  # row, keys, P, dS, exponent of dS
    asked = np.asarray(x.visible[:, key_index].any(axis=1))
    for i in range(nq):
        seen = np.flatnonzero(x.visible[i])
        if not len(seen) or not (i in dq or asked[i]):
            continue
        if i not in dq and x.given is not None:
            seen = seen[np.isin(seen, key_index)]  # with a given LSE a weight needs no other key
        p, ds, ds_exp = weigh.row(i, seen)
        if i in dq:
            total = ds.dot(weigh.k_int[seen]) * weigh.scale_int
            dq[i] = [to_mpf(n, ds_exp + weigh.k_exp + weigh.scale_exp) for n in total]
        if asked[i]:
            mine = np.isin(seen, key_index)
            of_keys.append((i, np.array([wanted_keys[int(j)] for j in seen[mine]]), p[mine], ds[mine], ds_exp))
    lowest = min((e for *_, e in of_keys), default=0)
    dk_int, dv_int = np.zeros((len(key_index), d), dtype=object), np.zeros((len(key_index), dv), dtype=object)
    for i, at, p, ds, ds_exp in of_keys:
        dk_int[at] += np.outer(np.left_shift(ds, ds_exp - lowest), q_int[i])
        dv_int[at] += np.outer(p, do_int[i])
    dk_exp = lowest + q_exp + weigh.scale_exp
    found: dict[str, Digits] = {
        "dq": [dq[int(i)] for i in row_index],
        "dk": [[to_mpf(n, dk_exp) for n in row] for row in dk_int * weigh.scale_int],
        "dv": [[to_mpf(n, do_exp - wp) for n in row] for row in dv_int],
    }
    out: dict[str, Any] = {}
    for name, index, tail in (
        ("dq", row_index, x.scale * weigh.ds_err * np.abs(x.k).sum(axis=0)),
        ("dk", key_index, x.scale * weigh.ds_err * np.abs(x.q).sum(axis=0)),
        ("dv", key_index, weigh.p_err * np.abs(x.do).sum(axis=0)),
    ):
        values = found[name]
        out[f"{name}_digits"] = values
        out[name] = np.array([[float(a) for a in row] for row in values]).reshape(len(index), len(tail))
        live = np.asarray(x.visible.any(axis=1 if name == "dq" else 0))[index]
        err = 2.0**-53 * np.abs(out[name]) + tail + 2.0**-1074
        out[f"{name}_err"] = np.where(live[:, None], err, 0.0)
    return GradientDigits(**out, rows=row_index, keys=key_index, digits=digits)


class _Weights:
    """P and dS of one row at a time, as integers, and bounds on the errors of all of them."""

    def __init__(self, x: Problem, wp: int):
        self.x, self.wp = x, wp
        self.exp = _fixed_exp(wp)
        self.k_int, self.k_exp = to_integers(x.k)
        self.v_int, self.v_exp = to_integers(x.v)
        scale, self.scale_exp = to_integers(np.array([x.scale]))
        self.scale_int = int(scale[0])
        # |P - exact| <= p_err: N weights within WEIGHT_ULPS units and the floor of a division, over L >= 1; only the
        # first with a given LSE. dS has that error twice (P and D), its other factors are at most 2 max|dP| + max|dLSE|
        # + max|dO . o|.
        size = np.abs(x.do) @ np.abs(x.v).T
        g = 2 * float(size.max(initial=0.0)) + float(np.abs(x.dlse).max(initial=0.0))
        self.largest_p = 1.0
        if x.given is not None:
            g += float((np.abs(x.do) * np.abs(x.given[0])).sum(axis=1).max(initial=0.0))
        n = max(x.visible.shape)
        self.p_unit = 4 * (n + 1) * WEIGHT_ULPS * 2.0**-wp
        self.g = g

    @property
    def p_err(self) -> float:
        return self.p_unit * self.largest_p

    @property
    def ds_err(self) -> float:
        return 4 * self.p_err * self.g

    def row(self, i: int, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """P in units of 2**-wp, dS and the exponent of its unit, at the keys `seen` of row i."""
        x, wp = self.x, self.wp
        q_int, q_exp = to_integers(x.q[i])
        do_int, do_exp = to_integers(x.do[i])
        s = [int(a) for a in self.k_int[seen].dot(q_int) * self.scale_int]
        s_exp = self.k_exp + q_exp + self.scale_exp
        dp = _Scaled(self.v_int[seen].dot(do_int), self.v_exp + do_exp)
        if x.given is not None:
            (lse,), lse_exp = to_integers(x.given[1][i : i + 1])
            shift = _fixed(int(lse), lse_exp + wp)
            p = np.array([self.weight(_fixed(a, s_exp + wp) - shift) for a in s], dtype=object)
            self.largest_p = max(self.largest_p, *(2.0 * (int(a) >> wp) + 2.0 for a in p))
            o_int, o_exp = to_integers(x.given[0][i])
            D = _Scaled(do_int.dot(o_int), do_exp + o_exp)
        else:
            top = max(s)
            w = np.array([self.weight(_fixed(a - top, s_exp + wp)) for a in s], dtype=object)
            p = np.left_shift(w, wp) // int(w.sum())
            D = _Scaled(p.dot(dp.units), dp.exponent - wp)
        (dlse,), dlse_exp = to_integers(x.dlse[i : i + 1])
        exponent = min(dp.exponent, D.exponent, dlse_exp)
        g = dp.at(exponent) - D.at(exponent) + _Scaled(dlse, dlse_exp).at(exponent)
        return p, p * g, exponent - wp

    def weight(self, x: int) -> int:
        """exp in units of 2**-wp; 0 below half a unit."""
        return self.exp(x) if x > -(self.wp + 8) << self.wp else 0


@dataclass(frozen=True)
class _Scaled:
    """units * 2**exponent, an integer or an array of them."""

    units: Any
    exponent: int

    def at(self, exponent: int) -> Any:
        """The same in units of 2**exponent, which must not be larger than the own ones."""
        return self.units * (1 << (self.exponent - exponent))


def _fixed(a: int, shift: int) -> int:
    return a << shift if shift >= 0 else a >> -shift


def textbook(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    *,
    scale: float,
    visible: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    digits: int = 50,
) -> tuple[Digits, Digits, Digits]:
    """(dQ, dK, dV) as mpf, in the order of the formulas: softmax Jacobian in full, no D, no maximum, no integers."""
    x = Problem.of(q, k, v, do, scale=scale, visible=visible, dlse=dlse, given=None).finite("textbook")
    ctx = MPContext()
    ctx.dps = digits + 10
    (nq, nk), d, dv = x.visible.shape, x.q.shape[1], x.v.shape[1]
    dQ, dK, dV = ([[ctx.mpf(0)] * c for _ in range(n)] for n, c in ((nq, d), (nk, d), (nk, dv)))
    scale_mpf = ctx.mpf(scale)
    for i in range(nq):
        keys = [j for j in range(nk) if x.visible[i, j]]
        if not keys:
            continue
        e = [ctx.exp(scale_mpf * ctx.fdot(map(float, x.q[i]), map(float, x.k[j]))) for j in keys]
        p = [a / ctx.fsum(e) for a in e]
        dP = [ctx.fdot(map(float, x.do[i]), map(float, x.v[j])) for j in keys]
        # dP_b / dS_a = P_b (1[a = b] - P_a), dLSE / dS_a = P_a
        dS = [
            ctx.fsum(dP[b] * p[b] * ((a == b) - p[a]) for b in range(len(keys))) + float(x.dlse[i]) * p[a]
            for a in range(len(keys))
        ]
        for a, j in enumerate(keys):
            for c in range(d):
                dQ[i][c] += scale_mpf * dS[a] * float(x.k[j, c])
                dK[j][c] += scale_mpf * dS[a] * float(x.q[i, c])
            for c in range(dv):
                dV[j][c] += p[a] * float(x.do[i, c])
    return dQ, dK, dV
