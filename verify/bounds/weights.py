"""Errors of the log-weights: how far exp2's argument and result can be from the exact weight of each key.

Steps 1 and 3 of README.md. Everything is per block of query rows, arrays (R, Nk) in natural units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verify.arithmetic import ArithmeticModel
from verify.formats import FORMATS
from verify.oracle.float64 import Softmax


@dataclass(frozen=True)
class LogErrors:
    """Bounds on the log-weight errors of one block of rows; 0 at masked keys."""

    h_o: np.ndarray  # (R, Nk) up to a factor common to the row, which O does not see
    h_lse: np.ndarray  # (R, Nk) in full
    h_o_bias: np.ndarray | None  # the parts that add linearly ...
    h_lse_bias: np.ndarray | None
    h_random: np.ndarray | None  # ... and those that add in root-sum-square (None: not asked for)
    top_score_error: np.ndarray  # (R,) largest error of a scaled score
    top_error: np.ndarray  # (R,) bound on |ln p| of the key that set the reference, in its own tile
    counts: np.ndarray  # (R, T) visible keys per tile
    rescales: np.ndarray  # (R,) most times that l and O are multiplied by an alpha other than 0 and 1


def log_errors(
    s: Softmax,
    q: np.ndarray,
    k: np.ndarray,
    *,
    scale: float,
    model: ArithmeticModel,
    bc: int,
    confidence: float | None,
) -> LogErrors:
    """Evaluate step 1 (scores), step 3 (exponents) and the count of rescales for rows q of the block s."""
    u = model.unit
    d = q.shape[1]
    dot = model.score_sum(d)
    absolute = scale * (_flushed(q, k, model) + (2 * d + 2) * model.s_planes * model.operation_tiny) + s.log_error
    score_error = np.where(s.visible, float(dot.g) * s.magnitude + absolute, 0.0)
    top_score_error = score_error.max(axis=1, initial=0.0)
    after, rescales = _rescales(s, score_error, bc, model)

    m = np.abs(s.m)[:, None]
    size = np.abs(s.m[:, None] - s.gap)  # |s|
    c_unit = model.scale_roundings * u
    exp2_step = -math.log1p(-model.exp2_error)
    exp2_steps = 1 + (0 if model.rescales_exactly else after)
    # Exponents are rounded versions of computed scores: second order, and S - r is at most gap + lag on the way.
    common = 8 * u * (score_error + top_score_error[:, None]) + exp2_steps * exp2_step
    common += model.m_roundings * u * (np.maximum(size, m) + model.lag)
    travel = s.gap + 2 * model.lag
    scale_o = c_unit * s.gap
    scale_lse = c_unit * (size if model.lse_shares_c else s.gap + model.lag)

    def masked(h: np.ndarray) -> np.ndarray:
        return np.where(s.visible, h, 0.0)

    h_o_bias = h_lse_bias = h_random = None
    if confidence is not None:
        bias, random = dot.g_probable(confidence)
        # The rounding of s - m is the key's own; those of the alphas are shared by all keys before them.
        linear = float(bias) * s.magnitude + absolute + common + (model.gap_roundings - 1) * u * travel
        h_o_bias, h_lse_bias = masked(linear + scale_o), masked(linear + scale_lse)
        h_random = masked(float(random) * s.magnitude + confidence * u * travel)
    exponents = score_error + common + model.gap_roundings * u * travel
    return LogErrors(
        h_o=masked(exponents + scale_o),
        h_lse=masked(exponents + scale_lse),
        h_o_bias=h_o_bias,
        h_lse_bias=h_lse_bias,
        h_random=h_random,
        top_score_error=top_score_error,
        top_error=model.top_roundings * u * (m[:, 0] + model.lag + top_score_error) * (1 + 8 * u) + exp2_step,
        counts=_per_tile(s.visible, bc, 0).sum(axis=2),
        rescales=rescales,
    )


def _flushed(q: np.ndarray, k: np.ndarray, model: ArithmeticModel) -> np.ndarray | float:
    """sum|q||k| over the terms where an operand is subnormal and the unit takes it for 0."""
    if not model.flushes_operands:
        return 0.0
    q_lost, k_lost = subnormal_part(q, model), subnormal_part(k, model)
    if not (q_lost.any() or k_lost.any()):
        return 0.0
    return q_lost @ np.abs(k).T + np.abs(q) @ k_lost.T


def subnormal_part(x: np.ndarray, model: ArithmeticModel) -> np.ndarray:
    """|x| where the matrix unit's operand format holds x as a subnormal, 0 elsewhere."""
    return np.where(np.abs(x) < FORMATS["bf16"].smallest_normal, np.abs(x), 0.0)


def _rescales(s: Softmax, score_error: np.ndarray, bc: int, model: ArithmeticModel) -> tuple[np.ndarray, np.ndarray]:
    """(after, most): per key, and per row, how often alpha can differ from 0 and 1 once the key is in.

    The reference can move in a tile only if the tile's largest possible score exceeds the least that the reference
    can be. A reference without lag is at least every score seen, less its error. One that trails is at least the
    first live tile's maximum and at least the running maximum less the lag. Tiles count in the order of the kernel.
    """
    nk = s.p.shape[1]

    def tile_max(x: np.ndarray) -> np.ndarray:
        return _per_tile(np.where(s.visible, x, -np.inf), bc, -np.inf).max(axis=2)

    order = -1 if model.last_tile_first else 1
    highest, lowest = (tile_max(x)[:, ::order] for x in (score_error - s.gap, -score_error - s.gap))
    running = np.maximum.accumulate(lowest, axis=1)
    if model.lag_log2 > 0:
        first = np.where(np.isneginf(running[:, :-1]), lowest[:, 1:], -np.inf)
        first = np.maximum.accumulate(np.concatenate([lowest[:, :1], first], axis=1), axis=1)[:, :-1]
        least = np.maximum(first, running[:, :-1] - model.lag)
        if model.lag_per_row:
            least = np.maximum(least, running[:, :-1])
    else:
        least = running[:, :-1]
    # A first live tile finds the reference at -inf: alpha is 0, and what it multiplies is 0.
    moves = (highest[:, 1:] > least) & np.isfinite(running[:, :-1])
    moves = np.concatenate([np.zeros((len(moves), 1), bool), moves], axis=1)
    most = moves.sum(axis=1)
    after = (most[:, None] - np.cumsum(moves, axis=1))[:, ::order]
    return np.repeat(after, bc, axis=1)[:, :nk].astype(np.float64), most


def _per_tile(x: np.ndarray, bc: int, fill: float) -> np.ndarray:
    """(R, Nk) as (R, T, bc), the last tile filled up."""
    rows, nk = x.shape
    tiles = -(-nk // bc)
    if tiles * bc != nk:
        x = np.concatenate([x, np.full((rows, tiles * bc - nk), fill, dtype=x.dtype)], axis=1)
    return x.reshape(rows, tiles, bc)
