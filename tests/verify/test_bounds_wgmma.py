"""The model of the wgmma kernels: key tiles in descending order, and a reference that may trail the maximum by 2^8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verify import arithmetic, bounds, inputs, simulator
from verify.bounds import weights
from verify.compare import ratio
from verify.oracle import float64

NAME = "wgmma_sm90a"
PLANS = {"eager": {}, "lazy": {"lazy_rescale": True}}


def model(dtype="bf16", **plan):
    return arithmetic.model(NAME, dtype, **plan)


def worst(x, kernel, judged, bc, errors):
    """Largest error/bound of O and LSE of a simulated `kernel` under the bound of the model `judged`."""
    arrays = {"scale": x.scale, "visible": x.mask}
    assert bounds.outside_domain(*x, **arrays, model=judged) is None
    o, lse = simulator.forward(*x, **arrays, model=kernel, bc=bc, errors=errors)
    bound, want = bounds.forward(*x, **arrays, model=judged, bc=bc), float64.attention(*x, **arrays)
    pairs = ((o, want.o, bound.o, want.o_err), (lse, want.lse, bound.lse, want.lse_err))
    return max(float(ratio(got, w, b, want_error=e).max(initial=0.0)) for got, w, b, e in pairs)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", inputs.FAMILIES)
def test_a_kernel_that_rounds_as_its_model_says_is_within_the_bound(family, dtype, plan):
    for seed, (nk, bc, direction) in enumerate([(70, 16, "random"), (33, 64, "low"), (129, 32, "high")]):
        judged = model(dtype, debug=seed != 1, **plan)
        x = inputs.FAMILIES[family](3, nk, 24, 8, dtype=dtype, seed=seed)
        assert worst(x, judged, judged, bc, simulator.Errors(direction, seed)) <= 1.0


@pytest.mark.parametrize("change", [{"fraction_bits": 10}, {"exp2_error": 2.0**-8}, {"p_format": "bf16"}], ids=str)
def test_a_kernel_that_rounds_worse_than_its_model_says_is_outside(change):
    x = inputs.FAMILIES["gaussian"](3, 129, 24, 8, dtype="fp16", seed=1)
    kernel = replace(model("fp16", debug=True), **change)
    assert worst(x, kernel, model("fp16", debug=True), 16, simulator.Errors("high")) > 1.0


def rescales(x, judged, bc):
    """Per row, the most alphas that are neither 0 nor 1."""
    s = float64.softmax(x.q, x.k, scale=x.scale, visible=x.mask)
    errors = weights.log_errors(s, x.q, x.k, scale=x.scale, model=judged, bc=bc, confidence=None)
    return errors.rescales


def test_tiles_count_in_the_order_of_the_kernel():
    """A maximum that rises with the keys asks for an alpha in nearly every tile; in descending order, in none."""
    rising = inputs.FAMILIES["late_max"](2, 128, 16, 8, dtype="bf16", seed=3)
    falling = inputs.FAMILIES["falling_max"](2, 128, 16, 8, dtype="bf16", seed=3)
    ascending = replace(model(), last_tile_first=False)
    assert rescales(rising, model(), 16).max() < rescales(rising, ascending, 16).max()
    assert rescales(falling, model(), 16).max() > rescales(falling, ascending, 16).max()


def test_a_lazy_kernel_rescales_less_and_may_trail():
    lazy = model(lazy_rescale=True)
    assert lazy.lag_log2 == pytest.approx(8.0) and lazy.lag_log2 > 8.0 and model(lazy_rescale=False).lag_log2 == 0.0
    x = inputs.FAMILIES["falling_max"](4, 256, 16, 8, dtype="bf16", seed=5)
    assert (rescales(x, lazy, 16) <= rescales(x, model(), 16)).all()


def test_it_sums_as_the_recorded_vectors_of_the_machine_do():
    from verify.emulator import measured

    assert (model().block, model().fraction_bits) == (measured.BLOCK, measured.FRACTION_BITS)
    assert model().step_unit == arithmetic.model("mma_sm80", "bf16", device="sm_90").step_unit
