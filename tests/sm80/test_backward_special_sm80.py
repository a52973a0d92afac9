"""Special values, absent keys, empty problems, strides and subsets of gradients in the mma.sync backward kernels."""

import mmap

import numpy as np
import pytest

from tests.sm80 import backward_units as units

D = 64
BOTH = pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


@pytest.fixture(scope="module")
def problem():
    return units.make_problem(D, sram_kb=48)


def run(problem, x):
    return units.gradients(problem, x)


def same(one, two):
    return all(np.array_equal(units.bits(a), units.bits(b)) for a, b in zip(one, two, strict=True))


@BOTH
@DTYPES
def test_empty_rows_have_no_gradient_and_add_nothing_whatever_they_hold(problem, dtype, deterministic):
    """Rows before the first key; NaN in their q, dO, dLSE and O."""
    x = units.draw((1, 2, 1, 100, 60), D, D, dtype, dlse=True, causal="bottom_right", deterministic=deterministic)
    assert np.isneginf(x.lse[:, :, :40]).all() and not np.isneginf(x.lse[:, :, 40:]).any()
    want = run(problem, x)
    for tensor in (x.q, x.dout, x.dlse, x.o):
        tensor[:, :, :40] = np.nan
    got = run(problem, x)
    assert (units.wide(got[0])[:, :, :40] == 0).all()
    assert same(got[1:], want[1:]) and (deterministic is False or same(got, want))


@BOTH
def test_a_row_whose_scores_are_all_minus_infinity_is_empty(problem, deterministic):
    x = units.draw((1, 1, 1, 20, 30), D, D, "bf16", deterministic=deterministic)
    x.lse[0, 0, 7] = -np.inf
    x.dout[0, 0, 7] = np.nan
    got = run(problem, x)
    assert (units.wide(got[0])[0, 0, 7] == 0).all()
    assert np.isfinite(units.wide(got[0])).all()


@BOTH
@pytest.mark.parametrize(
    "shape", [(2, 2, 1, 0, 70), (2, 2, 1, 70, 0), (1, 1, 1, 0, 0), (0, 2, 2, 5, 5), (1, 0, 2, 5, 70)]
)
def test_empty_problems_give_zeros(problem, shape, deterministic):
    x = units.draw(shape, D, D, "bf16", dlse=True, deterministic=deterministic)
    assert all((units.wide(g) == 0).all() for g in run(problem, x))


@BOTH
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
def test_what_lies_beyond_the_key_length_is_not_read_and_has_no_gradient(problem, causal, deterministic):
    """NaN lies there, and the emulator knows only the keys before. A length that cannot be gives its batch NaN."""
    shape = (4, 4, 2, 70, 200)
    lengths = (0, 131, 201, -1)
    x = units.draw(shape, D, D, "bf16", causal=causal, key_lengths=(0, 131, 0, 0), deterministic=deterministic)
    for b, n in enumerate(lengths):
        x.k[b, :, max(n, 0) :], x.v[b, :, max(n, 0) :] = np.nan, np.nan
    x.key_lengths = (0, 131, 0, 0)
    clean = run(problem, x)
    units.assert_right(problem, x, clean)
    for gradient in clean[1:]:
        assert (units.wide(gradient)[0] == 0).all() and (units.wide(gradient)[1, :, 131:] == 0).all()
    x.key_lengths = lengths
    got = run(problem, x)
    for one, two in zip(got, clean, strict=True):
        assert np.isnan(units.wide(one)[2:]).all()
        assert np.array_equal(units.bits(one[:2]), units.bits(two[:2])) or not deterministic


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
@BOTH
def test_a_gradient_that_is_not_wanted_is_left_out_and_changes_no_other(problem, wanted, deterministic):
    x = units.draw((1, 2, 1, 100, 90), D, D, "bf16", causal="bottom_right", dlse=True, deterministic=deterministic)
    whole = run(problem, x)
    x.wanted = wanted
    part = run(problem, x)
    units.assert_right(problem, x, part)
    for name, one, two in zip("qkv", part, whole, strict=True):
        assert (one is None) == (name not in wanted)
        if one is not None and (name != "q" or deterministic):
            assert np.array_equal(units.bits(one), units.bits(two)), name


def test_nothing_is_done_when_nothing_is_wanted(problem):
    x = units.draw((1, 1, 1, 20, 20), D, D, "bf16", wanted="")
    assert run(problem, x) == [None, None, None]


