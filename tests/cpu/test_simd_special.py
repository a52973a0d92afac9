"""Special values and poisoned memory: what is not visible has no influence, what is not a number is not hidden."""

import mmap

import numpy as np
import pytest

from tests.cpu import judged, units
from tests.cpu.test_simd import _machine as _machine  # skips what this machine cannot run
from tests.cpu.test_simd import draw, dtypes, isas, package
from verify import special

MAP_NORESERVE = 0x4000  # Linux; not named by Python's mmap before 3.13


@pytest.mark.field("R001", "R025", "R026", "R037", "R056")
@isas
@dtypes
def test_the_table_of_special_values_holds(isa, dtype):
    problem = package()
    bc = units.plan(problem, isa, dtype).bc
    for case in special.table(dtype, d=64, dv=64, bc=bc, seed=1):
        q, k, v = (x.astype(units.DTYPE[dtype]) for x in (case.q, case.k, case.v))
        causal = False if case.causal == "none" else case.causal
        got = units.attention(
            problem, isa, dtype, q, k, v, scale=case.scale, causal=causal, key_lengths=case.key_lengths
        )
        judged.assert_right(
            problem, isa, dtype, q, k, v, got,
            scale=case.scale, causal=causal, key_lengths=case.key_lengths, name=case.name,
        )  # fmt: skip


@isas
@dtypes
def test_a_nan_of_any_payload_stays(isa, dtype):
    """2^n is added to the exponent nowhere: a payload must not carry a NaN over into a number."""
    problem = package()
    kind = {"float32": np.uint32, "float64": np.uint64, "bf16": np.uint16, "fp16": np.uint16}[dtype]
    bits = 8 * np.dtype(kind).itemsize
    fraction = {"float32": 23, "float64": 52, "bf16": 7, "fp16": 10}[dtype]
    quiet = ((1 << (bits - 1)) - 1) ^ ((1 << (fraction - 1)) - 1)
    for payload in (0, 1, 2, (1 << (fraction - 1)) - 1):
        for sign in (0, 1 << (bits - 1)):
            q, k, v = draw((1, 1, 1, 3, 70), 64, 64, dtype)
            q.view(kind)[0, 0, 1, 5] = quiet | payload | sign
            o, lse = (x.astype(np.float64) for x in units.attention(problem, isa, dtype, q, k, v))
            assert np.isnan(o[0, 0, 1]).all() and np.isnan(lse[0, 0, 1])
            assert np.isfinite(o[0, 0, [0, 2]]).all() and np.isfinite(lse[0, 0, [0, 2]]).all()


@pytest.mark.field("R005", "R006", "R007")
@isas
@dtypes
def test_what_lies_beyond_the_key_length_is_never_read(isa, dtype):
    """Bitwise equal to the trimmed call, with NaN beyond; also right after a call that filled the scratch with NaN."""
    problem = package()
    q, k, v = draw((2, 4, 2, 70, 200), 64, 64, dtype)
    bad_k, bad_v = k.copy(), v.copy()
    lengths = (0, 131)
    for b, n in enumerate(lengths):
        bad_k[b, :, n:] = np.nan
        bad_v[b, :, n:] = np.nan
    for causal in (False, "bottom_right", "top_left"):
        clean = units.attention(problem, isa, dtype, q, k, v, causal=causal, key_lengths=lengths)
        units.attention(problem, isa, dtype, q, bad_k, bad_v)
        poisoned = units.attention(problem, isa, dtype, q, bad_k, bad_v, causal=causal, key_lengths=lengths)
        assert np.array_equal(clean[0], poisoned[0]) and np.array_equal(clean[1], poisoned[1])
        assert (poisoned[0][0] == 0).all() and (poisoned[1][0] == -np.inf).all()


@pytest.mark.field("R005")
@isas
@dtypes
def test_masked_keys_have_no_influence(isa, dtype):
    """Any K at a masked position, and any V that no row of the tile sees: the bits of the result do not move."""
    problem = package()
    q, k, v = draw((1, 2, 2, 60, 150), 64, 64, dtype)
    clean = units.attention(problem, isa, dtype, q, k, v, causal="top_left")
    for value in (np.nan, np.inf, -np.inf, 60000.0):
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[:, :, 60:] = value
        bad_v[:, :, 60:] = value
        bad_k[:, :, 59] = value  # seen by the last row only
        dirty = units.attention(problem, isa, dtype, q, bad_k, bad_v, causal="top_left")
        assert np.array_equal(clean[0][:, :, :59], dirty[0][:, :, :59])
        assert np.array_equal(clean[1][:, :, :59], dirty[1][:, :, :59])


