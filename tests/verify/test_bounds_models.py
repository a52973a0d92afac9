"""Rows of constants: what a plan and a calibration may change, and sums of products against a bit-exact unit."""

import json
from dataclasses import replace

import numpy as np
import pytest

from verify import arithmetic, simulator
from verify.arithmetic import MODELS, gamma, model


def test_every_path_of_the_contract_has_a_model():
    for name, dtypes in {
        "fma_f32": ("float32", "bf16", "fp16"),
        "muladd_f32": ("float32", "bf16", "fp16"),
        "fma_f64": ("float64",),
        "muladd_f64": ("float64",),
        "amx_bf16": ("bf16",),
        "amx_fp16_planes": ("fp16",),
        "mma_sm80": ("bf16", "fp16"),
        "torch_16": ("bf16", "fp16"),
        "torch_f32": ("float32",),
        "torch_f64": ("float64",),
    }.items():
        assert MODELS[name][0] == dtypes
        for dtype in dtypes:
            m = model(name, dtype)
            assert m.out_format == (None if dtype in ("float32", "float64") else dtype)
            assert model(name, dtype, debug=True).out_format is None


def test_p_has_the_format_that_the_path_gives_it():
    assert model("mma_sm80", "fp16").p_unit == 2.0**-11 and model("mma_sm80", "fp16").p_tiny == 2.0**-25
    assert model("mma_sm80", "bf16").p_unit == 2.0**-8
    assert model("fma_f32", "bf16").p_unit == 0.0 and model("fma_f32", "bf16").p_format is None
    assert model("amx_bf16", "bf16").p_unit == 2.0**-8


def test_plan_figures_that_round_are_used_and_the_others_are_passed_over():
    m = model("amx_bf16", "bf16", br=128, bc=64, exp_degree=5, memory={"Q": 1})
    assert m.exp2_error == arithmetic.EXP2_ERROR_OF_DEGREE[5]
    assert m == replace(model("amx_bf16", "bf16"), exp2_error=m.exp2_error)
    assert model("fma_f64", "float64", exp2_error=1e-15).exp2_error == 1e-15
    with pytest.raises(ValueError, match="degree 3"):
        model("amx_bf16", "bf16", exp_degree=3)


def test_unknown_names_dtypes_and_constants_are_refused():
    with pytest.raises(ValueError, match="not one of fma_f32"):
        model("fma", "float32")
    with pytest.raises(ValueError, match="takes bf16, not fp16"):
        model("amx_bf16", "fp16")
    with pytest.raises(ValueError, match="product"):
        replace(model("fma_f32", "float32"), product="wgmma")
    with pytest.raises(ValueError, match="out of range"):
        replace(model("fma_f32", "float32"), exp2_error=0.0)


def test_a_calibration_replaces_constants_of_its_device_only(tmp_path, monkeypatch):
    monkeypatch.setattr(arithmetic, "CALIBRATION", tmp_path)
    record = {"arithmetic": "mma_sm80", "device": "h", "constants": {"block": 16, "fraction_bits": 25}}
    (tmp_path / "mma_sm80.h.json").write_text(json.dumps(record))
    assert model("mma_sm80", "bf16", device="h").block == 16
    assert model("mma_sm80", "bf16", device="other").block == 8
    assert model("mma_sm80", "bf16").block == 8
    (tmp_path / "mma_sm80.h.json").write_text(json.dumps({**record, "device": "other"}))
    with pytest.raises(ValueError, match="describes mma_sm80 on other"):
        model("mma_sm80", "bf16", device="h")
    (tmp_path / "mma_sm80.h.json").write_text(json.dumps({**record, "constants": {"blok": 16}}))
    with pytest.raises(ValueError, match="no such constant: blok"):
        model("mma_sm80", "bf16", device="h")


def test_checked_in_calibrations_name_constants_of_their_model():
    for path in arithmetic.CALIBRATION.glob("*.json"):
        name, device = path.name.removesuffix(".json").split(".", 1)
        for dtype in MODELS[name][0]:
            model(name, dtype, device=device)


def test_a_limit_on_the_sum_of_a_tile_is_a_limit_on_one_weight():
    m = model("amx_bf16", "bf16")
    assert m.at(64).lag_log2 == pytest.approx(8.01) and m.at(128).lag_log2 == pytest.approx(9.01)
    assert m.at(64).at(128).lag_log2 == pytest.approx(8.01)
    assert model("mma_sm80", "bf16").at(64).lag_log2 == 0.0


