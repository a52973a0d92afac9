"""Every plan fits its machine in every resource, or the refusal names the resource and adds up."""

from __future__ import annotations

import re
from itertools import product

import pytest

from codegen import planners, problem
from codegen.devices import DEVICES, KB
from codegen.errors import PlanError
from codegen.planners import TARGETS

GPUS = [arch for arch in TARGETS if arch in DEVICES]
BUDGETS_KB = (48, 64, 99, 163, 227)
WIDTHS = (64, 128, 192, 256)


def decide(arch, sram_bytes, d, **more):
    return planners.planner(arch).decide(problem.make(sram_bytes=sram_bytes, d=d, archs=[arch], **more), arch)


def whole_numbers(text):
    return [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", text)]


@pytest.mark.field("R094")
@pytest.mark.parametrize("arch", TARGETS)
def test_tiles_follow_the_budget_and_the_devices_limit(arch):
    for kb, d in product(BUDGETS_KB, WIDTHS):
        try:
            decision = decide(arch, kb * KB, d)
        except PlanError as e:
            assert "needs" in str(e) and kb * KB in whole_numbers(str(e)), str(e)
            continue
        limit = min(kb * KB, DEVICES[arch].smem_per_block_bytes) if arch in DEVICES else kb * KB
        assert decision.limit_bytes == limit
        for v in decision.variants:
            assert sum(part.bytes for part in v.plan.memory) == v.plan.fast_memory_bytes <= limit, (arch, kb, d, v)


@pytest.mark.field("R094")
def test_d256_on_a_card_with_99_kb_is_planned_or_refused_with_the_bytes():
    for v in decide("sm86", 99 * KB, 256).variants:
        assert v.plan.fast_memory_bytes <= 101376


@pytest.mark.field("R095")
@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("off", [-1024, -1, 0, 1, 1024])
def test_within_one_kb_of_the_limit_the_numbers_add_up(arch, off):
    device = DEVICES[arch]
    decision = decide(arch, device.smem_per_block_bytes + off, 128)
    assert decision.limit_bytes == device.smem_per_block_bytes + min(off, 0)
    for v in decision.variants:
        asked = v.plan.fast_memory_bytes + device.smem_reserved_bytes
        assert asked <= device.smem_per_sm_bytes and v.plan.fast_memory_bytes <= decision.limit_bytes


@pytest.mark.field("R095", "R096")
@pytest.mark.parametrize("arch", TARGETS)
def test_the_smallest_that_would_fit_does_and_one_byte_less_does_not(arch):
    with pytest.raises(PlanError) as e:
        decide(arch, 1024, 128)
    needs = next(n for n in whole_numbers(str(e.value).split("needs")[1]))
    dtype = next(t for t in TARGETS[arch].dtypes if t in str(e.value))
    assert decide(arch, needs, 128, dtypes=[dtype], backward=False).variants
    with pytest.raises(PlanError):
        decide(arch, needs - 1, 128, dtypes=[dtype], backward=False)


@pytest.mark.field("R097")
@pytest.mark.parametrize("arch", GPUS)
def test_threads_and_registers_are_limits_too(arch):
    device = DEVICES[arch]
    for kb, d in product((48, 99, 163, 227), (8, 64, 128, 256)):
        try:
            decision = decide(arch, kb * KB, d)
        except PlanError:
            continue
        for v in decision.variants:
            facts = v.plan.as_dict()
            assert 32 <= facts["threads"] <= device.threads_per_block
            if "consumer_registers" in facts:  # one warpgroup gives work to the others; setmaxnreg moves registers
                consumers = facts["threads"] // 128 - 1
                per_block = 128 * (facts["producer_registers"] + consumers * facts["consumer_registers"])
                assert facts["consumer_registers"] <= 256 and per_block <= device.registers_per_block
                continue
            assert facts["registers"] <= device.registers_per_thread
            assert facts["registers"] * facts["threads"] <= device.registers_per_block


@pytest.mark.parametrize("arch", TARGETS)
def test_equal_requests_get_equal_plans(arch):
    first, second = decide(arch, 99 * KB, 72, dv=40), decide(arch, 99 * KB, 72, dv=40)
    assert first == second


@pytest.mark.parametrize("arch", TARGETS)
def test_every_head_size_has_a_plan_at_99_kb(arch):
    for d, dv in ((8, 8), (40, 256), (72, 24), (256, 8), (136, 136)):
        dtypes = [t for t in TARGETS[arch].dtypes if t != "float64"]
        assert decide(arch, 99 * KB, d, dv=dv, dtypes=dtypes).variants
