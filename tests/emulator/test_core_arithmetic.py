"""The three models of accumulation differ where they must; conversions round to nearest even; ex2 errs as asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from verify.emulator import build
from verify.emulator.emulator import ACCUMULATIONS, Emulator, guarded, guarded_copy

SOURCE = Path(__file__).parent / "kernels" / "core_arithmetic.cu"
ULP = 2.0**-23  # of float32 at 1


@pytest.fixture
def emulator():
    made = Emulator(build.library(SOURCE))
    yield made
    for name in ("mma", "ex2_error"):  # options outlive a configuration
        made.option(name, 0)


def per_element(emulator: Emulator, function: str, x: np.ndarray) -> np.ndarray:
    """The two 32-bit results for each pair of `x`; its size is a multiple of 256."""
    source, target = guarded_copy(x.astype(np.float32)), guarded((x.size,), np.float32)
    emulator.clear()
    emulator.register("in", source)
    emulator.register("out", target, once=True)
    emulator.launch(function, source, target, x.size // 256).check()
    return target


def dot(emulator: Emulator, a: list[float], b: list[float]) -> float:
    """D[0][0] of a product whose A has the row `a` and whose B has the column `b`, in bf16."""
    registers = np.zeros((32, 6), np.uint32)  # a0..a3, b0, b1 of each lane
    words = [np.zeros(16, np.float32) for _ in range(2)]
    for word, values in zip(words, (a, b), strict=True):
        word[: len(values)] = values
    a_bits, b_bits = ((w.view(np.uint32) >> 16).reshape(8, 2) for w in words)
    for t in range(4):  # g = 0: lanes 0..3
        registers[t, [0, 2]] = [pair[0] | pair[1] << 16 for pair in (a_bits[t], a_bits[t + 4])]
        registers[t, [4, 5]] = [pair[0] | pair[1] << 16 for pair in (b_bits[t], b_bits[t + 4])]
    source, target = guarded_copy(registers.view(np.int64)), guarded((32, 4), np.float32)
    emulator.clear()
    emulator.register("in", source)
    emulator.register("out", target, once=True)
    run = emulator.launch("run_product", source, target, 1).check()
    assert run.counters["mma"] == 1 and not target[:, 2:].any()
    return float(target[0, 0])


# A row times a column of ones; what "chain", "exact" and "truncating" must make of the sum.
SUMS = {
    "seven addends too small for a chain": ([1.0] + [ULP / 4] * 7, (1.0, 1 + 2 * ULP, 1.0)),
    "one addend above half a unit": ([1.0, 0.75 * ULP], (1 + ULP, 1 + ULP, 1.0)),
    "cancellation": ([1.0, ULP / 8, -1.0], (0.0, ULP / 8, 0.0)),
    "addends that cancel in different blocks": ([2.0**20] + [0.0] * 7 + [-(2.0**20), 1.0], (1.0, 1.0, 1.0)),
    "an infinity": ([1.0, np.inf, -5.0], (np.inf, np.inf, np.inf)),
}


@pytest.mark.parametrize("row, expected", SUMS.values(), ids=SUMS.keys())
def test_each_model_adds_in_its_own_way(emulator, row, expected):
    for index, (model, value) in enumerate(zip(ACCUMULATIONS, expected, strict=True)):
        emulator.option("mma", index)
        assert dot(emulator, row, [1.0] * len(row)) == value, model


def test_the_exponent_of_a_product_is_that_of_its_factors(emulator):
    """1.5 x 1.5 counts as below 2: beside it an addend of 2^-24 is not cut off."""
    emulator.option("mma", ACCUMULATIONS.index("truncating"))
    assert dot(emulator, [1.5, -1.5, ULP / 2], [1.5, 1.5, 1.0]) == ULP / 2
    assert dot(emulator, [2.25, -2.25, ULP / 2], [1.0, 1.0, 1.0]) == 0


def test_opposite_infinities_are_nan_in_each_model(emulator):
    for index in range(len(ACCUMULATIONS)):
        emulator.option("mma", index)
        assert np.isnan(dot(emulator, [np.inf, -np.inf], [1.0, 1.0]))


def around_every_f16() -> np.ndarray:
    """Every finite float16, the middle to the next one, and the float32 on both sides of each."""
    values = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = (values + np.append(values[1:], 65536.0)) / 2
    centre = np.concatenate([values, middles]).astype(np.float32)
    near = np.concatenate([centre, np.nextafter(centre, np.float32(np.inf)), np.nextafter(centre, np.float32(-np.inf))])
    return np.concatenate([near, -near, np.array([np.inf, -np.inf, 1e30, -1e30], np.float32)])


def test_conversions_round_to_nearest_even(emulator):
    x = around_every_f16()
    x = np.append(x, np.zeros(-x.size % 256, np.float32))
    pairs = per_element(emulator, "run_convert", x).view(np.uint16).reshape(-1, 4)  # bf16 low, high, f16 low, high
    with np.errstate(over="ignore"):
        assert np.array_equal(pairs[:, 2:].reshape(-1), x.astype(np.float16).view(np.uint16))
    bits = x.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # ties to even, carries into the exponent
    assert np.array_equal(pairs[:, :2].reshape(-1), nearest.astype(np.uint16))


def test_nan_becomes_the_canonical_nan(emulator):
    x = np.full(256, np.nan, np.float32)
    assert (per_element(emulator, "run_convert", x).view(np.uint16) == 0x7FFF).all()


def test_ex2_is_right_at_its_edges(emulator):
    x = np.zeros(256, np.float32)
    x[:8] = [0.0, -np.inf, np.inf, -126.0, -126.5, -150.0, 1.0, np.nan]
    got = per_element(emulator, "run_exponential", x)
    assert np.array_equal(got[:7], np.array([1, 0, np.inf, 2.0**-126, 0, 0, 2], np.float32)) and np.isnan(got[7])


def test_ex2_errs_by_no_more_than_it_is_asked_to_and_to_both_sides(emulator):
    x = np.linspace(-20, 0, 4096).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    emulator.option("ex2_error", 2.0**-10)
    relative = per_element(emulator, "run_exponential", x) / exact - 1
    rounding = 2.0**-22  # of exp2f and of the product
    assert np.abs(relative).max() <= 2.0**-10 + rounding
    assert relative.max() > 2.0**-11 and relative.min() < -(2.0**-11)
    emulator.option("ex2_error", 0)
    assert np.abs(per_element(emulator, "run_exponential", x) / exact - 1).max() <= rounding


def test_reciprocals_and_logarithms_flush_subnormal_numbers(emulator):
    """PTX ISA, "rcp", "lg2" with .ftz; within the error of 2^-22 that both may have elsewhere."""
    least = np.float32(2.0**-126)
    x = np.array(
        [0.0, -0.0, least / 2, -least / 2, least, 2.0**126, 2.0**127, np.inf, -np.inf, -4.0, np.nan], np.float32
    )
    pairs = np.ones((128, 2), np.float32)
    pairs[: x.size] = x[:, None]
    pairs[64:] = np.geomspace(2.0**-125, 2.0**125, 64, dtype=np.float32)[:, None]
    got = per_element(emulator, "run_reciprocal_logarithm", pairs.reshape(-1)).reshape(-1, 2)
    inf, nan = np.inf, np.nan
    reciprocals = np.array([inf, -inf, inf, -inf, 2.0**126, least, 0, 0, -0.0, -0.25, nan], np.float32)
    assert np.array_equal(got[: x.size, 0], reciprocals, equal_nan=True)
    assert np.array_equal(np.signbit(got[: x.size, 0]), np.signbit(reciprocals))
    logarithms = np.array([-inf, -inf, -inf, -inf, -126, 126, 127, inf, nan, nan, nan], np.float32)
    assert np.array_equal(got[: x.size, 1], logarithms, equal_nan=True)
    exact = pairs[64:, 0].astype(np.float64)
    assert np.abs(got[64:, 0] * exact - 1).max() <= 2.0**-22
    assert (np.abs(got[64:, 1] - np.log2(exact)) <= 2.0**-22 * np.maximum(1, np.abs(np.log2(exact)))).all()
