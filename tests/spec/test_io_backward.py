"""Traffic of the emitted backward kernels: closed formulas against walked blocks, the paper's count, what must move."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spec import io_backward, io_backward_loops, io_counts, masks
from spec.io_backward import GRADIENTS, BackwardKernel, Form
from spec.io_counts import Sizes
from spec.io_kernels import Call

ALIGNMENTS = (None, masks.BOTTOM_RIGHT, masks.TOP_LEFT)
SUBSETS = [wanted for n in range(4) for wanted in itertools.combinations(GRADIENTS, n)]
KERNEL = BackwardKernel(
    br=64, bc=64, threads=256, d_padded=64, tile_sums=64 * 64, dq_column_warps=2, query_br=128, query_bc=32,
    query_threads=256,
)  # fmt: skip


def drawn(seed):
    """A ragged call with heads, lengths (some of them outside [0, Nk]) and a mask, a kernel, and what is wanted."""
    rng = np.random.default_rng(seed)
    batch, group, hkv = (int(x) for x in rng.integers(1, 4, 3))
    nq, nk = int(rng.integers(0, 70)), int(rng.integers(0, 70))
    lengths = tuple(int(x) for x in rng.integers(-2, nk + 3, batch)) if rng.random() < 0.6 else None
    call = Call(
        nq=nq, nk=nk, dk=int(rng.integers(1, 40)), dv=int(rng.integers(1, 40)), batch=batch, hq=group * hkv, hkv=hkv,
        causal=ALIGNMENTS[int(rng.integers(3))], key_lengths=lengths,
    )  # fmt: skip
    br, bc, query_br, query_bc = (int(x) for x in rng.integers(1, 30, 4))
    kernel = BackwardKernel(
        br=br, bc=bc, threads=32 * int(rng.integers(1, 9)), d_padded=48, tile_sums=br * 64,
        dq_column_warps=int(rng.integers(1, 4)), query_br=query_br, query_bc=query_bc, query_threads=64,
        gradient_itemsize=int(rng.choice((2, 4))),
    )  # fmt: skip
    wanted = SUBSETS[int(rng.integers(len(SUBSETS)))]
    form = Form(wanted=wanted, deterministic=bool(rng.random() < 0.5), dlse=bool(rng.random() < 0.5))
    return call, kernel, form


@pytest.mark.parametrize("seed", range(400))
def test_closed_formula_equals_the_walk_over_blocks(seed):
    call, kernel, form = drawn(seed)
    assert io_backward.backward(call, kernel, form) == io_backward_loops.backward(call, kernel, form)


@pytest.mark.parametrize("seed", range(100))
def test_gradients_are_written_whole_and_once_and_only_where_wanted(seed):
    call, kernel, form = drawn(seed)
    elements = {
        "dq": call.batch * call.hq * call.nq * call.dk,
        "dk": call.batch * call.hkv * call.nk * call.dk,
        "dv": call.batch * call.hkv * call.nk * call.dv,
    }
    written = io_backward.backward(call, kernel, form).written
    for name, n in elements.items():
        assert written[name] == (kernel.gradient_itemsize * n if name in form.wanted else 0)


@pytest.mark.parametrize("seed", range(200))
def test_no_form_moves_less_than_what_every_algorithm_must(seed):
    call, kernel, _ = drawn(seed)
    for deterministic in (False, True):
        moved = io_backward.backward(call, kernel, Form(deterministic=deterministic)).total
        assert moved >= io_backward.compulsory(call, itemsize=2)


def test_one_square_head_moves_the_paper_terms_and_the_stated_ones():
    n, d = 512, 64
    s, tiles = Sizes(nq=n, nk=n, dk=d, dv=d), n // 64
    got = io_backward.backward(Call(nq=n, nk=n, dk=d, dv=d), KERNEL)
    paper = io_counts.flash2_backward(s, 64)
    # Listing: D, O, dO; per key tile Q, dO, L, D, dQ (read and written); K, V, dK, dV; zeroed dQ.
    assert got.read["q"] == got.read["do"] - 2 * n * d == 2 * tiles * n * d
    assert got.read["k"] == got.read["v"] == got.written["dk"] == got.written["dv"] == 2 * n * d
    assert got.read["sums"] - 4 * n * d == got.written["sums"] - 4 * n * d == 4 * tiles * n * d
    elements = {2: 0, 4: 0}
    for side in (got.read, got.written):
        for name, moved in side.items():
            width = 4 if name in ("rows", "sums", "lse", "dlse") else 2
            elements[width] += moved // width
    # Beyond the listing: `prepare` reads LSE and rewrites it (2 n); a pass finishes dQ (2 n d and its statistics).
    finishing = 2 * n * d + 4 * 2 * n
    assert elements[2] + elements[4] == paper.total + 2 * n + finishing
    assert io_backward.flash2(Call(nq=n, nk=n, dk=d, dv=d), br=64, bc=64, itemsize=4) == 4 * paper.total


def test_a_deterministic_pass_sums_nothing_in_memory():
    call = Call(nq=300, nk=400, dk=64, dv=64, hq=4, hkv=2, causal=masks.BOTTOM_RIGHT)
    got = io_backward.backward(call, KERNEL, Form(deterministic=True))
    assert got.read["sums"] == got.written["sums"] == 0
    assert got.written["dq"] == 2 * 4 * 300 * 64


@pytest.mark.parametrize("seed", range(60))
def test_the_papers_counts_of_a_call_are_those_of_its_heads(seed):
    call, kernel, _ = drawn(seed)
    full = Call(**{**vars(call), "causal": None})
    sizes = [Sizes(nq=call.nq, nk=call.length(e), dk=call.dk, dv=call.dv) for e in range(call.batch)]
    tile = {"br": kernel.br, "bc": kernel.bc}
    assert io_backward.standard(call, itemsize=2) == 2 * call.hq * sum(
        io_counts.standard_backward(s).total for s in sizes
    )
    for ours, theirs in (
        (io_backward.flash2, io_counts.flash2_backward),
        (io_backward.flash1, io_counts.flash1_backward),
    ):
        want = call.hq * sum(theirs(s, kernel.bc).total for s in sizes)
        assert ours(full, itemsize=4, **tile) == 4 * want  # then statistics and sums are as wide as the rest
        assert ours(call, itemsize=2, **tile) <= ours(full, itemsize=2, **tile)
        assert 2 * want <= ours(full, itemsize=2, **tile) <= 4 * want


def test_lengths_outside_are_no_keys_and_no_statistics_for_dq():
    call = Call(nq=64, nk=64, dk=64, dv=64, key_lengths=(65,))
    got = io_backward.backward(call, KERNEL)
    assert got.read["k"] == got.read["q"] == 0 and got.read["rows"] == 0 and got.written["dq"] == 2 * 64 * 64
