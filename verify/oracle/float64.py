"""Tier T0: attention in float64 on every element, with an a-priori bound on its own error.

Source: the bound is the perturbation identity of a softmax average (verify/bounds/README.md, step 2) with
e = 2**-53 in place of the kernel's units. Scores come exact or nearly so from `exact_scores`, and the exact maximum
is subtracted before the first rounding. NumPy's exp is taken as within 4 ulp (its documented limit for the vector
library; tests compare it with 50 digits).

    h_k     = 5e |x_k| + scale (err_k + 2e (|lo_k| + max|lo|)) + 8e           error of the log-weight x_k = s_k - m
    o_err   = sum_k p_k expm1(h_k) (|v_k| + |O|) + (2N + 10) e sum_k p_k |v_k| + 4e |O| + N 2**-1074 (1 + max|v|)
    lse_err = sum_k p_k expm1(h_k) + (N + 8) e + 4e (|m| + |ln L| + |LSE|)

Not accurate enough to judge float64 kernels: there o_err is of the size of the kernel's own error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from verify.oracle.exact import TINY, UNIT, Scores, exact_scores
from verify.oracle.reference import Reference, checked_inputs

CHUNK = 1 << 19  # scores handled at once: a few temporaries of this size stay in the last-level cache


@dataclass(frozen=True)
class Softmax:
    """Weights of one block of rows; masked entries have p = 0, gap = 0, log_error = 0."""

    p: np.ndarray  # (R, Nk) weights, rows sum to 1 (0 for an empty row)
    gap: np.ndarray  # (R, Nk) m - s >= 0, in natural units
    log_error: np.ndarray  # (R, Nk) bound on the error of -gap
    magnitude: np.ndarray  # (R, Nk) scale * sum|q||k|
    m: np.ndarray  # (R,) largest visible scaled score, 0 for an empty row
    total: np.ndarray  # (R,) L = sum exp(s - m) >= 1, 1 for an empty row
    live: np.ndarray  # (R,) some key is visible
    visible: np.ndarray  # (R, Nk)


def softmax(q: np.ndarray, k: np.ndarray, scale: float, visible: np.ndarray) -> Softmax:
    """Weights for finite inputs. Shapes and types as `checked_inputs` returns them."""
    scores: Scores = exact_scores(q, k)
    live = np.asarray(visible.any(axis=1))
    hi = np.where(visible, scores.hi, -np.inf)
    top = np.where(live, hi.max(axis=1, initial=-np.inf), 0.0)
    with np.errstate(invalid="ignore"):
        x = (hi - top[:, None]) + scores.lo
        # The largest high part need not belong to the largest score: what is left of the maximum goes too.
        rest = np.where(live, x.max(axis=1, initial=-np.inf), 0.0)
        x = (x - rest[:, None]) * scale
        w = np.exp(x)
    total = np.where(live, w.sum(axis=1), 1.0)
    x = np.where(visible, x, 0.0)
    low = np.abs(scores.lo)
    low = low + np.where(visible, low, 0.0).max(axis=1, initial=0.0, keepdims=True)
    log_error = 5 * UNIT * np.abs(x) + scale * (scores.err + 2 * UNIT * low) + 8 * UNIT
    return Softmax(
        p=w / total[:, None],
        gap=-x,
        log_error=np.where(visible, log_error, 0.0),
        magnitude=scores.magnitude * scale,
        m=top * scale + rest * scale,
        total=total,
        live=live,
        visible=visible,
    )


def row_chunks(nq: int, nk: int) -> Iterator[slice]:
    """Slices of query rows such that one chunk has about CHUNK scores."""
    step = max(1, CHUNK // max(nk, 1))
    return (slice(i, min(i + step, nq)) for i in range(0, nq, step))


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, visible: np.ndarray | None = None
) -> Reference:
    """softmax(scale q k^T) v over the visible keys, and its LSE.

    Args:
        q (Nq, d), k (Nk, d), v (Nk, dv): any float dtype up to float64, taken as exact values.
        scale: finite and > 0, taken as an exact float64.
        visible: (Nq, Nk) bool, True where row i may see key j; None for all.
    Returns:
        Reference for all rows. A row without keys has o = 0, lse = -inf. Non-finite inputs follow the table of
        special values: NaN or a logit of +inf poisons the row, a logit of -inf has weight 0, a NaN in v poisons its
        column of the rows that see it, an infinity in v gives infinity (NaN where both signs meet).
    """
    q, k, v, visible = checked_inputs(q, k, v, scale, visible)
    visible, poisoned = _resolve_scores(q, k, visible)
    q, k = _finite_rows(q), _finite_rows(k)
    v_finite = np.where(np.isfinite(v), v, 0.0)
    (nq, nk), dv = visible.shape, v.shape[1]
    o, o_err = np.zeros((nq, dv)), np.zeros((nq, dv))
    lse, lse_err = np.full(nq, -np.inf), np.zeros(nq)
    v_abs = np.abs(v_finite)
    v_max = v_abs.max(axis=0, initial=0.0)
    for rows in row_chunks(nq, nk):
        s = softmax(q[rows], k, scale, visible[rows])
        chunk_o = s.p @ v_finite
        excess = s.p * np.expm1(s.log_error)
        excess_sum = excess.sum(axis=1)
        err = excess @ v_abs + excess_sum[:, None] * np.abs(chunk_o)
        err += (2 * nk + 10) * UNIT * (s.p @ v_abs) + 4 * UNIT * np.abs(chunk_o) + nk * TINY * (1 + v_max)
        log_total = np.log(s.total)
        chunk_lse = s.m + log_total
        chunk_lse_err = excess_sum + (nk + 8) * UNIT + 4 * UNIT * (np.abs(s.m) + np.abs(log_total) + np.abs(chunk_lse))
        o[rows] = np.where(s.live[:, None], chunk_o, 0.0)
        o_err[rows] = np.where(s.live[:, None], err, 0.0)
        lse[rows] = np.where(s.live, chunk_lse, -np.inf)
        lse_err[rows] = np.where(s.live, chunk_lse_err, 0.0)
    _place_nonfinite_values(o, v, visible)
    o[poisoned] = np.nan
    lse[poisoned] = np.nan
    o_err = np.where(np.isfinite(o), o_err, 0.0)
    lse_err = np.where(np.isfinite(lse), lse_err, 0.0)
    return Reference(o=o, lse=lse, o_err=o_err, lse_err=lse_err, rows=np.arange(nq))


def _finite_rows(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x).all(axis=1, keepdims=True), x, 0.0)


def _resolve_scores(q: np.ndarray, k: np.ndarray, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Handle scores of rows with a NaN or an infinity: (visible without keys of logit -inf, poisoned rows)."""
    bad_q, bad_k = ~np.isfinite(q).all(axis=1), ~np.isfinite(k).all(axis=1)
    if not (bad_q.any() or bad_k.any()):
        return visible, np.zeros(len(q), bool)
    touched = visible & (bad_q[:, None] | bad_k[None, :])
    with np.errstate(invalid="ignore", over="ignore"):
        s = np.where(touched, q @ k.T, 0.0)
    # A row with a non-finite element has no finite logit: 0 * inf is NaN.
    absent = touched & np.isneginf(s)
    return visible & ~absent, (touched & ~absent).any(axis=1)


def _place_nonfinite_values(o: np.ndarray, v: np.ndarray, visible: np.ndarray) -> None:
    """Write NaN and infinities of v into the columns of the rows that see them."""
    if np.isfinite(v).all():
        return
    seen = visible.astype(np.float64)
    nan, plus, minus = (seen @ kind.astype(np.float64) > 0 for kind in (np.isnan(v), np.isposinf(v), np.isneginf(v)))
    o[plus] = np.inf
    o[minus] = -np.inf
    o[nan | (plus & minus)] = np.nan
