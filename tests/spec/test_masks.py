"""Masks mean what they say, tile classes are exact, and the causal tile counts have closed formulas."""

from __future__ import annotations

import numpy as np
import pytest

from spec import masks
from spec.errors import MaskError
from spec.masks import BOTTOM_RIGHT, TOP_LEFT, TileClass
from spec.tiling import tiles
from tests.spec.problems import MASKS


def counts(mask, nq, nk):
    return masks.row_counts(mask, nq, nk).tolist()


@pytest.mark.field("R012")
def test_causal_alignments_differ_when_the_lengths_do():
    bottom_right, top_left = masks.Causal(BOTTOM_RIGHT), masks.Causal(TOP_LEFT)
    assert counts(bottom_right, 1, 8) == [8]
    assert counts(bottom_right, 2, 6) == [5, 6]
    assert counts(bottom_right, 5, 2) == [0, 0, 0, 1, 2]
    assert counts(top_left, 1, 8) == [1]
    assert counts(top_left, 2, 6) == [1, 2]
    assert counts(top_left, 5, 2) == [1, 2, 2, 2, 2]
    assert counts(bottom_right, 7, 7) == counts(top_left, 7, 7) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.field("R012")
def test_an_alignment_must_be_named():
    with pytest.raises(MaskError, match="bottom_right"):
        masks.Causal("diagonal")
    with pytest.raises(TypeError):
        masks.Causal()


@pytest.mark.field("R008")
def test_window_bounds_are_inclusive():
    """A window of 3 keys is left = 2."""
    window = masks.Causal(BOTTOM_RIGHT) & masks.Window(2, None)
    assert counts(window, 8, 8) == [1, 2, 3, 3, 3, 3, 3, 3]
    assert counts(masks.Window(1, 2), 6, 6) == [3, 4, 4, 4, 3, 2]


@pytest.mark.field("R009")
@pytest.mark.parametrize("right", [None, 2**31 - 1, 2**63, 10**30])
def test_a_huge_window_is_no_window(right):
    nq, nk = 512, 128
    assert masks.dense(masks.Window(None, right), nq, nk).all()
    assert (masks.tile_classes(masks.Window(None, right), nq, nk, 64, 64) == TileClass.FULL).all()


@pytest.mark.field("R010")
@pytest.mark.parametrize("bounds", [(-1, -3), (None, -1), (-2, 0)])
def test_a_negative_window_bound_is_refused(bounds):
    with pytest.raises(MaskError, match="None for no limit"):
        masks.Window(*bounds)


@pytest.mark.field("R011")
def test_rows_whose_window_misses_the_keys_see_nothing():
    nq, nk, left, right = 129, 50, 32, 64
    seen = masks.dense(masks.Window(left, right), nq, nk)
    for i in range(nq):
        low, high = i + nk - nq - left, i + nk - nq + right
        assert seen[i].sum() == max(0, min(high, nk - 1) - max(low, 0) + 1)
    assert (counts(masks.Window(left, right), nq, nk)[0], counts(masks.Window(left, right), nq, nk)[-1]) == (0, 33)


@pytest.mark.field("R017")
@pytest.mark.parametrize(
    "mask",
    [
        masks.Explicit(np.ones((1500, 1500), bool)),
        masks.Documents(np.zeros(1500)),
        masks.Blocks(np.ones((3, 3), bool), 500, 500),
    ],
    ids=["explicit", "documents", "blocks"],
)
def test_a_mask_made_for_another_size_is_refused(mask):
    with pytest.raises(MaskError, match="500"):
        masks.dense(mask, 500, 1500)


@pytest.mark.field("R001", "R019")
def test_a_mask_of_numbers_is_refused():
    """True = attend is the one polarity, and 0/1 floats are a bias."""
    with pytest.raises(MaskError, match="bias"):
        masks.Explicit(np.ones((3, 3)))
    assert masks.dense(masks.Explicit(np.array([[True, False]])), 1, 2).tolist() == [[True, False]]


