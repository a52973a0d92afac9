"""FlashAttention-1: K/V in the outer loop, O kept normalised, (O, l, m) in slow memory between visits.

Source: Dao et al., "FlashAttention" (arXiv:2205.14135). Forward: Algorithm 1, with what Algorithm 2 adds (scale, mask,
dropout). Backward: Algorithm 4. A comment `# L9` names the line; names are the paper's (Qi, Kj, Sij, mi, li, Oi).

Holds for every row after column tile j (checked by `invariants.py`), S over the keys of tiles 0..j:
  N1  m = rowmax S      N2  l = rowsum exp(S - m)      N3  O = softmax(S) V, so O needs no final division.
A row stays at (m, l, O) = (-inf, 0, 0) until its first visible key.

Tiles that the mask empties are skipped, which is what Algorithm 5 adds (`block_sparse.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spec.dropout import Dropout
from spec.errors import ShapeError
from spec.head import Array, Gradients, Head, divide_rows, finite_or_zero, log_sum, sum_over_visible, times
from spec.masks import Mask, TileClass
from spec.observer import NORMALISED, Observer, TileState
from spec.rounding import Rounding
from spec.standard import output_gradients, select
from spec.tiling import check_tile, tiles


class Flash1Output(NamedTuple):
    """o (Nq, dv), lse (Nq,), and the statistics m, l (Nq,) that Algorithm 2 returns for the backward pass."""

    o: Array
    lse: Array
    m: Array
    l: Array


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
    rounding: Rounding | None = None,
    dtype: npt.DTypeLike = np.float64,
    on_tile: Observer | None = None,
) -> Flash1Output:
    """Algorithms 1 and 2 with tiles of br rows and bc keys. Other arguments and errors: `spec.head.Head.of`."""
    check_tile(br, bc)
    head = Head.of(
        q, k, v, scale=scale, mask=mask, bias=bias, softcap=softcap, dropout=dropout, rounding=rounding, dtype=dtype
    )
    O = np.zeros((head.nq, head.dv), head.dtype)  # L2
    l = np.zeros(head.nq, head.dtype)
    m = np.full(head.nq, -np.inf, head.dtype)
    for j, cols in tiles(head.nk, bc):  # L5
        Vj = head.v[cols]  # L6
        for i, rows in tiles(head.nq, br):  # L7
            tile = head.tile_class(rows, cols)
            if tile == TileClass.EMPTY:
                continue
            visible = head.visible(rows, cols, tile)
            Oi, li, mi = O[rows], l[rows], m[rows]  # L8
            Sij = head.scores(rows, cols, visible)  # L9
            mij = Sij.max(axis=1)  # L10
            Pij = np.exp(Sij - finite_or_zero(mij)[:, None])
            lij = Pij.sum(axis=1)
            mi_new = np.maximum(mi, mij)  # L11
            alpha = np.exp(mi - finite_or_zero(mi_new))
            beta = np.exp(mij - finite_or_zero(mi_new))
            li_new = alpha * li + beta * lij
            PVij = sum_over_visible(head.rounding.of_p(times(Pij, head.z(rows, cols))), Vj, visible)
            Oi_new = divide_rows((li * alpha)[:, None] * Oi + beta[:, None] * PVij, li_new)  # L12
            O[rows], l[rows], m[rows] = Oi_new, li_new, mi_new  # L12, L13
            if on_tile is not None:
                on_tile(TileState(NORMALISED, i, j, rows, cols, Sij, mi_new, li_new, Oi_new))
    return Flash1Output(head.rounding.of_o(O), log_sum(m, l), m, l)  # L16


@np.errstate(invalid="ignore", over="ignore")
def backward(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    o: npt.ArrayLike,
    m: npt.ArrayLike,
    l: npt.ArrayLike,
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
    """Algorithm 4: gradients from o, m, l of the forward pass and do (Nq, dv); dlse as in `standard.backward`.

    The dropout factors are computed again from their counter, as the listing does from its RNG state.
    """
    check_tile(br, bc)
    head = Head.of(
        q, k, v, scale=scale, mask=mask, bias=bias, softcap=softcap, dropout=dropout, rounding=rounding, dtype=dtype
    )
    dO, dLSE = output_gradients(head, do, dlse)
    O, m, l = (np.asarray(x, dtype=head.dtype) for x in (o, m, l))
    if O.shape != (head.nq, head.dv) or m.shape != (head.nq,) or l.shape != (head.nq,):
        raise ShapeError(f"o{O.shape}, m{m.shape}, l{l.shape}: want ({head.nq}, {head.dv}), ({head.nq},), ({head.nq},)")
    dQ, dK, dV = np.zeros_like(head.q), np.zeros_like(head.k), np.zeros_like(head.v)  # L5
    dB = None if head.bias is None else np.zeros((head.nq, head.nk), head.dtype)
    for _, cols in tiles(head.nk, bc):  # L6
        Kj, Vj = head.k[cols], head.v[cols]  # L7
        for _, rows in tiles(head.nq, br):  # L9
            tile = head.tile_class(rows, cols)
            if tile == TileClass.EMPTY:
                continue
            visible = head.visible(rows, cols, tile)
            seen_by = None if visible is None else visible.T
            Qi, Oi, dOi, li, mi = head.q[rows], O[rows], dO[rows], l[rows], m[rows]  # L10
            Sij = head.scores(rows, cols, visible)  # L11, L12
            Pij = select(divide_rows(np.exp(Sij - finite_or_zero(mi)[:, None]), li), visible)  # L13
            Zij = head.z(rows, cols)  # L14
            dV[cols] += sum_over_visible(times(Pij, Zij).T, dOi, seen_by)  # L15, L16
            dPij = times(dOi @ Vj.T, Zij)  # L17, L18
            Di = (dOi * Oi).sum(axis=1) - dLSE[rows]  # L19
            dSij = select(Pij * (dPij - Di[:, None]), visible)  # L20
            if dB is not None:
                dB[rows, cols] = dSij
            dSij = times(dSij, head.score_slope(rows, cols))
            dQ[rows] += head.scale * sum_over_visible(dSij, Kj, visible)  # L21
            dK[cols] += head.scale * sum_over_visible(dSij.T, Qi, seen_by)  # L22
    return Gradients(dQ, dK, dV, None if dB is None else head.bias_gradient(dB))
