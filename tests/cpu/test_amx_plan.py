"""AMX plans: legal for every request that has one, refused with a reason otherwise, the same wherever they are made."""

import itertools

import pytest

from codegen.errors import PlanError
from codegen.plans import cpu, cpu_amx
from codegen.plans.cpu_isa import Limits
from tests.cpu import units

DTYPES = ("bf16", "fp16")


def plan_amx(dtype, *, d, dv=None, sram, **override):
    problem = units.make_problem(d, dv, sram=sram, dtypes=(dtype,), **override)
    return cpu_amx.plan_amx(problem, dtype, Limits(fast_memory_bytes=sram))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_plan_fits_and_a_refusal_means_that_nothing_does(dtype):
    sizes = (8, 24, 32, 64, 96, 128, 200, 256)
    refused = 0
    for d, dv, sram in itertools.product(sizes, sizes, (24 << 10, 64 << 10, 100_000, 192 << 10, 1 << 20, 2 << 20)):
        try:
            plan, changes, rejected = plan_amx(dtype, d=d, dv=dv, sram=sram)
        except PlanError as error:
            refused += 1
            smallest = cpu_amx.make_plan(dtype, br=32, bc=32, d=d, dv=dv, limit_bytes=sram)
            assert smallest.fast_memory_bytes > sram and f"{smallest.fast_memory_bytes:,} bytes" in str(error)
            continue
        assert plan.fast_memory_bytes == sum(part.bytes for part in plan.memory) <= sram
        assert plan.br % 32 == 0 and plan.bc % 32 == 0 and plan.l2_keys % plan.bc == 0
        assert all(step.why for step in changes) and all(tile.why for tile in rejected)
        # One more tile of keys in L2 would not fit, or is more than helps.
        more = plan.fast_memory_bytes + plan.bc * plan.key_bytes
        assert more > sram or (plan.l2_keys + plan.bc) * plan.key_bytes > cpu_amx.MOST_L2_BYTES
    assert 0 < refused < 200


def test_the_default_package_keeps_the_rows_of_the_papers_tile():
    plan, changes, _ = plan_amx("bf16", d=128, sram=192 << 10)
    assert plan.br == 128 and plan.fast_memory_bytes <= 192 << 10
    assert [step.what for step in changes] == [f"Bc 192 -> {plan.bc}"]


def test_less_memory_takes_keys_before_rows_and_rows_before_the_last_keys():
    tiles = [(p.br, p.bc) for p in (plan_amx("bf16", d=128, sram=s << 10)[0] for s in (192, 128, 96, 64, 60))]
    assert tiles == sorted(tiles, reverse=True) and tiles[0][0] == 128 and tiles[-1] == (32, 32)
    assert [bc for br, bc in tiles if br > 32] and all(bc >= cpu_amx.ENOUGH_KEYS for br, bc in tiles if br > 32)


@pytest.mark.parametrize(
    "override, message",
    [
        ({"br": 8}, "Br=8: an AMX tile is a multiple of 32 rows"),
        ({"br": 48}, "try --br 32"),
        ({"bc": 40}, "Bc=40: an AMX tile is a multiple of 32 keys"),
        ({"br": 4096}, "no tile with Br=4096 fits 196,608 bytes at d=128, bf16"),
        ({"br": 128, "bc": 512}, "smallest: Br=128 Bc=512 needs"),
    ],
)
def test_an_illegal_override_is_refused_with_its_reason(override, message):
    with pytest.raises(PlanError) as caught:
        plan_amx("bf16", d=128, sram=192 << 10, **override)
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_legal_override_is_kept(dtype):
    for br, bc in ((32, 32), (64, 96), (256, 64)):
        plan, changes, rejected = plan_amx(dtype, d=64, sram=2 << 20, br=br, bc=bc)
        assert (plan.br, plan.bc) == (br, bc) and changes == () and rejected == ()


def test_the_plan_dictionary_has_what_the_bound_needs():
    for dtype, planes, degree in (("bf16", 1, 4), ("fp16", 2, 5)):
        plan = plan_amx(dtype, d=64, sram=192 << 10)[0]
        facts = plan.as_dict()
        assert facts["planes"] == planes and facts["exp_degree"] == degree
        assert 2.0 ** facts["lag"] == pytest.approx(plan.most_weight)
        assert sum(facts["memory"].values()) == facts["fast_memory_bytes"]


def test_a_request_too_small_for_amx_alone_is_served_by_the_other_kernels():
    decision = cpu.decide(units.make_problem(256, sram=100 << 10, dtypes=("fp16",)), "cpu")
    assert {v.isa for v in decision.variants} == {"v4", "v3", "baseline"}
    assert "amx/fp16" in decision.rejected
