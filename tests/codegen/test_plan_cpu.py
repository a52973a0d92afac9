"""The CPU planner: every tile that it accepts is legal, every figure is the kernel's own, every step has a reason."""

import itertools

import pytest

from codegen import problem as problems
from codegen.errors import PlanError
from codegen.plans import cpu, cpu_vector
from codegen.plans.cpu_isa import VECTOR_ISAS, Limits
from codegen.problem import HEAD_DIMS, ITEMSIZE
from spec import tile_rule

KB = 1024
ISAS = [pytest.param(isa, id=isa.name) for isa in VECTOR_ISAS]


def request(sram=192 * KB, d=128, **more):
    return problems.make(sram_bytes=sram, d=d, archs=("cpu",), **more)


def plans(problem):
    return {(v.isa, v.dtype): v.plan for v in cpu.decide(problem, "cpu").variants}


def test_the_default_request_has_every_kernel_best_first():
    kernels = [(v.isa, v.dtype) for v in cpu.decide(request(), "cpu").variants]
    vector = ["v4", "v3", "baseline"]
    assert kernels == [
        (isa, dtype)
        for dtype in ("float32", "float64", "bf16", "fp16")
        for isa in (["amx", *vector] if ITEMSIZE[dtype] == 2 else vector)
    ]


@pytest.mark.field("R094", "R095")
@pytest.mark.parametrize("sram", [24 * KB, 48 * KB, 100_000, 192 * KB, 1024 * KB, 8192 * KB])
def test_every_plan_fits_the_budget_and_its_parts_add_up(sram):
    for d, dv in ((8, 8), (64, 64), (128, 128), (256, 256), (40, 200), (256, 8)):
        try:
            found = plans(request(sram, d, dv=dv))
        except PlanError:
            assert sram < 128 * KB
            continue
        for plan in found.values():
            assert plan.fast_memory_bytes == sum(part.bytes for part in plan.memory) <= sram
            assert plan.as_dict()["fast_memory_bytes"] == plan.fast_memory_bytes
            assert plan.br % 32 == 0 and plan.bc % 8 == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bf16", "fp16"])
def test_every_multiple_of_32_rows_is_whole_panels(isa, dtype):
    for br, d in itertools.product(range(32, 1025, 32), (8, 136, 256)):
        plan = cpu_vector.make_plan(isa, dtype, br=br, bc=8, d=d, dv=d)
        assert plan.panels * plan.vectors * plan.lanes == br
        larger = [n for n in (2, 3) if n > plan.vectors]
        assert all(br % (n * plan.lanes) for n in larger), "a wider panel was possible"


@pytest.mark.field("R098")
@pytest.mark.parametrize("br", [1, 8, 16, 17, 33, 100])
def test_an_illegal_br_is_refused_with_the_nearest_legal_one(br):
    with pytest.raises(PlanError, match=f"Br={br}: a CPU tile is a multiple of 32 rows\n  try --br "):
        cpu.decide(request(br=br), "cpu")


@pytest.mark.field("R098")
@pytest.mark.parametrize("bc", [1, 4, 9, 100])
def test_an_illegal_bc_is_refused_with_the_nearest_legal_one(bc):
    with pytest.raises(PlanError, match=f"Bc={bc}: a CPU tile is a multiple of 8 keys\n  try --bc "):
        cpu.decide(request(bc=bc), "cpu")


def test_a_legal_override_is_taken_as_it_is_or_refused():
    for br, bc in ((32, 8), (64, 128), (192, 64), (96, 1000)):
        found = plans(request(4096 * KB, br=br, bc=bc))
        assert all((p.br, p.bc) == (br, bc) for p in found.values())
    with pytest.raises(PlanError, match="Br=192 Bc=128") as refused:
        cpu.decide(request(br=192, bc=128), "cpu")
    assert "smallest: Br=192 Bc=128 needs" in str(refused.value)
    half = plans(request(br=128, dtypes=("float32",)))
    assert all(p.br == 128 and p.bc < 64 for p in half.values())


def test_a_tile_that_only_amx_cannot_have_turns_amx_down():
    decision = cpu.decide(request(4096 * KB, bc=40), "cpu")
    assert {v.isa for v in decision.variants} == {"v4", "v3", "baseline"}
    assert "multiple of 32 keys" in decision.rejected["amx/bf16"][0].why


@pytest.mark.field("R096")
def test_a_budget_that_holds_nothing_names_the_smallest_tile_and_one_that_would_do():
    with pytest.raises(PlanError) as refused:
        cpu.decide(request(1 * KB, 256), "cpu")
    first, smallest, remedy = str(refused.value).split("\n")
    assert first == "no tile fits 1,024 bytes at d=256, float32 on the CPU (v4)"
    assert smallest.startswith("  smallest: Br=32 Bc=8 needs ") and "Q panels 32,768" in smallest
    enough = int(remedy.removeprefix("  try --sram ").split("KB")[0])
    assert cpu_vector.plan_vector(request(enough * KB, 256), "float32", VECTOR_ISAS[0], Limits(enough * KB))
    with pytest.raises(PlanError):
        small = request((enough - 1) * KB, 256)
        cpu_vector.plan_vector(small, "float32", VECTOR_ISAS[0], Limits((enough - 1) * KB))


