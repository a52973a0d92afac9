"""The backward AMX kernel: the claims of the vector kernels, made for bf16 on the matrix unit."""

import pytest

from codegen.errors import PlanError
from codegen.plans import cpu_amx, cpu_backward_amx
from codegen.plans.cpu_isa import Limits
from tests.cpu import amx_unit, backward_judged, backward_units, units
from tests.cpu import test_backward_layout as layout
from tests.cpu import test_backward_simd as gradients
from tests.cpu import test_backward_special as special_values
from tests.cpu.test_simd import package

needs_amx = pytest.mark.skipif(bool(amx_unit.machine_lacks()), reason=f"needs {amx_unit.machine_lacks()}")

CLAIMS = [
    gradients.test_inputs_that_attack_the_algorithm_stay_within_the_bound,
    gradients.test_the_debug_form_stores_gradients_unrounded,
    gradients.test_a_tile_adds_to_dk_and_dv_only_after_its_predecessor,
    gradients.test_any_subset_of_gradients_has_the_same_bits,
    gradients.test_a_head_has_the_same_bits_alone_and_in_any_batch,
    gradients.test_doubling_dout_doubles_every_gradient_exactly,
    special_values.test_the_table_of_special_values_holds,
    special_values.test_empty_rows_add_nothing_whatever_they_hold,
    special_values.test_what_lies_beyond_the_key_length_is_never_read,
    special_values.test_masked_keys_and_values_have_no_influence,
    special_values.test_a_lse_that_does_not_belong_to_the_scores_shows,
    layout.test_strides_and_addresses_do_not_change_a_bit,
    layout.test_dout_may_have_any_stride_in_its_last_dimension,
    layout.test_expanded_heads_are_fine,
    layout.test_one_array_may_be_q_k_v_and_dout,
    layout.test_every_gradient_is_written_and_nothing_else,
    layout.test_a_call_depends_on_nothing_that_ran_before,
]


@needs_amx
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda f: f.__name__.removeprefix("test_"))
def test_the_amx_kernel(claim):
    claim("amx", "bf16")


@needs_amx
@pytest.mark.parametrize("sizes", gradients.PACKAGES, ids=lambda s: "d{}_dv{}_br{}_bc{}".format(*s))
def test_errors_are_within_both_derived_bounds(sizes):
    gradients.test_errors_are_within_both_derived_bounds("amx", "bf16", sizes)


@needs_amx
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_bits_do_not_depend_on_the_workers(causal):
    gradients.test_bits_do_not_depend_on_the_workers("amx", "bf16", causal)


@needs_amx
@pytest.mark.parametrize("shape", special_values.EMPTY)
def test_empty_problems_give_zeros(shape):
    special_values.test_empty_problems_give_zeros("amx", "bf16", shape)


@needs_amx
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_offsets_are_64_bit(axis):
    special_values.test_offsets_are_64_bit("amx", "bf16", axis)


@needs_amx
def test_the_result_is_near_that_of_the_vector_kernel():
    """Two kernels, one input: they differ by the rounding of P and dS to bf16 and of the gradients, no more."""
    problem = package()
    q, k, v, dout, dlse = backward_judged.draw((1, 4, 2, 150, 130), 64, 64, "bf16", dlse=True)
    (o, lse), mine = backward_judged.run(problem, "amx", "bf16", q, k, v, dout, dlse, causal=True)
    vector = backward_units.gradients(problem, "v4", "bf16", q, k, v, o, lse, dout, dlse, causal=True)
    for name in ("amx", "v4"):
        got = mine if name == "amx" else vector
        backward_judged.assert_right(
            problem, name, "bf16", q, k, v, (o, lse), dout, dlse, got, causal=True, end_to_end=False
        )
    assert any((a != b).any() for a, b in zip(mine, vector, strict=True))


def test_the_unit_has_no_kernel_for_other_types_and_one_symbol():
    files = backward_units.sources(package(), "amx")
    built = units.build(files, "backward_cpu_amx.cpp", [*cpu_amx.UNIT_FLAGS, "-c"], shared=False, name="unit.o")
    symbols = [line.split()[-2:] for line in units.output("nm", built).splitlines()]
    assert [name for kind, name in symbols if kind in "TVWuBDRC"] == ["attention_backward_amx"]
    assert {name for kind, name in symbols if kind == "U"} <= {"aligned_alloc", "fma", "free", "memset", "sched_yield"}


def test_a_plan_fits_its_budget_or_says_what_would():
    for d in (8, 40, 64, 128, 256):
        for kb in (16, 64, 192, 1024):
            problem = units.make_problem(d, sram=kb << 10, dtypes=("bf16",))
            try:
                plan, _, rejected = cpu_backward_amx.plan_backward(problem, Limits(fast_memory_bytes=kb << 10))
            except PlanError as error:
                need = int(str(error).split("--sram ")[1].split("KB")[0])
                assert need > kb
                kb = need
                plan, _, rejected = cpu_backward_amx.plan_backward(problem, Limits(fast_memory_bytes=kb << 10))
                assert (plan.br, plan.bc) == (32, 32)
            assert plan.fast_memory_bytes <= kb << 10
            assert all(f"of {kb << 10:,}" in tile.why for tile in rejected)


@pytest.mark.parametrize("br, bc", [(48, 64), (64, 40), (0, 32)])
def test_a_tile_off_the_granule_is_refused(br, bc):
    with pytest.raises(PlanError, match="multiple of 32"):
        cpu_backward_amx.make_plan(br=br, bc=bc, d=64, dv=64)