def test_the_mask_of_a_package_call():
    assert masks.dense(masks.of_call(False), 3, 4).all()
    assert counts(masks.of_call(True), 3, 4) == counts(masks.of_call("bottom_right"), 3, 4) == [2, 3, 4]
    assert counts(masks.of_call("top_left", key_length=2), 3, 4) == [1, 2, 2]
    assert counts(masks.of_call(key_length=0), 3, 4) == [0, 0, 0]


def test_prefix_is_visible_to_every_row():
    assert counts(masks.prefix(3, TOP_LEFT), 5, 5) == [3, 3, 3, 4, 5]


@pytest.mark.parametrize("seed", range(80))
def test_tile_classes_are_exact(seed):
    """Every rule agrees with evaluating the predicate at every pair of the tile."""
    rng = np.random.default_rng(seed)
    nq, nk, br, bc = (int(x) for x in rng.integers((0, 0, 1, 1), (70, 70, 20, 20)))
    mask = MASKS[1 + seed % (len(MASKS) - 1)](rng, nq, nk)
    mask = masks.Explicit(mask) if isinstance(mask, np.ndarray) else mask
    mask = [mask, mask & masks.Causal(BOTTOM_RIGHT), mask | masks.Window(3, 3)][seed % 3]
    seen, classes = masks.dense(mask, nq, nk), masks.tile_classes(mask, nq, nk, br, bc)
    for i, rows in tiles(nq, br):
        for j, cols in tiles(nk, bc):
            tile = seen[rows, cols]
            want = TileClass.FULL if tile.all() else TileClass.PARTIAL if tile.any() else TileClass.EMPTY
            assert classes[i, j] == want
    assert masks.row_counts(mask, nq, nk).tolist() == seen.sum(axis=1).tolist()


@pytest.mark.field("R014")
def test_a_short_last_tile_can_be_full():
    assert (masks.tile_classes(masks.NoMask(), 20, 20, 16, 16) == TileClass.FULL).all()
    assert (masks.tile_classes(masks.KeyPadding(20), 20, 20, 16, 16) == TileClass.FULL).all()


@pytest.mark.field("R099")
@pytest.mark.parametrize("align", [BOTTOM_RIGHT, TOP_LEFT])
def test_causal_tile_counts_have_closed_formulas(align):
    rng = np.random.default_rng(7)
    for _ in range(400):
        nq, nk, br, bc = (int(x) for x in rng.integers((0, 0, 1, 1), (60, 60, 20, 20)))
        classes = masks.tile_classes(masks.Causal(align), nq, nk, br, bc)
        live, full = masks.causal_tiles(nq, nk, br, bc, align)
        assert live.tolist() == (classes != TileClass.EMPTY).sum(axis=1).tolist(), (nq, nk, br, bc)
        assert full.tolist() == (classes == TileClass.FULL).sum(axis=1).tolist(), (nq, nk, br, bc)


@pytest.mark.parametrize(
    "n, br, bc, want",
    [(1000, 64, 192, (51, 35, 96)), (1000, 128, 64, (72, 56, 128)), (4096, 128, 192, (363, 320, 704))],
)
def test_causal_tile_counts_at_known_sizes(n, br, bc, want):
    live, full = masks.causal_tiles(n, n, br, bc, BOTTOM_RIGHT)
    assert (live.sum(), full.sum(), len(live) * -(-n // bc)) == want


def test_sampling_corners_and_centre_is_not_a_classification():
    """j = i - 8 with 16 x 16 tiles: 11 live tiles have all corners and the centre masked. So tiles are evaluated."""
    n, side = 97, 16

    class Line(masks.Mask):
        def allowed(self, i, j, nq, nk):
            return j == i - 8

    seen, fooled = masks.dense(Line(), n, n), 0
    for i, rows in tiles(n, side):
        for j, cols in tiles(n, side):
            points = [
                seen[r, c]
                for r, c in [
                    (rows.start, cols.start),
                    (rows.start, cols.stop - 1),
                    (rows.stop - 1, cols.start),
                    (rows.stop - 1, cols.stop - 1),
                    ((rows.start + rows.stop) // 2, (cols.start + cols.stop) // 2),
                ]
            ]
            live = masks.tile_classes(Line(), n, n, side, side)[i, j] != TileClass.EMPTY
            assert live == seen[rows, cols].any()
            fooled += live and not any(points)
    assert fooled == 11
