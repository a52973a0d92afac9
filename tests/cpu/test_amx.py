"""The AMX kernels compute attention, at sizes that straddle every edge: panels, key chunks, tiles, padding, planes.

Kernels are compiled from the emitted unit alone and called through their C interface (amx_unit.py); results are judged
by the bound that verify derives from the arithmetic of the path.
"""

import itertools

import numpy as np
import pytest

from tests.cpu import amx_unit, judged, units
from tests.cpu.test_simd import draw
from verify import inputs

pytestmark = pytest.mark.skipif(bool(amx_unit.machine_lacks()), reason=f"this machine lacks {amx_unit.machine_lacks()}")

# d, dv, Br, Bc: K in place and copied; columns of half a tile; one panel and several; one chunk of keys and several.
PACKAGES = [(64, 64, 96, 64), (40, 72, 32, 32), (8, 24, 64, 96), (256, 16, 128, 32), (96, 200, 64, 128)]
# B, Hq, Hkv, Nq, Nk: below, at and above a panel, a tile and a chunk of keys; shared K/V heads; decode.
SHAPES = [
    (1, 2, 1, 97, 65),
    (2, 6, 2, 5, 77),
    (1, 4, 1, 1, 129),
    (1, 1, 1, 193, 3),
    (1, 2, 2, 64, 64),
    (2, 3, 3, 17, 1),
    (1, 8, 2, 20, 24),
    (1, 1, 1, 300, 210),
    (1, 1, 1, 33, 0),
]

dtypes = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


def package(d=64, dv=64, br=96, bc=64, **more):
    return units.make_problem(d, dv, br=br, bc=bc, dtypes=("bf16", "fp16"), **more)


def assert_right(problem, dtype, q, k, v, got, **call):
    return judged.assert_right(problem, "amx", dtype, q, k, v, got, **call)


@pytest.mark.field("R012", "R030", "R053", "R060", "R061", "R063", "R105")
@pytest.mark.parametrize("sizes", PACKAGES, ids=lambda s: "d{}_dv{}_br{}_bc{}".format(*s))
@dtypes
def test_errors_are_within_the_derived_bound(dtype, sizes):
    problem = package(*sizes)
    for number, shape in enumerate(SHAPES):
        causal = (False, "bottom_right", "top_left")[number % 3]
        rng = np.random.default_rng(number)
        for mask, lengths in (
            (causal, None),
            (False if causal else "bottom_right", rng.integers(0, shape[4] + 1, shape[0])),
        ):
            q, k, v = draw(shape, *sizes[:2], dtype)
            got = amx_unit.attention(problem, dtype, q, k, v, causal=mask, key_lengths=lengths)
            assert_right(problem, dtype, q, k, v, got, causal=mask, key_lengths=lengths, name=f"{shape} {mask}")


@dtypes
def test_inputs_that_attack_the_algorithm_stay_within_the_bound(dtype):
    """Every family of verify.inputs that needs no mask beyond those of the kernel, one and several tiles long."""
    problem = package()
    for (name, family), (nq, nk) in itertools.product(inputs.FAMILIES.items(), ((3, 65), (50, 200))):
        x = family(nq, nk, 64, dtype=dtype, seed=3)
        causal = {"causal_bottom_right": "bottom_right", "causal_top_left": "top_left"}.get(name, False)
        if x.visible is not None and not causal:
            continue
        q, k, v = (a.astype(units.DTYPE[dtype])[None, None] for a in x)
        call = {"scale": x.scale, "causal": causal, "key_lengths": None if x.length is None else [x.length]}
        got = amx_unit.attention(problem, dtype, q, k, v, **call)
        assert_right(problem, dtype, q, k, v, got, name=f"{name} {nq}x{nk}", **call)


@pytest.mark.field("R033", "R057", "R078")
@dtypes
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype):
    """The rows of a panel move their references together, but by powers of two: no row feels its neighbours."""
    problem = package()
    q, k, v = draw((2, 4, 2, 130, 150), 64, 64, dtype)
    q[:, :, ::7] *= 4  # some rows need a new reference more often
    o, lse = amx_unit.attention(problem, dtype, q, k, v)
    for b, h, i in ((0, 0, 0), (1, 3, 129), (0, 2, 95), (1, 1, 96), (1, 2, 31)):
        one = np.s_[b : b + 1, h // 2 : h // 2 + 1]
        alone = amx_unit.attention(problem, dtype, q[b : b + 1, h : h + 1, i : i + 1], k[one], v[one])
        assert np.array_equal(alone[0][0, 0, 0], o[b, h, i]) and alone[1][0, 0, 0] == lse[b, h, i]


@dtypes
def test_the_rows_of_a_tile_and_the_l2_block_do_not_change_a_bit(dtype):
    """Both only order the work; Bc alone decides where sums are cut."""
    q, k, v = draw((1, 2, 1, 200, 700), 64, 64, dtype)
    want = amx_unit.attention(package(br=32, sram=192 << 10), dtype, q, k, v, causal=True)
    for br, sram in ((128, 256 << 10), (256, 2 << 20)):
        got = amx_unit.attention(package(br=br, sram=sram), dtype, q, k, v, causal=True)
        assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])


