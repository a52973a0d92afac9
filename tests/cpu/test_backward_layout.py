"""Any strides, any address, backward: equal bits to contiguous copies, and only the gradients are written."""

import numpy as np
import pytest

from tests.cpu import backward_judged, backward_units, units
from tests.cpu.test_simd import _machine as _machine  # skips what this machine cannot run
from tests.cpu.test_simd import dtypes, isas, package
from tests.cpu.test_simd_layout import LAYOUTS, laid_out


@pytest.mark.field("R043", "R044", "R048")
@isas
@dtypes
def test_strides_and_addresses_do_not_change_a_bit(isa, dtype):
    """`far` rows are 4 KiB apart and more: K and V are then copied for the panels of a tile."""
    problem = package()
    q, k, v, dout, dlse = backward_judged.draw((2, 4, 2, 110, 130), 64, 64, dtype, dlse=True)
    (o, lse), want = backward_judged.run(problem, isa, dtype, q, k, v, dout, dlse, causal=True)
    for how in LAYOUTS:
        moved = [laid_out(x, how) for x in (q, k, v, o)]
        sums = [np.ascontiguousarray(x.transpose(2, 0, 1)).transpose(1, 2, 0) for x in (lse, dlse)]
        out = [laid_out(np.full_like(x, np.nan), how) for x in want]
        args = (*moved, sums[0], laid_out(dout, how), sums[1])
        backward_units.gradients(problem, isa, dtype, *args, causal=True, out=out)
        assert all(np.array_equal(a, b) for a, b in zip(out, want, strict=True)), how


@isas
@dtypes
def test_dout_may_have_any_stride_in_its_last_dimension(isa, dtype):
    """What sum().backward() hands over has stride 0 everywhere; a transposed one has a row stride of 1."""
    problem = package()
    q, k, v, dout, _ = backward_judged.draw((1, 4, 2, 70, 66), 64, 64, dtype)
    o, lse = backward_judged.forward(problem, isa, dtype, q, k, v)
    one = np.ones((1, 1, 1, 1), dout.dtype)
    transposed = np.ascontiguousarray(dout.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)
    doubled = np.zeros((*dout.shape[:3], 128), dout.dtype)
    doubled[..., ::2] = dout
    for strange in (np.broadcast_to(one, dout.shape), np.broadcast_to(dout[..., :1], dout.shape), transposed,
                    np.broadcast_to(dout[:, :, :1], dout.shape), doubled[..., ::2]):  # fmt: skip
        plain = np.ascontiguousarray(strange)
        assert strange.strides != plain.strides
        want = backward_units.gradients(problem, isa, dtype, q, k, v, o, lse, plain)
        got = backward_units.gradients(problem, isa, dtype, q, k, v, o, lse, strange)
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.field("R045")
@isas
@dtypes
def test_expanded_heads_are_fine(isa, dtype):
    problem = package()
    q, k, v, dout, _ = backward_judged.draw((2, 4, 1, 40, 66), 64, 64, dtype)
    (o, lse), want = backward_judged.run(
        problem, isa, dtype, q, *(np.repeat(x, 4, axis=1) for x in (k, v)), dout
    )  # fmt: skip
    shared = [np.broadcast_to(x, (2, 4, 66, 64)) for x in (k, v)]  # stride 0 over the heads
    out = backward_units.empty_gradients(problem, dtype, q, *shared)
    got = backward_units.gradients(problem, isa, dtype, q, *shared, o, lse, dout, out=out)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.field("R039")
@isas
@dtypes
def test_one_array_may_be_q_k_v_and_dout(isa, dtype):
    problem = package()
    x = backward_judged.draw((1, 2, 2, 100, 1), 64, 64, dtype)[0]
    given, got = backward_judged.run(problem, isa, dtype, x, x, x, x)
    backward_judged.assert_right(problem, isa, dtype, x, x, x, given, x, None, got, end_to_end=False)


@pytest.mark.field("R066", "R106")
@isas
@dtypes
def test_every_gradient_is_written_and_nothing_else(isa, dtype):
    """Gradients start as NaN and lie between guard values."""
    for sizes in ((64, 64, 96, 64), (40, 72, 32, 32)):
        problem = package(*sizes)
        for shape, lengths in (((1, 3, 1, 5, 9), None), ((2, 1, 1, 97, 70), (0, 33)), ((1, 2, 2, 33, 70), None)):
            q, k, v, dout, _ = backward_judged.draw(shape, *sizes[:2], dtype)
            o, lse = backward_judged.forward(problem, isa, dtype, q, k, v, causal="top_left", key_lengths=lengths)
            homes, out = [], []
            for x in (q, k, v):
                home = np.full((*x.shape[:2], x.shape[2] + 2, x.shape[3] + 2), 7, x.dtype)
                home[:, :, 1:-1, 1:-1] = np.nan
                homes.append(home)
                out.append(home[:, :, 1:-1, 1:-1])
            words = {"causal": "top_left", "key_lengths": lengths, "out": out}
            backward_units.gradients(problem, isa, dtype, q, k, v, o, lse, dout, workers=2, **words)
            for home, x in zip(homes, out, strict=True):
                assert np.isfinite(x.astype(np.float64)).all()
                x[...] = 7
                assert (home == 7).all()


@isas
@dtypes
def test_a_call_depends_on_nothing_that_ran_before(isa, dtype):
    problem, other = package(), package(40, 72, 32, 32)
    a = backward_judged.draw((1, 4, 2, 100, 130), 64, 64, dtype)
    b = backward_judged.draw((1, 1, 1, 60, 60), 40, 72, dtype)
    first, alone = (backward_judged.run(p, isa, dtype, *x)[1] for p, x in ((problem, a), (other, b)))
    for _ in range(5):
        again = backward_judged.run(other, isa, dtype, *b)[1], backward_judged.run(problem, isa, dtype, *a)[1]
        for got, want in zip(again, (alone, first), strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.field("R104")
@pytest.mark.parametrize("isa", units.ISAS)
def test_a_unit_shares_nothing_with_the_linker_but_its_entry(isa):
    """A weak function could be taken from a unit for a newer machine: everything else is local, nothing is std::."""
    files = backward_units.sources(package(), isa)
    flags = [*units.ISAS[isa].flags, "-c"]
    built = units.build(files, f"backward_cpu_{isa}.cpp", flags, shared=False, name="unit.o")
    symbols = [line.split()[-2:] for line in units.output("nm", built).splitlines()]
    assert [name for kind, name in symbols if kind in "TVWuBDRC"] == [f"attention_backward_{isa}"]
    libc = {"aligned_alloc", "fma", "free", "memcpy", "memset", "sched_yield"}
    assert {name for kind, name in symbols if kind == "U"} <= libc
    for text in files.values():
        assert b"std::" not in text and b"<algorithm>" not in text
