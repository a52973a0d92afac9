"""The mask language: which query row may attend to which key.

A mask is a predicate Allowed(i, j) of a row i < Nq and a key j < Nk. One polarity everywhere: True = may attend.
Masked is absent: the score of a masked pair is exactly -inf, never a large negative number.

Source: the masks of Dao, "FlashAttention" (arXiv:2205.14135), Algorithm 2, with the alignments in use since. With
delta = Nk - Nq for "bottom_right" and delta = 0 for "top_left":

    Causal           j <= i + delta                   the alignment must be named; the two agree when Nq = Nk
    Window(a, b)     i + delta - a <= j <= i + delta + b   both ends inclusive: "W keys" means a = W - 1
    KeyPadding(len)  j < len
    Documents        document of row i = document of key j
    prefix(p)        j < p, or causal
    a & b, a | b     both, either

`tile_class` says of a tile whether it is EMPTY (skip it, load nothing), FULL (no mask code) or PARTIAL. The tile's
rows and keys are in range by construction: a short last tile does not make a full tile partial. Every class here is
exact: a rule decides where it can, and evaluating the predicate on the whole tile decides the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from spec.errors import MaskError
from spec.tiling import check_tile, tiles

Array = npt.NDArray[Any]

BOTTOM_RIGHT = "bottom_right"
TOP_LEFT = "top_left"
_FAR = 2**62  # stands for "no limit"; far beyond any index, far below an overflow of int64


class TileClass(IntEnum):
    """What a tile contains of the mask."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class Mask:
    """A predicate of (i, j). A subclass gives `allowed`; it may override `tile_class` with a faster exact rule."""

    def allowed(self, i: Array, j: Array, nq: int, nk: int) -> Array:
        """Boolean array over the broadcast of rows i and keys j (int64), True = may attend."""
        raise NotImplementedError

    def tile_class(self, rows: slice, cols: slice, nq: int, nk: int) -> TileClass:
        """Class of the tile rows x cols (half-open slices with start and stop, in range)."""
        seen = self.visible(rows, cols, nq, nk)
        if not seen.any():
            return TileClass.EMPTY
        return TileClass.FULL if seen.all() else TileClass.PARTIAL

    def visible(self, rows: slice, cols: slice, nq: int, nk: int) -> Array:
        """The predicate on one tile, as a boolean array (rows, cols)."""
        i = np.arange(rows.start, rows.stop, dtype=np.int64)[:, None]
        j = np.arange(cols.start, cols.stop, dtype=np.int64)[None, :]
        return np.broadcast_to(self.allowed(i, j, nq, nk), (len(i), j.shape[1]))

    def __and__(self, other: Mask) -> Mask:
        return And((self, other))

    def __or__(self, other: Mask) -> Mask:
        return Or((self, other))


@dataclass(frozen=True)
class NoMask(Mask):
    """Every pair is allowed."""

    def allowed(self, i: Array, j: Array, nq: int, nk: int) -> Array:
        return np.ones(np.broadcast_shapes(i.shape, j.shape), dtype=bool)

    def tile_class(self, rows: slice, cols: slice, nq: int, nk: int) -> TileClass:
        return TileClass.EMPTY if _area(rows, cols) == 0 else TileClass.FULL


class _Band(Mask):
    """low <= j - i - delta <= high. j - i takes every integer of its range on a tile, so the rule is exact."""

    align: str

    def limits(self) -> tuple[int, int]:
        raise NotImplementedError

    def allowed(self, i: Array, j: Array, nq: int, nk: int) -> Array:
        low, high = self.limits()
        offset = j - i - delta(self.align, nq, nk)
        return (low <= offset) & (offset <= high)

    def tile_class(self, rows: slice, cols: slice, nq: int, nk: int) -> TileClass:
        low, high = self.limits()
        d = delta(self.align, nq, nk)
        smallest = cols.start - (rows.stop - 1) - d
        largest = (cols.stop - 1) - rows.start - d
        if _area(rows, cols) == 0 or largest < low or high < smallest:
            return TileClass.EMPTY
        return TileClass.FULL if low <= smallest and largest <= high else TileClass.PARTIAL


