"""The formulas in plan.json are the specification's counts, exact at any length."""

from __future__ import annotations

import pytest

from codegen import formulas
from spec import io_bounds, io_counts


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


def backward_values(nq, nk, **plan):
    return {key: formulas.evaluate(f, {"Nq": nq, "Nk": nk}) for key, f in formulas.backward(**plan).items()}


@pytest.mark.parametrize("target", ["cpu", "sm80"])
@pytest.mark.parametrize("nq, nk", [(0, 0), (1, 1), (95, 7), (0, 9), (9, 0), (97, 512), (2**40, 2**41)])
@pytest.mark.parametrize("d, dv, br, bc", [(128, 128, 96, 64), (64, 32, 1, 1), (8, 256, 128, 48)])
def test_the_backward_text_is_the_specifications_count(target, nq, nk, d, dv, br, bc):
    s = io_counts.Sizes(nq=nq, nk=nk, dk=d, dv=dv)
    by_rows = target == "cpu"
    want = io_counts.flash2_backward_by_rows(s, br) if by_rows else io_counts.flash2_backward(s, bc)
    summed = s.kv if by_rows else nq * d  # elements of the gradients that are summed in slow memory
    for itemsize in (8, 4, 2):
        got = backward_values(nq, nk, target=target, d=d, dv=dv, br=br, bc=bc, itemsize=itemsize)
        converted = summed if itemsize == 2 else 0  # read once more, and written as gradients
        assert got["flops"] == io_bounds.flops_backward_recomputed(s)
        assert got["slow_memory_reads_elements"] == want.reads + converted
        assert got["slow_memory_writes_elements"] == want.writes + converted
        if itemsize > 2:
            assert got["slow_memory_bytes"] == itemsize * want.total  # LSE and sums are as wide as the rest


@pytest.mark.parametrize("target", ["cpu", "sm80"])
def test_planned_costs_of_the_backward_pass_at_a_known_point(target):
    """96 rows and 130 keys, d = 8, dv = 16: two row tiles of 64, three key tiles of 48."""
    got = backward_values(96, 130, target=target, d=8, dv=16, br=64, bc=48, itemsize=2)
    nq, nk, d, dv = 96, 130, 8, 16
    if target == "cpu":
        read = {2: nq * (d + 2 * dv) + 2 * nk * (d + dv), 4: nq + 2 * nk * (d + dv) + nk * (d + dv)}
        written = {2: nq * d + nk * (d + dv), 4: nk * (d + dv) + 2 * nk * (d + dv)}
    else:
        read = {2: nq * 2 * dv + nk * (d + dv) + 3 * nq * (d + dv), 4: 3 * nq * (d + 2) + nq * d}
        written = {2: nk * (d + dv) + nq * d, 4: nq * d + nq + 3 * nq * d}
    assert got["slow_memory_reads_elements"] == sum(read.values())
    assert got["slow_memory_writes_elements"] == sum(written.values())
    assert got["slow_memory_bytes"] == sum(width * (read[width] + written[width]) for width in (2, 4))


@pytest.mark.parametrize(
    "formula", ["__import__('os')", "Nq ** Nk", "Nq - 1", "1.5 * Nq", "Nq.real", "[Nq]", "Nq if Nk else 1"]
)
def test_a_formula_is_arithmetic_and_nothing_else(formula):
    with pytest.raises(ValueError, match="not part of a formula"):
        formulas.evaluate(formula, {"Nq": 2, "Nk": 3})
