"""The forward bound: never violated by a kernel that rounds as its model says, violated by one that does not."""

import dataclasses
import math
import re

import numpy as np
import pytest

from verify import arithmetic, bounds, inputs, simulator
from verify.bounds import output
from verify.compare import assert_within, ratio
from verify.oracle import balls, float64

PATHS = [
    ("fma_f32", "float32"),
    ("fma_f32", "bf16"),
    ("fma_f32", "fp16"),
    ("muladd_f32", "float32"),
    ("fma_f64", "float64"),
    ("muladd_f64", "float64"),
    ("amx_bf16", "bf16"),
    ("amx_fp16_planes", "fp16"),
    ("mma_sm80", "bf16"),
    ("mma_sm80", "fp16"),
    ("torch_16", "bf16"),
    ("torch_16", "fp16"),
    ("torch_f32", "float32"),
]


SOUND = simulator.Errors()


def judge(x, model, bc, errors=SOUND, run=simulator.forward):
    """Largest error/bound of a simulated kernel: O, LSE, and both under the probabilistic bound."""
    arrays = {"scale": x.scale, "visible": x.mask}
    assert bounds.outside_domain(*x, **arrays, model=model) is None
    o, lse = run(*x, **arrays, model=model, bc=bc, errors=errors)
    bound = bounds.forward(*x, **arrays, model=model, bc=bc)
    oracle = balls if model.working == "float64" else float64
    want = oracle.attention(*x, **arrays)
    pairs = [
        (o, want.o, bound.o, want.o_err),
        (lse, want.lse, bound.lse, want.lse_err),
        (o, want.o, bound.o_probabilistic, want.o_err),
        (lse, want.lse, bound.lse_probabilistic, want.lse_err),
    ]
    return [float(ratio(got, w, b, want_error=e).max(initial=0.0)) for got, w, b, e in pairs]


@pytest.mark.parametrize("name, dtype", PATHS, ids=["-".join(p) for p in PATHS])
@pytest.mark.parametrize("family", inputs.FAMILIES)
def test_a_kernel_that_rounds_as_its_model_says_is_within_the_bound(family, name, dtype):
    for seed, (nk, bc, direction) in enumerate([(70, 16, "random"), (33, 64, "low"), (129, 32, "high")]):
        model = arithmetic.model(name, dtype, debug=seed != 1)
        x = inputs.FAMILIES[family](3, nk, 24, 8, dtype=dtype, seed=seed)
        o, lse, o_probable, lse_probable = judge(x, model, bc, simulator.Errors(direction, seed))
        assert o <= 1.0 and lse <= 1.0
        if inputs.FAMILIES[family].random:
            assert o_probable <= 1.0 and lse_probable <= 1.0


@pytest.mark.parametrize("name, dtype", PATHS, ids=["-".join(p) for p in PATHS])
def test_the_smallest_problems_are_within_the_bound(name, dtype):
    model = arithmetic.model(name, dtype)
    for nk in (1, 2, 15, 16, 17):
        for family in ("gaussian", "far_below_zero", "all_masked_row"):
            o, lse, *_ = judge(inputs.FAMILIES[family](2, nk, 8, 8, dtype=dtype, seed=nk), model, 16)
            assert o <= 1.0 and lse <= 1.0


@pytest.mark.parametrize("exponent", [20, 30, 36, 44])
@pytest.mark.parametrize("name", ["fma_f32", "muladd_f32"])
def test_the_error_of_lse_grows_with_logits_as_large_as_the_domain_allows(name, exponent):
    """A log-weight error beyond what exp holds in float64 is an error of LSE all the same."""
    model = arithmetic.model(name, "float32")
    seen = []
    for seed, direction in enumerate(["low", "high", "random"]):
        x = inputs.FAMILIES["gaussian"](5, 40, 16, 8, dtype="float32", seed=seed)
        x = dataclasses.replace(x, q=x.q * 2.0**exponent)
        seen.append(judge(x, model, 16, simulator.Errors(direction, seed))[:2])
    assert np.max(seen) <= 1.0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("n", [1024, 4096])
