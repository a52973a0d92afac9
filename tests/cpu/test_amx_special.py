"""AMX kernels, special values and memory: what is not visible has no influence, what is not a number is not hidden."""

import mmap

import numpy as np
import pytest

from tests.cpu import amx_unit, units
from tests.cpu.test_amx import assert_right, dtypes, package
from tests.cpu.test_simd import draw
from tests.cpu.test_simd_layout import LAYOUTS, laid_out
from verify import special

pytestmark = pytest.mark.skipif(bool(amx_unit.machine_lacks()), reason=f"this machine lacks {amx_unit.machine_lacks()}")


@pytest.mark.field("R001", "R025", "R026", "R037", "R056")
@dtypes
def test_the_table_of_special_values_holds(dtype):
    problem = package()
    bc = amx_unit.plan(problem, dtype).bc
    for case in special.table(dtype, d=64, dv=64, bc=bc, seed=1):
        q, k, v = (x.astype(units.DTYPE[dtype]) for x in (case.q, case.k, case.v))
        causal = False if case.causal == "none" else case.causal
        call = {"scale": case.scale, "causal": causal, "key_lengths": case.key_lengths}
        got = amx_unit.attention(problem, dtype, q, k, v, **call)
        assert_right(problem, dtype, q, k, v, got, name=case.name, **call)


@dtypes
def test_a_nan_of_any_payload_stays(dtype):
    """P is rounded by adding to its bits: a payload must not carry a NaN over into a number."""
    problem = package(40, 24, 32, 32)
    fraction = {"bf16": 7, "fp16": 10}[dtype]
    infinity = 0x7FFF ^ ((1 << fraction) - 1)
    clean = amx_unit.attention(problem, dtype, *draw((1, 1, 1, 3, 70), 40, 24, dtype))
    for payload in (1, 2, 1 << (fraction - 1), (1 << fraction) - 1):
        for sign in (0, 0x8000):
            nan = np.array(infinity | payload | sign, np.uint16)
            for tensor, place in ((0, (1, 5)), (1, (69, 39)), (2, (69, 23))):
                qkv = draw((1, 1, 1, 3, 70), 40, 24, dtype)
                qkv[tensor].view(np.uint16)[0, 0][place] = nan
                o, lse = (x.astype(np.float64)[0, 0] for x in amx_unit.attention(problem, dtype, *qkv))
                rows = [1] if tensor == 0 else [0, 1, 2]
                columns = [23] if tensor == 2 else list(range(24))
                expected = np.zeros_like(o, bool)
                expected[np.ix_(rows, columns)] = True
                assert np.array_equal(np.isnan(o), expected)
                assert np.array_equal(o[~expected], clean[0][0, 0].astype(np.float64)[~expected])
                if tensor == 2:
                    assert np.array_equal(lse, clean[1][0, 0])
                else:
                    assert np.array_equal(np.isnan(lse), expected.any(axis=1))


@pytest.mark.parametrize("sizes", [(64, 64, 96, 64), (40, 24, 32, 32)], ids=["in_place", "copied"])
@dtypes
def test_an_infinite_score_keeps_its_sign(dtype, sizes):
    """-inf is weight 0, +inf a NaN row; the planes of fp16 alone would make NaN of both."""
    problem = package(*sizes)
    q, k, v = draw((1, 1, 1, 40, 150), *sizes[:2], dtype)
    q[..., 0], k[..., 0] = np.linspace(-2, 2, 40), 0
    k[0, 0, 70, 0] = -np.inf
    got = amx_unit.attention(problem, dtype, q, k, v)
    assert_right(problem, dtype, q, k, v, got)
    assert np.isnan(got[1][0, 0, :20]).all() and np.isfinite(got[1][0, 0, 20:]).all()


@pytest.mark.field("R005", "R006", "R007")
@dtypes
def test_what_lies_beyond_the_key_length_is_never_read(dtype):
    """Bitwise equal to the trimmed call with NaN beyond; K in place, and copied."""
    for sizes in ((64, 64, 96, 64), (40, 24, 32, 32)):
        problem = package(*sizes)
        q, k, v = draw((2, 4, 2, 70, 200), *sizes[:2], dtype)
        bad_k, bad_v = k.copy(), v.copy()
        lengths = (0, 131)
        for b, n in enumerate(lengths):
            bad_k[b, :, n:] = np.nan
            bad_v[b, :, n:] = np.nan
        for causal in (False, "bottom_right", "top_left"):
            clean = amx_unit.attention(problem, dtype, q, k, v, causal=causal, key_lengths=lengths)
            poisoned = amx_unit.attention(problem, dtype, q, bad_k, bad_v, causal=causal, key_lengths=lengths)
            assert np.array_equal(clean[0], poisoned[0]) and np.array_equal(clean[1], poisoned[1])
            assert (poisoned[0][0] == 0).all() and (poisoned[1][0] == -np.inf).all()


