"""The formulas in plan.json are the specification's counts, exact at any length."""

from __future__ import annotations

import pytest

from codegen import formulas
from spec import io_counts


def values(nq, nk, **plan):
    return {key: formulas.evaluate(f, {"Nq": nq, "Nk": nk}) for key, f in formulas.forward(**plan).items()}


@pytest.mark.field("R074")
@pytest.mark.parametrize("nq, nk", [(2048, 2**22), (2**40, 2**40), (1, 2**62)])
def test_planned_costs_are_exact_at_any_length(nq, nk):
    tiles = -(-nq // 96)
    assert values(nq, nk, d=128, dv=128, br=96, itemsize=2) == {
        "flops": 2 * nq * nk * 256,
        "slow_memory_reads_elements": nq * 128 + tiles * nk * 256,
        "slow_memory_writes_elements": nq * 129,
        "slow_memory_bytes": 2 * (nq * 128 + tiles * nk * 256 + nq * 128) + 4 * nq,
    }


@pytest.mark.parametrize("nq, nk", [(0, 0), (1, 1), (95, 7), (96, 512), (97, 512), (4096, 4096)])
@pytest.mark.parametrize("d, dv, br", [(128, 128, 96), (64, 32, 1), (8, 256, 128)])
def test_the_text_is_the_specifications_count(nq, nk, d, dv, br):
    got = values(nq, nk, d=d, dv=dv, br=br, itemsize=4)
    want = io_counts.flash2_forward(io_counts.Sizes(nq=nq, nk=nk, dk=d, dv=dv), br)
    assert got["slow_memory_reads_elements"] == want.reads
    assert got["slow_memory_writes_elements"] == want.writes
    assert got["slow_memory_bytes"] == 4 * want.total  # float32: LSE is as wide as the rest


@pytest.mark.parametrize(
    "formula", ["__import__('os')", "Nq ** Nk", "Nq - 1", "1.5 * Nq", "Nq.real", "[Nq]", "Nq if Nk else 1"]
)
def test_a_formula_is_arithmetic_and_nothing_else(formula):
    with pytest.raises(ValueError, match="not part of a formula"):
        formulas.evaluate(formula, {"Nq": 2, "Nk": 3})
