"""Traffic of the emitted kernels per tensor: closed formulas against walked blocks, the paper's count, the bound."""

from __future__ import annotations

import numpy as np
import pytest

from spec import io_bounds, io_counts, io_kernel_loops, io_kernels, masks, tile_rule
from spec.errors import ShapeError
from spec.io_counts import Sizes
from spec.io_kernels import Call
from spec.tiling import count

ALIGNMENTS = (None, masks.BOTTOM_RIGHT, masks.TOP_LEFT)


def drawn(seed):
    """A ragged call with heads, lengths (some of them outside [0, Nk]) and a mask, and a kernel for it."""
    rng = np.random.default_rng(seed)
    batch, group, hkv = (int(x) for x in rng.integers(1, 4, 3))
    nq, nk = int(rng.integers(1, 70)), int(rng.integers(0, 70))
    lengths = tuple(int(x) for x in rng.integers(-2, nk + 3, batch)) if rng.random() < 0.6 else None
    call = Call(
        nq=nq, nk=nk, dk=int(rng.integers(1, 40)), dv=int(rng.integers(1, 40)), batch=batch, hq=group * hkv, hkv=hkv,
        causal=ALIGNMENTS[int(rng.integers(3))], key_lengths=lengths,
    )  # fmt: skip
    br, bc = (int(x) for x in rng.integers(1, 30, 2))
    return call, {"br": br, "bc": bc, "threads": 32 * int(rng.integers(1, 9)), "itemsize": 2}


@pytest.mark.parametrize("seed", range(300))
def test_closed_formula_equals_the_walk_over_blocks(seed):
    call, kernel = drawn(seed)
    assert io_kernels.forward(call, **kernel) == io_kernel_loops.forward(call, **kernel)
    assert io_kernels.forward(call, o_itemsize=4, **kernel) == io_kernel_loops.forward(call, o_itemsize=4, **kernel)


@pytest.mark.parametrize("seed", range(300))
def test_the_paper_and_the_own_terms_make_the_whole(seed):
    call, kernel = drawn(seed)
    paper = {name: size for name, size in kernel.items() if name != "threads"}
    for o_itemsize in (None, 4):
        own = io_kernels.own_terms(call, o_itemsize=o_itemsize, **kernel)
        whole = io_kernels.forward(call, o_itemsize=o_itemsize, **kernel).total
        assert whole == io_kernels.flash2(call, **paper) + sum(own.values())


def test_without_mask_and_lengths_the_kernel_moves_what_the_paper_counts():
    call = Call(nq=333, nk=517, dk=192, dv=128, batch=2, hq=3, hkv=3)
    got = io_kernels.forward(call, br=48, bc=80, threads=96, itemsize=2)
    s = Sizes(nq=333, nk=517, dk=192, dv=128)
    heads = 6
    assert sum(got.read.values()) == heads * 2 * io_counts.flash2_forward(s, 48).reads == heads * 2 * 1222016
    assert got.written == {**dict.fromkeys(io_kernels.TENSORS, 0), "o": heads * 2 * 333 * 128, "lse": heads * 4 * 333}


def test_causal_check_value():
    """C = 8680 of the square causal case: 1175040 elements read, 64000 of O and 1000 of L written."""
    call = Call(nq=1000, nk=1000, dk=64, dv=64, causal=masks.BOTTOM_RIGHT)
    got = io_kernels.forward(call, br=64, bc=64, threads=128, itemsize=2)
    assert sum(got.read.values()) == 2 * 1175040
    assert (got.written["o"], got.written["lse"]) == (2 * 64000, 4 * 1000)


@pytest.mark.parametrize("seed", range(60))
def test_formulas_beside_are_those_of_one_head_summed(seed):
    call, kernel = drawn(seed)
    br, bc = kernel["br"], kernel["bc"]
    a0 = a1 = 0
    for entry in range(call.batch):
        s = Sizes(nq=call.nq, nk=call.length(entry), dk=call.dk, dv=call.dv)
        a0 += 2 * io_counts.standard_forward(s).total
        if call.causal is None:
            one, tc = io_counts.flash1_forward(s, bc), count(s.nk, bc)
            statistics = 2 * tc * s.nq + 2 * (1 + tc) * s.nq
            a1 += 2 * (one.total - statistics) + 4 * statistics
    assert io_kernels.standard(call, itemsize=2) == call.hq * a0
    if call.causal is None:
        assert io_kernels.flash1(call, br=br, bc=bc, itemsize=2) == call.hq * a1


@pytest.mark.parametrize("seed", range(200))
def test_no_kernel_is_below_the_lower_bound(seed):
    """A tile that fits M moves at least the bound, whatever mask, lengths and sharing of K/V heads."""
    rng = np.random.default_rng(seed)
    call, _ = drawn(seed)
    call = Call(
        nq=8 * call.nq, nk=8 * call.nk, dk=call.dk, dv=call.dk, batch=call.batch, hq=call.hq, hkv=call.hkv,
        causal=call.causal, key_lengths=call.key_lengths and tuple(8 * n for n in call.key_lengths),
    )  # fmt: skip
    m = int(rng.integers(tile_rule.smallest_m(call.dk), 40 * call.dk**2 + 5 * call.dk + 10))
    tile = tile_rule.fitting_tile(m, call.dk)
    bound = io_bounds.lower_bound_of_call(call, m)
    assert io_kernels.forward(call, br=tile.br, bc=tile.bc, threads=32, itemsize=1).total >= bound
    assert io_kernels.flash1(call, br=tile.br, bc=tile.bc, itemsize=1) >= bound
    assert bound >= io_kernels.compulsory(call) >= call.batch * call.hq * call.nq * call.dv


def test_the_bound_of_one_plain_head_is_that_of_the_sizes():
    s = Sizes(nq=4096, nk=4096, dk=64, dv=64)
    call = Call(nq=4096, nk=4096, dk=64, dv=64)
    for m in (83456, 2000):
        assert io_bounds.lower_bound_of_call(call, m) == io_bounds.lower_bound(s, m)
    assert io_kernels.pairs(call) == 4096**2
    halved = Call(nq=4096, nk=4096, dk=64, dv=64, causal=masks.TOP_LEFT)
    assert io_kernels.pairs(halved) == 4096 * 4097 // 2


def test_rows_and_keys_that_nobody_sees_are_not_compulsory():
    call = Call(nq=10, nk=4, dk=3, dv=5, hq=2, hkv=1, causal=masks.BOTTOM_RIGHT)  # rows 6..9 see 1..4 keys
    assert io_kernels.compulsory(call) == 2 * 4 * 3 + 4 * (3 + 5) + 2 * 10 * 5


def test_a_call_whose_parts_do_not_belong_together_is_refused():
    with pytest.raises(ShapeError):
        Call(nq=1, nk=1, dk=1, dv=1, hq=3, hkv=2)
    with pytest.raises(ShapeError):
        Call(nq=1, nk=1, dk=1, dv=1, batch=2, key_lengths=(1,))
