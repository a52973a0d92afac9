"""The paper's tile rule gives the paper's numbers, and the footprint test says where its tiles fit."""

from __future__ import annotations

import pytest

from spec import tile_rule
from spec.errors import TileError
from spec.tile_rule import Tile

KB = 1024
# Largest shared memory of a block (CUDA Programming Guide, technical specifications per compute capability).
BLOCK_BYTES = {"7.5": 64 * KB, "8.0": 163 * KB, "8.6": 99 * KB, "9.0": 227 * KB}


def test_the_tile_of_the_default_command():
    """192 KB, d = 128, 16-bit: 128 x 192, which needs 212,992 bytes for five tiles and 213,504 with the statistics."""
    paper = tile_rule.paper_tile(192 * KB, 2, 128)
    assert (paper.m, paper.tile) == (98304, Tile(128, 192))
    assert (paper.five_tiles_bytes, paper.footprint_bytes) == (212_992, 213_504)
    assert not paper.fits and paper.over == 213_504 / 196_608 - 1
    # without O, as the post counts: 90112 elements
    assert paper.five_tiles_bytes // 2 - paper.tile.br * 128 == 90_112


@pytest.mark.parametrize("d, last", [(64, 33_855), (128, 133_247), (256, 528_639)])
def test_the_last_memory_that_fails(d, last):
    assert tile_rule.last_failing(d) == last
    assert not tile_rule.fits(tile_rule.rule(last, d), last, d)
    for m in range(last + 1, last + 2000):
        assert tile_rule.fits(tile_rule.rule(m, d), m, d)


@pytest.mark.parametrize("d", range(1, 13))
def test_the_last_failing_memory_by_exhaustion(d):
    beyond = 8 * d * d + 40 * d + 100
    fails = [m for m in range(1, beyond) if not tile_rule.fits(tile_rule.rule(m, d), m, d)]
    assert max(fails) == tile_rule.last_failing(d)
    assert set(range(1, 8 * d * d)) <= set(fails), "below 8 d^2 the rule never fits"


def test_the_rule_overflows_four_tiles_by_rounding_up_alone():
    tile = tile_rule.rule(1000, 64)
    assert tile == Tile(4, 4) and 4 * tile.br * 64 == 1024 > 1000
    assert tile_rule.rule(1000, 64, rounding="floor") == Tile(3, 3)


def test_a_quarter_over_at_4_d_squared():
    for d in (64, 128, 256):
        m = 4 * d * d
        tile = tile_rule.rule(m, d)
        assert tile == Tile(d, d)
        assert tile_rule.footprint(tile, d, statistics=False) * 4 == 5 * m


# compute capability: (d, Br, Bc, elements by which five tiles exceed M, or None where they fit)
PAPER_TILES = [
    ("7.5", 64, Tile(64, 128), 128),
    ("7.5", 128, Tile(64, 64), 0.13),
    ("7.5", 256, Tile(32, 32), 0.03),
    ("8.0", 64, Tile(64, 326), None),
    ("8.0", 128, Tile(128, 163), 0.15),
    ("8.0", 256, Tile(82, 82), 0.09),
    ("8.6", 64, Tile(64, 198), None),
    ("8.6", 128, Tile(99, 99), 0.20),
    ("8.6", 256, Tile(50, 50), 0.06),
    ("9.0", 64, Tile(64, 454), None),
    ("9.0", 128, Tile(128, 227), 0.03),
    ("9.0", 256, Tile(114, 114), 0.12),
]


@pytest.mark.field("R094")
@pytest.mark.parametrize("capability, d, tile, over", PAPER_TILES)
def test_the_paper_tile_on_every_card(capability, d, tile, over):
    paper = tile_rule.paper_tile(BLOCK_BYTES[capability], 2, d)
    assert paper.tile == tile
    assert paper.fits == (over is None)
    if over == 128:  # elements, with the statistics
        assert (paper.footprint_bytes - paper.sram_bytes) // 2 == 128
    elif over is not None:
        assert round(paper.over, 2) == over