@pytest.mark.field("R005", "R006")
@dtypes
def test_no_byte_beyond_the_last_key_is_touched(dtype):
    """K and V end where the page ends, and the next page may not be read."""
    page = mmap.PAGESIZE
    problem = package()
    for nk in (1, 31, 32, 33, 70):
        tensors = draw((1, 1, 1, 40, nk), 64, 64, dtype)
        want = amx_unit.attention(problem, dtype, *tensors)
        homes, views = [], []
        for x in tensors:
            pages = -(-x.nbytes // page)
            home = mmap.mmap(-1, (pages + 1) * page)
            base = np.frombuffer(home, np.uint8).ctypes.data
            view = np.frombuffer(home, x.dtype, x.size, offset=pages * page - x.nbytes).reshape(x.shape)
            view[...] = x
            assert units.ctypes.CDLL(None).mprotect(units.ctypes.c_void_p(base + pages * page), page, 0) == 0
            homes.append(home)
            views.append(view)
        got = amx_unit.attention(problem, dtype, *views)
        assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])


@pytest.mark.field("R005")
@dtypes
def test_masked_keys_have_no_influence(dtype):
    """Any K at a masked position, and any V that no row of the panel sees: the bits of the result do not move."""
    problem = package()
    q, k, v = draw((1, 2, 2, 60, 150), 64, 64, dtype)
    clean = amx_unit.attention(problem, dtype, q, k, v, causal="top_left")
    for value in (np.nan, np.inf, -np.inf, 60000.0):
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[:, :, 60:] = value
        bad_v[:, :, 64:] = value
        bad_k[:, :, 59] = value  # seen by the last row only
        dirty = amx_unit.attention(problem, dtype, q, bad_k, bad_v, causal="top_left")
        assert np.array_equal(clean[0][:, :, :59], dirty[0][:, :, :59])
        assert np.array_equal(clean[1][:, :, :59], dirty[1][:, :, :59])


@pytest.mark.field("R002")
@dtypes
def test_rows_that_meet_their_first_key_late_stay_finite(dtype):
    """Equal logits and constant V: every row gives that constant, whether its first tiles are masked or not."""
    problem = package()
    q = np.ones((1, 1, 640, 64), units.DTYPE[dtype])
    k, v = q.copy(), np.full_like(q, 1.5)
    k[:, :, :300] = 0
    k[:, :, :300, 0] = -np.inf  # weight 0 for the first 300 keys: their tiles leave m = -inf
    o, lse = amx_unit.attention(problem, dtype, q, k, v, causal=True)
    assert (o[0, 0, :300] == 0).all() and (lse[0, 0, :300] == -np.inf).all()
    assert_right(problem, dtype, q, k, v, (o, lse), causal=True)


@pytest.mark.field("R025")
@dtypes
@pytest.mark.parametrize("logit", [-2.5e5, 2.5e5, -5e4, 1e-30, 3e15])
def test_one_key_gives_its_value_whatever_its_logit(dtype, logit):
    if dtype == "fp16" and abs(logit) > 60000:
        logit = float(np.sign(logit)) * 60000.0
    problem = package()
    q, k = (np.zeros((1, 1, 5, 64), units.DTYPE[dtype]) for _ in range(2))
    q[..., 0], k[..., 0] = 1, logit
    k, v = k[:, :, :1].copy(), draw((1, 1, 1, 5, 1), 64, 64, dtype)[2]
    got = amx_unit.attention(problem, dtype, q, k, v, scale=1.0)
    assert np.array_equal(got[0], np.broadcast_to(v, got[0].shape))
    assert_right(problem, dtype, q, k, v, got, scale=1.0)


def test_references_beyond_24_bits_choose_the_right_key():
    """A reference near 2^80 is kept in two parts, so the largest weight is still in [1, 2)."""
    problem = package()
    rng = np.random.default_rng(0)
    for power in (10, 30, 50, 80):
        q, k, v = draw((1, 1, 1, 40, 130), 64, 64, "bf16")
        q[:], k[:] = 0, 0
        q[..., 0], k[..., 0] = 1, rng.permutation(130) * 2.0**power
        o, lse = amx_unit.attention(problem, "bf16", q, k, v, scale=1.0)
        top = int(np.argmax(k[0, 0, :, 0].astype(np.float64)))
        assert np.array_equal(o[0, 0], np.broadcast_to(v[0, 0, top], o[0, 0].shape))
        want = float(k[0, 0, top, 0])
        assert (np.abs(lse - want) <= 2.0**-22 * abs(want)).all()


