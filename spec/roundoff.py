"""How far the reference itself can be from the truth: rounding-error bounds for float64 and float32 NumPy.

Model, with unit roundoff u of the dtype: each +, -, *, / has relative error at most u; a sum of n terms is taken in
any order; exp, log and tanh are within 4 ulp, that is 8u (a test measures NumPy's), with exp(0) = 1 exactly. Notation
of the papers: S scores, m row maximum, gap = m - S >= 0, P softmax, l row sum relative to m, T tiles of keys.

The step that every bound shares. A key's weight in l or in O is a product of exponentials exp(S - m_1) exp(m_1 - m_2)
... whose exponents add up to -gap. Rounding them changes the weight by a factor exp(h), |h| <= u gap, because the
maximum only rises and the differences telescope (a reference that lags by t adds 2ut). Everything else that happens to
the weight is at most n + 5T + 4 roundings and T + 1 exponentials, n being the keys of the row: `compound`. Masked keys
add exact zeros and cost no rounding. Over the whole row, sum_k P_k gap_k = entropy(P) - ln l <= ln n: `state`.

The right-hand sides are evaluated with computed values. Each of those is within a factor exp(2(H + theta)) of the true
one, where H and theta are the exponent and rounding errors of its row, and no product has more than four of them: the
factor `second_order` = exp(8(H + theta)) keeps the bounds rigorous. Where it is not small, no bound is claimed.

These bounds speak of this package only. Kernels are judged by `verify`, which has a model per arithmetic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spec.head import Array, Gradients, Head, Output, times
from spec.rounding import format_named
from spec.standard import attend, output_gradients, select

ULPS = 4  # accuracy of NumPy's exp, log and tanh, in units in the last place
DOMAIN = 1.0 / 64.0  # the largest H + theta for which a bound is claimed


class StateBound(NamedTuple):
    """Relative errors of a state (m, l, o) after some tiles, given the scores as computed."""

    l: float  # of l, for a row with at least one key
    u: float  # of U = exp(S - m) V, relative to l max |v|


def unit(dtype: npt.DTypeLike) -> float:
    """Unit roundoff u: 2^-53 for float64, 2^-24 for float32."""
    return float(np.finfo(dtype).eps) / 2.0


def gamma(n: int, u: float) -> float:
    """(1 - u)^-n - 1: the relative error of a product of n factors (1 + delta)^(+-1), |delta| <= u."""
    return math.expm1(-n * math.log1p(-u))


def compound(keys: int, tiles: int, u: float) -> float:
    """Relative error of one key's contribution to l or O in any forward algorithm, exponents aside."""
    return math.expm1(-(keys + 5 * tiles + 4) * math.log1p(-u) - (tiles + 1) * math.log1p(-2 * ULPS * u))


def state(*, keys: int, tiles: int, u: float, lag: float | None = None, u_p: float = 0.0) -> StateBound:
    """Errors of l and U after `tiles` tiles with `keys` visible keys; u_p is the unit roundoff of a rounded P.

    Underflow is not part of it: see `underflow`.
    """
    exponents = u * (math.log(max(keys, 1)) + 2.0 * (lag or 0.0))
    theta = compound(keys, tiles, u)
    l = (theta + (1.0 + theta) * exponents) * math.exp(u * -math.log(np.finfo(np.float64).tiny))  # gap where w > 0
    return StateBound(l, l + (1.0 + l) * u_p)


def underflow(*, keys: int, tiles: int, dtype: npt.DTypeLike) -> float:
    """Absolute error from results below the normal range: one per exponential or product of each key."""
    return keys * (tiles + 4) * float(np.finfo(dtype).tiny)


