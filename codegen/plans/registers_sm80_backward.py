"""Which tiles of the mma.sync backward kernels hold in registers: a rule fitted to ptxas.

A thread keeps dK, dV, S^T and dP^T (later a part of dQ in place of the last two) in float32: `accumulators` of the 255
registers that exist; in `query_tiles` dQ, S and dP. The rest holds operands on their way to the matrix unit, and
addresses. The more k16 steps of S^T and dP^T are unrolled, the more operands ptxas fetches early; so the largest tiles
unroll two and not four, but for those that were compiled one by one.

Fitted with ptxas 13.0.88 for sm_80 and sm_90: tests/sm80/sweep_backward_registers.py compiles what the planner takes
over widths and budgets; `registers_sm80_backward.json` is what it found. No accepted tile spills there. Not every tile
of unequal d and dv was compiled: 64 x 64 at (d, dv) = (120, 96), (88, 128) and (88, 160) spills 4 to 8 bytes, 47 others
drawn at random do not.
"""

from __future__ import annotations

from typing import Protocol

PER_THREAD = 255
MOST_KEYS = 192  # accumulators of key_tiles; where a warp has all rows of its keys,
MOST_KEYS_OF_ALL_ROWS = 160  # P and dS of twice as many rows are operands at the same time
MOST_QUERY = 192  # and of query_tiles
FEW_KEYS, FEW_QUERY = 160, 176  # up to here four steps are unrolled, beyond it two
FEW_QUERY_OF_32_ROWS = 160  # a step has operands of twice as many rows: 128 x 48 at d=80 spilled 4 bytes with 176

# (d, dv, Br, Bc), padded widths: larger tiles that hold with four steps.
FOUR_STEPS_KEYS = {(128, 128, 64, 128)}
FOUR_STEPS_QUERY = {(128, 128, 256, 32)}


class Tile(Protocol):
    """A tile of either kernel."""

    @property
    def d_padded(self) -> int: ...
    @property
    def dv_padded(self) -> int: ...
    @property
    def br(self) -> int: ...
    @property
    def bc(self) -> int: ...
    @property
    def accumulators(self) -> int: ...


class QueryTile(Tile, Protocol):
    @property
    def row_tiles(self) -> int: ...


class KeyTile(Tile, Protocol):
    @property
    def row_warps(self) -> int: ...


def most_keys(tile: KeyTile) -> int:
    """The most accumulators of a tile of `key_tiles`, spread like this one, that hold."""
    return MOST_KEYS_OF_ALL_ROWS if tile.row_warps == 1 else MOST_KEYS


def holds_keys(tile: KeyTile) -> bool:
    """Whether a tile of `key_tiles` holds."""
    return tile.accumulators <= most_keys(tile)


def holds_query(tile: Tile) -> bool:
    """Whether a tile of `query_tiles` holds."""
    return tile.accumulators <= MOST_QUERY


def key_steps(tile: KeyTile) -> int:
    """k16 steps of S^T and dP^T to unroll."""
    return _steps(tile, FEW_KEYS, FOUR_STEPS_KEYS)


def query_steps(tile: QueryTile) -> int:
    """k16 steps of S and dP to unroll in `query_tiles`."""
    return _steps(tile, FEW_QUERY if tile.row_tiles == 1 else FEW_QUERY_OF_32_ROWS, FOUR_STEPS_QUERY)


def _steps(tile: Tile, few: int, compiled: set[tuple[int, int, int, int]]) -> int:
    return 4 if tile.accumulators <= few or (tile.d_padded, tile.dv_padded, tile.br, tile.bc) in compiled else 2