@BOTH
def test_every_stride_is_taken_and_nothing_between_rows_is_read(problem, deterministic):
    """(B,N,H,d) tensors, gaps between rows, one dO for all heads, LSE by columns: the bits of the contiguous call."""
    x = units.draw((2, 4, 2, 70, 90), D, D, "bf16", causal="top_left", dlse=True, deterministic=deterministic)
    x.dout[...] = x.dout[:, :1]
    want = run(problem, x)
    b, h, n, _ = x.q.shape
    x.q = units.placed(x.q, (n * h * D, D, h * D, 1))
    x.k = units.placed(x.k, (2 * 90 * (D + 8), 90 * (D + 8), D + 8, 1))
    x.v = units.placed(x.v, (90 * 2 * D, D, 2 * D, 1))
    x.o = units.placed(x.o, (n * h * D, D, h * D, 1))
    x.dout = units.placed(x.dout[:, :1], (n * D, n * D, D, 1)).repeat(1, axis=1)
    home = units.placed(x.dout[:, 0])
    x.dout = np.lib.stride_tricks.as_strided(home, (b, h, n, D), (n * D * 2, 0, D * 2, 2))
    x.lse, x.dlse = (units.placed(t, (1, 2 * n, 2)) for t in (x.lse, x.dlse))
    got = run(problem, x)
    assert same(got[1:], want[1:]) and (not deterministic or same(got, want))
    units.assert_right(problem, x, got)


@BOTH
def test_a_number_that_is_none_shows_in_all_that_depends_on_it(problem, deterministic):
    clean = units.draw((1, 1, 1, 90, 100), D, D, "bf16", causal="top_left", dlse=True, deterministic=deterministic)

    def spoilt(name, index):
        x = units.draw((1, 1, 1, 90, 100), D, D, "bf16", causal="top_left", dlse=True, deterministic=deterministic)
        getattr(x, name)[0, 0][index] = np.nan
        return [units.wide(g)[0, 0] for g in run(problem, x)]

    assert all(np.isfinite(units.wide(g)).all() for g in run(problem, clean))
    for name in ("q", "lse"):
        dq, dk, dv = spoilt(name, 50)
        assert np.isnan(dq[50]).all() and np.isnan(dk[:51]).all() and np.isnan(dv[:51]).all(), name
        assert np.isfinite(dq[np.arange(90) != 50]).all(), name
    for name in ("dlse", "o", "dout"):
        dq, dk, _ = spoilt(name, 50)
        assert np.isnan(dq[50]).all() and np.isnan(dk[:51]).all(), name
        assert np.isfinite(dq[np.arange(90) != 50]).all(), name
    dq, dk, dv = spoilt("k", 40)
    assert np.isnan(dq[40:]).all() and np.isnan(dk[40]).all() and np.isnan(dv[40]).all()
    dq, dk, dv = spoilt("v", 40)
    assert np.isnan(dq[40:]).all() and np.isnan(dk[40]).all() and np.isfinite(dv).all()


@BOTH
@DTYPES
def test_a_lse_that_does_not_belong_to_the_scores_shows(problem, dtype, deterministic):
    """A weight beyond the format is an infinity; LSE = NaN or +inf is not a number."""
    x = units.draw((1, 1, 1, 4, 9), D, D, dtype, deterministic=deterministic)
    x.lse[0, 0] = (-1e5, np.nan, np.inf, -1e30)
    dq, _, dv = run(problem, x)
    assert not np.isfinite(units.wide(dq)).any() and not np.isfinite(units.wide(dv)).any()


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "row"])
@BOTH
def test_offsets_are_64_bit(problem, axis, deterministic):
    """Batches, heads or rows 2^32 elements apart, in memory of which hardly a page is ever touched."""
    far = (1 << 32) + 64
    x = units.draw((2, 2, 2, 2, 2), D, D, "bf16", dlse=True, deterministic=deterministic)
    want = run(problem, x)

    def spread(t):
        home = np.frombuffer(mmap.mmap(-1, (far + 1024) * t.itemsize, flags=0x4022), t.dtype)  # MAP_NORESERVE
        steps = [256, 128, 64]
        steps[axis] = far
        view = np.lib.stride_tricks.as_strided(home, t.shape, [n * t.itemsize for n in (*steps, 1)[: t.ndim]])
        view[...] = t
        return view

    for name in ("q", "k", "v", "o", "lse", "dout", "dlse"):
        setattr(x, name, spread(getattr(x, name)))
    got = run(problem, x)
    assert same(got[1:], want[1:]) and (not deterministic or same(got, want))
