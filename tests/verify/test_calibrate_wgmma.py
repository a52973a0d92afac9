"""The questions to wgmma, answered by the emulator and by the model of a recorded machine: they mean what they say."""

from __future__ import annotations

import numpy as np
import pytest

from verify import arithmetic, calibrate_wgmma
from verify.conformance import emulated
from verify.emulator import isa, measured
from verify.emulator.emulator import ACCUMULATIONS, SCHEDULES


def machine(case):
    """D of one probe on a machine that sums as the recorded one does, read from the case's own image and registers."""
    image, registers, out, a, b, *words = case.arguments
    _, n, _, _, bfloat, from_registers, first, _ = (word.value for word in words)
    name = "bf16" if bfloat else "f16"
    if from_registers:
        left = isa.scatter(isa.unpack(registers.array), isa.wgmma_a(), (64, 16))
    else:
        left = isa.read_operand(image.array, a.value, 64, k_major=True)
    right = isa.read_operand(image.array, b.value, n, k_major=True)
    c = isa.scatter(first + np.arange(128)[:, None] + 128.0 * np.arange(n // 2), isa.wgmma_d(n), (64, n))
    product = measured.h200_product(isa.decode(left, name), isa.decode(right, name).T, c)
    return isa.gather(product, isa.wgmma_d(n)).reshape(out.before.shape)


def test_the_recorded_machine_is_as_good_as_the_model_says():
    found = calibrate_wgmma.ask(machine, "sm_90")
    assert len(found) == 2 * 3 * 3 and all(p.holds for p in found)
    assert {p.arithmetic for p in found} == {"wgmma_sm90a"} and {p.device for p in found} == {"sm_90"}
    assert [p.constants for p in found[::3]] == [{"block": 16, "fraction_bits": 25}] * 6


@pytest.mark.parametrize("fraction, holds", [(25, True), (24, False)])
def test_a_machine_with_fewer_bits_is_found_out(monkeypatch, fraction, holds):
    monkeypatch.setattr(calibrate_wgmma, "FORMS", ((True, 64),))
    monkeypatch.setattr(measured, "FRACTION_BITS", fraction)
    found = calibrate_wgmma.ask(machine, "sm_90")
    assert [p.holds for p in found[::3]] == [holds] * 2
    assert {p.constants["fraction_bits"] for p in found[::3]} == {fraction}


def test_the_probe_runs_as_it_is_in_the_emulator():
    """One launch of each form: element (0, 0) is c + a . b."""
    a, b = np.arange(1.0, 17.0), np.arange(16.0, 0.0, -1.0)
    for from_registers, n in calibrate_wgmma.FORMS:
        for dtype in ("bf16", "fp16"):
            case = calibrate_wgmma._case(a, b, 7.0, n, dtype, from_registers)
            emulated.emulator(case.source).option("mma", ACCUMULATIONS.index("exact"))
            done, outputs = emulated.run(case, SCHEDULES[0])
            assert not done.findings and done.code == 0
            assert outputs["d"][0, 0] == 7 + a @ b


def test_the_model_of_the_certificates_is_the_one_that_is_measured():
    assert calibrate_wgmma.NAME in arithmetic.MODELS
    with pytest.raises(ValueError, match="whole number"):
        calibrate_wgmma._case(np.zeros(16), np.zeros(16), 0.5, 8, "bf16", False)
