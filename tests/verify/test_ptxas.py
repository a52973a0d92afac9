"""The ptxas gate on real kernels: clean ones pass, and each fault planted in one is found. Needs nvcc, not a GPU."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from click.testing import CliRunner

from codegen.errors import RequestError
from codegen.plans import registers_sm80
from codegen.plans.sm80 import Sm80Plan
from verify import packages, ptxas, report
from verify.__main__ import main
from verify.ptxas_output import LOCAL_MNEMONICS


def nvcc() -> str | None:
    try:
        return ptxas.tools().nvcc
    except RequestError:
        return None


needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="needs nvcc (CUDA toolkit) on this machine")
SMALL = Sm80Plan(br=32, bc=32, d=64, dv=64, row_tiles=2, refill_before_softmax=True)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return replace(ptxas.write_plan(tmp_path_factory.mktemp("clean"), SMALL), archs=("sm_80",))


@needs_nvcc
def test_a_package_passes_and_its_registers_are_recorded():
    folder = packages.emit(sram="163KB", d=64, br=64, bc=32, dtypes=("bf16", "fp16"), archs=("sm80",))
    figures = ptxas.run([folder])
    assert figures["holds"] and figures["findings"] == []
    backward, unit = figures["units"]
    assert [kernel["arch"] for kernel in backward["kernels"]] == ["sm_80"] * 12 + ["sm_90"] * 12
    assert all(kernel["registers"] <= kernel["allowed"] for kernel in backward["kernels"])
    assert [kernel["arch"] for kernel in unit["kernels"]] == ["sm_80", "sm_80", "sm_90", "sm_90"]
    for kernel in unit["kernels"]:
        assert 64 < kernel["registers"] <= kernel["allowed"] == 255
        if figures["cuobjdump"]:
            assert kernel["instructions"]["HMMA"] % 32 == 0 and not set(LOCAL_MNEMONICS) & set(kernel["instructions"])
    assert len(ptxas.rows(figures)) == 28
    assert "0 findings" in report.markdown("ptxas sm80", [{"file": "ptxas.json", **figures}])


@needs_nvcc
def test_a_tile_beyond_the_rule_spills_and_is_found(tmp_path):
    plan = Sm80Plan(br=128, bc=128, d=128, dv=128, row_tiles=2, refill_before_softmax=True)
    assert registers_sm80.fit(2, plan.warps, 128, 128, plan.bc) is None
    verdict = ptxas.check(replace(ptxas.write_plan(tmp_path, plan), archs=("sm_80",)), ptxas.tools())
    (found,) = verdict.all_findings
    assert "for sm_80: spill: " in found and plan.fast_memory_bytes == verdict.unit.limits.shared_bytes


SMEM = "  const uint32_t smem = dynamic_smem();\n"
IN_THE_KERNEL = {
    "static shared": (
        "  __shared__ volatile int planted[4];\n  planted[threadIdx.x % 4] = 1;\n",
        "static bytes beside the plan's 12288 dynamic",
    ),
    "stack frame": ("  volatile int planted[64];\n  planted[threadIdx.x] = 1;\n", "local memory: a stack frame"),
    "warning": ("  int planted;\n", "warning: "),
}
IN_THE_LAUNCH = {
    "shared size": ("int kSharedBytes = ", "int kSharedBytes = 16 + ", "shared memory: kSharedBytes is nothing"),
    "launch size": ("dynamicSmemBytes = kSharedBytes", "dynamicSmemBytes = kBc", "shared memory: launched with kBc"),
}


def planted(unit, folder, old, new):
    """The unit with one change of its text, in a folder of its own."""
    for file in unit.source.parent.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    source = folder / unit.source.name
    text = source.read_text()
    assert text.count(old) == 1
    source.write_text(text.replace(old, new))
    return replace(unit, source=source)


@needs_nvcc
@pytest.mark.parametrize("fault", IN_THE_KERNEL)
def test_a_fault_planted_in_the_kernel_is_found(clean, tmp_path, fault):
    lines, says = IN_THE_KERNEL[fault]
    found = ptxas.check(planted(clean, tmp_path, SMEM, SMEM + lines), ptxas.tools()).all_findings
    assert any(says in one for one in found), found


@needs_nvcc
def test_what_the_clean_kernel_says_passes_only_with_its_own_plan_and_launch(clean, tmp_path):
    said = ptxas.compiled(clean, ptxas.tools())
    assert ptxas.judge(clean, *said).all_findings == []
    missing = ptxas.judge(replace(clean, least_kernels=2), *said).all_findings
    assert missing == ["missing: 1 kernels for sm_80, the plan has 2"]
    for name, (old, new, says) in IN_THE_LAUNCH.items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        (found,) = ptxas.judge(planted(clean, folder, old, new), *said).all_findings
        assert says in found


@needs_nvcc
def test_the_command_fails_on_a_finding(tmp_path):
    """A package whose kernel asks for other shared memory than its plan."""
    words = {"dtypes": ("bf16",), "archs": ("sm80",), "backward": False}
    folder = packages.emit(sram="163KB", d=16, br=16, bc=16, **words)
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = copy / "csrc" / "forward_sm80.cu"
    source.write_text(source.read_text().replace("constexpr int kSharedBytes = ", "constexpr int kSharedBytes = 32 + "))
    bad = CliRunner().invoke(main, ["ptxas", str(copy), "--json"])
    assert bad.exit_code == 1 and "kSharedBytes is nothing" in bad.stderr and not json.loads(bad.stdout)["holds"]


def test_the_border_is_accepted_and_its_next_tile_is_not():
    plans = ptxas.border()
    assert len(plans) > 400
    for plan in plans:
        words = (plan.row_tiles, plan.warps, plan.d_padded, plan.dv_padded)
        assert registers_sm80.fit(*words, plan.bc) is not None and registers_sm80.fit(*words, plan.bc + 16) is None
    few = ptxas.border(10)
    assert len(few) == 10 and set(few) <= set(plans) and {p.row_tiles for p in ptxas.border(60)} == {1, 2}


def test_without_nvcc_the_command_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(ptxas.shutil, "which", lambda *args, **more: None)
    said = CliRunner().invoke(main, ["ptxas"])
    assert said.exit_code == 2 and "no nvcc here" in said.stderr


def test_a_package_without_cuda_is_refused():
    folder = packages.emit(d=16, dtypes=("float32",), archs=("cpu",))
    with pytest.raises(RequestError, match="no CUDA unit"):
        ptxas.units_of(folder)
