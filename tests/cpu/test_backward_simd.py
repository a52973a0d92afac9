"""The backward vector kernels compute the gradients: every instruction set and type, at sizes that straddle edges.

Kernels are compiled from the emitted unit alone and called through their C interface; O and LSE come from the forward
unit. Results are judged by the bounds at that O and LSE, and end to end.
"""

import itertools

import numpy as np
import pytest

from tests.cpu import backward_judged, backward_units, units
from tests.cpu.test_simd import _machine as _machine  # skips what this machine cannot run
from tests.cpu.test_simd import dtypes, isas, package
from verify import inputs

# d, dv, Br, Bc: 2 panels of 3 vectors; 2 vectors or 1, rows that are not whole vectors. Narrower ones:
# test_backward_programs.py.
PACKAGES = [(64, 64, 96, 64), (40, 72, 32, 32)]
# B, Hq, Hkv, Nq, Nk: below, at and above a panel, a tile and a block; several query heads per K/V head; one row.
SHAPES = [
    (1, 2, 1, 97, 65),
    (2, 6, 2, 5, 77),
    (1, 4, 1, 1, 129),
    (1, 1, 1, 193, 3),
    (2, 1, 1, 17, 1),
    (1, 2, 1, 100, 24),
    (1, 1, 1, 130, 150),
]


@pytest.mark.parametrize("sizes", PACKAGES, ids=lambda s: "d{}_dv{}_br{}_bc{}".format(*s))
@dtypes
@isas
def test_errors_are_within_both_derived_bounds(isa, dtype, sizes):
    problem = package(*sizes)
    for number, shape in enumerate(SHAPES):
        causal = (False, "bottom_right", "top_left")[number % 3]
        lengths = np.random.default_rng(number).integers(0, shape[4] + 1, shape[0])
        masks = (causal, None), (False if causal else "bottom_right", lengths)
        for mask, keys in masks[: 1 + (sizes == PACKAGES[0])]:
            q, k, v, dout, dlse = backward_judged.draw(shape, *sizes[:2], dtype, dlse=number % 2 == 0)
            words = {"causal": mask, "key_lengths": keys}
            given, got = backward_judged.run(problem, isa, dtype, q, k, v, dout, dlse, **words)
            _, outside = backward_judged.assert_right(
                problem, isa, dtype, q, k, v, given, dout, dlse, got,
                name=f"{shape} {words}", end_to_end=keys is None, **words,
            )  # fmt: skip
            assert not outside


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@isas
def test_the_debug_form_stores_gradients_unrounded(isa, dtype):
    problem = package(40, 72, 32, 32, debug=True, dtypes=("bf16", "fp16"))
    q, k, v, dout, dlse = backward_judged.draw((1, 4, 2, 70, 50), 40, 72, dtype, dlse=True)
    given, got = backward_judged.run(problem, isa, dtype, q, k, v, dout, dlse, causal=True)
    assert {x.dtype for x in got} == {np.dtype(np.float32)}
    backward_judged.assert_right(problem, isa, dtype, q, k, v, given, dout, dlse, got, causal=True, end_to_end=False)


@dtypes
@isas
def test_inputs_that_attack_the_algorithm_stay_within_the_bound(isa, dtype):
    """Every family of verify.inputs that needs no mask beyond those of the kernel; dO aligned with a value, too."""
    problem = package()
    judged = 0
    for (name, family), (nq, nk) in itertools.product(inputs.FAMILIES.items(), ((3, 65), (50, 130))):
        x = family(nq, nk, 64, dtype=dtype, seed=3)
        causal = {"causal_bottom_right": "bottom_right", "causal_top_left": "top_left"}.get(name, False)
        if x.visible is not None and not causal:
            continue
        q, k, v = (a.astype(units.DTYPE[dtype])[None, None] for a in x)
        words = {"scale": x.scale, "causal": causal, "key_lengths": None if x.length is None else [x.length]}
        rng = np.random.default_rng(nq)
        for dout in (rng.standard_normal((1, 1, nq, 64)), np.broadcast_to(np.nan_to_num(v[:, :, :1]), (1, 1, nq, 64))):
            dout = dout.astype(units.DTYPE[dtype])
            given, got = backward_judged.run(problem, isa, dtype, q, k, v, dout, **words)
            _, outside = backward_judged.assert_right(
                problem,
                isa,
                dtype,
                q,
                k,
                v,
                given,
                dout,
                None,
                got,
                name=f"{name} {nq}x{nk}",
                end_to_end=False,
                **words,
            )
            judged += 1 - outside
    assert judged > 30