@dataclass(frozen=True)
class Causal(_Band):
    """j <= i + delta."""

    align: str

    def __post_init__(self) -> None:
        _check_align(self.align)

    def limits(self) -> tuple[int, int]:
        return -_FAR, 0


@dataclass(frozen=True)
class Window(_Band):
    """i + delta - left <= j <= i + delta + right, both inclusive; None = no limit on that side.

    Other libraries write -1 for "no limit"; a negative bound is refused here, so that it can never be read as one.
    """

    left: int | None
    right: int | None
    align: str = BOTTOM_RIGHT

    def __post_init__(self) -> None:
        _check_align(self.align)
        for name, bound in (("left", self.left), ("right", self.right)):
            if bound is not None and bound < 0:
                raise MaskError(f"window {name} = {bound}: give the number of keys on that side, or None for no limit")

    def limits(self) -> tuple[int, int]:
        low = -_FAR if self.left is None else -min(self.left, _FAR)
        high = _FAR if self.right is None else min(self.right, _FAR)
        return low, high


@dataclass(frozen=True)
class KeyPadding(Mask):
    """j < length: the keys at and beyond `length` do not exist."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise MaskError(f"key padding: length {self.length} is negative")

    def allowed(self, i: Array, j: Array, nq: int, nk: int) -> Array:
        return np.broadcast_to(j < self.length, np.broadcast_shapes(i.shape, j.shape))

    def tile_class(self, rows: slice, cols: slice, nq: int, nk: int) -> TileClass:
        if _area(rows, cols) == 0 or cols.start >= self.length:
            return TileClass.EMPTY
        return TileClass.FULL if cols.stop <= self.length else TileClass.PARTIAL


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """A row attends to the keys of its own document. `of_key` defaults to `of_row` (self attention)."""

    of_row: npt.ArrayLike
    of_key: npt.ArrayLike | None = None

    def allowed(self, i: Array, j: Array, nq: int, nk: int) -> Array:
        rows = np.asarray(self.of_row)
        keys = rows if self.of_key is None else np.asarray(self.of_key)
        if rows.shape != (nq,) or keys.shape != (nk,):
            raise MaskError(f"documents of {rows.shape} rows, {keys.shape} keys; the problem has Nq={nq}, Nk={nk}")
        return rows[i] == keys[j]


@dataclass(frozen=True, eq=False)
class Explicit(Mask):
    """A boolean array (Nq, Nk), True = may attend. An array of numbers is a bias, not a mask, and is refused."""

    seen: Array

    def __post_init__(self) -> None:
        if self.seen.dtype != np.bool_ or self.seen.ndim != 2:
            raise MaskError(
                f"a mask is a boolean array (Nq, Nk), not {self.seen.dtype} of {self.seen.ndim} dimensions; "
                "numbers that are added to the scores go to `bias`"
            )

    def allowed(self, i: Array, j: Array, nq: int, nk: int) -> Array:
        if self.seen.shape != (nq, nk):
            raise MaskError(f"mask of shape {self.seen.shape}; the problem has Nq={nq}, Nk={nk}")
        return self.seen[i, j]


@dataclass(frozen=True, eq=False)
class Blocks(Mask):
    """Algorithm 5's block mask M: pair (i, j) is allowed where live[i // br, j // bc] is True."""

    live: Array
    br: int
    bc: int

    def __post_init__(self) -> None:
        check_tile(self.br, self.bc)

    def allowed(self, i: Array, j: Array, nq: int, nk: int) -> Array:
        want = (-(-nq // self.br), -(-nk // self.bc))
        if self.live.shape != want or self.live.dtype != np.bool_:
            raise MaskError(f"block mask {self.live.dtype}{self.live.shape}, want bool{want} for Nq={nq}, Nk={nk}")
        return self.live[i // self.br, j // self.bc]


@dataclass(frozen=True)
class And(Mask):
    """Allowed by every part."""

    parts: tuple[Mask, ...]

    def allowed(self, i: Array, j: Array, nq: int, nk: int) -> Array:
        return np.logical_and.reduce([part.allowed(i, j, nq, nk) for part in self.parts])

    def tile_class(self, rows: slice, cols: slice, nq: int, nk: int) -> TileClass:
        classes = [part.tile_class(rows, cols, nq, nk) for part in self.parts]
        if TileClass.EMPTY in classes or min(classes) == TileClass.FULL:
            return min(classes)
        return super().tile_class(rows, cols, nq, nk)


@dataclass(frozen=True)
class Or(Mask):
    """Allowed by at least one part."""

    parts: tuple[Mask, ...]

    def allowed(self, i: Array, j: Array, nq: int, nk: int) -> Array:
        return np.logical_or.reduce([part.allowed(i, j, nq, nk) for part in self.parts])

    def tile_class(self, rows: slice, cols: slice, nq: int, nk: int) -> TileClass:
        classes = [part.tile_class(rows, cols, nq, nk) for part in self.parts]
        if TileClass.FULL in classes or max(classes) == TileClass.EMPTY:
            return max(classes)
        return super().tile_class(rows, cols, nq, nk)


def prefix(p: int, align: str) -> Mask:
    """The first p keys are seen by every row, the others causally."""
    return KeyPadding(p) | Causal(align)


def of_call(causal: bool | str = False, key_length: int | None = None) -> Mask:
    """The mask of a call of an emitted package: `causal` is False, True (= bottom_right) or an alignment."""
    mask: Mask = NoMask()
    if causal is not False:
        mask = Causal(BOTTOM_RIGHT if causal is True else str(causal))
    return mask if key_length is None else mask & KeyPadding(key_length)


def delta(align: str, nq: int, nk: int) -> int:
    """The shift between row i and the key on its diagonal."""
    return nk - nq if align == BOTTOM_RIGHT else 0


def dense(mask: Mask, nq: int, nk: int) -> Array:
    """The whole predicate as a boolean array (Nq, Nk)."""
    return mask.visible(slice(0, nq), slice(0, nk), nq, nk)


def row_counts(mask: Mask, nq: int, nk: int) -> Array:
    """Number of keys that each row may see, (Nq,) int64. Computed 256 rows at a time: never an Nq x Nk array."""
    counts = np.zeros(nq, dtype=np.int64)
    for _, rows in tiles(nq, 256):
        counts[rows] = mask.visible(rows, slice(0, nk), nq, nk).sum(axis=1)
    return counts


def tile_classes(mask: Mask, nq: int, nk: int, br: int, bc: int) -> Array:
    """Class of every tile, (Tr, Tc) int8 with the values of TileClass."""
    check_tile(br, bc)
    classes = [[mask.tile_class(rows, cols, nq, nk) for _, cols in tiles(nk, bc)] for _, rows in tiles(nq, br)]
    return np.array(classes, dtype=np.int8).reshape(-(-nq // br), -(-nk // bc))


def causal_tiles(nq: int, nk: int, br: int, bc: int, align: str) -> tuple[Array, Array]:
    """Closed formulas: live tiles n_i and full tiles f_i of each row tile under a causal mask, (Tr,) int64 each.

    Tiles 0 .. f_i - 1 are full, f_i .. n_i - 1 partial, the others empty.
    """
    check_tile(br, bc)
    d, tc = delta(align, nq, nk), -(-nk // bc)
    i0 = np.arange(0, nq, br, dtype=np.int64)  # first row of each row tile
    i1 = np.minimum(i0 + br, nq) - 1  # last row, inclusive
    live = np.clip((i1 + d) // bc + 1, 0, tc)
    full = np.where(i0 + d >= nk - 1, tc, np.clip((i0 + d + 1) // bc, 0, tc))
    return live, full


def _area(rows: slice, cols: slice) -> int:
    return max(0, rows.stop - rows.start) * max(0, cols.stop - cols.start)


def _check_align(align: str) -> None:
    if align not in (BOTTOM_RIGHT, TOP_LEFT):
        raise MaskError(f"alignment {align!r}: name {BOTTOM_RIGHT!r} (j <= i + Nk - Nq) or {TOP_LEFT!r} (j <= i)")
