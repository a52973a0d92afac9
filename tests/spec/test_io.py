"""Slow-memory traffic: closed formulas against counting loops, published check values, lower bounds, FLOPs."""

from __future__ import annotations

import numpy as np
import pytest

from spec import io_bounds, io_counts, io_loops, masks, tile_rule
from spec.errors import TileError
from spec.io_counts import Sizes, Traffic
from spec.masks import TileClass
from spec.tiling import count, length, tiles


def ragged(seed):
    rng = np.random.default_rng(seed)
    nq, nk = (int(x) for x in rng.integers(0, 90, 2))
    dk, dv, br, bc = (int(x) for x in rng.integers(1, 40, 4))
    return Sizes(nq=nq, nk=nk, dk=dk, dv=dv), br, bc, rng


@pytest.mark.parametrize("seed", range(300))
def test_closed_formulas_equal_counting_loops(seed):
    s, br, bc, rng = ragged(seed)
    assert io_counts.standard_forward(s) == io_loops.standard_forward(s)
    assert io_counts.standard_backward(s) == io_loops.standard_backward(s)
    assert io_counts.flash1_forward(s, bc) == io_loops.flash1_forward(s, br, bc)
    assert io_counts.flash1_backward(s, bc) == io_loops.flash1_backward(s, br, bc)
    assert io_counts.flash2_forward(s, br) == io_loops.flash2_forward(s, br, bc)
    for printed in (False, True):
        want = io_loops.flash2_backward(s, br, bc, as_printed=printed)
        assert io_counts.flash2_backward(s, bc, as_printed=printed) == want
    parts = int(rng.integers(1, 6))
    assert io_counts.split(s, br, parts) == io_loops.split(s, br, bc, parts)

    live = rng.random((count(s.nq, br), count(s.nk, bc))) < 0.5
    rows = [length(t) for _, t in tiles(s.nq, br)]
    keys = [length(t) for _, t in tiles(s.nk, bc)]
    live_rows = sum(rows[i] for i, j in zip(*np.nonzero(live), strict=True))
    live_keys = sum(keys[j] for i, j in zip(*np.nonzero(live), strict=True))
    in_live_columns = sum(n for j, n in enumerate(keys) if live[:, j].any())
    assert io_counts.block_sparse(s, live_rows) == io_loops.block_sparse(s, br, bc, live)
    skipping = io_loops.block_sparse(s, br, bc, live, skip_empty_columns=True)
    assert io_counts.block_sparse(s, live_rows, in_live_columns) == skipping
    assert io_counts.flash2_forward_masked(s, live_keys) == io_loops.flash2_forward(s, br, bc, live)

    assert io_counts.flash2_backward_by_rows(s, br) == io_loops.flash2_backward_by_rows(s, br, bc)
    assert io_counts.flash1_backward_masked(s, live_rows) == io_loops.flash1_backward(s, br, bc, live)
    assert io_counts.flash2_backward_masked(s, live_rows) == io_loops.flash2_backward(s, br, bc, live)
    by_rows = io_loops.flash2_backward_by_rows(s, br, bc, live)
    assert io_counts.flash2_backward_by_rows_masked(s, live_keys) == by_rows