@pytest.mark.field("R085", "R110", "R111")
@dtypes
def test_workers_share_the_work_without_changing_a_bit(dtype):
    problem = package(br=32)
    q, k, v = draw((2, 4, 2, 150, 270), 64, 64, dtype)
    want = amx_unit.attention(problem, dtype, q, k, v, causal=True, key_lengths=[270, 99])
    for workers in (2, 3, 2, 3):
        got = amx_unit.attention(problem, dtype, q, k, v, causal=True, key_lengths=[270, 99], workers=workers)
        assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])


@pytest.mark.field("R014")
@dtypes
def test_masked_and_unmasked_paths_agree_bitwise(dtype):
    """Bottom-right causal lets the last row see every key, and so does no mask: only the code path differs."""
    problem = package()
    q, k, v = draw((1, 2, 2, 40, 128), 64, 64, dtype)
    for n in (1, 7, 40):
        full = amx_unit.attention(problem, dtype, q[:, :, :n], k, v)
        last = amx_unit.attention(problem, dtype, q[:, :, :n], k, v, causal=True)
        assert np.array_equal(full[0][:, :, -1], last[0][:, :, -1])
        assert np.array_equal(full[1][:, :, -1], last[1][:, :, -1])
    short = amx_unit.attention(problem, dtype, q, k[:, :, :90].copy(), v[:, :, :90].copy())
    masked = amx_unit.attention(problem, dtype, q, k, v, key_lengths=[90])
    assert np.array_equal(short[0], masked[0]) and np.array_equal(short[1], masked[1])


@dtypes
def test_powers_of_two_and_signs_of_v_pass_through_exactly(dtype):
    problem = package()
    q, k, v = draw((1, 2, 1, 50, 140), 64, 64, dtype)
    v = np.exp2(v.astype(np.float64) / 8).astype(v.dtype)  # near 1: no result is subnormal, in fp16 either
    o, lse = amx_unit.attention(problem, dtype, q, k, v)
    for factor in (2.0, -1.0, -0.25):
        again = amx_unit.attention(problem, dtype, q, k, (v.astype(np.float64) * factor).astype(v.dtype))
        assert np.array_equal(again[0].astype(np.float64), o.astype(np.float64) * factor)
        assert np.array_equal(again[1], lse)


@dtypes
def test_constant_v_comes_back_exactly(dtype):
    """bf16: numerator and denominator hold the same rounded weights. fp16: P loses less than half an ulp."""
    problem = package()
    q, k, v = draw((1, 2, 1, 50, 140), 64, 64, dtype)
    v[:] = 1.5
    o, _ = amx_unit.attention(problem, dtype, q, k, v)
    assert (o == v[0, 0, 0, 0]).all()


@dtypes
def test_the_trace_of_the_debug_form_is_the_state_after_each_key_tile(dtype):
    """Tile j leaves the l of a run on the keys of tiles 0..j, bit for bit, relative to a reference of its own."""
    problem = package(debug=True)
    bc = amx_unit.plan(problem, dtype).bc
    q, k, v = draw((1, 4, 2, 70, 3 * bc - 5), 64, 64, dtype)
    for rows, causal in ((70, False), (70, "top_left"), (5, "bottom_right")):
        length = 2 * bc + 9
        call = {"causal": causal, "key_lengths": [length]}
        queries = q[:, :, :rows]
        o, lse, trace = amx_unit.attention(problem, dtype, queries, k, v, trace=True, **call)
        assert o.dtype == np.float32
        offset = {False: k.shape[2], "top_left": 0, "bottom_right": k.shape[2] - rows}[causal]
        seen = np.minimum(length, np.arange(rows) + 1 + offset)
        for j in range(trace.shape[3]):
            m, total, weighted = (trace[..., j, part].astype(np.float64) for part in (0, 1, np.s_[2:]))
            untouched = seen <= j * bc
            assert np.isnan(trace[:, :, untouched, j]).all() and not np.isnan(trace[:, :, ~untouched, j]).any()
            whole_log2 = m / np.log(2)
            assert (np.abs(whole_log2 - np.round(whole_log2)) < 1e-4)[:, :, ~untouched].all()
            shorter = {**call, "key_lengths": [min(length, (j + 1) * bc)]}
            before = amx_unit.attention(problem, dtype, queries, k, v, **shorter)
            unit = np.finfo(np.float32).eps
            assert (np.abs(m + np.log(total) - before[1]) <= 4 * unit * (1 + np.abs(m)))[:, :, ~untouched].all()
            # O of the trace over its own l: apart from the rounding of P, which l does not have, it is the output.
            p_unit = {"bf16": 2.0**-8, "fp16": 2.0**-16}[dtype]
            allowed = 2 * p_unit * np.abs(v).astype(np.float64).max()
            assert (np.abs(weighted / total[..., None] - before[0]) <= allowed)[:, :, ~untouched].all()
        assert_right(problem, dtype, queries, k, v, (o, lse), **call)


def test_a_package_of_one_type_carries_one_kernel():
    for dtype, other in (("bf16", "fp16"), ("fp16", "bf16")):
        files = amx_unit.sources(units.make_problem(64, 64, dtypes=("float32", dtype)))
        assert f"forward_amx_{dtype}.h" in files and f"forward_amx_{other}.h" not in files
        assert other.encode() + b"::" not in files["forward_cpu_amx.cpp"]
