"""nvcc and ptxas on the emitted wgmma kernels: no spill, no serialised wgmma, no warning, the planned products.

Needs nvcc, not a GPU. The border of the register rule was compiled once (registers_sm90a.json, see test_plan_sm90a.py);
here the kernels that matter most are compiled again on each run.
"""

import subprocess
from dataclasses import replace

import pytest

from tests.sm90a import gpu_check, kernels
from verify import packages, ptxas, ptxas_sm90a

pytestmark = pytest.mark.skipif(kernels.nvcc() is None, reason="needs nvcc (CUDA toolkit) on this machine")

# Each is at its limit of registers in its own way: P in shared memory, three consumers, O of 256 columns.
PLANS = ("d128_192x128_skip", "d64_192x128", "d256_128x80")


@pytest.mark.parametrize("name", PLANS)
def test_the_fastest_plans_compile_without_spills_or_serialised_products(tmp_path, name):
    plan, _ = gpu_check.PLANS[name]
    _, reports = kernels.build(kernels.write(tmp_path, plan), "-Werror", "all-warnings")
    assert len(reports) == 2, "a full and a causal kernel"
    for report in reports:
        assert report.spilled_bytes == 0 and report.warnings == (), report
        assert report.registers <= 65536 // plan.threads, "what the block is launched with"


def test_a_kernel_that_exceeds_its_registers_is_noticed(tmp_path):
    """192 x 128 at d = 128 holds only with P in shared memory."""
    plan = replace(gpu_check.PLANS["d128_192x128"][0], p_in_shared=False, causal="full")
    _, reports = kernels.build(kernels.write(tmp_path, plan))
    assert any(report.spilled_bytes or report.warnings for report in reports)


@pytest.mark.parametrize("causal, loops", [("full", 1), ("causal", 2)])
def test_the_products_of_the_text_are_those_of_the_algorithm(tmp_path, causal, loops):
    """Q K^T stands before the loop, in each copy of it and between tiles; P V there too, and at the end."""
    plan = replace(gpu_check.PLANS["d128_128x128"][0], causal=causal)
    source = kernels.write(tmp_path, plan)
    ptx = source.with_suffix(".ptx")
    line = [kernels.nvcc(), "-std=c++17", "-O3", "-arch=compute_90a", "-ptx", str(source), "-o", str(ptx)]
    subprocess.run(line, check=True)
    text = ptx.read_text()
    assert text.count("wgmma.mma_async") == (loops + 2) * (plan.d_padded // 16 + plan.bc // 16)
    assert ".local" not in text and "call.uni" not in text


def gate():
    """The tools of verify/ptxas.py; skips without a disassembler, in whose text the products are counted."""
    use = ptxas.tools()
    if use.cuobjdump is None:
        pytest.skip("needs cuobjdump (triton has one)")
    return use


def test_the_gate_counts_the_products_and_what_a_step_takes():
    plan, _ = gpu_check.PLANS["d64_256x64"]
    row = ptxas_sm90a.check(ptxas_sm90a.Asked(plan, "test"), gate())
    assert row["findings"] == [] and row["spilled_bytes"] == 0
    assert [(k["mask"], k["products"], len(k["loops"])) for k in sorted(row["kernels"], key=lambda k: k["mask"])] == [
        ("causal", 4 * 8, 2), ("full", 3 * 8, 1),
    ]  # fmt: skip
    for kernel in row["kernels"]:
        for loop in kernel["loops"]:
            assert loop["HGMMA"] == 8 and loop["MUFU"] == 32 + 2  # an exponential per score of a lane, one per row


def test_the_gate_finds_a_tile_that_spills():
    plan = replace(gpu_check.PLANS["d128_192x128"][0], p_in_shared=False, causal="full")
    row = ptxas_sm90a.check(ptxas_sm90a.Asked(plan, "test"), gate())
    assert row["spilled_bytes"] > 0 and any("spill" in text for text in row["findings"])


def test_the_units_of_a_package_are_gated_by_their_own_plans():
    folder = packages.emit(sram="227KB", d=64, dtypes=("bf16",), archs=("sm90a",), backward=False)
    found = {unit.source.name: unit for unit in ptxas.units_of(folder)}
    assert set(found) == {"forward_sm80.cu", "forward_sm90a_0.cu"}
    unit = found["forward_sm90a_0.cu"]
    (plan,) = {v["fast_memory_bytes"] for v in packages.plan(folder)["variants"] if v["target"] == "sm90a"}
    assert unit.archs == ("sm_90a",) and unit.limits.shared_bytes == plan
