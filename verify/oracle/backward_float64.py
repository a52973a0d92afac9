"""Tier T0 of the backward pass: every gradient in float64, with an a-priori bound on its own error.

With e = 2**-53, h the errors of the log-weights (`float64.softmax`) and hats omitted:

    r_k   = (expm1(h_k) + t + (N + 4) e) / (1 - t - (N + 4) e),  t = sum p expm1(h)     relative error of p_k
            expm1(h_k + 4e|m| + 2e|m - lse| + 2e|x_k|)     for a given LSE, x = s - lse: no sum, no division
    F     = (dv + 2) e sum|dO||V|                                                       error of dP
    E_D   = sum_k p_k (r_k |dP_k| + F_k) + (N + 2) e sum_k p_k |dP_k|                   error of D = sum_k p_k dP_k
            (dv + 2) e sum|dO||O|                          for a given O
    X     = r |dS| + p (1 + r)(F + E_D + e|D|) + 3e |dS|                                error of dS

    dq_err = scale (X |K| + (N + 4) e |dS| |K|), and likewise dk_err over the rows
    dv_err = (r p)^T |dO| + (Nq + 4) e p^T |dO|

plus one 2**-1074 per operation that may underflow. Computed values stand in for exact ones on the right: SECOND_ORDER
covers that as long as r < R_MAX, and beyond it no accuracy is claimed (the error is infinite).

Not accurate enough to judge float64 kernels: there the bound is of the size of the kernel's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verify.oracle.backward_reference import Given, Gradients, Problem
from verify.oracle.exact import TINY, UNIT
from verify.oracle.float64 import row_chunks, softmax

R_MAX = 2.0**-10
SECOND_ORDER = 1 + 2.0**-7  # products of up to six factors, each within (1 + R_MAX)


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
) -> Gradients:
    """Gradients of sum(do o O) + sum(dlse o LSE) by q, k and v.

    Args:
        q (Nq, d), k (Nk, d), v (Nk, dv), do (Nq, dv), dlse (Nq,) or None: any float dtype, taken as exact values.
        scale, visible: as in `float64.attention`.
        given: (o (Nq, dv), lse (Nq,)) that a kernel read; None for those of exact attention.
    Returns:
        Gradients of all rows and keys. An empty row has dq = 0 and adds nothing, whatever stands in its do and dlse. A
        visible logit of -inf is an absent pair. Every other NaN or infinity that an element depends on makes it NaN:
        in q, a visible k or a logit, all of the row's dq and of the dk, dv of the keys that it sees; in a visible v, in
        do, dlse or the given o, dq of the row and dk of its keys; in do[i, c] also dv[j, c] of each key j it sees.
    """
    problem = Problem.of(q, k, v, do, scale=scale, visible=visible, dlse=dlse, given=given)
    poison = Poison.of(problem)
    x = poison.clean(problem)
    (nq, nk), d, dv = x.visible.shape, x.q.shape[1], x.v.shape[1]
    abs_k = np.abs(x.k)
    dq, dq_err = np.zeros((nq, d)), np.zeros((nq, d))
    dk, dk_err, dk_size = (np.zeros((nk, d)) for _ in range(3))
    dv_sum, dv_err, dv_size = (np.zeros((nk, dv)) for _ in range(3))
    for rows in row_chunks(nq, nk):
        p, r, ds, ds_err = _ds(x, rows)
        abs_q, abs_do = np.abs(x.q[rows]), np.abs(x.do[rows])
        dq[rows] = scale * (ds @ x.k)
        dq_err[rows] = scale * (ds_err @ abs_k + (nk + 4) * UNIT * (np.abs(ds) @ abs_k)) + 4 * nk * TINY * (1 + scale)
        dk += ds.T @ x.q[rows]
        dk_err += ds_err.T @ abs_q
        dk_size += np.abs(ds).T @ abs_q
        dv_sum += p.T @ x.do[rows]
        dv_err += (r * p + 4 * TINY * x.visible[rows]).T @ abs_do
        dv_size += p.T @ abs_do
    n = (nq + 4) * UNIT
    dk_err = scale * (dk_err + n * dk_size) + 4 * nq * TINY * (1 + scale)
    dv_err = dv_err + n * dv_size + 4 * nq * TINY
    rows_seen, keys_seen = np.asarray(x.visible.any(axis=1)), np.asarray(x.visible.any(axis=0))
    dq, dq_err = _finished(dq, dq_err, rows_seen, poison.dq)
    dk, dk_err = _finished(scale * dk, dk_err, keys_seen, poison.dk)
    dv_sum, dv_err = _finished(dv_sum, dv_err, keys_seen, poison.dv)
    return Gradients(dq, dk, dv_sum, dq_err, dk_err, dv_err, rows=np.arange(nq), keys=np.arange(nk))


def _finished(
    value: np.ndarray, error: np.ndarray, seen: np.ndarray, poisoned: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    value = np.where(poisoned, np.nan, value)
    return value, np.where(seen[:, None] & ~poisoned, error * SECOND_ORDER, 0.0)


def _ds(x: Problem, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(p, r, dS, error of dS) of a block of rows; r is the relative error of p."""
    s = softmax(x.q[rows], x.k, x.scale, x.visible[rows])
    do, seen, nk = x.do[rows], x.visible[rows], len(x.k)
    dp, size = do @ x.v.T, np.abs(do) @ np.abs(x.v).T
    dp_err = (x.v.shape[1] + 2) * UNIT * size + x.v.shape[1] * TINY
    if x.given is None:
        p, rel = s.p, np.expm1(s.log_error)
        spent = (p * rel).sum(axis=1, keepdims=True) + (nk + 4) * UNIT
        r = (rel + spent) / np.maximum(1 - spent, 1e-300)
        weighted = p * np.abs(dp)
        D = (p * dp).sum(axis=1)
        D_err = (r * weighted + p * dp_err).sum(axis=1) + (nk + 2) * UNIT * weighted.sum(axis=1)
        D_err += nk * TINY * (4 + 4 * np.abs(dp).max(axis=1, initial=0.0))
    else:
        o, lse = x.given[0][rows], x.given[1][rows]
        shift = s.m - lse
        exponent = np.where(seen, shift[:, None] - s.gap, 0.0)
        with np.errstate(over="ignore"):
            p = np.where(seen, np.exp(exponent), 0.0)
        fixed = 4 * UNIT * np.abs(s.m) + 2 * UNIT * np.abs(shift)
        r = np.expm1(np.minimum(s.log_error + fixed[:, None] + 2 * UNIT * np.abs(exponent), 1.0))
        D = (do * o).sum(axis=1)
        D_err = (x.v.shape[1] + 2) * UNIT * (np.abs(do) * np.abs(o)).sum(axis=1) + x.v.shape[1] * TINY
    D = D - x.dlse[rows]
    D_err = D_err + UNIT * np.abs(D)
    g = np.where(seen, dp - D[:, None], 0.0)
    ds = p * g
    r = np.where(seen, np.where(r < R_MAX, r, np.inf), 0.0)
    with np.errstate(invalid="ignore"):
        error = r * np.abs(ds) + p * (1 + r) * (dp_err + D_err[:, None]) + 3 * UNIT * np.abs(ds)
    error = np.where(np.isnan(error), np.inf, error) + 4 * TINY * (1 + np.abs(g))
    return p, r, ds, np.where(seen, error, 0.0)