@pytest.mark.parametrize("align", [masks.BOTTOM_RIGHT, masks.TOP_LEFT])
@pytest.mark.parametrize("seed", range(40))
def test_causal_traffic_is_that_of_the_live_tiles(seed, align):
    """C = sum_i min(n_i Bc, Nk), R = sum_i n_i br_i."""
    s, br, bc, _ = ragged(seed)
    live = masks.tile_classes(masks.Causal(align), s.nq, s.nk, br, bc) != TileClass.EMPTY
    per_row, _ = masks.causal_tiles(s.nq, s.nk, br, bc, align)
    live_keys = int(np.minimum(per_row * bc, s.nk).sum())
    assert io_counts.flash2_forward_masked(s, live_keys) == io_loops.flash2_forward(s, br, bc, live)
    by_rows = io_loops.flash2_backward_by_rows(s, br, bc, live)
    assert io_counts.flash2_backward_by_rows_masked(s, live_keys) == by_rows
    live_rows = int((per_row * [length(rows) for _, rows in tiles(s.nq, br)]).sum())
    assert io_counts.flash2_backward_masked(s, live_rows) == io_loops.flash2_backward(s, br, bc, live)
    assert io_counts.flash1_backward_masked(s, live_rows) == io_loops.flash1_backward(s, br, bc, live)
    square = Sizes(nq=s.nq, nk=s.nq, dk=s.dk, dv=s.dv)
    live = masks.tile_classes(masks.Causal(align), s.nq, s.nq, br, br) != TileClass.EMPTY
    want = io_loops.flash2_forward(square, br, br, live)
    assert io_counts.flash2_forward_masked(square, io_counts.causal_live_keys(s.nq, br)) == want


# (Nq, Nk, dk, dv), (Br, Bc), (Tr, Tc), reads and writes of A0, A3, A1, A4, F2f, F2b
CHECK_VALUES = [
    ((4096, 4096, 128, 128), (128, 192), (32, 22), (35127296, 34078720), (86507520, 35127296), (24297472, 12247040),
     (47366144, 14155776), (34078720, 528384), (36880384, 13111296)),
    ((1024, 1024, 64, 64), (16, 256), (64, 4), (2293760, 2162688), (5570560, 2293760), (663552, 337920),
     (1187840, 589824), (8454144, 66560), (1056768, 459776)),
    ((1000, 1000, 64, 64), (64, 192), (16, 6), (2192000, 2064000), (5320000, 2192000), (908000, 462000),
     (1676000, 704000), (2112000, 65000), (1420000, 577000)),
    ((333, 517, 192, 128), (48, 80), (7, 7), (573698, 386946), (1175429, 573698), (916022, 346320),
     (1661942, 842368), (1222016, 42957), (1448822, 677261)),
]  # fmt: skip


@pytest.mark.parametrize("sizes, tile, numbers, a0, a3, a1, a4, f2f, f2b", CHECK_VALUES)
def test_check_values(sizes, tile, numbers, a0, a3, a1, a4, f2f, f2b):
    s, (br, bc) = Sizes(**dict(zip(("nq", "nk", "dk", "dv"), sizes, strict=True))), tile
    assert (count(s.nq, br), count(s.nk, bc)) == numbers
    assert io_counts.standard_forward(s) == Traffic(*a0)
    assert io_counts.standard_backward(s) == Traffic(*a3)
    assert io_counts.flash1_forward(s, bc) == Traffic(*a1)
    assert io_counts.flash1_backward(s, bc) == Traffic(*a4)
    assert io_counts.flash2_forward(s, br) == Traffic(*f2f)
    assert io_counts.flash2_backward(s, bc) == Traffic(*f2b)


def test_causal_check_value():
    n, side = 1000, 64
    assert io_counts.causal_live_keys(n, side) == 8680
    s = Sizes(nq=n, nk=n, dk=64, dv=64)
    assert io_counts.flash2_forward_masked(s, 8680) == Traffic(1175040, 65000)
    live, full = masks.causal_tiles(n, n, side, side, masks.BOTTOM_RIGHT)
    assert (live.sum(), (live - full).sum()) == (136, 16)


