"""nvcc and ptxas on the emitted backward kernels: no spill, no local memory, no warning, the products that are planned.

Needs nvcc, not a GPU. What the planner takes over widths and budgets was compiled once (registers_sm80_backward.json);
here the kernels that matter most go through the gate (`verify.ptxas`) on each run.
"""

import re
import subprocess

import pytest

from codegen import problem
from codegen.plans import sm80_backward
from codegen.plans.sm80_backward import KeyTiles, QueryTiles, Sm80BackwardPlan
from tests.sm80 import backward_units as units
from tests.sm80.backward_tiles_alone import ARCHS, compile_together
from tests.sm80.test_compile_sm80 import has_nvcc
from verify import ptxas

pytestmark = pytest.mark.skipif(not has_nvcc(), reason="needs nvcc and ptxas (CUDA toolkit) on this machine")


def assert_clean(unit):
    verdict = ptxas.check(unit, ptxas.tools())
    assert verdict.all_findings == []
    assert len(verdict.kernels) == unit.least_kernels * len(unit.archs)


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_the_default_package_compiles_without_spills(tmp_path, debug):
    plan = units.plan_of(units.make_problem(128, sram_kb=192))
    assert_clean(ptxas.write_backward_plan(tmp_path, plan, ("bf16", "fp16"), debug=debug))


@pytest.mark.parametrize("d, dv", [(64, 64), (24, 24), (72, 40), (256, 256)])
def test_other_widths_compile_without_spills(tmp_path, d, dv):
    assert_clean(ptxas.write_backward_plan(tmp_path, units.plan_of(units.make_problem(d, dv, sram_kb=192))))


# d, dv, arch, KB: plans that spilled before the rule knew their kind.
ONCE_SPILLED = [
    (120, 96, "sm90", 99), (88, 128, "sm80", 80), (88, 160, "sm90", 128),  # two row warps, dQ in one pass
    (88, 88, "sm80", 60), (96, 216, "sm80", 116),  # one row warp; fewer rows
    (240, 240, "sm90", 227),  # passes of dQ of unequal length
    (96, 32, "sm80", 163),  # 64 rows per warp beside dK and dV
    (32, 192, "sm90", 227),  # query_tiles, four of twelve steps unrolled
]  # fmt: skip


def test_what_a_wider_rule_let_spill_compiles_without_spills():
    """Only the kernels that spilled or may, all in one unit, which takes less than half the time of whole ones."""
    asked = [(problem.make(sram_bytes=kb * 1024, d=d, dv=dv, archs=(arch,)), arch) for d, dv, arch, kb in ONCE_SPILLED]
    plans = [sm80_backward.plan_backward(one, "bf16", arch)[0] for one, arch in asked]
    tiles = [tile for plan in plans for tile in (plan.keys, plan.query)]
    for tile, found in zip(tiles, compile_together(tiles), strict=True):
        assert not any(found.spilled), tile


def test_a_tile_beyond_the_rule_spills_in_its_unit_and_alone(tmp_path):
    """The gate, the rule and the sweep of tiles speak of the same thing: twice the rows per warp do not hold."""
    keys = KeyTiles(d=128, dv=128, br=128, bc=128, warps=8, row_warps=2, stages=1)
    query = QueryTiles(d=128, dv=128, br=128, bc=32, row_tiles=1, stages=1)
    assert keys.accumulators > 192
    verdict = ptxas.check(ptxas.write_backward_plan(tmp_path, Sm80BackwardPlan(keys=keys, query=query)), ptxas.tools())
    assert any("spill" in finding and "key_tiles" in finding for finding in verdict.all_findings)
    for tile, name in zip((keys, query), ("key_tiles<BFloat16, true>", "query_tiles<BFloat16>"), strict=True):
        alone = compile_together([tile])[0]
        whole = {k.arch: k for k in verdict.kernels if k.name == name}
        assert alone.registers == tuple(whole[arch].registers for arch in ARCHS)
        assert any(alone.spilled) == any(k.findings for k in whole.values()) == (tile is keys)


def test_the_kernels_hold_the_instructions_that_the_plan_counts(tmp_path):
    """A lost unroll shows as fewer, a duplicated loop as more."""
    plan = units.plan_of(units.make_problem(128, sram_kb=192))
    source = ptxas.write_backward_plan(tmp_path, plan).source
    line = [ptxas.tools().nvcc, "-std=c++17", "-O3", "-arch=compute_80", "-ptx", str(source), "-o", "-"]
    text = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    kernels = {part.split("(")[0]: part for part in re.split(r"\.visible \.entry |\.entry ", text)[1:]}
    with_sums, in_order = (
        next(code for name, code in kernels.items() if part in name)
        for part in ("key_tilesINS_8BFloat16ELb1", "query_tiles")
    )
    keys, query = plan.keys, plan.query
    d, dv, rows = keys.d_padded // 16, keys.dv_padded // 16, keys.rows // 16
    steps = keys.steps_at_once
    assert d % steps == dv % steps == 0 and keys.row_warps == 2
    once = 2 * keys.key_tiles * rows * 2 * steps  # S^T and dP^T
    own = 2 * keys.key_tiles * rows * (d + dv) // keys.row_warps
    dq = 2 * keys.dq_row_tiles * keys.dq_columns * 4  # four steps at once
    assert with_sums.count("mma.sync.aligned") == once + 2 * own + dq
    assert with_sums.count("red.global.add.f32") == 8 * keys.dq_row_tiles * keys.dq_columns
    tiles, blocks = query.row_tiles, query.bc // 16
    assert in_order.count("mma.sync.aligned") == 2 * tiles * blocks * (2 * query.steps_at_once + d)
    assert ".local" not in text and "call" not in re.sub(r"//.*", "", text)
