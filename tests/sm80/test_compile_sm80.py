"""nvcc and ptxas on the emitted mma.sync kernels: no spill, no stack, no static shared memory, no warning.

Needs nvcc, not a GPU. The whole border of the register rule was compiled once (registers_sm80.json, see
tests/codegen/test_plan_sm80.py); here the kernels that matter most go through the gate (`verify.ptxas`) on each run.
tests/verify/test_ptxas.py plants faults in a kernel and sees the gate find them.
"""

import re
import subprocess

import pytest

from codegen import problem
from codegen.errors import RequestError
from codegen.plans import sm80
from verify import ptxas


def has_nvcc():
    try:
        return bool(ptxas.tools())
    except RequestError:
        return False


pytestmark = pytest.mark.skipif(not has_nvcc(), reason="needs nvcc and ptxas (CUDA toolkit) on this machine")


def plan(**asked):
    return sm80.decide(problem.make(archs=["sm80"], **{"sram_bytes": 192 * 1024, **asked}), "sm80").variants[0].plan


# The fastest tiles for d = 64 and 128, then odd ones.
TILES = [(128, 128, 64, 64), (128, 64, 128, 128), (32, 16, 24, 24), (16, 16, 8, 256), (128, 128, 72, 40)]


def assert_clean(unit, kernels_in_it):
    verdict = ptxas.check(unit, ptxas.tools())
    assert verdict.all_findings == []
    assert [k.arch for k in verdict.kernels] == [arch for arch in unit.archs for _ in range(kernels_in_it)]


@pytest.mark.field("R094", "R095")
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_the_default_package_compiles_without_spills(tmp_path, debug):
    assert_clean(ptxas.write_plan(tmp_path, plan(d=128), ("bf16", "fp16"), debug=debug), 2)


@pytest.mark.parametrize("br, bc, d, dv", TILES)
def test_other_tiles_compile_without_spills(tmp_path, br, bc, d, dv):
    assert_clean(ptxas.write_plan(tmp_path, plan(d=d, dv=dv, br=br, bc=bc)), 1)


def test_the_key_loop_holds_the_instructions_that_the_plan_counts(tmp_path):
    """A lost unroll shows as fewer, a duplicated loop as more; unrolled fully, no matrix instruction is in a helper."""
    tile = plan(d=128, br=128, bc=64)
    source = ptxas.write_plan(tmp_path, tile).source
    line = [ptxas.tools().nvcc, "-std=c++17", "-O3", "-arch=compute_80", "-ptx", str(source), "-o", "-"]
    text = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    steps, keys, m = tile.steps_at_once, tile.bc // 16, tile.row_tiles
    columns = tile.dv_padded // 16
    assert text.count("mma.sync.aligned.m16n8k16") == 2 * m * keys * (steps + columns)
    assert len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared", text)) == steps * (m + keys)
    assert len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans", text)) == keys * columns
    assert ".local" not in text and "call" not in re.sub(r"//.*", "", text)
