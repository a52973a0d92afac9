"""The emitted mma.sync backward kernels on the emulator: no finding in three schedules, within their bound."""

import pytest

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