def test_equal_weights_reach_the_deterministic_bound_and_break_the_probabilistic_one(dtype, n):
    x = inputs.equal_weights_at_a_midpoint(1, n, 16, 8, dtype=dtype, seed=0)
    model = arithmetic.model("mma_sm80", dtype, debug=True)
    o, _, probable, _ = judge(x, model, 64, simulator.Errors("none"))
    assert 0.5 < o <= 1.0
    assert probable > 1.0


@pytest.mark.parametrize("n", [64, 1024])
def test_a_sum_of_the_rounded_weights_keeps_equal_weights_exact(n):
    x = inputs.equal_weights_at_a_midpoint(1, n, 16, 8, dtype="bf16", seed=0)
    model = arithmetic.model("amx_bf16", "bf16", debug=True)
    o, _ = simulator.forward(*x, scale=x.scale, visible=x.mask, model=model, bc=64)
    bound = bounds.forward(*x, scale=x.scale, model=model, bc=64)
    assert np.abs(o - 1.0).max() < 1e-6
    assert bound.o.max() < 2.0**-12  # V has no spread: P's rounding does not reach O, and the bound knows


class Broken(simulator._Kernel):
    """A kernel with a mistake that plain tolerances let through."""

    def __init__(self, model, scale, errors, mistake):
        super().__init__(model, scale, errors)
        self.mistake = mistake
        if mistake == "scale in bf16":
            self.c = simulator.round_to(self.c, "bf16")
        if mistake == "log2 e with 5 digits":
            self.c = self.fl(np.asarray(scale * 1.4427))

    def dot(self, c, a, b, planes):
        if self.mistake == "Q in bf16" and planes == self.model.s_planes:
            a = simulator.round_to(a, "bf16")
        return super().dot(c, a, b, planes)

    def weights(self, s, base):
        if self.mistake == "S in bf16":
            s = simulator.round_to(s, "bf16")
        return super().weights(s, base)

    def exp2(self, t):
        y = super().exp2(t)
        return y * (1 + 1e-4 * np.sin(9 * np.where(np.isfinite(t), t, 0.0))) if self.mistake == "cubic exp2" else y

    def round_p(self, p):
        return simulator.round_to(p, "bf16")[None] if self.mistake == "P in bf16" else super().round_p(p)

    def add_rows(self, lanes, p, alpha, restarts):
        if self.mistake == "l of the rounded P":
            p = simulator.round_to(p, "bf16")
        if self.mistake == "l not rescaled":
            alpha = np.ones_like(alpha)
        found = super().add_rows(lanes, p, alpha, restarts)
        return simulator.round_to(found, "fp16") if self.mistake == "l in fp16" else found

    def add_values(self, o, p, v, alpha):
        if self.mistake == "O not rescaled":
            alpha = np.where(alpha == 0, 0.0, 1.0)
        found = super().add_values(o, p, v, alpha)
        return simulator.round_to(found, "bf16") if self.mistake == "O in bf16" else found


def run_broken(mistake):
    def run(q, k, v, *, scale, visible, model, bc, errors):
        return Broken(model, scale, errors, mistake).run(q, k, v, visible, bc, None)

    return run


