"""Where a listing or a popular account is wrong, shown by running both.

Numbers of the errata that follow from counts or formulas; each test names the statement and what holds.
"""

from __future__ import annotations

import numpy as np
import pytest

from spec import flash1, io_bounds, io_counts, roundoff, standard, tile_rule
from spec.head import Head
from spec.io_counts import Sizes

KB = 1024


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    return rng.normal(size=(12, 4)), rng.normal(size=(20, 4)), rng.normal(size=(20, 3))


def test_flash1_needs_no_final_division(problem):
    """To divide O by l at the end belongs to FlashAttention-2; in Algorithm 1 it makes O wrong by the factor l."""
    out, want = flash1.forward(*problem, br=4, bc=8), standard.forward(*problem)
    bound = 2 * roundoff.forward(Head.of(*problem), 3).o
    assert (np.abs(out.o - want.o) <= bound).all()
    assert (np.abs(out.o / out.l[:, None] - want.o) > bound).any(axis=1).all()


def test_the_published_flash2_rescaling_is_inverted():
    """diag(alpha)^-1 O, as printed, against diag(alpha) O, on two tiles of one key with logits 0 and 1, V = 1, 0."""
    alpha = np.exp(0.0 - 1.0)
    right, printed = alpha * 1.0 + 0.0, 1.0 / alpha + 0.0
    l = alpha + 1.0
    exact = 1.0 / (1.0 + np.exp(1.0))
    assert abs(right / l - exact) <= 16 * 2.0**-53 < abs(printed / l - exact)


def test_the_row_sum_needs_an_inverse(problem):
    """In the proof of Theorem 1, O = diag(l)^-1 (...): without the inverse it is off by l squared."""
    out = flash1.forward(*problem, br=4, bc=8)
    P = np.exp(problem[0] @ problem[1].T / 2.0 - out.m[:, None])
    bound = 2 * roundoff.forward(Head.of(*problem), 3).o  # this product, exponential and division are within it as well
    assert (np.abs(P @ problem[2] / out.l[:, None] - out.o) <= bound).all()
    assert (np.abs(P @ problem[2] * out.l[:, None] - out.o) > bound).any(axis=1).all()


def test_o_is_state_too_and_is_stored_tc_times():
    """That O is written once and m, l are the only state holds for FlashAttention-2; A1 stores O per column tile."""
    s = Sizes(nq=4096, nk=4096, dk=128, dv=128)
    tc = 22
    assert io_counts.flash1_forward(s, 192).writes == (1 + tc) * 4096 * (128 + 2)
    assert io_counts.flash2_forward(s, 128).writes == 4096 * (128 + 1)


def test_four_tiles_are_five():
    """192 KB, d = 128: with Oi the tiles take 212,992 bytes; an A100 block may use 166,912."""
    paper = tile_rule.paper_tile(192 * KB, 2, 128)
    assert paper.five_tiles_bytes == 212_992 > 192 * KB > 163 * KB == 166_912


def test_traffic_is_still_quadratic():
    """Flash attention removes the N x N storage, not the order: doubling N quadruples the traffic, as N grows."""
    d, bc, n = 64, 256, 2**20
    small, large = (io_counts.flash1_forward(Sizes(nq=x, nk=x, dk=d, dv=d), bc).total for x in (n, 2 * n))
    assert 3.99 < large / small < 4


@pytest.mark.parametrize("kb, d, saving", [(192, 64, 7.1), (192, 128, 1.9), (100, 64, 3.9), (100, 128, 1.04)])
def test_the_saving_over_standard_attention(kb, d, saving):
    """N = 4096, 16-bit, the paper's tiles: exact counts, not "an order of magnitude"."""
    s = Sizes(nq=4096, nk=4096, dk=d, dv=d)
    bc = tile_rule.paper_tile(kb * KB, 2, d).tile.bc
    ratio = io_counts.standard_forward(s).total / io_counts.flash1_forward(s, bc).total
    assert round(ratio, 2 if saving == 1.04 else 1) == saving


def test_backward_flops_grow_by_a_quarter():
    """Not "roughly double": 8 -> 10 N^2 d is 1.25x; forward and backward together 12 -> 14, 1.17x."""
    s = Sizes(nq=1024, nk=1024, dk=64, dv=64)
    forward, stored, again = (
        f(s) for f in (io_bounds.flops_forward, io_bounds.flops_backward_standard, io_bounds.flops_backward_recomputed)
    )
    assert again / stored == 1.25 and again / forward == 2.5
    assert round((forward + again) / (forward + stored), 2) == 1.17


def test_the_intensity_of_standard_attention():
    """N = 4096, d = 128: S and P alone are 134 MB; with Q, K, V, O 138.4 MB, so 62 FLOP per byte and not 64."""
    s = Sizes(nq=4096, nk=4096, dk=128, dv=128)
    traffic = io_counts.standard_forward(s)
    assert round(4 * 4096**2 * 2 / 1e6, 1) == 134.2
    assert round(traffic.total * 2 / 1e6, 1) == 138.4
    assert round(io_bounds.intensity(io_bounds.flops_forward(s), traffic, 2)) == 62


def test_not_everything_stays_in_the_unit_interval(problem):
    """P~, alpha, beta do; l reaches the number of keys, and U that times max |V|."""
    keys = np.zeros_like(problem[1])  # equal scores: l = Nk
    out = flash1.forward(problem[0], keys, problem[2], br=4, bc=8)
    assert (out.l == 20).all()
