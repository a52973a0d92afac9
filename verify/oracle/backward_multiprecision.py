"""Tier T2 of the backward pass: dQ of chosen rows, dK and dV of chosen keys, to 50 digits with mpmath alone.

Scores, dP and the given values are exact integers; a weight is a fixed-point exponential relative to the largest of its
row, within WEIGHT_ULPS units of 2**-wp (see `multiprecision`); everything after that is integer arithmetic up to one
division per row. With integers p_k, g_k = dP_k + dLSE, L = sum p and N = sum p_k dP_k:

    P_k = p_k / L        dS_k = p_k (g_k L - N) / L^2

With a given O and LSE, P_k = exp(s_k - lse) is the fixed-point number itself and dS_k = p_k (g_k - dO . o).

`textbook` is the literal formula, for tiny shapes: an independent transcription for the fast forms to agree with.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    ctx = MPContext()
    ctx.prec = wp + 40
    weigh = _Weights(x, ctx, wp)
    dq = {int(i): [ctx.mpf(0)] * d for i in row_index}
    dk = {int(j): [ctx.mpf(0)] * d for j in key_index}
    dv_sum = {int(j): [ctx.mpf(0)] * dv for j in key_index}
    asked = np.asarray(x.visible[:, key_index].any(axis=1))
    for i in range(nq):
        seen = np.flatnonzero(x.visible[i])
        if not len(seen) or not (i in dq or asked[i]):
            continue
        if i not in dq and x.given is not None:
            seen = seen[np.isin(seen, key_index)]  # with a given LSE a weight needs no other key
        p, ds = weigh.row(i, seen)
        if i in dq:
            dq[i] = [x.scale * ctx.fdot(zip(ds, map(float, x.k[seen, c]), strict=True)) for c in range(d)]
        for p_ij, ds_ij, j in zip(p, ds, map(int, seen), strict=True):
            if j in dk:
                dk[j] = [a + x.scale * ds_ij * float(b) for a, b in zip(dk[j], x.q[i], strict=True)]
                dv_sum[j] = [a + p_ij * float(b) for a, b in zip(dv_sum[j], x.do[i], strict=True)]
    p_err, ds_err = weigh.p_err, weigh.ds_err
    out: dict[str, Any] = {}
    for name, found, index, tail in (
        ("dq", dq, row_index, x.scale * ds_err * np.abs(x.k).sum(axis=0)),
        ("dk", dk, key_index, x.scale * ds_err * np.abs(x.q).sum(axis=0)),
        ("dv", dv_sum, key_index, p_err * np.abs(x.do).sum(axis=0)),
    ):
        values = [found[int(n)] for n in index]
        out[f"{name}_digits"] = values
        out[name] = np.array([[float(a) for a in row] for row in values]).reshape(len(index), len(tail))
        live = np.asarray(x.visible.any(axis=1 if name == "dq" else 0))[index]
        err = 2.0**-53 * np.abs(out[name]) + tail + 2.0**-1074
        out[f"{name}_err"] = np.where(live[:, None], err, 0.0)
    return GradientDigits(**out, rows=row_index, keys=key_index, digits=digits)


class _Weights:
    """P and dS of one row at a time, as mpf, and bounds on the errors of all of them."""

    def __init__(self, x: Problem, ctx: Any, wp: int):
        self.x, self.ctx, self.wp = x, ctx, wp
        self.exp = _fixed_exp(wp)
        self.k_int, self.k_exp = to_integers(x.k)
        self.v_int, self.v_exp = to_integers(x.v)
        self.scale_int, self.scale_exp = to_integers(np.array([x.scale]))
        # |P - exact| <= p_err: N weights within WEIGHT_ULPS units, over L >= 1 (none with a given LSE), mpf roundings.
        # dS has three factors with that error, each other factor at most 2 max|dP| + max|dLSE| + max|dO . o|.
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

    def row(self, i: int, seen: np.ndarray) -> tuple[list[Any], list[Any]]:
        """P and dS at the keys `seen` of row i."""
        x, ctx, wp = self.x, self.ctx, self.wp
        q_int, q_exp = to_integers(x.q[i])
        do_int, do_exp = to_integers(x.do[i])
        s = [int(a) for a in self.k_int[seen].dot(q_int) * int(self.scale_int[0])]
        dp = [int(a) for a in self.v_int[seen].dot(do_int)]
        s_exp, dp_exp = self.k_exp + q_exp + self.scale_exp, self.v_exp + do_exp
        dlse = ctx.mpf(float(x.dlse[i]))
        if x.given is not None:
            lse_int, lse_exp = to_integers(x.given[1][i : i + 1])
            lse = _fixed(int(lse_int[0]), lse_exp + wp)
            p = [ctx.ldexp(ctx.mpf(self.weight(_fixed(a, s_exp + wp) - lse)), -wp) for a in s]
            self.largest_p = max(self.largest_p, *(2 * float(a) for a in p))
            D = ctx.fdot(zip(map(float, x.do[i]), map(float, x.given[0][i]), strict=True)) - dlse
            return p, [a * (ctx.ldexp(ctx.mpf(b), dp_exp) - D) for a, b in zip(p, dp, strict=True)]
        top = max(s)
        w = [self.weight(_fixed(a - top, s_exp + wp)) for a in s]
        L = sum(w)
        N = sum(a * b for a, b in zip(w, dp, strict=True))
        square = ctx.mpf(L * L)
        ds = [a * (ctx.ldexp(ctx.mpf(b * L - N), dp_exp) + dlse * L) / square for a, b in zip(w, dp, strict=True)]
        return [ctx.mpf(a) / L for a in w], ds

    def weight(self, x: int) -> int:
        """exp in units of 2**-wp; 0 below half a unit."""
        return self.exp(x) if x > -(self.wp + 8) << self.wp else 0


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
