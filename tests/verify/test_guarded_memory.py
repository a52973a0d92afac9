"""Memory that tells, on the CPU: guards on both sides, outputs of NaN, rows beyond the length."""

from __future__ import annotations

import pytest
import torch

from verify.guarded_memory import GUARD_BYTES, Guarded, drawn, scattered, unwritten


def test_the_guards_are_on_both_sides():
    for place in (0, GUARD_BYTES - 1, -GUARD_BYTES, -1):
        made = Guarded((2, 3), torch.bfloat16, "cpu")
        assert made.values.isnan().all() and not list(made.faults("O"))
        made.values.fill_(1)
        assert not list(made.faults("O")) and not list(unwritten("O", made.read()))
        made._memory[place] += 1
        assert list(made.faults("O")) == ["O: a guard byte was overwritten"]


@pytest.mark.parametrize("layout", ["contiguous", "bnhd", "padded"])
def test_rows_beyond_are_nan_where_they_are_filled(layout):
    values = drawn((2, 3, 5, 8), torch.float32, 0)
    made = scattered(values, (2, 5), layout, "cpu", fill=True)
    assert torch.equal(made[0, :, :2], values[0, :, :2]) and torch.equal(made[1], values[1])
    assert made[0, :, 2:].isnan().all() and made.is_contiguous() == (layout == "contiguous")
