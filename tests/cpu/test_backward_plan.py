"""The planner of the backward CPU kernels: what fits, what is turned down, and what the registers hold."""

import pytest

from codegen.errors import PlanError
from codegen.plans import cpu_backward
from codegen.plans.cpu_isa import VECTOR_ISAS, Limits
from codegen.problem import HEAD_DIMS
from tests.cpu import units

DTYPES = ("float32", "float64", "bf16", "fp16")


def planned(isa, dtype, *, sram, d, dv=None):
    problem = units.make_problem(d, dv, sram=sram, dtypes=(dtype,))
    return cpu_backward.plan_backward(problem, dtype, isa, Limits(fast_memory_bytes=sram))


@pytest.mark.parametrize("isa", VECTOR_ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_fits_its_budget_or_says_what_would(isa, dtype):
    for d in (8, 40, 64, 128, 256):
        for sram in (16 << 10, 64 << 10, 192 << 10, 1 << 20):
            try:
                plan, _, rejected = planned(isa, dtype, sram=sram, d=d)
            except PlanError as error:
                need = int(str(error).split("--sram ")[1].split("KB")[0])
                assert sram < need << 10
                plan, _, rejected = planned(isa, dtype, sram=need << 10, d=d)
                assert (plan.br, plan.bc) == (plan.lanes, 8) and rejected
                sram = need << 10
            assert plan.fast_memory_bytes <= sram
            assert plan.br % plan.panel_rows == 0 and plan.bc % 8 == 0
            assert sum(part.bytes for part in plan.memory) <= plan.fast_memory_bytes
            assert all(f"of {sram:,}" in tile.why for tile in rejected)


def test_a_larger_budget_never_gives_a_smaller_tile():
    for isa in VECTOR_ISAS:
        areas = [(p := planned(isa, "float32", sram=kb << 10, d=64)[0]).br * p.bc for kb in (96, 128, 192, 256, 512)]
        assert areas == sorted(areas)


@pytest.mark.parametrize("isa", VECTOR_ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_column_groups_cover_a_width_once_within_the_registers(isa, dtype):
    registers = 32 if isa.vector_bytes == 64 else 16
    for width in HEAD_DIMS:
        plan = cpu_backward.make_plan(isa, dtype, br=96, bc=64, d=width, dv=width)
        covered = []
        for group in cpu_backward.column_groups(isa, plan, width):
            covered += range(group.first, group.first + group.lanes * group.vectors)
            assert group.vectors * (group.keys + 1) + (isa.name != "v4") <= registers
        assert covered == list(range(width))


@pytest.mark.parametrize("br, bc", [(0, 64), (20, 64), (48, 20), (48, 0)])
def test_a_tile_off_the_granule_is_refused(br, bc):
    with pytest.raises(PlanError, match="multiple of"):
        cpu_backward.make_plan(VECTOR_ISAS[0], "float32", br=br, bc=bc, d=64, dv=64)