@dtypes
def test_a_maximum_that_rises_in_every_tile_moves_the_reference(dtype):
    """Logits 0, 5, 10, ... in steps of 7.2 log2 units per key: weights would overflow without a new reference."""
    problem = package(bc=32)
    q, k, v = draw((1, 1, 1, 33, 400), 64, 64, dtype)
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0] = 1, 5 * np.arange(400)
    q[0, 0, 3, 0] = -1  # one row falls while the others rise
    got = amx_unit.attention(problem, dtype, q, k, v, scale=1.0)
    assert_right(problem, dtype, q, k, v, got, scale=1.0)


@dtypes
def test_a_scale_below_the_normal_range_gives_the_mean(dtype):
    problem = package()
    q, k, v = draw((1, 1, 1, 20, 100), 64, 64, dtype)
    for scale in (1e-30, 1e-40, 1e-300, 5e-324):
        got = amx_unit.attention(problem, dtype, q, k, v, scale=scale, key_lengths=[97])
        assert_right(problem, dtype, q, k, v, got, scale=1e-30, key_lengths=[97])


@pytest.mark.field("R025")
@dtypes
def test_a_scale_that_overflows_the_scores_never_looks_like_no_key(dtype):
    problem = package()
    q = np.full((1, 1, 5, 64), 4096, units.DTYPE[dtype])
    v = draw((1, 1, 1, 5, 5), 64, 64, dtype)[2]
    o, lse = amx_unit.attention(problem, dtype, q, q, v, scale=2.0**110)  # 2^30 * 2^110 > largest float32
    assert np.isnan(o.astype(np.float64)).all() and np.isnan(lse).all()


@pytest.mark.field("R043", "R044", "R048")
@dtypes
def test_strides_and_addresses_do_not_change_a_bit(dtype):
    """`far` rows and odd addresses make bf16 copy K; the others read it in place."""
    problem = package()
    for shape in ((2, 4, 2, 110, 130), (1, 4, 1, 3, 70)):
        q, k, v = draw(shape, 64, 64, dtype)
        want = amx_unit.attention(problem, dtype, q, k, v, causal=True)
        for how in LAYOUTS:
            moved = [laid_out(x, how) for x in (q, k, v)]
            out = laid_out(np.zeros_like(want[0]), how)
            got = amx_unit.attention(problem, dtype, *moved, causal=True, out=out)
            assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1]), how


@pytest.mark.field("R045", "R047")
@dtypes
def test_expanded_heads_and_odd_strides_of_size_one_are_fine(dtype):
    problem = package()
    q, k, v = draw((2, 4, 1, 40, 66), 64, 64, dtype)
    want = amx_unit.attention(problem, dtype, q, k, v)
    shared = [np.broadcast_to(x, (2, 4, 66, 64)) for x in (k, v)]  # stride 0 over the heads
    got = amx_unit.attention(problem, dtype, q, *shared)
    assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])
    same = [np.broadcast_to(x[:, :, :1], x.shape) for x in (k, v)]  # stride 0 over the keys
    o, _ = amx_unit.attention(problem, dtype, q, *same)
    assert np.array_equal(o, np.broadcast_to(v[:, :, :1], o.shape))


@pytest.mark.field("R066", "R106")
@dtypes
def test_every_output_is_written_and_nothing_else(dtype):
    """Outputs start as NaN and lie between guard values; dv below, at and above a column tile."""
    for sizes in ((64, 64, 96, 64), (40, 72, 32, 32), (8, 24, 64, 96)):
        problem = package(*sizes)
        for shape in ((1, 3, 1, 5, 9), (2, 1, 1, 97, 0), (1, 2, 2, 33, 70)):
            q, k, v = draw(shape, *sizes[:2], dtype)
            b, h, _, n, _ = shape
            home = np.full((b, h, n + 2, sizes[1] + 2), 7, q.dtype)
            out = home[:, :, 1:-1, 1:-1]
            out[...] = np.nan
            o, lse = amx_unit.attention(problem, dtype, q, k, v, out=out)
            assert np.isfinite(o.astype(np.float64)).all() and not np.isnan(lse).any()
            home[:, :, 1:-1, 1:-1] = 7
            assert (home == 7).all()


@pytest.mark.field("R074", "R077")
@dtypes
def test_offsets_are_64_bit(dtype):
    """Batches, heads and rows 2^32 elements apart, in memory of which hardly a page is ever touched."""
    problem = package()
    far = (1 << 32) + 64
    tensors = draw((2, 2, 2, 2, 2), 64, 64, dtype)
    want = amx_unit.attention(problem, dtype, *tensors)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    home = np.frombuffer(mmap.mmap(-1, (far + 1024) * 2, flags=flags), units.DTYPE[dtype])
    for axis in range(3):
        steps = [256, 128, 64]
        steps[axis] = far
        for i in range(3):
            moved = np.lib.stride_tricks.as_strided(home, tensors[i].shape, [2 * n for n in (*steps, 1)])
            moved[...] = tensors[i]
            got = amx_unit.attention(problem, dtype, *tensors[:i], moved, *tensors[i + 1 :])
            assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])
