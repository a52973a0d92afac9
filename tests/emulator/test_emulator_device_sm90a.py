"""The kernels of an emitted sm_90a package as the judge meets them: units, scratch memory, whole tiles copied."""

from __future__ import annotations

import numpy as np
import pytest

from verify import devices, judge, packages
from verify.emulator.device import NAN_BITS, Call, EmulatorDevice
from verify.emulator.emulator import SCHEDULES
from verify.inputs import FAMILIES
from verify.suite import Shape
from verify.suite import case as make

WORDS = {"sram": "64KB", "d": 32, "br": 64, "bc": 32, "dtypes": ("bf16",), "archs": ("sm90a",)}


@pytest.fixture(scope="module")
def attn():
    return packages.load(packages.emit(**WORDS))


def case(family="gaussian", **shape):
    return make(FAMILIES[family], Shape(**shape), family, dtype="bf16", d=32, dv=32, seed=3)


@pytest.mark.parametrize(
    "shape",
    [
        {"nq": 70, "nk": 65, "hq": 2, "hkv": 1, "causal": "bottom_right"},
        {"nq": 20, "nk": 90, "b": 3, "lengths": (0.0, 0.5, 1.0), "layout": "bnhd"},
        {"nq": 5, "nk": 33, "causal": "top_left", "layout": "padded"},
    ],
    ids=str,
)
def test_a_package_is_within_its_bound_in_every_schedule(attn, shape):
    device, one = EmulatorDevice("sm90a"), case(**shape)
    (path,) = device.paths(attn, "bf16", one)
    assert (path.isa, path.arithmetic, path.br, path.bc) == ("sm90a_0", "wgmma_sm90a", 64, 32)
    o, lse = device.run(attn, one, path)
    (verdict,) = judge.hear(one, [(path, o, lse)], device="emulator")
    assert verdict.holds, verdict.message("")
    assert device.findings == 0 and device.launches == len(SCHEDULES)


def test_keys_beyond_a_length_are_nan_for_a_kernel_that_copies_whole_tiles():
    one = case(nq=4, nk=40, b=2, lengths=(0.25, 1.0))
    call, other = Call.of(one, tma=True), Call.of(one)
    for name in ("k", "v"):
        assert (call.arrays[name][0, :, 10:] == NAN_BITS).all() and not (call.arrays[name][0, :, :10] == NAN_BITS).any()
        assert (call.arrays[name][1] == other.arrays[name][1]).all() and "scratch" not in other.arrays
    assert call.arrays["scratch"].dtype == np.uint32 and call.arrays["scratch"].nbytes == 4


def test_a_unit_is_a_path_where_its_mask_is(attn):
    """Rows of one unit are one path; a row for another mask is none."""
    plan = packages.plan(attn.__path__[0])
    row = next(v for v in plan["variants"] if v["target"] == "sm90a")
    for causal, full, masked in (("any", True, True), ("full", True, False), ("causal", False, True)):
        variant = {**row, "causal": causal}
        assert devices.takes(variant, case(nq=2, nk=2)) is full
        assert devices.takes(variant, case(nq=2, nk=2, causal="top_left")) is masked
    assert [str(p) for p in EmulatorDevice("sm80").paths(attn, "bf16", case(nq=2, nk=2))] == ["sm80/bf16"]
