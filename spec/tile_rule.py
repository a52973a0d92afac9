"""The paper's tile rule, the memory that its tiles really need, and the tile that fits.

Source: Dao et al., "FlashAttention" (arXiv:2205.14135), Algorithm 1 line 1: Bc = ceil(M/4d), Br = min(ceil(M/4d), d)
for a fast memory of M elements. Kj, Vj, Qi and Oi get M/4 each; Br <= d keeps Sij within M/4 as well. The rule is an
asymptotic choice, not an allocation: with five tiles and two statistics per row resident,

    footprint F = (Bc + Br)(dk + dv) + Br Bc + 2 Br <= M

fails for every M < 8 d^2 and a few M above (`last_failing`). So the rule proposes and the footprint decides.

The paper has one width d. For dk != dv this module puts 2(dk + dv) for 4d and (dk + dv)/2 for d, which gives Kj with
Vj, and Qi with Oi, M/2 each and keeps Br Bc within M/4; for dk = dv it is the paper's rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from spec.errors import TileError


@dataclass(frozen=True)
class Tile:
    """Br query rows by Bc keys."""

    br: int
    bc: int


@dataclass(frozen=True, kw_only=True)
class PaperTile:
    """The paper's tile for a byte budget, and whether it fits. `_bytes` are bytes; other sizes count elements."""

    tile: Tile
    m: int  # the papers' M: sram_bytes // itemsize
    sram_bytes: int
    five_tiles_bytes: int  # Qi, Kj, Vj, Oi, Sij
    footprint_bytes: int  # the five tiles and the two statistics of each row

    @property
    def fits(self) -> bool:
        return self.footprint_bytes <= self.sram_bytes

    @property
    def over(self) -> float:
        """Fraction by which the footprint exceeds the budget; negative when it fits."""
        return self.footprint_bytes / self.sram_bytes - 1.0


def elements(sram_bytes: int, itemsize: int) -> int:
    """M of the papers: how many elements a fast memory of so many bytes holds. The only division of this kind."""
    if sram_bytes < 0 or itemsize < 1:
        raise TileError(f"{sram_bytes} bytes of {itemsize}-byte elements")
    return sram_bytes // itemsize


def rule(m: int, dk: int, dv: int | None = None, *, rounding: str = "ceil") -> Tile:
    """Algorithm 1 line 1. rounding "ceil" is the listing; "floor" keeps the four d-wide tiles within M.

    Raises: TileError: "floor" gives no row at all, M < 4d.
    """
    width = dk + (dk if dv is None else dv)  # 2d
    if m < 1 or dk < 1 or width <= dk:
        raise TileError(f"M={m}, dk={dk}, dv={dv}: all must be at least 1")
    if rounding not in ("ceil", "floor"):
        raise TileError(f"rounding {rounding!r}: 'ceil' or 'floor'")
    share = -(-m // (2 * width)) if rounding == "ceil" else m // (2 * width)
    if share == 0:
        raise TileError(f"M={m} is below {2 * width}: the rule with floor gives no row at dk={dk}, dv={width - dk}")
    return Tile(br=min(share, width // 2), bc=share)


def footprint(tile: Tile, dk: int, dv: int | None = None, *, statistics: bool = True) -> int:
    """Elements of the five resident tiles, and of m and l unless `statistics` is False."""
    width = dk + (dk if dv is None else dv)
    return (tile.bc + tile.br) * width + tile.br * tile.bc + (2 * tile.br if statistics else 0)


def footprint_in_registers(tile: Tile, dk: int, dv: int | None = None) -> int:
    """Elements of Qi, Kj, Vj: the shared memory of a kernel that keeps Sij and Oi in registers."""
    return tile.br * dk + tile.bc * (dk + (dk if dv is None else dv))


def paper_tile(sram_bytes: int, itemsize: int, dk: int, dv: int | None = None) -> PaperTile:
    """The paper's tile for a budget in bytes, with the bytes that it needs."""
    m = elements(sram_bytes, itemsize)
    tile = rule(m, dk, dv)
    return PaperTile(
        tile=tile,
        m=m,
        sram_bytes=sram_bytes,
        five_tiles_bytes=footprint(tile, dk, dv, statistics=False) * itemsize,
        footprint_bytes=footprint(tile, dk, dv) * itemsize,
    )


def fits(tile: Tile, m: int, dk: int, dv: int | None = None) -> bool:
    return footprint(tile, dk, dv) <= m


def smallest_m(dk: int, dv: int | None = None) -> int:
    """The least M in which any tile fits: Br = Bc = 1."""
    return footprint(Tile(1, 1), dk, dv)


def largest_bc(m: int, br: int, dk: int, dv: int | None = None, *, multiple: int = 1) -> int:
    """The largest Bc, a multiple of `multiple`, whose footprint with br rows is within M; 0 if there is none."""
    width = dk + (dk if dv is None else dv)
    return max(0, (m - br * width - 2 * br) // (width + br)) // multiple * multiple


def largest_bc_in_registers(m: int, br: int, dk: int, dv: int | None = None, *, multiple: int = 1) -> int:
    """As `largest_bc` with `footprint_in_registers`."""
    width = dk + (dk if dv is None else dv)
    return max(0, (m - br * dk) // width) // multiple * multiple


def fitting_tile(m: int, dk: int, dv: int | None = None) -> Tile:
    """A tile that fits M, as near to the paper's as the footprint allows.

    The rule with floor if that fits; else its Br with the largest Bc that fits; else fewer rows.
    Raises: TileError: not even Br = Bc = 1 fits; the message has the numbers.
    """
    least = smallest_m(dk, dv)
    if m < least:
        raise TileError(
            f"no tile fits M={m} elements at dk={dk}, dv={dk if dv is None else dv}: "
            f"the smallest, Br=1 Bc=1, needs {least}"
        )
    width = dk + (dk if dv is None else dv)
    proposed = rule(m, dk, dv, rounding="floor") if m >= 2 * width else Tile(1, 1)
    if fits(proposed, m, dk, dv):
        return proposed
    br = next(br for br in range(proposed.br, 0, -1) if largest_bc(m, br, dk, dv) >= 1)
    return Tile(br, min(proposed.bc, largest_bc(m, br, dk, dv)))


def last_failing(d: int) -> int:
    """The largest M at which the paper's tile does not fit. Above it the rule is also an allocation.

    For M > 4d^2 the tile is Br = d, Bc = c = ceil(M/4d), and M in (4d(c-1), 4dc]; it needs F(c) = 3dc + 2d^2 + 2d, so
    it fails there for the M below F(c). The last c with F(c) - 1 > 4d(c-1) is the last that fails at all.
    """
    if d < 1:
        raise TileError(f"d={d}: must be at least 1")
    c = (2 * d * d + 6 * d - 2) // d  # the last c with d c < 2 d^2 + 6 d - 1
    return min(3 * d * c + 2 * d * d + 2 * d - 1, 4 * d * c)
