"""Standard attention: Algorithms 0 and 3 of FlashAttention, with the N x N matrices in slow memory.

Source: Dao et al., "FlashAttention" (arXiv:2205.14135), Algorithm 0 (forward) and Algorithm 3 (backward). A comment
`# L2` names the line of the listing. The listings leave out the scale, which is written tau in this project's notes.

This is the reference that the tiled algorithms are compared with: no tile, no recurrence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spec.dropout import Dropout
from spec.errors import ShapeError
from spec.head import Array, Gradients, Head, Output, divide_rows, finite_or_zero, log_sum, sum_over_visible, times
from spec.masks import Mask
from spec.rounding import Rounding


def forward(
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
) -> Output:
    """Algorithm 0. Arguments and errors: `spec.head.Head.of`. Returns Output(o, lse)."""
    head = Head.of(
        q, k, v, scale=scale, mask=mask, bias=bias, softcap=softcap, dropout=dropout, rounding=rounding, dtype=dtype
    )
    return attend(head)


def probabilities(q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, **arguments: Any) -> Array:
    """The attention weights P (Nq, Nk), before dropout: for debugging and teaching. Arguments as in `forward`."""
    return _softmax(Head.of(q, k, v, **arguments))[0]


@np.errstate(invalid="ignore", over="ignore")  # inf - inf is NaN by design: see head.py
def attend(head: Head) -> Output:
    """Algorithm 0 on a checked problem."""
    rows, cols = slice(0, head.nq), slice(0, head.nk)
    visible = head.visible(rows, cols)
    P, m, l = _softmax(head)  # L1, L2
    Pd = head.rounding.of_p(times(P, head.z(rows, cols)))
    O = sum_over_visible(Pd, head.v, visible)  # L3
    return Output(head.rounding.of_o(O), log_sum(m, l))


@np.errstate(invalid="ignore", over="ignore")
def _softmax(head: Head) -> tuple[Array, Array, Array]:
    """P (Nq, Nk) with m and l (Nq,); an empty row of P is 0."""
    rows, cols = slice(0, head.nq), slice(0, head.nk)
    S = head.scores(rows, cols, head.visible(rows, cols))  # L1
    m = S.max(axis=1, initial=-np.inf)  # L2
    P = np.exp(S - finite_or_zero(m)[:, None])
    l = P.sum(axis=1)
    return divide_rows(P, l), m, l


@np.errstate(invalid="ignore", over="ignore")
def backward(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    do: npt.ArrayLike,
    *,
    scale: float | None = None,
    mask: Mask | Array | None = None,
    bias: npt.ArrayLike | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    rounding: Rounding | None = None,
    dlse: npt.ArrayLike | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> Gradients:
    """Algorithm 3: gradients of sum(dO o O) + sum(dLSE o LSE).

    Args:
        do: (Nq, dv), the gradient of the loss by O. dlse: (Nq,), by LSE; it adds P o dLSE to dS. Others as in forward.
    Returns: Gradients(dq, dk, dv, dbias); an empty row and an invisible key contribute and receive exactly 0.
    """
    head = Head.of(
        q, k, v, scale=scale, mask=mask, bias=bias, softcap=softcap, dropout=dropout, rounding=rounding, dtype=dtype
    )
    dO, dLSE = output_gradients(head, do, dlse)
    rows, cols = slice(0, head.nq), slice(0, head.nk)
    visible, slope = head.visible(rows, cols), head.score_slope(rows, cols)
    P, _, _ = _softmax(head)
    P = select(P, visible)
    Z = head.z(rows, cols)
    seen_by = None if visible is None else visible.T  # (Nk, Nq)
    dV = sum_over_visible(times(P, Z).T, dO, seen_by)  # L1
    dP = select(times(dO @ head.v.T, Z), visible)  # L2
    D = (P * dP).sum(axis=1)  # L3
    dS = select(P * (dP - (D - dLSE)[:, None]), visible)
    dbias = head.bias_gradient(dS)
    dS = times(dS, slope)
    dQ = head.scale * sum_over_visible(dS, head.k, visible)  # L4, with the scale that the listing lacks
    dK = head.scale * sum_over_visible(dS.T, head.q, seen_by)  # L5
    return Gradients(dQ, dK, dV, dbias)


def output_gradients(head: Head, do: npt.ArrayLike, dlse: npt.ArrayLike | None) -> tuple[Array, Array]:
    """dO (Nq, dv), rounded like an input, and dLSE (Nq,), zeros if absent."""
    dO = head.rounding.of_inputs(np.asarray(do, dtype=head.dtype))
    dLSE = np.zeros(head.nq, head.dtype) if dlse is None else np.asarray(dlse, dtype=head.dtype)
    if dO.shape != (head.nq, head.dv) or dLSE.shape != (head.nq,):
        raise ShapeError(f"do{dO.shape}, dlse{dLSE.shape}: want ({head.nq}, {head.dv}) and ({head.nq},)")
    return dO, dLSE


def select(x: Array, visible: Array | None) -> Array:
    """x where visible, 0 elsewhere: a masked pair is absent, whatever stands there."""
    return x if visible is None else np.where(visible, x, 0.0).astype(x.dtype, copy=False)