@pytest.mark.parametrize("n, d, b", [(96, 8, 16), (100, 16, 32), (7, 3, 2)])
def test_square_totals(n, d, b):
    """The totals for Nq = Nk = N, dk = dv = d, as in the notes of the papers' readers."""
    s, t = Sizes(nq=n, nk=n, dk=d, dv=d), -(-n // b)
    assert io_counts.standard_forward(s).total == 4 * n * n + 4 * n * d
    assert io_counts.standard_backward(s).total == 7 * n * n + 8 * n * d
    assert io_counts.flash1_forward(s, b).total == 2 * n * d + n * (d + 2) + t * n * (3 * d + 4)
    assert io_counts.flash1_backward(s, b).total == 7 * n * d + t * n * (5 * d + 2)
    assert io_counts.flash2_forward(s, b).total == 2 * n * d + n + 2 * t * n * d


def test_leading_constants():
    """c of c N^2 d^2 / M for large M: 12 with the paper's tiles, 4 for FlashAttention-2 with the tallest Br."""
    d, m, n = 64, 10**8, 10**10
    s, unit = Sizes(nq=n, nk=n, dk=d, dv=d), n * n * d * d / m
    paper = io_counts.flash1_forward(s, tile_rule.rule(m, d).bc).total / unit
    tallest = io_counts.flash2_forward(s, (m - 2 * d) // (2 * d + 3)).total / unit
    # tails, statistics (4 of 3d + 4) and the terms linear in N are what separates these from 12 and 4
    assert 12 <= paper <= 12 * (1 + 2 / d) and 4 <= tallest <= 4 * (1 + 2 / d)


def test_the_lower_bound_at_a_known_point():
    """d = 64, M = 83456: 0.84 N^2 d^2 / M; A1 with the paper's tiles is within 14.7x, F2f with the tallest rows 5x."""
    d, m, n = 64, 83456, 10**7
    s = Sizes(nq=n, nk=n, dk=d, dv=d)
    assert round(float(io_bounds.product_bound(s, m)) / (n * n * d * d / m), 2) == 0.84
    assert io_bounds.ratio(io_counts.flash1_forward(s, tile_rule.rule(m, d).bc), s, m) <= 14.7
    assert io_bounds.ratio(io_counts.flash2_forward(s, (m - 2 * d) // (2 * d + 3)), s, m) <= 5


@pytest.mark.parametrize("seed", range(200))
def test_no_count_is_below_the_lower_bound(seed):
    """Every forward algorithm with tiles that fit M moves at least the bound."""
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(1, 5000)), int(rng.integers(1, 65))
    m = int(rng.integers(tile_rule.smallest_m(d), 40 * d * d + 5 * d + 10))
    s, tile = Sizes(nq=n, nk=n, dk=d, dv=d), tile_rule.fitting_tile(m, d)
    assert tile_rule.fits(tile, m, d)
    for traffic in (io_counts.flash1_forward(s, tile.bc), io_counts.flash2_forward(s, tile.br)):
        assert traffic.total >= io_bounds.lower_bound(s, m)
        assert io_bounds.ratio(traffic, s, m) >= 1.0
    assert io_bounds.lower_bound(s, m) >= io_bounds.compulsory(s) == 4 * n * d
    with pytest.raises(TileError):
        io_bounds.product_bound(s, 0)


def test_flops():
    n, d = 1000, 64
    s = Sizes(nq=n, nk=n, dk=d, dv=d)
    assert io_bounds.flops_forward(s) == 4 * n * n * d
    assert io_bounds.flops_backward_standard(s) == 8 * n * n * d
    assert io_bounds.flops_backward_recomputed(s) == 10 * n * n * d
    uneven = Sizes(nq=3, nk=5, dk=7, dv=11)
    products = {"S": (3, 5, 7), "dV": (5, 11, 3), "dP": (3, 5, 11), "dQ": (3, 7, 5), "dK": (5, 7, 3)}
    assert io_bounds.flops_backward_recomputed(uneven) == sum(2 * a * b * c for a, b, c in products.values())
    assert io_bounds.intensity(100, Traffic(10, 15), 2) == 2.0


def test_a_count_beyond_32_bits_is_exact():
    s = Sizes(nq=2**20, nk=2**22, dk=128, dv=128)
    assert io_counts.flash2_forward(s, 128).reads == 2**27 + 2**13 * 2**22 * 2**8
    assert io_counts.standard_forward(s).total == 4 * 2**42 + 2 * (2**20 + 2**22) * 128
