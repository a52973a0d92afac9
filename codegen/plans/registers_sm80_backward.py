"""Which tiles of the mma.sync backward kernels hold in registers: a rule fitted to ptxas.

A thread keeps dK, dV, S^T and dP^T (later dQ in place of the last two) in float32: `accumulators` of the 255 registers
that exist, and in `query_tiles` dQ, S and dP. The rest holds operands on their way to the matrix unit, and addresses.
"""

from __future__ import annotations

from typing import Protocol

PER_THREAD = 255
MOST_KEYS = 192
MOST_QUERY = 160


class Tile(Protocol):
    @property
    def accumulators(self) -> int: ...


def holds_keys(tile: Tile) -> bool:
    """Whether a tile of `key_tiles` holds."""
    return tile.accumulators <= MOST_KEYS


def holds_query(tile: Tile) -> bool:
    """Whether a tile of `query_tiles` holds."""
    return tile.accumulators <= MOST_QUERY
