"""The answer of an oracle: float64 values that are within a stated distance of the exact ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Reference:
    """Attention over one head, at the query rows `rows`.

    o: (R, dv) and lse: (R,), natural log of the scaled scores; -inf and o = 0 on a row without keys.
    o_err, lse_err: bounds on |o - exact| and |lse - exact|; 0 where the value is not finite.
    rows: (R,) index of each row in the arrays that were asked about.
    """

    o: np.ndarray
    lse: np.ndarray
    o_err: np.ndarray
    lse_err: np.ndarray
    rows: np.ndarray


def checked_inputs(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, visible: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q (Nq, d), k (Nk, d), v (Nk, dv) as float64 and visible as (Nq, Nk) bool (all True for None).

    Raises:
        ValueError: shapes disagree, an input is wider than float64, or scale is not finite and positive.
    """
    arrays = [np.asarray(a) for a in (q, k, v)]
    for a, name in zip(arrays, "qkv", strict=True):
        if a.ndim != 2 or a.dtype.kind != "f" or a.dtype.itemsize > 8:
            raise ValueError(f"{name}: want a 2-D array of at most float64, got {a.dtype} of shape {a.shape}")
    q, k, v = (a.astype(np.float64) for a in arrays)
    if q.shape[1] != k.shape[1] or k.shape[0] != v.shape[0]:
        raise ValueError(f"shapes disagree: q{q.shape} k{k.shape} v{v.shape}")
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be finite and positive, got {scale}")
    shape = (q.shape[0], k.shape[0])
    visible = np.ones(shape, bool) if visible is None else np.asarray(visible)
    if visible.shape != shape or visible.dtype != np.bool_:
        raise ValueError(f"visible: want bool of shape {shape}, got {visible.dtype} of shape {visible.shape}")
    return q, k, v, visible
