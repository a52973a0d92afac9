"""The probes measure what they say, and a measurement reaches the model only when it is complete and holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from verify import arithmetic, calibrate, calibrate_cpu, calibrate_cuda, packages
from verify.__main__ import main
from verify.formats import round_to
from verify.probe import Probe, float_bits


@pytest.fixture(scope="module")
def quick():
    return calibrate.run("cpu", exhaustive=False)


def test_this_machine_is_as_good_as_its_models_say(quick):
    assert quick["holds"], [p for p in quick["probes"] if not p["holds"]]
    words = {"dtypes": ("float32", "bf16", "fp16"), "archs": ("cpu",), "backward": False}
    attn = packages.load(packages.emit(d=16, **words))  # the one that was measured: it is built
    assert {p["device"] for p in quick["probes"]} >= set(attn.isas("float32"))
    errors = [p["measured"] for p in quick["probes"] if "exp2_error" in p["constants"]]
    assert errors and all(2.0**-25 < error < 2.0**-22 for error in errors)


def test_the_command_prints_a_row_per_probe():
    done = CliRunner().invoke(main, ["calibrate", "--quick"])
    assert done.exit_code == 0 and "exp2(0)" in done.output and "NO" not in done.output


def test_only_an_exhaustive_run_that_holds_writes_files(tmp_path, monkeypatch):
    good = [Probe("fma_f32", "v9", "exp2", 1e-7, 2e-7, {"exp2_error": 1e-7}), Probe("fma_f32", "v9", "exp2(0)", 1, 1)]
    bad = [Probe("fma_f32", "v9", "exp2", 3e-7, 2e-7, {"exp2_error": 3e-7})]
    for probes, exhaustive, files in ((good, False, 0), (bad, True, 0), (good, True, 1)):
        monkeypatch.setattr(calibrate_cpu, "measure", lambda stride, step, probes=probes: probes)
        figures = calibrate.run("cpu", exhaustive=exhaustive, into=tmp_path)
        assert figures["holds"] == all(p.holds for p in probes) and len(list(tmp_path.iterdir())) == files
    monkeypatch.setattr(arithmetic, "CALIBRATION", tmp_path)
    assert arithmetic.model("fma_f32", "float32", device="v9").exp2_error == 1e-7
    assert json.loads((tmp_path / "fma_f32.v9.json").read_text())["probes"][0]["holds"]


def test_the_model_of_the_matrix_unit_rounds_each_chain():
    ones = np.zeros((1, 32))
    ones[0, :4] = 1.0
    result, sure = calibrate_cpu.amx_model(ones, ones, np.array([2.0**-30]))
    assert result[0] == 4.0 and sure[0]  # 4 + 2^-30 is exact in float64, then rounds to 4
    # 1 + 2^-24 rounds to 1 in the even chain; a single chain, or one that is exact, would give 1 + 2^-23.
    even = np.zeros((1, 32))
    even[0, 0], even[0, 2], even[0, 4] = 1.0, 2.0**-24, 2.0**-24
    result, _ = calibrate_cpu.amx_model(even, np.ones((1, 32)), np.zeros(1))
    assert result[0] == 1.0


@pytest.mark.parametrize("block, fraction", [(16, 25), (8, 24), (4, 23)])
def test_the_gpu_probes_tell_the_known_matrix_units_apart(block, fraction):
    """Against a NumPy unit that aligns to the largest addend and truncates to `fraction` bits, `block` terms a step."""

    def dots(a, b, c):
        out = c.astype(np.float64)
        for first in range(0, 16, block):
            terms = np.concatenate([out[:, None], a[:, first : first + block] * b[:, first : first + block]], axis=1)
            top = np.frexp(np.abs(terms).max(axis=1))[1] - 1
            unit = np.exp2(top - fraction)[:, None]
            out = round_to((np.trunc(terms / unit) * unit).sum(axis=1), "float32", toward_zero=True)
        return out

    assumed = arithmetic.model("mma_sm80", "bf16")
    found = calibrate_cuda.matrix_unit(dots, "sm_99", "bf16", assumed)
    assert found[0].constants == {"block": block, "fraction_bits": fraction}
    assert found[0].holds and found[2].holds and found[1].measured == 0.0  # truncated


def test_without_a_gpu_the_request_is_refused():
    import torch

    if torch.cuda.is_available():
        assert calibrate.run("cuda", exhaustive=False)["holds"]
        return
    done = CliRunner().invoke(main, ["calibrate", "--device", "cuda"])
    assert done.exit_code == 2 and "no CUDA device" in done.output


def test_float_bits():
    assert float_bits(1.0) == 0x3F800000 and float_bits(-2.0) == 0xC0000000