@pytest.mark.parametrize(
    "mistake, name, dtype, family",
    [
        ("scale in bf16", "mma_sm80", "bf16", "gaussian"),
        ("log2 e with 5 digits", "amx_bf16", "bf16", "far_below_zero"),
        ("Q in bf16", "mma_sm80", "fp16", "gaussian"),
        ("S in bf16", "mma_sm80", "bf16", "gaussian"),
        ("S in bf16", "amx_bf16", "bf16", "gaussian"),
        ("cubic exp2", "mma_sm80", "fp16", "gaussian"),
        ("P in bf16", "mma_sm80", "fp16", "equal_weights_at_a_midpoint"),
        ("l of the rounded P", "mma_sm80", "bf16", "gaussian"),
        ("l not rescaled", "fma_f32", "float32", "late_max"),
        ("l in fp16", "fma_f32", "float32", "gaussian"),
        ("O not rescaled", "mma_sm80", "bf16", "late_max"),
        ("O in bf16", "mma_sm80", "bf16", "drift"),
        ("O in bf16", "fma_f32", "float32", "gaussian"),
    ],
)
def test_a_broken_kernel_is_outside_the_bound(mistake, name, dtype, family):
    model = arithmetic.model(name, dtype, debug=True)
    x = inputs.FAMILIES[family](4, 256, 24, 8, dtype=dtype, seed=2)
    sound = judge(x, model, 32)
    broken = judge(x, model, 32, run=run_broken(mistake))
    assert max(sound[:2]) <= 1.0
    assert max(broken[:2]) > 1.0


@pytest.mark.parametrize("name, dtype", PATHS, ids=["-".join(p) for p in PATHS])
@pytest.mark.parametrize(
    "family", ["gaussian", "late_max", "huge_logits", "mixed_scales", "constant_values", "random_mask"]
)
def test_matrix_products_alone_give_a_bound_that_is_never_smaller_and_not_much_larger(family, name, dtype, monkeypatch):
    model = arithmetic.model(name, dtype)
    x = inputs.FAMILIES[family](6, 90, 32, 8, dtype=dtype, seed=4)
    sharp = bounds.forward(*x, scale=x.scale, visible=x.mask, model=model, bc=32)
    monkeypatch.setattr(output, "ELEMENTWISE", 0)
    fast = bounds.forward(*x, scale=x.scale, visible=x.mask, model=model, bc=32)
    assert (fast.o >= sharp.o * (1 - 1e-12)).all() and (fast.lse == sharp.lse).all()
    live = sharp.o > 0
    assert np.median(fast.o[live] / sharp.o[live]) < 2.0


def test_rows_can_be_sampled_and_chunked(monkeypatch):
    x = inputs.causal_bottom_right(40, 50, 16, dtype="bf16", seed=1)
    model = arithmetic.model("mma_sm80", "bf16")
    whole = bounds.forward(*x, scale=x.scale, visible=x.mask, model=model, bc=16, failure=None)
    rows = [0, 13, 39]
    some = bounds.forward(x.q[rows], x.k, x.v, scale=x.scale, visible=x.mask[rows], model=model, bc=16, failure=None)
    assert some.o == pytest.approx(whole.o[rows], rel=1e-12) and some.lse == pytest.approx(whole.lse[rows], rel=1e-12)
    assert whole.o_probabilistic is None and whole.lse_probabilistic is None
    monkeypatch.setattr(float64, "CHUNK", 100)
    chunked = bounds.forward(*x, scale=x.scale, visible=x.mask, model=model, bc=16, failure=None)
    assert chunked.o == pytest.approx(whole.o, rel=1e-12) and chunked.lse == pytest.approx(whole.lse, rel=1e-12)


@pytest.mark.parametrize("name, dtype", PATHS, ids=["-".join(p) for p in PATHS])
def test_rows_without_keys_have_a_bound_of_zero(name, dtype):
    model = arithmetic.model(name, dtype)
    none = bounds.forward(np.ones((3, 8)), np.ones((0, 8)), np.ones((0, 8)), scale=1.0, model=model, bc=16)
    assert none.o.shape == (3, 8) and not none.o.any() and not none.lse.any()
    x = inputs.all_masked_row(5, 40, 8, dtype=dtype, seed=1)
    some = bounds.forward(*x, scale=x.scale, visible=x.visible, model=model, bc=16)
    empty = ~x.mask.any(axis=1)
    for bound in (some.o, some.lse, some.o_probabilistic, some.lse_probabilistic):
        assert (bound[empty] == 0).all() and (bound[~empty] > 0).all()
    nothing = bounds.forward(np.ones((0, 8)), np.ones((4, 8)), np.ones((4, 8)), scale=1.0, model=model, bc=16)
    assert nothing.o.shape == (0, 8)