LARGEST_BC = [  # five tiles resident at (d, Br); Q, K, V resident at (d, Br)
    ("7.5", {(64, 64): 112, (128, 64): 48, (128, 16): 96}, {(64, 128): 192, (128, 128): 64, (256, 64): 32}),
    ("8.0", {(64, 64): 384, (128, 64): 208, (128, 16): 288}, {(64, 128): 576, (128, 128): 256, (256, 64): 128}),
    ("8.6", {(64, 64): 208, (128, 64): 96, (128, 16): 160}, {(64, 128): 320, (128, 128): 128, (256, 64): 64}),
    ("9.0", {(64, 64): 560, (128, 64): 304, (128, 16): 400}, {(64, 128): 832, (128, 128): 384, (256, 64): 192}),
]


@pytest.mark.parametrize("capability, five, three", LARGEST_BC)
def test_the_largest_bc_on_every_card(capability, five, three):
    m = tile_rule.elements(BLOCK_BYTES[capability], 2)
    for (d, br), bc in five.items():
        assert tile_rule.largest_bc(m, br, d, multiple=16) == bc
        assert tile_rule.fits(Tile(br, bc), m, d) and not tile_rule.fits(Tile(br, bc + 16), m, d)
    for (d, br), bc in three.items():
        assert tile_rule.largest_bc_in_registers(m, br, d, multiple=16) == bc
        assert tile_rule.footprint_in_registers(Tile(br, bc), d) <= m
        assert tile_rule.footprint_in_registers(Tile(br, bc + 16), d) > m


@pytest.mark.field("R096")
@pytest.mark.parametrize("m, dk, dv", [(0, 64, 64), (255, 64, 64), (512, 16384, None), (100, 8, 256)])
def test_when_nothing_fits_the_message_has_the_numbers(m, dk, dv):
    need = tile_rule.smallest_m(dk, dv)
    with pytest.raises(TileError, match=f"M={m} elements at dk={dk}.*Br=1 Bc=1, needs {need}"):
        tile_rule.fitting_tile(m, dk, dv)
    assert tile_rule.fitting_tile(need, dk, dv) == Tile(1, 1)


@pytest.mark.field("R094")
@pytest.mark.parametrize("kib", [48, 64, 99, 163, 227])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_the_fitting_tile_fits_and_is_as_wide_as_its_rows_allow(kib, d):
    m = tile_rule.elements(kib * KB, 2)
    tile, proposed = tile_rule.fitting_tile(m, d), tile_rule.rule(m, d, rounding="floor")
    assert tile_rule.fits(tile, m, d)
    assert tile.br == proposed.br
    assert tile.bc == proposed.bc or not tile_rule.fits(Tile(tile.br, tile.bc + 1), m, d)


def test_every_memory_above_the_least_has_a_fitting_tile():
    for dk, dv in ((1, 1), (3, 5), (8, 8), (16, 8)):
        for m in range(tile_rule.smallest_m(dk, dv), 1500):
            assert tile_rule.fits(tile_rule.fitting_tile(m, dk, dv), m, dk, dv)


def test_unequal_widths_share_the_memory():
    """K with V, and Q with O, get M/2 each; Br Bc stays within M/4. Equal widths give the paper's rule."""
    tile = tile_rule.rule(96_000, 192, 128)
    assert tile == Tile(150, 150) and tile.bc * (192 + 128) == 48_000 and tile.br * tile.bc <= 24_000
    assert tile_rule.rule(98_304, 128, 128) == tile_rule.rule(98_304, 128)


@pytest.mark.parametrize("arguments", [(0, 64), (100, 0), (100, 64, 0)])
def test_senseless_sizes_are_refused(arguments):
    with pytest.raises(TileError, match="at least 1"):
        tile_rule.rule(*arguments)
    with pytest.raises(TileError, match="floor"):
        tile_rule.rule(255, 64, rounding="floor")
    with pytest.raises(TileError, match="'ceil' or 'floor'"):
        tile_rule.rule(255, 64, rounding="nearest")