@pytest.mark.field("R002")
@isas
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_that_meet_their_first_key_late_stay_finite(isa, dtype):
    """Equal logits and constant V: every row gives that constant, whether its first tiles are masked or not."""
    problem = package()
    q = np.ones((1, 1, 640, 64), units.DTYPE[dtype])
    k, v = q.copy(), np.full_like(q, 1.5)
    k[:, :, :300] = 0
    k[:, :, :300, 0] = -np.inf  # weight 0 for the first 300 keys: their tiles leave m = -inf
    o, lse = units.attention(problem, isa, dtype, q, k, v, causal=True)
    assert (o[0, 0, :300] == 0).all() and (lse[0, 0, :300] == -np.inf).all()
    judged.assert_right(problem, isa, dtype, q, k, v, (o, lse), causal=True)


@pytest.mark.field("R025")
@isas
@dtypes
@pytest.mark.parametrize("logit", [-2.5e5, 2.5e5, -5e4, 1e-30, 3e15])
def test_one_key_gives_its_value_whatever_its_logit(isa, dtype, logit):
    if dtype == "fp16" and abs(logit) > 60000:
        logit = float(np.sign(logit)) * 60000.0
    problem = package()
    q, k = (np.zeros((1, 1, 5, 64), units.DTYPE[dtype]) for _ in range(2))
    q[..., 0], k[..., 0] = 1, logit
    k, v = k[:, :, :1].copy(), draw((1, 1, 1, 5, 1), 64, 64, dtype)[2]
    o, lse = units.attention(problem, isa, dtype, q, k, v, scale=1.0)
    assert np.array_equal(o, np.broadcast_to(v, o.shape))
    assert (lse == k[0, 0, 0, 0].astype(lse.dtype)).all()


@isas
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_far_apart_or_huge_never_give_nan(isa, dtype):
    """s - m is exact or far from 0: no weight exceeds 1, and the largest key has weight exactly 1."""
    problem = package()
    rng = np.random.default_rng(0)
    for size in (1e4, 1e8, 1e15, 1e25):
        q, k, v = draw((1, 1, 1, 40, 130), 64, 64, dtype)
        q[:], k[:] = 0, 0
        q[..., 0], k[..., 0] = 1, rng.standard_normal(130) * size
        o, lse = units.attention(problem, isa, dtype, q, k, v, scale=1.0)
        top = int(np.argmax(k[0, 0, :, 0]))
        assert np.array_equal(o[0, 0], np.broadcast_to(v[0, 0, top], o[0, 0].shape))
        assert (lse == k[0, 0, top, 0]).all()


@isas
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_scale_below_the_normal_range_gives_the_mean(isa, dtype):
    problem = package()
    q, k, v = draw((1, 1, 1, 20, 100), 64, 64, dtype)
    for scale in (1e-30, 1e-40, 1e-300, 5e-324):
        o, lse = units.attention(problem, isa, dtype, q, k, v, scale=scale, key_lengths=[97])
        judged.assert_right(problem, isa, dtype, q, k, v, (o, lse), scale=1e-30, key_lengths=[97])


@pytest.mark.field("R073", "R077")
@isas
@dtypes
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "row"])
def test_offsets_are_64_bit(isa, dtype, axis):
    """Batches, heads or rows 2^32 elements apart, in memory of which hardly a page is ever touched."""
    problem = package()
    kind = np.dtype(units.DTYPE[dtype])
    far = (1 << 32) + 64
    tensors = draw((2, 2, 2, 2, 2), 64, 64, dtype)
    want = units.attention(problem, isa, dtype, *tensors)
    size = (far + 1024) * kind.itemsize
    home = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE), kind)

    def spread(x):
        steps = [256, 128, 64]
        steps[axis] = far
        view = np.lib.stride_tricks.as_strided(home, x.shape, [n * kind.itemsize for n in (*steps, 1)])
        view[...] = x
        return view

    for i in range(3):
        got = units.attention(problem, isa, dtype, *tensors[:i], spread(tensors[i]), *tensors[i + 1 :])
        assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])
    out = spread(np.zeros_like(want[0]))
    units.attention(problem, isa, dtype, *tensors, out=out)
    assert np.array_equal(out, want[0])
