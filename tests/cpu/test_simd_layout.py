"""Any strides with a unit last stride, any address: equal bits to contiguous copies, and no byte outside is written."""

import numpy as np
import pytest

from tests.cpu import judged, units
from tests.cpu.test_simd import _machine as _machine  # skips what this machine cannot run
from tests.cpu.test_simd import draw, dtypes, isas, package


def laid_out(x, how, poison=True):
    """A view of equal values in another layout; the gaps hold NaN."""
    b, h, n, d = x.shape
    wide = {"padded": d + 1, "far": d + 1024}.get(how, d)
    if how in ("bnhd", "padded_bnhd"):
        home = np.full((b, n, h, d + (3 if how == "padded_bnhd" else 0)), np.nan if poison else 0, x.dtype)
        view = home[..., :d].transpose(0, 2, 1, 3)
    elif how == "odd address":
        raw = np.zeros(x.nbytes + 1, np.uint8)
        view = np.frombuffer(raw.data, x.dtype, x.size, offset=1).reshape(x.shape)
    else:
        home = np.full((b, h, n, wide), np.nan if poison else 0, x.dtype)
        view = home[..., :d]
    view[...] = x
    return view


LAYOUTS = ("bnhd", "padded_bnhd", "padded", "far", "odd address")


@pytest.mark.field("R043", "R044", "R048")
@isas
@dtypes
def test_strides_and_addresses_do_not_change_a_bit(isa, dtype):
    """`far` rows are 4 KiB apart and more: K and V are then copied for the panels of a tile."""
    problem = package()
    for shape in ((2, 4, 2, 110, 130), (1, 4, 1, 3, 70)):
        q, k, v = draw(shape, 64, 64, dtype)
        want = units.attention(problem, isa, dtype, q, k, v, causal=True)
        for how in LAYOUTS:
            moved = [laid_out(x, how) for x in (q, k, v)]
            out = laid_out(np.zeros_like(want[0]), how)
            got = units.attention(problem, isa, dtype, *moved, causal=True, out=out)
            assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1]), how


@pytest.mark.field("R045", "R047")
@isas
@dtypes
def test_expanded_heads_and_odd_strides_of_size_one_are_fine(isa, dtype):
    problem = package()
    q, k, v = draw((2, 4, 1, 40, 66), 64, 64, dtype)
    want = units.attention(problem, isa, dtype, q, k, v)
    shared = [np.broadcast_to(x, (2, 4, 66, 64)) for x in (k, v)]  # stride 0 over the heads
    got = units.attention(problem, isa, dtype, q, *shared)
    assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])
    one = [
        np.lib.stride_tricks.as_strided(x[:1, :1, :1], (1, 1, 1, 64), (7 * x.itemsize,) * 3 + (x.itemsize,))
        for x in (q, k, v)
    ]
    o, _ = units.attention(problem, isa, dtype, *one)
    assert np.array_equal(o[0, 0, 0], v[0, 0, 0])


@pytest.mark.field("R039")
@isas
@dtypes
def test_one_array_may_be_q_k_and_v(isa, dtype):
    problem = package()
    x = draw((2, 3, 3, 130, 1), 64, 64, dtype)[0]
    got = units.attention(problem, isa, dtype, x, x, x)
    judged.assert_right(problem, isa, dtype, x, x, x, got)


@pytest.mark.field("R066", "R106")
@isas
@dtypes
def test_every_output_is_written_and_nothing_else(isa, dtype):
    """Outputs start as NaN and lie between guard values; dv below, at and above a vector."""
    for sizes in ((64, 64, 96, 64), (40, 72, 32, 8), (8, 24, 64, 40)):
        problem = package(*sizes)
        for shape in ((1, 3, 1, 5, 9), (2, 1, 1, 97, 0), (1, 2, 2, 33, 70)):
            q, k, v = draw(shape, *sizes[:2], dtype)
            b, h, _, n, _ = shape
            home = np.full((b, h, n + 2, sizes[1] + 2), 7, q.dtype)
            out = home[:, :, 1:-1, 1:-1]
            out[...] = np.nan
            o, lse = units.attention(problem, isa, dtype, q, k, v, out=out)
            assert np.isfinite(o.astype(np.float64)).all() and not np.isnan(lse).any()
            home[:, :, 1:-1, 1:-1] = 7
            assert (home == 7).all()


@pytest.mark.field("R110", "R111")
@isas
@dtypes
def test_a_call_depends_on_nothing_that_ran_before(isa, dtype):
    problem, other = package(), package(40, 72, 32, 8)
    a, b = draw((1, 4, 2, 100, 130), 64, 64, dtype), draw((1, 1, 1, 60, 60), 40, 72, dtype)
    first, alone = units.attention(problem, isa, dtype, *a), units.attention(other, isa, dtype, *b)
    for _ in range(20):
        assert np.array_equal(units.attention(other, isa, dtype, *b)[0], alone[0])
        again = units.attention(problem, isa, dtype, *a)
        assert np.array_equal(again[0], first[0]) and np.array_equal(again[1], first[1])
