"""Which tiles of the mma.sync backward kernels hold in registers: a rule fitted to ptxas.

A thread keeps dK, dV, S^T and dP^T (later a part of dQ in place of the last two) in float32: `accumulators` of the 255
registers that exist; in `query_tiles` dQ, S and dP. The rest holds operands on their way to the matrix unit, and
addresses. The more k16 steps of S^T and dP^T are unrolled, the more operands ptxas fetches early; so the largest tiles
unroll two and not four, but for those that were compiled one by one.

`key_tiles` makes dV, dK and dQ one behind the other. Where one warp or two share the rows, the loop over the rows of
the others is gone, and with few keys that of dQ too. Then all of it is straight code: ptxas overlaps fetches, products
and reductions over its whole length, and spills from 112 accumulators on, however little is unrolled before. A second
pass of dQ makes a loop again, and takes 20 registers less and more.

Fitted with ptxas 13.0.88 for sm_80 and sm_90: tests/sm80/sweep_backward_registers.py compiles what the planner takes
over widths and budgets. `registers_sm80_backward.json` is what it found for whole units,
`registers_sm80_backward_tiles.json` for the tight tiles of every budget and all pairs of widths: none spills. Of the
up to four widths of one padding, which differ by cut columns, one at least was compiled, and all where it was near the
limit; in nine of ten paddings they are within 10 registers of each other.
"""

from __future__ import annotations

from typing import Protocol

PER_THREAD = 255
MOST_KEYS = 192  # accumulators of key_tiles; where a warp has all rows of its keys,
MOST_KEYS_OF_ALL_ROWS = 160  # P and dS of twice as many rows are operands at the same time
MOST_KEYS_OF_64_ROWS = 176  # 32 keys x 64 rows per warp, and d or dv beyond 64: 128 x 128 at (96, 32) spilled with 192
MOST_QUERY = 192  # and of query_tiles; where dP and dQ are one k16 step each, nothing is a loop:
MOST_QUERY_OF_16 = 176  # 32 x 16 at (160, 16) spilled with 192
FEW_KEYS, FEW_QUERY = 160, 176  # up to here four steps are unrolled, beyond it two
FEW_QUERY_OF_32_ROWS = 160  # a step has operands of twice as many rows: 128 x 48 at d=80 spilled 4 bytes with 176
FEW_QUERY_OF_64_KEYS = 144  # and of more keys, where more than four steps exist: 128 x 64 at (32, 192) spilled with 160

# Straight code, where a warp has all rows of its keys: the four k16 steps of dQ that are unrolled are all of them with
STRAIGHT_KEYS = 64  # keys or fewer. Where dQ is one block of columns and cannot be split, these accumulators hold,
MOST_STRAIGHT, MOST_STRAIGHT_OF_16 = 112, 144  # the latter where S^T and dP^T have 16 of them.
MOST_OF_16_KEYS = 128  # with two stages: the passes, of one k16 step, are so short that ptxas unrolls them again

# Registers of dK, dV, S^T and dP^T, beyond which straight code gets a second pass of dQ. Where two warps share the
# rows it spills later, by the registers of S^T and dP^T: with 48 and more, and with 32.
SPLIT_OF_ALL_ROWS, SPLIT_OF_48, SPLIT_OF_32 = 96, 144, 160
LONG_PASSES_UP_TO = 176  # where four share them: two passes of unequal length, or three, of many columns; then four

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
    @property
    def stages(self) -> int: ...
    @property
    def pairs(self) -> int: ...
    @property
    def sums(self) -> int: ...
    @property
    def dq_passes(self) -> int: ...
    @property
    def dq_columns(self) -> int: ...


def most_keys(tile: KeyTile) -> int:
    """The most accumulators of a tile of `key_tiles`, spread like this one, that hold."""
    if tile.row_warps > 1:
        wide = tile.pairs >= 128 and max(tile.d_padded, tile.dv_padded) > 64
        return MOST_KEYS_OF_64_ROWS if wide else MOST_KEYS
    if tile.bc == 16 and tile.stages > 1:
        return MOST_OF_16_KEYS
    if tile.bc <= STRAIGHT_KEYS and tile.dq_passes == tile.dq_columns == 1:
        return MOST_STRAIGHT_OF_16 if tile.pairs == 16 else MOST_STRAIGHT
    return MOST_KEYS_OF_ALL_ROWS


def holds_keys(tile: KeyTile) -> bool:
    """Whether a tile of `key_tiles` holds."""
    return tile.accumulators <= most_keys(tile)


def most_query(tile: Tile) -> int:
    """The most accumulators of a tile of `query_tiles` of these widths that hold."""
    return MOST_QUERY_OF_16 if tile.bc == tile.dv_padded == 16 else MOST_QUERY


def holds_query(tile: Tile) -> bool:
    """Whether a tile of `query_tiles` holds."""
    return tile.accumulators <= most_query(tile)


def dq_passes(tile: KeyTile, columns: int, least: int) -> int:
    """In how many passes over the keys a warp makes its `columns` 16-column blocks of dQ: `least` or more."""
    if _is_straight(tile, columns):
        counts = [n for n in range(max(2, least), columns + 1) if not _is_unrolled(n, columns)]
        none_empty = (n for n in counts if _share(columns, _share(columns, n)) == n)
        return next(none_empty, counts[0] if counts else least)
    tight = tile.row_warps == 4 and tile.sums + tile.pairs > LONG_PASSES_UP_TO and columns > 8
    return max(4, least) if tight and (columns % least or least == 3) else least


def _is_unrolled(passes: int, columns: int) -> bool:
    """Whether ptxas makes straight code of passes by itself (72 reductions where the loop has 24): short ones alike."""
    blocks = _share(columns, passes)
    return passes == 3 or (columns >= 6 and blocks <= 3 and passes * blocks == columns)


def _share(parts: int, among: int) -> int:
    return -(-parts // among)


def _is_straight(tile: KeyTile, columns: int) -> bool:
    """Whether dV, dK and dQ are so long a piece of code without a loop that it spills."""
    registers = tile.sums + tile.pairs
    if tile.row_warps == 1:
        return tile.bc <= STRAIGHT_KEYS and registers > SPLIT_OF_ALL_ROWS
    if tile.row_warps > 2 or tile.pairs < 32:
        return False
    # With 96 keys two of six steps of dQ are left behind a loop that runs once: long where the columns are many.
    few_keys = tile.bc <= STRAIGHT_KEYS or (tile.bc == 96 and columns > 4)
    return few_keys and registers > (SPLIT_OF_48 if tile.pairs >= 48 else SPLIT_OF_32)


def key_steps(tile: KeyTile) -> int:
    """k16 steps of S^T and dP^T to unroll."""
    return _steps(tile, FEW_KEYS, FOUR_STEPS_KEYS)


def query_steps(tile: QueryTile) -> int:
    """k16 steps of S and dP to unroll in `query_tiles`."""
    if tile.row_tiles == 1:
        few = FEW_QUERY
    elif tile.bc >= 64 and max(tile.d_padded, tile.dv_padded) > 64:
        few = FEW_QUERY_OF_64_KEYS
    else:
        few = FEW_QUERY_OF_32_ROWS
    return _steps(tile, few, FOUR_STEPS_QUERY)


def _steps(tile: Tile, few: int, compiled: set[tuple[int, int, int, int]]) -> int:
    return 4 if tile.accumulators <= few or (tile.d_padded, tile.dv_padded, tile.br, tile.bc) in compiled else 2
