"""Special values and poisoned memory, backward: what is not visible has no influence, and no NaN is hidden."""

import mmap

import numpy as np
import pytest

from tests.cpu import backward_judged, backward_units, units
from tests.cpu.test_simd import _machine as _machine  # skips what this machine cannot run
from tests.cpu.test_simd import dtypes, isas, package
from tests.cpu.test_simd_special import MAP_NORESERVE
from verify import special

EMPTY = [(2, 2, 1, 0, 70), (2, 2, 1, 70, 0), (1, 1, 1, 0, 0), (0, 2, 2, 5, 5), (1, 0, 2, 5, 70)]  # B, Hq, Hkv, Nq, Nk


@isas
@dtypes
def test_the_table_of_special_values_holds(isa, dtype):
    """Beside the table, NaN and infinities in dO and dLSE."""
    problem = package()
    bc = backward_units.plan(problem, isa, dtype).bc
    rng = np.random.default_rng(1)
    for case in special.table(dtype, d=64, dv=64, bc=bc, seed=1):
        q, k, v = (x.astype(units.DTYPE[dtype]) for x in (case.q, case.k, case.v))
        causal = False if case.causal == "none" else case.causal
        words = {"scale": case.scale, "causal": causal, "key_lengths": case.key_lengths}
        for spoilt in (None, np.nan, np.inf):
            dout = rng.standard_normal((*q.shape[:3], 64)).astype(q.dtype)
            dlse = rng.standard_normal(q.shape[:3]).astype(np.float64 if dtype == "float64" else np.float32)
            if spoilt is not None:
                dout[:, :, 3, 5] = spoilt
                dlse[:, :, 4] = spoilt
            given, got = backward_judged.run(problem, isa, dtype, q, k, v, dout, dlse, **words)
            backward_judged.assert_right(
                problem, isa, dtype, q, k, v, given, dout, dlse, got,
                name=f"{case.name} dO {spoilt}", end_to_end=False, **words,
            )  # fmt: skip


@isas
@dtypes
def test_empty_rows_add_nothing_whatever_they_hold(isa, dtype):
    """Rows before the first key: dQ = 0 and nothing added, with NaN in their q, dO, dLSE and O."""
    problem = package()
    q, k, v, dout, dlse = backward_judged.draw((1, 2, 1, 100, 60), 64, 64, dtype, dlse=True)
    (o, lse), want = backward_judged.run(problem, isa, dtype, q, k, v, dout, dlse, causal="bottom_right")
    assert np.isneginf(lse[:, :, :40]).all() and not np.isneginf(lse[:, :, 40:]).any()
    for x in (q, dout, dlse, o):
        x[:, :, :40] = np.nan
    got = backward_units.gradients(problem, isa, dtype, q, k, v, o, lse, dout, dlse, causal="bottom_right")
    assert (got[0][:, :, :40] == 0).all()
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@isas
@dtypes
@pytest.mark.parametrize(
    "shape", [(2, 2, 1, 0, 70), (2, 2, 1, 70, 0), (1, 1, 1, 0, 0), (0, 2, 2, 5, 5), (1, 0, 2, 5, 70)]
)
def test_empty_problems_give_zeros(isa, dtype, shape):
    problem = package()
    q, k, v, dout, dlse = backward_judged.draw(shape, 64, 64, dtype, dlse=True)
    o, lse = np.zeros_like(dout), np.full(dout.shape[:3], -np.inf, dlse.dtype)
    got = backward_units.gradients(problem, isa, dtype, q, k, v, o, lse, dout, dlse)
    assert all((x == 0).all() for x in got)


@pytest.mark.field("R005", "R006")
@isas
@dtypes
def test_what_lies_beyond_the_key_length_is_never_read(isa, dtype):
    """Bitwise equal with NaN beyond; dK and dV there are 0; also after a call that filled the scratch with NaN."""
    problem = package()
    q, k, v, dout, _ = backward_judged.draw((2, 4, 2, 70, 200), 64, 64, dtype)
    bad_k, bad_v = k.copy(), v.copy()
    lengths = (0, 131)
    for b, n in enumerate(lengths):
        bad_k[b, :, n:] = np.nan
        bad_v[b, :, n:] = np.nan
    for causal in (False, "bottom_right", "top_left"):
        words = {"causal": causal, "key_lengths": lengths}
        (o, lse), clean = backward_judged.run(problem, isa, dtype, q, k, v, dout, **words)
        backward_judged.run(problem, isa, dtype, q, bad_k, bad_v, dout)
        got = backward_units.gradients(problem, isa, dtype, q, bad_k, bad_v, o, lse, dout, **words)
        assert all(np.array_equal(a, b) for a, b in zip(got, clean, strict=True))
        for x in got[1:]:
            assert (x[0] == 0).all() and (x[1, :, 131:] == 0).all()


