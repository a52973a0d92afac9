"""nvcc and ptxas on the emitted mma.sync kernels: no spill, no stack, no static shared memory, no warning.

Needs nvcc, not a GPU. The whole border of the register rule was compiled once (registers_sm80.json, see
tests/codegen/test_plan_sm80.py); here the kernels that matter most are compiled again on each run.
"""

import re
import subprocess

import pytest

from codegen import problem
from codegen.plans import registers_sm80, sm80
from tests.sm80 import kernels

pytestmark = pytest.mark.skipif(kernels.ptxas() is None, reason="needs nvcc and ptxas (CUDA toolkit) on this machine")


def plan(**asked):
    return sm80.decide(problem.make(archs=["sm80"], **{"sram_bytes": 192 * 1024, **asked}), "sm80").variants[0].plan


# The fastest tiles for d = 64 and 128, then odd ones.
TILES = [(128, 128, 64, 64), (128, 64, 128, 128), (32, 16, 24, 24), (16, 16, 8, 256), (128, 128, 72, 40)]


@pytest.fixture(scope="module")
def ptx_of(tmp_path_factory):
    def build(tile, dtypes=("bf16", "fp16"), **more):
        folder = tmp_path_factory.mktemp("kernel")
        return kernels.to_ptx(kernels.write(folder, tile, dtypes, **more))

    return build


def assert_clean(ptx, kernels_in_it):
    for arch in kernels.ARCHS:
        reports = kernels.assemble(ptx, arch)
        assert len(reports) == kernels_in_it
        for report in reports:
            assert report.spilled_bytes == 0, (arch, report)
            assert report.registers <= registers_sm80.PER_THREAD
            assert report.static_shared_bytes == 0, "the plan's bytes are all that the block gets"


@pytest.mark.field("R094", "R095")
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_the_default_package_compiles_without_spills(ptx_of, debug):
    assert_clean(ptx_of(plan(d=128), debug=debug), 2)


@pytest.mark.parametrize("br, bc, d, dv", TILES)
def test_other_tiles_compile_without_spills(ptx_of, br, bc, d, dv):
    assert_clean(ptx_of(plan(d=d, dv=dv, br=br, bc=bc), ("bf16",)), 1)


def test_the_key_loop_holds_the_instructions_that_the_plan_counts(ptx_of):
    """A lost unroll shows as fewer, a duplicated loop as more; unrolled fully, no matrix instruction is in a helper."""
    tile = plan(d=128, br=128, bc=64)
    text = ptx_of(tile, ("bf16",)).read_text()
    steps, keys, m = tile.steps_at_once, tile.bc // 16, tile.row_tiles
    columns = tile.dv_padded // 16
    assert text.count("mma.sync.aligned.m16n8k16") == 2 * m * keys * (steps + columns)
    assert len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared", text)) == steps * (m + keys)
    assert len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans", text)) == keys * columns
    assert ".local" not in text and "call" not in re.sub(r"//.*", "", text)


def test_warnings_are_errors(tmp_path):
    source = kernels.write(tmp_path, plan(d=72, dv=24), ("bf16", "fp16"))
    line = [kernels.nvcc(), "-std=c++17", "-O3", "-arch=sm_80", "-Werror", "all-warnings", "-Xcompiler", "-Wall", "-c"]
    subprocess.run([*line, str(source), "-o", str(tmp_path / "kernel.o")], check=True)
