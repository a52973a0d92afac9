"""The judge on the emulator, backward: the emitted sm_80 kernels hold in every schedule, and a fault is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from verify import judge_backward, output_gradients, packages, suite
from verify.emulator.device import EmulatorDevice
from verify.emulator.device_backward import BackwardCall
from verify.emulator.emulator import ACCUMULATIONS, SCHEDULES, FindingError
from verify.inputs import FAMILIES


@pytest.fixture(scope="module")
def odd():
    """Widths that are no multiple of 16, d != dv."""
    return packages.load(packages.emit(sram="163KB", d=24, dv=40, archs=("sm80",), br=32, bc=48))


def case(dtype="bf16", *, gradient="normal", wanted=(True, True, True), layout="contiguous", **shape):
    words = {"nq": 70, "nk": 75, "b": 2, "hq": 4, "hkv": 2, "causal": "bottom_right", "lengths": (1.0, 0.6), **shape}
    made = suite.case(FAMILIES["gaussian"], suite.Shape(**words), "gaussian", dtype=dtype, d=24, dv=40, seed=3)
    return output_gradients.attach(made, gradient, dlse="normal", layout=layout, wanted=wanted, seed=1)


def given_of(one):
    """Any O and LSE will do: the stage-wise bound is about the gradients at the pair that was read."""
    rng = np.random.default_rng(0)
    o = rng.standard_normal(one.do.shape)
    return judge_backward.read_by_kernel(one, o, np.float32(3 + rng.random(o.shape[:3])).astype(np.float64))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_way_to_sum_a_product_is_within_the_bound(odd, dtype):
    one, results = case(dtype), []
    given = given_of(one)
    for accumulation in ACCUMULATIONS:
        device = EmulatorDevice(accumulation=accumulation, schedules=SCHEDULES[:1])
        runs = [(p, device.run_backward(odd, one, p, given)) for p in device.backward_paths(odd, dtype, one)]
        assert [path.deterministic for path, _ in runs] == [False, True]
        assert all(v.holds for v in judge_backward.hear(one, given, runs, spec=False, compare_plain=False))
        results.append(np.concatenate([x.ravel() for x in runs[0][1]]))
    if dtype == "fp16":  # 8 bits of bf16 hide it
        assert any(not np.array_equal(results[0], other) for other in results[1:])


def test_the_error_that_ex2_may_have_is_within_the_bound_and_is_seen(odd):
    one, found = case("fp16"), []
    given = given_of(one)
    for error in (-(2.0**-22), 2.0**-22, 2.0**-6):
        device = EmulatorDevice(ex2_error=error, schedules=SCHEDULES[:1])
        path = device.backward_paths(odd, "fp16", one)[1]
        (verdict,) = judge_backward.hear(one, given, [(path, device.run_backward(odd, one, path, given))], spec=False)
        found.append(verdict.holds)
    assert found == [True, True, False]


@pytest.mark.parametrize("which", [0, 1], ids=["sums", "deterministic"])
def test_a_result_that_depends_on_the_schedule_is_a_finding(odd, which, monkeypatch):
    one, launch, launches = case(), BackwardCall.launch, []

    def shaken(call, emulator, target):
        done = launch(call, emulator, target)
        launches.append(call)
        if len(launches) == 2:
            call.arrays["dv"][1, 1, 3, 5] ^= 1
        return done

    monkeypatch.setattr(BackwardCall, "launch", shaken)
    device = EmulatorDevice()
    path = device.backward_paths(odd, "bf16", one)[which]
    with pytest.raises(FindingError, match=r"dv\[1, 1, 3, 5\] is .* under ascending-late and descending-early"):
        device.runs_backward(odd, one, path, given_of(one))
    assert device.findings == 1


def test_only_sums_in_no_fixed_order_give_a_result_per_schedule(odd):
    one, device = case(), EmulatorDevice()
    sums, fixed = device.backward_paths(odd, "bf16", one)
    assert (str(sums), str(fixed)) == ("sm80/bf16", "sm80-deterministic/bf16")
    assert len(device.runs_backward(odd, one, sums, given_of(one))) == 3
    assert len(device.runs_backward(odd, one, fixed, given_of(one))) == 1


@pytest.mark.parametrize("gradient", ["normal", "same_row", "ones"])
@pytest.mark.parametrize("layout", ["contiguous", "bnhd", "padded", "offset", "transposed"])
def test_a_kernel_gets_what_the_binding_promises(layout, gradient):
    one = replace(case(gradient=gradient, layout=layout, wanted=(True, False, True)))
    given = given_of(one)
    call = BackwardCall.of(one, given, deterministic=True)
    for name in ("q", "k", "v", "o", "dout"):
        array = call.arrays[name]
        assert array.ctypes.data % 16 == 0 and all(step % 16 == 0 for step in array.strides[:3]), name
        assert array.strides[3] == 2
    assert np.array_equal(call.result("dout"), one.do) and np.array_equal(call.result("o"), given[0])
    assert np.array_equal(call.arrays["lse"], given[1]) and np.array_equal(call.arrays["dlse"], one.dlse)
    assert np.isnan(call.result("dq")).all() and np.isnan(call.result("dv")).all() and call.result("dk").size == 0
    assert call.args.dk is None and call.args.dout_stride[3] == 1 and call.args.deterministic == 1
    assert np.isnan(call.result("k")[1, :, 45:]).all()


def test_without_pairs_no_kernel_is_called_and_the_gradients_are_zero(odd):
    one, device = case(nk=0, causal="none", lengths=None), EmulatorDevice()
    path = device.backward_paths(odd, "bf16", one)[0]
    dq, dk, dv = device.run_backward(odd, one, path, given_of(one))
    assert dq.shape == one.q.shape and (dq == 0).all() and dk.size == dv.size == 0
    assert device.counted["bytes_read"] == 0
