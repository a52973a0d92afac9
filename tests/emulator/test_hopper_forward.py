"""Warp-specialised Hopper kernels compute exactly what they should in every schedule, with no finding.

Queries are rows with one 1, keys are integers 0..12, values integers -4..4, and the scale makes one unit of score one
power of two: all weights are powers of two, and all sums fit float32, so any order of accumulation gives the same bits.
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from tests.emulator import hopper
from verify.emulator.emulator import ACCUMULATIONS, SCHEDULES, Schedule, guarded, guarded_copy

SCALE = np.float32(np.log(2))  # times log2(e) in the kernel: one
SHAPES = [(128, 128), (70, 133), (133, 70), (1, 1), (200, 65), (65, 256)]
U = 2.0**-24


def inputs(seed: int, heads: int, nq: int, nk: int, d: int):
    rng = np.random.default_rng(seed)
    q = np.zeros((heads, nq, d), np.float32)
    np.put_along_axis(q, rng.integers(0, d, (heads, nq, 1)), 1.0, axis=2)
    k = rng.integers(0, 13, (heads, nk, d)).astype(np.float32)
    v = rng.integers(-4, 5, (heads, nk, d)).astype(np.float32)
    return q, k, v


def attention(q, k, v, causal):
    """Output as bf16 bits and log-sum-exp in float64; the float32 operations that round are the kernel's own two."""
    scores = np.einsum("hqd,hkd->hqk", q.astype(np.float64), k.astype(np.float64))
    nq, nk = scores.shape[1:]
    if causal:
        scores[:, np.arange(nk)[None] > np.arange(nq)[:, None] + nk - nq] = -np.inf
    m = scores.max(axis=-1, keepdims=True)
    p = np.exp2(scores - np.where(np.isneginf(m), 0.0, m))
    total = p.sum(axis=-1, keepdims=True)
    o = p @ v.astype(np.float64)
    assert (total * 2.0**12 < 2**24).all() and (np.abs(o) * 2.0**12 < 2**24).all()  # exact in float32
    with np.errstate(divide="ignore"):
        inverse = np.where(total == 0, np.float32(0), np.float32(1) / total.astype(np.float32))
        lse = np.where(total == 0, -np.inf, m * np.log(2) + np.log(total))
    return hopper.to_bf16(o.astype(np.float32) * inverse.astype(np.float32)), lse[..., 0]


def lse_bound(lse, nk):
    """m * 1 * ln2 with m <= 12: the constant and two products round, each by u; logf <= ln(nk) is within 2 u; so is the
    sum within u. A second u of each covers the products of errors."""
    return 2 * U * (3 * 12 * np.log(2) + 2 * np.log(nk) + np.abs(lse))


def run(name, q, k, v, causal, schedule, *, blocks=None, options=(), check=True):
    emulator = hopper.emulator(name)
    arrays = [guarded_copy(hopper.to_bf16(x)) for x in (q, k, v)]
    o, lse = guarded(q.shape, np.uint16), guarded(q.shape[:2], np.float32)
    emulator.clear()
    emulator.configure(schedule, check=check)
    for option, value in options:
        emulator.option(option, value)
    for label, array in zip("qkv", arrays, strict=True):
        emulator.register(label, array)
    emulator.register("o", o, once=True)
    emulator.register("lse", lse, once=True)
    more = []
    if blocks is not None:
        counter = guarded_copy(np.zeros(1, np.uint32))
        emulator.register("counter", counter, writable=True)
        more = [counter]
    sizes = (q.shape[0], q.shape[1], k.shape[1], ctypes.c_float(SCALE), int(causal))
    grid = () if blocks is None else (blocks,)
    done = emulator.launch(name, *arrays, o, lse, *more, *sizes, *grid, None)
    for option, _ in options:
        emulator.option(option, 0)
    return done, o, lse


def assert_exact(name, q, k, v, causal, schedule, **words):
    done, o, lse = run(name, q, k, v, causal, schedule, **words)
    done.check(f"{name} {q.shape} {k.shape} causal={causal} {schedule}")
    want, want_lse = attention(q, k, v, causal)
    np.testing.assert_array_equal(o, want)
    finite = np.isfinite(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~finite)
    assert (np.abs(lse[finite] - want_lse[finite]) <= lse_bound(want_lse[finite], k.shape[1])).all()
    return done


def test_the_scale_makes_one_unit_of_score_a_power_of_two():
    assert SCALE * np.float32(1.44269504088896) == np.float32(1)