def test_what_no_row_sees_does_not_enter_the_bound():
    x = inputs.gaussian(4, 40, 16, dtype="bf16")
    visible = np.arange(40) < np.array([10, 20, 30, 30])[:, None]
    model = arithmetic.model("mma_sm80", "bf16")
    clean = bounds.forward(*x, scale=x.scale, visible=visible, model=model, bc=16)
    k, v = x.k.copy(), x.v.copy()
    k[30:], v[30:] = np.nan, np.inf
    poisoned = bounds.forward(x.q, k, v, scale=x.scale, visible=visible, model=model, bc=16)
    assert (poisoned.o == clean.o).all() and (poisoned.lse == clean.lse).all()


def test_bounds_are_finite_wherever_the_domain_is():
    for family in inputs.FAMILIES:
        for name, dtype in PATHS:
            x = inputs.FAMILIES[family](3, 40, 16, dtype=dtype, seed=0)
            model = arithmetic.model(name, dtype)
            assert bounds.outside_domain(*x, scale=x.scale, visible=x.mask, model=model) is None
            found = bounds.forward(*x, scale=x.scale, visible=x.mask, model=model, bc=16)
            for bound in (found.o, found.lse, found.o_probabilistic, found.lse_probabilistic):
                assert np.isfinite(bound).all() and (bound >= 0).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name, dtype", PATHS, ids=["-".join(p) for p in PATHS])
def test_logits_of_any_size_give_a_bound_without_a_warning(name, dtype):
    q, k = (1e7 * np.random.default_rng(seed).standard_normal((4, 32)) for seed in (1, 2))
    bound = bounds.forward(q, k, k[:, :8] / 1e7, scale=1.0, model=arithmetic.model(name, dtype), bc=16)
    assert np.isfinite(bound.o).all() and bound.o_probabilistic is not None


@pytest.mark.parametrize("name, dtype", PATHS, ids=["-".join(p) for p in PATHS])
def test_an_average_cannot_leave_the_range_of_v_so_the_bound_stays_near_it(name, dtype):
    x = inputs.gaussian(3, 40, 16, dtype=dtype)
    model = arithmetic.model(name, dtype)
    size = 2.0 ** (10 if model.working == "float32" else 24)  # scores far beyond what the working format resolves
    q, k = inputs._representable(x.q * size, dtype), inputs._representable(x.k * size, dtype)
    bound = bounds.forward(q, k, x.v, scale=64.0 * x.scale, model=model, bc=16)
    assert (bound.o <= 3 * np.ptp(x.v, axis=0).max()).all()