def scores(head: Head, rows: slice, cols: slice, s: Array) -> Array:
    """Error of each computed score of a tile, (rows, cols). s: the scores, -inf where masked.

    By Cauchy-Schwarz sum |q||k| <= ||q|| ||k||. A soft cap has slope at most 1; a division, tanh and a product follow.
    """
    u = unit(head.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        norm_q, norm_k = (np.sqrt((x.astype(np.float64) ** 2).sum(axis=1)) for x in (head.q[rows], head.k[cols]))
        error = gamma(head.d + 1, u) * head.scale * norm_q[:, None] * norm_k[None, :]
        if head.softcap is not None:
            error = error + (2 * ULPS + 2) * u * np.minimum(
                head.scale * norm_q[:, None] * norm_k[None, :], head.softcap
            )
        if head.bias is not None:
            error = error + u * np.where(np.isfinite(s), np.abs(s), 0.0)
    return np.asarray(error * (1.0 + gamma(head.d + 4, u)))  # the norms are computed too


def forward(head: Head, tiles: int) -> Output:
    """Bounds on |O - exact| and |LSE - exact| of any forward algorithm here, with at most `tiles` tiles of keys.

    With H = score error + rounding of the exponents, and because sum_k P_k (v_k - O) = 0:
        |O^ - O| <= [ sum P expm1(H) (|v| + |O|) + theta sum P e^H (|v| + |O|) ] / ((1 - theta) sum P e^-H)
        |LSE^ - LSE| <= ln(sum P e^H) + theta/(1 - theta) + 8u |ln l| + u |LSE|
    No bound (NaN) for rows that hold NaN or inf, or beyond DOMAIN; inputs and P unrounded, lag None.
    """
    f = _Dense.of(head)
    theta = compound(head.nk, tiles, f.u)
    W = f.P * np.expm1(f.H)
    weight = (f.P + W).sum(axis=1)[:, None]
    V = np.abs(head.v)
    numerator = times(W, f.Z) @ V + W.sum(axis=1)[:, None] * np.abs(f.O)
    numerator = numerator + theta * (times(f.P + W, f.Z) @ V + weight * np.abs(f.O))
    vmax = V.max(axis=0, initial=0.0) * (1.0 if f.Z is None else f.Z.max(initial=0.0))
    tiny = underflow(keys=head.nk, tiles=tiles, dtype=head.dtype)
    second_order = np.exp(8.0 * (f.H.max(axis=1, initial=0.0) + theta))
    o = second_order[:, None] * (numerator / (1.0 - theta) + f.u * np.abs(f.O)) + tiny * (1.0 + vmax)
    empty = np.isneginf(f.L)
    L, log_l = np.where(empty, 0.0, f.L), np.where(empty, 0.0, f.L - f.m)
    lse = np.log(np.where(empty, 1.0, weight[:, 0])) + theta / (1.0 - theta) + 2 * ULPS * f.u * np.abs(log_l)
    lse = second_order * (lse + f.u * np.abs(L)) + tiny
    o[empty], lse[empty] = 0.0, 0.0  # an empty row is exact
    unknown = ~(f.H.max(axis=1, initial=0.0) + theta < DOMAIN)
    o[unknown], lse[unknown] = np.nan, np.nan
    return Output(o, lse)


def merged(head: Head, tiles: int, parts: int) -> Output:
    """The same for partial results over `parts` key sets, merged by their O and LSE.

    A partial LSE is a float: it holds ln l only to within u |LSE|, so the weights of the parts are off by a factor
    exp(2b), b the error of a partial LSE and of merging it. Hence the bound grows with the size of the scores, which
    `forward` does not. O of a part may be as large as max |v|, whatever the whole is.
    """
    f = _Dense.of(head)
    theta = compound(head.nk, tiles, f.u)
    largest = np.abs(np.where(f.P > 0, f.S, 0.0)).max(axis=1, initial=0.0) + math.log(max(head.nk, 1))
    H = f.H.max(axis=1, initial=0.0)
    b = H + theta / (1.0 - theta) + 2 * ULPS * f.u * math.log(max(head.nk, 2))
    b = b + (parts + 1) * f.u * largest + parts * (4 * ULPS + 2) * f.u  # per merge: two exp, one log, sums
    vmax = np.abs(head.v).max(axis=0, initial=0.0) * (1.0 if f.Z is None else f.Z.max(initial=0.0))
    tiny = underflow(keys=head.nk, tiles=tiles + parts, dtype=head.dtype)
    relative = 2.0 * (np.expm1(H) + theta * np.exp(H)) / (1.0 - theta) + 2.0 * np.expm1(2.0 * b) + parts * 8 * f.u
    second_order = np.exp(8.0 * (b + theta))
    o = (second_order * relative)[:, None] * vmax + tiny * (1.0 + vmax)
    lse = second_order * b + tiny
    empty, unknown = np.isneginf(f.L), ~(b + theta < DOMAIN)
    o[empty], lse[empty] = 0.0, 0.0
    o[unknown], lse[unknown] = np.nan, np.nan
    return Output(o, lse)


def backward(head: Head, do: npt.ArrayLike, tiles: int, dlse: npt.ArrayLike | None = None) -> Gradients:
    """Bounds on the error of each gradient of any backward algorithm here, forward pass included.

    tiles: at least Tr and Tc. G bounds the relative error of P; F, b_D and X the errors of dP, D and dS.
    """
    dO, dLSE = output_gradients(head, do, dlse)
    f, B = _Dense.of(head), forward(head, tiles)
    u, aQ, aK, aV, aO = f.u, np.abs(head.q), np.abs(head.k), np.abs(head.v), np.abs(dO)
    L = np.where(np.isneginf(f.L), np.inf, f.L)
    S = np.where(f.P > 0, f.S, 0.0)
    far = np.where(f.P > 0, np.abs(S - np.where(np.isinf(L), 0.0, L)[:, None]), 0.0)
    G = np.expm1(f.H + f.E.max(axis=1, initial=0.0)[:, None] + B.lse[:, None] + u * far + (2 * ULPS + 2) * u)
    dP = times(dO @ head.v.T, f.Z)
    F = gamma(head.dv + 1, u) * times(aO @ aV.T, f.Z)
    D = (dO * f.O).sum(axis=1) - dLSE
    b_D = (aO * B.o).sum(axis=1) + gamma(head.dv + 1, u) * (aO * (np.abs(f.O) + B.o)).sum(axis=1)  # rowsum(dO o O)
    b_D = b_D + (f.P * (G * np.abs(dP) + (1 + G) * F)).sum(axis=1)  # rowsum(P o dP), as Algorithm 3 has it
    b_D = b_D + gamma(head.nk + 1, u) * (f.P * (1 + G) * np.abs(dP)).sum(axis=1) + u * (np.abs(dLSE) + np.abs(D))
    rest = F + b_D[:, None]
    dS = f.P * (dP - D[:, None])
    X = G * np.abs(dS) + f.P * (1 + G) * rest + gamma(3, u) * f.P * (1 + G) * (np.abs(dP - D[:, None]) + rest)
    X = select(X, f.visible)
    second_order = math.exp(8.0 * float(G.max(initial=0.0) + compound(head.nk + head.nq, tiles, u)))
    bias = head.bias_gradient(second_order * (X + gamma(head.nq * head.nk, u) * (np.abs(dS) + X)))
    slope = head.score_slope(slice(0, head.nq), slice(0, head.nk))
    if slope is not None and head.softcap is not None:
        b_slope = 2.0 * (f.E_raw / head.softcap + (2 * ULPS + 1) * u) + 4.0 * u
        X = X * slope + (np.abs(dS) + X) * b_slope
        dS = dS * slope
    M = np.abs(dS) + X
    tiny = underflow(keys=head.nq + head.nk, tiles=tiles, dtype=head.dtype)
    grow = second_order * head.scale
    dq = grow * (X @ aK + gamma(head.nk + tiles + 3, u) * (M @ aK)) + tiny * (1 + aK.max(initial=0.0))
    dk = grow * (X.T @ aQ + gamma(head.nq + tiles + 3, u) * (M.T @ aQ)) + tiny * (1 + aQ.max(initial=0.0))
    PZ = times(f.P, f.Z)
    dv = second_order * ((PZ * G).T @ aO + gamma(head.nq + tiles + 3, u) * ((PZ * (1 + G)).T @ aO))
    return Gradients(dq, dk, dv + tiny * (1 + aO.max(initial=0.0)), bias)


class _Dense(NamedTuple):
    """What both bounds need of the dense problem."""

    u: float
    visible: Array | None
    S: Array
    m: Array
    P: Array
    L: Array
    O: Array
    Z: Array | None
    E: Array  # error of each score
    E_raw: Array  # the same before soft cap and bias
    H: Array  # error of each exponent: scores, and rounding of S - m

    @classmethod
    def of(cls, head: Head) -> _Dense:
        rows, cols = slice(0, head.nq), slice(0, head.nk)
        visible, u = head.visible(rows, cols), unit(head.dtype)
        S = head.scores(rows, cols, visible)
        out = attend(head)
        m = np.where(np.isneginf(out.lse), 0.0, S.max(axis=1, initial=-np.inf))
        with np.errstate(invalid="ignore"):
            P = select(np.exp(S - np.where(np.isneginf(out.lse), np.inf, out.lse)[:, None]), visible)
            E = select(scores(head, rows, cols, S), visible)
            gap = np.where(P > 0, m[:, None] - S, 0.0)
        raw = np.sqrt((head.q**2).sum(axis=1))[:, None] * np.sqrt((head.k**2).sum(axis=1))
        H = E + u * (gap + E + E.max(axis=1, initial=0.0)[:, None])
        E_raw = gamma(head.d + 1, u) * head.scale * raw
        return cls(u, visible, S, m, P, out.lse, out.o, head.z(rows, cols), E, E_raw, H)


def rounded_output(o: Array, bound: Array, name: str | None) -> Array:
    """A bound on O, widened by one rounding of O to the named format."""
    if name is None:
        return bound
    fmt = format_named(name)
    return np.asarray(bound * (1.0 + fmt.unit) + fmt.unit * np.abs(o) + fmt.eta)