KERNEL_CASES = [("hopper_forward_d64", 64, None), ("hopper_forward_d128", 128, 1), ("hopper_forward_d128", 128, 3)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("name, d, blocks", KERNEL_CASES, ids=["d64", "d128_one_block", "d128_three_blocks"])
def test_forward_is_exact_in_every_schedule(name, d, blocks, schedule):
    for (nq, nk), causal in itertools.product(SHAPES, (False, True)):
        q, k, v = inputs(nq + nk, 2, nq, nk, d)
        assert_exact(name, q, k, v, causal, schedule, blocks=blocks)


@pytest.mark.parametrize("name, d, blocks", KERNEL_CASES[:2], ids=["d64", "d128"])
def test_no_random_schedule_gives_a_finding_or_another_result(name, d, blocks):
    q, k, v = inputs(5, 1, 100, 200, d)
    for seed in range(12):
        assert_exact(name, q, k, v, bool(seed % 2), Schedule("random", "random", seed=seed), blocks=blocks)


@pytest.mark.parametrize("model", range(len(ACCUMULATIONS)), ids=ACCUMULATIONS)
def test_exact_sums_are_the_same_in_every_model_of_accumulation(model):
    q, k, v = inputs(6, 1, 130, 190, 64)
    assert_exact("hopper_forward_d64", q, k, v, True, SCHEDULES[0], options=[("mma", model)])


def test_counters_are_those_of_the_algorithm():
    heads, nq, nk, d = 2, 200, 133, 64
    done = assert_exact("hopper_forward_d64", *inputs(7, heads, nq, nk, d), False, SCHEDULES[0])
    row_tiles, key_tiles, warps = 2, 3, 8
    assert done.bytes("q") == (heads * nq * d * 2, 0)
    assert done.bytes("k") == done.bytes("v") == (row_tiles * heads * nk * d * 2, 0)
    assert done.bytes("o") == (0, heads * nq * d * 2) and done.bytes("lse") == (0, heads * nq * 4)
    blocks = row_tiles * heads
    assert done.counters["wgmma"] == blocks * warps * key_tiles * (d // 16 + 64 // 16)
    assert done.counters["tma"] == blocks * (2 + 2 * key_tiles + 2)  # Q and O by warpgroup
    phases, wavefronts = done.counters["bank"]["stmatrix"]
    assert phases == wavefronts == blocks * warps * d // 16 * 4  # no bank conflict


def test_the_persistent_kernel_takes_every_tile_once_and_one_more_per_block():
    q, k, v = inputs(8, 3, 130, 64, 128)
    for blocks in (1, 4):
        done = assert_exact("hopper_forward_d128", q, k, v, False, SCHEDULES[0], blocks=blocks)
        assert done.bytes("counter") == ((9 + blocks) * 4,) * 2


def test_results_are_the_same_without_the_checker():
    q, k, v = inputs(9, 1, 128, 192, 64)
    for schedule in SCHEDULES:
        assert_exact("hopper_forward_d64", q, k, v, False, schedule, check=False)


def test_an_increase_to_fewer_registers_than_stated_is_found():
    q, k, v = inputs(10, 1, 64, 64, 64)
    done, _, _ = run("hopper_forward_d64", q, k, v, False, SCHEDULES[0], options=[("registers_per_thread", 248)])
    assert [one.kind for one in done.findings] == ["setmaxnreg"]
    assert "setmaxnreg.inc to 240" in done.findings[0].sentence and "has 248" in done.findings[0].sentence


# ---- Reductions


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("way", range(4), ids=["tensor", "linear", "vector", "scalar"])
def test_split_k_adds_every_slice_once(way, schedule):
    k = 256
    emulator = hopper.emulator("hopper_reduce")
    for trans_a in (False, True):
        rng = np.random.default_rng(way)
        a, b = (rng.integers(-8, 9, (64, k)).astype(np.float32) for _ in range(2))
        arrays = [guarded_copy(hopper.to_bf16(x)) for x in (a.T if trans_a else a, b)]
        c = guarded_copy(np.full((64, 64), 3, np.float32))
        emulator.clear()
        emulator.configure(schedule)
        for label, array in zip("ab", arrays, strict=True):
            emulator.register(label, array)
        emulator.register("c", c, writable=True)
        done = emulator.launch("hopper_split_k", *arrays, c, k, int(trans_a), way, None).check()
        np.testing.assert_array_equal(c, a @ b.T + 3)
        assert done.bytes("c") == (4 * 64 * 64 * 4,) * 2  # a reduction reads and writes, once per slice


def test_the_order_of_reductions_follows_the_seed():
    """Terms of very different size: the float32 sum depends on the order of the blocks."""
    k = 512
    a = np.ones((64, k), np.float32)
    b = np.repeat(2.0 ** np.random.default_rng(0).permutation(np.arange(0, 32, 4)), 64)[None] * np.ones((64, 1))
    arrays = [guarded_copy(hopper.to_bf16(x.astype(np.float32))) for x in (a, b)]
    emulator = hopper.emulator("hopper_reduce")
    sums = set()
    for seed in range(8):
        c = guarded_copy(np.full((64, 64), 0.3, np.float32))
        emulator.clear()
        emulator.configure(Schedule("random", "random", seed=seed))
        for label, array in zip("ab", arrays, strict=True):
            emulator.register(label, array)
        emulator.register("c", c, writable=True)
        emulator.launch("hopper_split_k", *arrays, c, k, 0, 3, None).check()
        sums.add(float(c[0, 0]))
    assert len(sums) > 1
