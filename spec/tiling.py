"""How a range is cut into tiles: tile t covers t*size .. min((t+1)*size, n), so only the last one may be short."""

from __future__ import annotations

from collections.abc import Iterator

from spec.errors import TileError


def tiles(n: int, size: int, start: int = 0) -> Iterator[tuple[int, slice]]:
    """The tiles of start .. n-1 as (number, slice), in order. An empty range has none."""
    for number, first in enumerate(range(start, n, size)):
        yield number, slice(first, min(first + size, n))


def count(n: int, size: int) -> int:
    """Number of tiles: Tr = ceil(Nq / Br), Tc = ceil(Nk / Bc)."""
    return -(-n // size)


def length(tile: slice) -> int:
    """Rows of a tile: br_i, bc_j."""
    return int(tile.stop - tile.start)


def check_tile(br: int, bc: int) -> None:
    """Refuse tile sizes below 1. A tile larger than the problem is fine: it is one short tile."""
    if br < 1 or bc < 1:
        raise TileError(f"tile Br={br}, Bc={bc}: both must be at least 1")
