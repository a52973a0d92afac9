"""What a tiled algorithm shows after each tile to whoever watches: the state that the invariants speak about.

An observer is any callable that takes a TileState. The arrays are the algorithm's own and fresh for each tile: keep
them freely, never write to them. Tiles that the mask empties are skipped and not reported, since nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

NORMALISED = "normalised"  # FlashAttention-1: o is the attention over the keys seen (N3)
DEFERRED = "deferred"  # FlashAttention-2: o = exp(S - m) V, so that o / l is (D3)


@dataclass(frozen=True, eq=False)
class TileState:
    """State of row tile i after column tile j. All arrays have the rows of the tile first."""

    form: str  # NORMALISED or DEFERRED
    i: int
    j: int
    rows: slice
    cols: slice
    s: Array  # (br_i, bc_j): the masked scores of this tile as computed, -inf where masked
    m: Array  # (br_i,): running maximum, or the reference r that trails it in the lagged form
    l: Array  # (br_i,): row sum relative to m
    o: Array  # (br_i, dv): see `form`
    lag: float | None = None  # threshold t of the lagged form, in natural units; None = the maximum itself


Observer = Callable[[TileState], None]
