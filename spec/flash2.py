"""FlashAttention-2: Q in the outer loop, O kept un-normalised on chip, one division per row at the end.

Source: Dao, "FlashAttention-2" (arXiv:2307.08691), Algorithm 1 (forward) and Algorithm 2 (backward). A comment `# L9`
names the line; names are the paper's. The published forward listing prints diag(alpha)^-1 where diag(alpha) is needed
(L10), and lacks scale, mask and dropout.

Holds for row tile i after column tile j (checked by `invariants.py`), S over the keys of tiles 0..j:
  D1  m = rowmax S      D2  l = rowsum exp(S - m)      D3  O = exp(S - m) V: O / l is attention over the keys seen.
At exit O / l is the output and m + ln l the LSE. A row stays at (-inf, 0, 0) until its first visible key.

Lagged maximum (FlashAttention-4, arXiv:2603.05451, conditional rescaling): `lag` = t keeps the reference r in place of
m while the maximum exceeds it by at most t, in natural units (the paper's 8 is in log2 units: t = 8 ln 2). D2 and D3
hold with r, 0 <= rowmax S - r <= t, and the output does not depend on t in exact arithmetic.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spec.dropout import Dropout
from spec.errors import ScaleError, ShapeError
from spec.head import Array, Gradients, Head, Output, divide_rows, finite_or_zero, log_sum, sum_over_visible, times
from spec.masks import Mask, TileClass
from spec.observer import DEFERRED, Observer, TileState
from spec.rounding import Rounding
from spec.standard import output_gradients, select
from spec.tiling import check_tile, tiles


@np.errstate(invalid="ignore", over="ignore")  # inf - inf is NaN by design: see head.py
def forward(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    br: int,
    bc: int,
    scale: float | None = None,
    mask: Mask | Array | None = None,
    bias: npt.ArrayLike | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    lag: float | None = None,
    rounding: Rounding | None = None,
    dtype: npt.DTypeLike = np.float64,
    on_tile: Observer | None = None,
    keys: tuple[int, int] | None = None,
) -> Output:
    """Algorithm 1 with tiles of br rows and bc keys.

    Args:
        lag: threshold t >= 0 of the lagged maximum; None = rescale whenever the maximum rises.
        keys: attend to keys start .. stop-1 only, as one part of a split (`split.py`); masks, bias and dropout keep
            their absolute positions. Other arguments and errors: `spec.head.Head.of`.
    """
    check_tile(br, bc)
    head = Head.of(
        q, k, v, scale=scale, mask=mask, bias=bias, softcap=softcap, dropout=dropout, rounding=rounding, dtype=dtype
    )
    start, stop = check_keys(keys, head.nk)
    if lag is not None and not (np.isfinite(lag) and lag >= 0.0):
        raise ScaleError(f"lag {lag}: want a finite number >= 0, in natural units")
    O = np.empty((head.nq, head.dv), head.dtype)
    L = np.empty(head.nq, head.dtype)
    for i, rows in tiles(head.nq, br):  # L3
        br_i = rows.stop - rows.start
        Oi = np.zeros((br_i, head.dv), head.dtype)  # L5
        li = np.zeros(br_i, head.dtype)
        mi = np.full(br_i, -np.inf, head.dtype)
        for j, cols in tiles(stop, bc, start):  # L6
            tile = head.tile_class(rows, cols)
            if tile == TileClass.EMPTY:
                continue
            visible = head.visible(rows, cols, tile)
            Vj = head.v[cols]  # L7
            Sij = head.scores(rows, cols, visible)  # L8
            mi_new = np.maximum(mi, Sij.max(axis=1))  # L9
            if lag is not None:
                mi_new = np.where(mi_new - mi <= lag, mi, mi_new)  # false for NaN, so that NaN is taken over
            Pij = np.exp(Sij - finite_or_zero(mi_new)[:, None])  # L9
            alpha = np.exp(mi - finite_or_zero(mi_new))
            li = alpha * li + Pij.sum(axis=1)  # L9
            PVij = sum_over_visible(head.rounding.of_p(times(Pij, head.z(rows, cols))), Vj, visible)
            Oi = alpha[:, None] * Oi + PVij  # L10
            mi = mi_new
            if on_tile is not None:
                on_tile(TileState(DEFERRED, i, j, rows, cols, Sij, mi, li, Oi, lag))
        O[rows] = divide_rows(Oi, li)  # L12, L14
        L[rows] = log_sum(mi, li)  # L13, L15
    return Output(head.rounding.of_o(O), L)  # L17


@np.errstate(invalid="ignore", over="ignore")
def backward(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    o: npt.ArrayLike,
    lse: npt.ArrayLike,
    do: npt.ArrayLike,
    *,
    br: int,
    bc: int,
    scale: float | None = None,
    mask: Mask | Array | None = None,
    bias: npt.ArrayLike | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    rounding: Rounding | None = None,
    dlse: npt.ArrayLike | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> Gradients:
    """Algorithm 2: gradients from o, lse of the forward pass and do (Nq, dv); dlse as in `standard.backward`."""
    check_tile(br, bc)
    head = Head.of(
        q, k, v, scale=scale, mask=mask, bias=bias, softcap=softcap, dropout=dropout, rounding=rounding, dtype=dtype
    )
    dO, dLSE = output_gradients(head, do, dlse)
    O, L = np.asarray(o, dtype=head.dtype), np.asarray(lse, dtype=head.dtype)
    if O.shape != (head.nq, head.dv) or L.shape != (head.nq,):
        raise ShapeError(f"o{O.shape}, lse{L.shape}: want ({head.nq}, {head.dv}) and ({head.nq},)")
    L = np.where(np.isneginf(L), np.inf, L)  # an empty row: P = exp(-inf) = 0
    dQ, dK, dV = np.zeros_like(head.q), np.zeros_like(head.k), np.zeros_like(head.v)  # L3
    dB = None if head.bias is None else np.zeros((head.nq, head.nk), head.dtype)
    D = (dO * O).sum(axis=1) - dLSE  # L4
    for _, cols in tiles(head.nk, bc):  # L5
        Kj, Vj = head.k[cols], head.v[cols]  # L6
        for _, rows in tiles(head.nq, br):  # L8
            tile = head.tile_class(rows, cols)
            if tile == TileClass.EMPTY:
                continue
            visible = head.visible(rows, cols, tile)
            seen_by = None if visible is None else visible.T
            Qi, dOi, Li, Di = head.q[rows], dO[rows], L[rows], D[rows]  # L9
            Sij = head.scores(rows, cols, visible)  # L10
            Pij = select(np.exp(Sij - Li[:, None]), visible)  # L11
            Zij = head.z(rows, cols)
            dV[cols] += sum_over_visible(times(Pij, Zij).T, dOi, seen_by)  # L12
            dPij = times(dOi @ Vj.T, Zij)  # L13
            dSij = select(Pij * (dPij - Di[:, None]), visible)  # L14
            if dB is not None:
                dB[rows, cols] = dSij
            dSij = times(dSij, head.score_slope(rows, cols))
            dQ[rows] += head.scale * sum_over_visible(dSij, Kj, visible)  # L15
            dK[cols] += head.scale * sum_over_visible(dSij.T, Qi, seen_by)  # L16
    return Gradients(dQ, dK, dV, None if dB is None else head.bias_gradient(dB))


def check_keys(keys: tuple[int, int] | None, nk: int) -> tuple[int, int]:
    """The key range as (start, stop); the whole of it by default."""
    start, stop = (0, nk) if keys is None else keys
    if not 0 <= start <= stop <= nk:
        raise ShapeError(f"keys {start}..{stop}: want 0 <= start <= stop <= Nk = {nk}")
    return start, stop