@pytest.mark.parametrize("causal", [False, "bottom_right"])
@isas
@dtypes
def test_bits_do_not_depend_on_the_workers(isa, dtype, causal):
    """One head and several: tiles of a head run side by side, and blocks of keys are added to in turn."""
    problem = package()
    for shape in ((1, 1, 1, 700, 330), (2, 4, 2, 210, 130)):
        q, k, v, dout, dlse = backward_judged.draw(shape, 64, 64, dtype, dlse=True)
        o, lse = backward_judged.forward(problem, isa, dtype, q, k, v, causal=causal)
        args = (problem, isa, dtype, q, k, v, o, lse, dout, dlse)
        want = backward_units.gradients(*args, causal=causal)
        for workers in (2, 3, 8, 2, 3):
            got = backward_units.gradients(*args, causal=causal, workers=workers)
            assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@isas
@dtypes
def test_a_tile_adds_to_dk_and_dv_only_after_its_predecessor(isa, dtype):
    problem = package()
    q, k, v, dout, _ = backward_judged.draw((1, 1, 1, 300, 70), 64, 64, dtype)
    o, lse = backward_judged.forward(problem, isa, dtype, q, k, v)
    assert not backward_units.finishes_without_the_first_tile(problem, isa, dtype, q, k, v, o, lse, dout)


@isas
@dtypes
def test_any_subset_of_gradients_has_the_same_bits(isa, dtype):
    problem = package()
    q, k, v, dout, _ = backward_judged.draw((1, 4, 2, 110, 90), 64, 64, dtype)
    o, lse = backward_judged.forward(problem, isa, dtype, q, k, v, causal=True)
    args = (problem, isa, dtype, q, k, v, o, lse, dout)
    every = backward_units.gradients(*args, causal=True)
    for wanted in ("q", "k", "v", "qk", "qv", "kv", ""):
        some = backward_units.gradients(*args, causal=True, wanted=wanted)
        for name, a, b in zip("qkv", some, every, strict=True):
            assert np.array_equal(a, b) if name in wanted else np.isnan(a.astype(np.float64)).all()


@isas
@dtypes
def test_a_head_has_the_same_bits_alone_and_in_any_batch(isa, dtype):
    problem = package()
    q, k, v, dout, dlse = backward_judged.draw((2, 4, 2, 130, 150), 64, 64, dtype, dlse=True)
    given, got = backward_judged.run(problem, isa, dtype, q, k, v, dout, dlse)
    for b, g in ((0, 1), (1, 0)):
        queries, keys = np.s_[b : b + 1, 2 * g : 2 * g + 2], np.s_[b : b + 1, g : g + 1]
        alone = backward_units.gradients(
            problem, isa, dtype, q[queries], k[keys], v[keys], given[0][queries], given[1][queries],
            dout[queries], dlse[queries],
        )  # fmt: skip
        for a, b_, at in zip(alone, got, (queries, keys, keys), strict=True):
            assert np.array_equal(a, b_[at])


@dtypes
def test_v3_and_v4_give_the_same_bits(dtype):
    """Both use FMA and one order of summation, so a product that the compiler left unfused would show here."""
    if not units.machine_runs("v4"):
        pytest.skip("this machine does not have the instructions of v4")
    problem = package()
    q, k, v, dout, _ = backward_judged.draw((1, 4, 2, 130, 150), 64, 64, dtype)
    results = []
    for isa in ("v3", "v4"):
        given, got = backward_judged.run(problem, isa, dtype, q, k, v, dout, causal=True)
        results.append((*given, *got))
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


@dtypes
@isas
def test_doubling_dout_doubles_every_gradient_exactly(isa, dtype):
    """A power of two commutes with every rounding."""
    problem = package()
    q, k, v, dout, _ = backward_judged.draw((1, 2, 1, 60, 70), 64, 64, dtype)
    (o, lse), once = backward_judged.run(problem, isa, dtype, q, k, v, dout, causal=True)
    twice = backward_units.gradients(problem, isa, dtype, q, k, v, o, lse, dout + dout, causal=True)
    for a, b in zip(once, twice, strict=True):
        normal = np.abs(a.astype(np.float64)) > 2.0**-13 if dtype == "fp16" else np.full(a.shape, True)
        assert np.array_equal((a + a)[normal], b[normal])