@isas
@dtypes
def test_masked_keys_and_values_have_no_influence(isa, dtype):
    """Any K or V at a key that a row does not see: the bits of its dQ, and of dK and dV of other keys, do not move."""
    problem = package()
    q, k, v, dout, _ = backward_judged.draw((1, 2, 2, 60, 150), 64, 64, dtype)
    (o, lse), clean = backward_judged.run(problem, isa, dtype, q, k, v, dout, causal="top_left")
    for value in (np.nan, np.inf, -np.inf, 60000.0):
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[:, :, 59:] = value  # 59: seen by the last row only
        bad_v[:, :, 59:] = value
        got = backward_units.gradients(problem, isa, dtype, q, bad_k, bad_v, o, lse, dout, causal="top_left")
        assert np.array_equal(got[0][:, :, :59], clean[0][:, :, :59])
        assert (got[1][:, :, 60:] == 0).all() and (got[2][:, :, 60:] == 0).all()


@isas
@dtypes
def test_a_lse_that_does_not_belong_to_the_scores_shows(isa, dtype):
    """A weight beyond the format is an infinity, not a wrapped exponent; LSE = NaN or +inf is not a number."""
    problem = package()
    q, k, v, dout, _ = backward_judged.draw((1, 1, 1, 4, 9), 64, 64, dtype)
    o, lse = backward_judged.forward(problem, isa, dtype, q, k, v)
    lse[0, 0] = (-1e5, np.nan, np.inf, -1e30)
    dq, _, dv = backward_units.gradients(problem, isa, dtype, q, k, v, o, lse, dout)
    assert not np.isfinite(dq.astype(np.float64)).any() and not np.isfinite(dv.astype(np.float64)).any()


@isas
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_scale_below_the_normal_range_gives_equal_weights(isa, dtype):
    problem = package()
    q, k, v, dout, _ = backward_judged.draw((1, 1, 1, 20, 100), 64, 64, dtype)
    for scale in (1e-30, 1e-40, 1e-300, 5e-324):
        _, got = backward_judged.run(problem, isa, dtype, q, k, v, dout, scale=scale)
        mean = dout[0, 0].sum(axis=0) / 100
        assert np.abs(got[2][0, 0] - mean).max() <= 64 * np.finfo(q.dtype).eps
        assert np.abs(got[0]).max() <= 1e3 * scale and np.abs(got[1]).max() <= 1e3 * scale


@isas
@dtypes
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "row"])
def test_offsets_are_64_bit(isa, dtype, axis):
    """Batches, heads or rows 2^32 elements apart, in memory of which hardly a page is ever touched."""
    problem = package()
    far = (1 << 32) + 64
    q, k, v, dout, dlse = backward_judged.draw((2, 2, 2, 2, 2), 64, 64, dtype, dlse=True)
    (o, lse), want = backward_judged.run(problem, isa, dtype, q, k, v, dout, dlse)

    def spread(x):
        size = (far + 1024) * x.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        home = np.frombuffer(mmap.mmap(-1, size, flags=flags), x.dtype)
        steps = [256, 128, 64]
        steps[axis] = far
        view = np.lib.stride_tricks.as_strided(home, x.shape, [n * x.itemsize for n in (*steps, 1)[: x.ndim]])
        view[...] = x
        return view

    tensors = [spread(x) for x in (q, k, v, o, lse, dout, dlse)]
    out = [spread(np.full_like(x, np.nan)) for x in (q, k, v)]
    backward_units.gradients(problem, isa, dtype, *tensors, out=out)
    assert all(np.array_equal(a, b) for a, b in zip(out, want, strict=True))