@pytest.mark.parametrize("sram", [20 * KB, 64 * KB, 192 * KB, 227 * KB, 2048 * KB])
def test_every_step_from_the_papers_tile_has_a_reason(sram):
    for d in HEAD_DIMS[::3]:
        try:
            decision = cpu.decide(request(sram, d), "cpu")
        except PlanError:
            continue
        for v in decision.variants:
            paper = tile_rule.rule(sram // ITEMSIZE[v.dtype], d, d)
            steps = decision.changes.get(f"{v.isa}/{v.dtype}", ())
            for side, start, end in (("Br", paper.br, v.plan.br), ("Bc", paper.bc, v.plan.bc)):
                told = [step.what for step in steps if step.what.startswith(side)]
                values = [int(x) for what in told for x in what[3:].split(" -> ")]
                assert (values or [start, start])[0] == start and (values or [end, end])[-1] == end
                assert all(a == b for a, b in zip(values[1::2], values[2::2], strict=False))
            assert all(step.why for step in steps)
        for tiles in decision.rejected.values():
            assert all(tile.why for tile in tiles)


def test_more_keys_than_l1_holds_are_not_planned():
    """At 2 MB and d=64 the rule asks for 2048 keys; S and O of a 48-row panel leave room for 192."""
    plan = plans(request(2048 * KB, 64))["v4", "float32"]
    assert (plan.br, plan.bc, plan.panel_rows) == (64, 320, 32)
    assert (plan.bc + 64) * plan.panel_rows * 4 <= 48 * KB < (plan.bc + 64 + 8) * plan.panel_rows * 4


def test_rows_of_the_key_block_that_would_collide_are_padded():
    wide = plans(request(4096 * KB, 256))["v4", "float64"]
    assert (wide.k_pitch, wide.v_pitch) == (264, 264)
    plan = plans(request(4096 * KB, 128))["v4", "float64"]
    assert plan.k_pitch == 128


def test_files_name_one_unit_per_instruction_set_that_has_a_kernel():
    def emitted(**more):
        problem = request(**more)
        return set(cpu.files(problem, cpu.decide(problem, "cpu")))

    units = {f"csrc/forward_cpu_{isa}.cpp" for isa in ("v4", "v3", "baseline")}
    headers = {"csrc/simd.h", "csrc/storage_simd.h", "csrc/block_simd.h", "csrc/forward_simd.h"}
    backward = {f"csrc/backward_cpu_{isa}.cpp" for isa in ("v4", "v3", "baseline")}
    backward |= {f"csrc/backward_{part}.h" for part in ("simd", "simd_block", "simd_sums", "tasks")}
    assert emitted(dtypes=("float32", "float64"), backward=False) == units | headers
    assert emitted(dtypes=("float32", "float64")) == units | headers | backward
    assert emitted() > units | headers | backward | {"csrc/forward_cpu_amx.cpp", "csrc/backward_cpu_amx.cpp"}


def test_gradients_have_a_kernel_per_dtype_and_an_amx_kernel_in_bf16():
    decision = cpu.decide(request(), "cpu")
    by_dtype = {t: [v.isa for v in decision.backward if v.dtype == t] for t in problems.DTYPES}
    vector = ["v4", "v3", "baseline"]
    assert by_dtype == {"float32": vector, "float64": vector, "bf16": ["amx", *vector], "fp16": vector}
    assert cpu.decide(request(backward=False), "cpu").backward == ()
    assert all(v.plan.fast_memory_bytes <= 192 * KB for v in decision.backward)


def test_gradients_keep_their_own_tile_whatever_the_forward_one_is():
    plain, asked = (cpu.decide(request(**more), "cpu") for more in ({}, {"br": 32, "bc": 32}))
    assert asked.backward == plain.backward
    assert all((v.plan.br, v.plan.bc) == (32, 32) for v in asked.variants)


def test_without_an_amx_forward_kernel_there_is_no_amx_backward_kernel():
    decision = cpu.decide(request(4096 * KB, bc=40), "cpu")
    assert {v.isa for v in decision.backward} == {"v4", "v3", "baseline"}


def test_amx_gradients_that_do_not_fit_are_turned_down():
    """d = 256 in 100 KB: the forward AMX kernel fits, the smallest backward one needs more."""
    decision = cpu.decide(request(100 * KB, 256, dtypes=("bf16",)), "cpu")
    assert "amx" in {v.isa for v in decision.variants} and "amx" not in {v.isa for v in decision.backward}
    assert "no backward tile fits" in decision.backward_rejected["amx/bf16"][0].why
