"""The inductive invariant as a bound: what the state (m, l, O) of a kernel may be after a key tile.

Tiles before j are processed the same way whatever follows, so the state after tile j is bitwise the final state of a
run on the keys of tiles 0..j. The bound of that run, without the operations that come after the last tile, serves. A
kernel that takes the last tile first has seen the keys of tile j and later instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verify.arithmetic import ArithmeticModel
from verify.bounds.output import INFLATE, forward
from verify.bounds.weights import log_errors
from verify.oracle.float64 import row_chunks, softmax
from verify.oracle.reference import checked_inputs


@dataclass(frozen=True)
class PrefixBound:
    """After the tile, with m in natural units of the scaled score, against attention over the keys seen:

    |O / l - o| <= o, |m + ln l - lse| <= lse, m_low <= m <= m_high (both -inf on rows that saw no key).
    """

    o: np.ndarray
    lse: np.ndarray
    m_low: np.ndarray
    m_high: np.ndarray


def seen_by(tile: int, bc: int, *, last_tile_first: bool) -> slice:
    """The keys that a kernel has seen when it is done with key tile `tile`."""
    return slice(tile * bc, None) if last_tile_first else slice(0, (tile + 1) * bc)


def prefix(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    visible: np.ndarray | None = None,
    model: ArithmeticModel,
    bc: int,
    tile: int,
) -> PrefixBound:
    """Bound of the state after key tile `tile`; arguments as in `forward`. O / l and m + ln l are taken in float64."""
    q, k, v, visible = checked_inputs(q, k, v, scale, visible)
    model = model.at(bc)
    seen = seen_by(tile, bc, last_tile_first=model.last_tile_first)
    k, v, visible = k[seen], v[seen], visible[:, seen]
    model = replace(
        model,
        out_format=None,
        final_roundings=1 if model.working == "float64" else 0,
        l_of_rounded_p=False,  # the trace has the l that makes the LSE
        lse_m_unit=model.lse_m_unit + model.unit,  # m is stored in the working format
        log_tiny=0.0,
        log_error=2.0**-50,
    )
    bound = forward(q, k, v, scale=scale, visible=visible, model=model, bc=bc, failure=None)
    low, high = np.full(len(q), -np.inf), np.full(len(q), -np.inf)
    k = np.where(np.asarray(visible.any(axis=0))[:, None], k, 0.0)
    for rows in row_chunks(len(q), len(k)):
        s = softmax(q[rows], k, scale, visible[rows])
        errors = log_errors(s, q[rows], k, scale=scale, model=model, bc=bc, confidence=None)
        relative = model.lse_m_unit + (model.scale_roundings * model.unit if model.lse_shares_c else 0.0)
        slack = (errors.top_score_error + relative * (np.abs(s.m) + model.lag)) * INFLATE
        low[rows] = np.where(s.live, s.m - model.lag - slack, -np.inf)
        high[rows] = np.where(s.live, s.m + slack, -np.inf)
    division = 2.0**-52 * np.abs(v).max(axis=0, initial=0.0, where=np.isfinite(v))
    o = np.where(np.isfinite(high)[:, None], bound.o + division, 0.0)
    return PrefixBound(o, bound.lse, low, high)