@pytest.mark.parametrize(
    "change",
    [
        {"exp2_error": 1e-4},
        {"lag_log2": 12.0},
        {"most_weight": 64.0},
        {"m_roundings": 30},
        {"gap_roundings": 400},
        {"scale_roundings": 400},
        {"p_unit": 2.0**-6},
        {"final_roundings": 40},
        {"fraction_bits": 20},
        {"o_planes": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_worse_arithmetic_has_a_wider_bound(change):
    x = inputs.late_max(3, 100, 16, dtype="bf16", seed=5)
    good = arithmetic.model("mma_sm80", "bf16", debug=True)
    worse = arithmetic.model("mma_sm80", "bf16", debug=True, **change)
    a = bounds.forward(*x, scale=x.scale, model=good, bc=16)
    b = bounds.forward(*x, scale=x.scale, model=worse, bc=16)
    assert (b.o > a.o).all() and (b.lse >= a.lse).all()


def test_the_probabilistic_bound_widens_as_the_failure_probability_shrinks():
    x = inputs.gaussian(8, 200, 32, dtype="float32")
    model = arithmetic.model("fma_f32", "float32")
    a, b = (bounds.forward(*x, scale=x.scale, model=model, bc=32, failure=f) for f in (1e-3, 1e-12))
    assert (b.o_probabilistic > a.o_probabilistic).all() and (b.o_probabilistic <= b.o).all()
    assert (b.o == a.o).all()


def test_a_lag_costs_what_the_derivation_says():
    """exp2_error is spent once per alpha that a key may meet; with powers of two never."""
    x = inputs.gaussian(8, 256, 16, dtype="bf16", seed=0)
    exact = arithmetic.model("amx_bf16", "bf16", debug=True)
    rounded = arithmetic.model("amx_bf16", "bf16", debug=True, rescales_exactly=False)
    few, many = (bounds.forward(*x, scale=x.scale, model=exact, bc=bc).lse for bc in (256, 16))
    assert (many - few < 20 * exact.unit).all()  # 16 tiles: as many more roundings of l, nothing else
    added = bounds.forward(*x, scale=x.scale, model=rounded, bc=16).lse - many
    assert (added >= 0).all() and added.max() > 2 * exact.exp2_error


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"q": 2.0**70}, r"sum\|q\|\|k\| reaches 2\^1\d\d, limit 2\^100"),
        ({"v": 2.0**125}, r"N max\|v\| reaches 2\^1\d\d, limit 2\^126"),
        ({"q": 2.0**16}, r"logits reach 2\^\d+ in base 2"),
        ({"q": np.nan}, "q has NaN or infinity"),
        ({"k": np.inf}, "k has NaN or infinity"),
        ({"v": np.nan}, "v has NaN or infinity"),
        ({"scale": 2.0**-140}, "scale .* does not fit float32"),
    ],
)
def test_outside_the_domain_the_reason_is_given(change, reason):
    model = arithmetic.model("mma_sm80", "bf16")
    a = {"q": np.full((2, 16), 2.0**20), "k": np.full((5, 16), 2.0**-20), "v": np.ones((5, 8))}
    scale = change.get("scale", 0.25)
    visible = np.ones((2, 5), bool)
    assert bounds.outside_domain(**a, scale=0.25, visible=visible, model=model) is None
    for name, factor in change.items():
        if name != "scale":
            a[name] = a[name] * factor
        if name == "q" and factor == 2.0**70:
            a["k"] = a["k"] * 2.0**50
        if name == "q" and factor == 2.0**16:
            a["k"] = a["k"] * 2.0**10
    assert re.search(reason, bounds.outside_domain(**a, scale=scale, visible=visible, model=model))
    hidden = np.zeros((2, 5), bool)  # what nobody sees is no reason
    assert bounds.outside_domain(**a, scale=scale, visible=hidden, model=model) is None


def test_fp16_values_next_to_the_largest_are_outside_the_domain():
    model = arithmetic.model("mma_sm80", "fp16")
    arrays = {"q": np.ones((1, 16)), "k": np.ones((2, 16)), "scale": 0.25, "visible": np.ones((1, 2), bool)}
    assert bounds.outside_domain(v=np.full((2, 8), 6e4), model=model, **arrays) is None
    assert "largest fp16" in bounds.outside_domain(v=np.full((2, 8), 65504.0), model=model, **arrays)
    wide = arithmetic.model("mma_sm80", "fp16", debug=True)
    assert bounds.outside_domain(v=np.full((2, 8), 65504.0), model=wide, **arrays) is None


def test_whole_heads_of_a_kernel_are_within_the_bound():
    """One larger shape, several query chunks, the fast form of the spread term."""
    x = inputs.gaussian(300, 700, 64, dtype="bf16", seed=3)
    model = arithmetic.model("amx_bf16", "bf16")
    o, lse = simulator.forward(*x, scale=x.scale, visible=x.mask, model=model, bc=64)
    bound = bounds.forward(*x, scale=x.scale, model=model, bc=64)
    want = float64.attention(*x, scale=x.scale)
    assert 0.05 < assert_within(o, want.o, bound.o, want_error=want.o_err) <= 1.0
    assert_within(lse, want.lse, bound.lse_probabilistic, want_error=want.lse_err)
    assert math.isfinite(float(bound.o.max()))