@dataclass(frozen=True)
class Poison:
    """Where the gradients are NaN (booleans that broadcast to their shapes), and which pairs are left.

    A pair with a logit of -inf is none, and a row whose weights are NaN is left out: all that it could add to is NaN.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    visible: np.ndarray

    @classmethod
    def of(cls, x: Problem) -> Poison:
        seen, no_score = _scores(x)
        live = np.asarray(seen.any(axis=1))
        bad_do, bad_v = ~np.isfinite(x.do), ~np.isfinite(x.v).all(axis=1)
        no_ds = bad_do.any(axis=1) | ~np.isfinite(x.dlse) | (seen & bad_v).any(axis=1)
        if x.given is not None:
            no_score = no_score | (live & ~np.isfinite(x.given[1]))
            no_ds = no_ds | ~np.isfinite(x.given[0]).all(axis=1)
        no_ds = live & (no_ds | no_score)
        dk = np.asarray(seen[no_ds].any(axis=0))
        dv = np.asarray(seen[no_score].any(axis=0))[:, None] | (
            seen.T.astype(np.float64) @ bad_do.astype(np.float64) > 0
        )
        return cls(no_ds[:, None], dk[:, None], dv, seen & ~no_score[:, None])

    def clean(self, x: Problem) -> Problem:
        """A finite problem with the same gradients wherever they are numbers."""
        given = None
        if x.given is not None:
            given = _finite(x.given[0]), _finite(x.given[1])
        q, k = (np.where(np.isfinite(a).all(axis=1, keepdims=True), a, 0.0) for a in (x.q, x.k))
        return Problem(q, k, _finite(x.v), _finite(x.do), _finite(x.dlse), self.visible, x.scale, given)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0.0)


def _scores(x: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(visible pairs without logits of -inf, rows with a logit of NaN or +inf)."""
    bad = ~np.isfinite(x.q).all(axis=1)[:, None] | ~np.isfinite(x.k).all(axis=1)[None, :]
    touched = x.visible & bad
    if not touched.any():
        return x.visible, np.zeros(len(x.q), bool)
    with np.errstate(invalid="ignore", over="ignore"):
        s = np.where(touched, x.q @ x.k.T, 0.0)
    absent = touched & np.isneginf(s)
    return x.visible & ~absent, (touched & ~absent).any(axis=1)