def test_gamma_is_exact_for_small_and_large_counts():
    assert gamma(1, 2.0**-24) == pytest.approx(2.0**-24, rel=1e-12)
    assert gamma(0, 0.5) == 0.0
    assert gamma(4096, 2.0**-24) == pytest.approx((1 + 2.0**-24) ** 4096 - 1, rel=1e-9)


@pytest.mark.parametrize("name, dtype", [(n, d) for n, (dtypes, _) in MODELS.items() for d in dtypes])
@pytest.mark.parametrize("kind", ["normal", "positive", "cancelling", "scattered"])
def test_a_dot_product_is_within_its_bound_for_every_kind_of_data(kind, name, dtype):
    """Error/bound of n-term products into an accumulator; close to 1 for a truncating unit."""
    m = model(name, dtype)
    kernel = simulator._Kernel(m, 1.0, simulator.Errors("none"))
    rng = np.random.default_rng(len(name))
    for n in (8, 24, 64, 256):
        a, b = (simulator.round_to(rng.standard_normal((16, n)), dtype) for _ in range(2))
        if kind == "positive":
            a, b = np.abs(a), np.abs(b)
        if kind == "cancelling":
            a[:, 1::2], b[:, 1::2] = -a[:, ::2], b[:, ::2]
        if kind == "scattered":
            a = simulator.round_to(a * np.exp2(rng.integers(-6, 6, a.shape)), dtype)
        wide_a, wide_b = (x.astype(kernel.wide) for x in (a, b))
        got = kernel.dot(np.zeros((16, 16), dtype=kernel.wide), wide_a, wide_b, m.s_planes)
        exact = wide_a.astype(np.longdouble) @ wide_b.astype(np.longdouble).T
        size = np.abs(a) @ np.abs(b).T
        error = np.abs(np.asarray(got - exact, dtype=np.float64))
        assert (error <= float(m.score_sum(n).g) * size + (2 * n + 2) * m.operation_tiny).all()


def test_a_truncating_block_loses_as_much_as_its_unit_allows():
    """15 products just under one bit of the accumulator's last place are lost in full."""
    m = model("mma_sm80", "bf16", block=16, fraction_bits=25)
    kernel = simulator._Kernel(m, 1.0, simulator.Errors("none"))
    a = np.full((1, 16), 2.0**-13 * (1 - 2.0**-8))
    got = kernel.dot(np.array([[1.0]]), a, np.full((1, 16), 2.0**-13), 1)
    lost = 1.0 + 16 * 2.0**-26 * (1 - 2.0**-8) - float(got[0, 0])
    assert float(got[0, 0]) == 1.0 and 0.3 < lost / m.step_unit < 1.0


# torch/include/ATen/cpu/vec/vec512/vec512_float.h: coefficients from the highest power down.
FEXP = [-0.079204240219773236, -0.22433836478672356, 0.30354260500649682, 0.00010703434948458272]
EXP = [0.00828929059, 0.0418978221, 0.166676521, 0.499991506, 0.999999701, 1.0]


def f32(x):
    return np.asarray(x).astype(np.float32).astype(np.float64)


def horner(coefficients, x):
    y = f32(coefficients[0])
    for c in coefficients[1:]:
        y = f32(y * x + f32(c))  # an FMA
    return y


@pytest.mark.parametrize("largest", [1.0, 20.0, 86.0])
def test_the_exponentials_of_torch_err_as_much_as_their_models_say(largest):
    """Beside the roundings of s - m, log2 e or ln 2 and their product, which grow with the argument."""
    x = f32(-largest * np.random.default_rng(1).random(1_000_000))
    grows = 3 * 2.0**-24 * np.abs(x)

    source = f32(x * f32(np.log2(np.e)))
    source = f32(source - horner(FEXP, f32(source - np.floor(source))))
    bits = np.trunc(f32(2.0**23 * source + 2.0**23 * 127))  # exact in float64 before its one rounding
    fexp = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    error = np.abs(fexp / np.exp(x) - 1)
    assert (error <= arithmetic.TORCH_FEXP_ERROR + grows).all()
    assert error.max() > 0.9 * arithmetic.TORCH_FEXP_ERROR

    n = np.floor(f32(x * f32(np.log2(np.e)) + 0.5))
    exp = np.ldexp(horner(EXP, f32(x - n * f32(np.log(2.0)))), n.astype(int))
    assert (np.abs(exp / np.exp(x) - 1) <= arithmetic.TORCH_EXP_ERROR + grows).all()
