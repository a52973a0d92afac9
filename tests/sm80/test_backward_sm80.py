"""The emitted mma.sync backward kernels on the emulator: no finding in three schedules, within their bound."""

import pytest

from codegen.plans.sm80_backward import KeyTiles, QueryTiles, Sm80BackwardPlan
from tests.sm80 import backward_units as units

# B, Hq, Hkv, Nq, Nk; the mask; the key lengths.
SHAPES = [
    ((1, 1, 1, 70, 150), False, None),
    ((1, 2, 1, 150, 130), "bottom_right", None),
    ((2, 4, 2, 100, 200), "top_left", (200, 77)),
    ((1, 1, 1, 1, 1), False, None),
    ((1, 1, 1, 5, 300), "bottom_right", None),
    ((1, 1, 1, 300, 5), "bottom_right", None),
]
WIDTHS = [(64, 64), (128, 128), (40, 72), (256, 64)]


@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("shape, causal, lengths", SHAPES, ids=lambda x: str(x).replace(" ", ""))
@pytest.mark.parametrize("d, dv", WIDTHS)
def test_gradients_are_within_the_stage_wise_bound(d, dv, shape, causal, lengths, deterministic):
    problem = units.make_problem(d, dv)
    dtype = "fp16" if shape[4] % 2 else "bf16"
    x = units.draw(shape, d, dv, dtype, dlse=deterministic, causal=causal, key_lengths=lengths)
    x.deterministic = deterministic
    units.assert_right(problem, x, units.gradients(problem, x))


@pytest.mark.parametrize("keys, passes", [
    (KeyTiles(d=120, dv=96, br=64, bc=64, warps=4, row_warps=2, stages=1), (2, 2)),
    (KeyTiles(d=72, dv=56, br=64, bc=64, warps=4, row_warps=1, stages=1), (2, 3)),  # the last pass is shorter
    (KeyTiles(d=184, dv=72, br=16, bc=32, warps=2, row_warps=1, stages=2), (4, 2)),  # and empty
])  # fmt: skip
def test_dq_in_more_passes_than_its_registers_need_is_right(keys, passes):
    """What the register rule asks for where one pass would be straight code."""
    assert (keys.dq_passes, keys.dq_columns) == passes
    plan = Sm80BackwardPlan(keys=keys, query=QueryTiles(d=keys.d, dv=keys.dv, br=64, bc=16, row_tiles=1, stages=1))
    problem = units.make_problem(keys.d, keys.dv, dtypes=("bf16",))
    x = units.draw((1, 2, 1, 70, 40), keys.d, keys.dv, "bf16", causal="bottom_right")
    units.assert_right(problem, x, units.gradients(problem, x, plan=plan), plan=plan)
