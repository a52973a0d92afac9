"""What a choice of the backward kernel costs, where the bounds claim nothing, and what has no part in them."""

import re

import numpy as np
import pytest

from verify import arithmetic, inputs
from verify.bounds.backward_domain import outside_backward_domain
from verify.bounds.backward_model import backward_model, tile_sum
from verify.bounds.backward_output import backward
from verify.oracle import float64
from verify.oracle.backward_reference import stack_group

PATHS = [(name, dtype) for name, (dtypes, _) in arithmetic.MODELS.items() for dtype in dtypes]
IDS = ["-".join(p) for p in PATHS]


def forward_of(x):
    found = float64.attention(*x, scale=x.scale, visible=x.mask)
    return found.o, found.lse


def example(family="gaussian", shape=(6, 40, 16, 8), dtype="bf16", seed=1):
    x = inputs.FAMILIES[family](*shape, dtype=dtype, seed=seed)
    rng = np.random.default_rng(seed)
    return x, inputs._representable(rng.standard_normal((shape[0], shape[3])), dtype), rng.standard_normal(shape[0])


def bound_of(x, do, model, **more):
    return backward(*x, do, **{"scale": x.scale, "visible": x.mask, "model": model, "br": 16, "bc": 16, **more})


@pytest.mark.parametrize(
    "change, moved",
    [
        ({"s_roundings": 40}, "dq dk dv"),
        ({"lse_roundings": 40}, "dq dk dv"),
        ({"argument_roundings": 40}, "dq dk dv"),
        ({"ds_roundings": 60}, "dq dk"),
        ({"ds_unit": 2.0**-6}, "dq dk"),
        ({"ds_tiny": 2.0**-10}, "dq dk"),
        ({"final_roundings": 40}, "dq dk"),
        ({"out_format": "bf16"}, "dq dk dv"),
        ({"dq_restarts": False}, "dq"),
        ({"dkv_restarts": True}, "dk dv"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_a_choice_that_rounds_more_widens_the_bounds_it_touches_and_no_other(change, moved):
    x, do, _ = example(shape=(40, 100, 16, 8))
    path = arithmetic.model("mma_sm80", "bf16", debug=True)
    same = {"given": forward_of(x)}
    plain, other = (
        bound_of(x, do, backward_model(path), **same),
        bound_of(x, do, backward_model(path, **change), **same),
    )
    for name in ("dq", "dk", "dv"):
        a, b = getattr(plain, name), getattr(other, name)
        if name not in moved.split():
            assert (a == b).all()
        else:
            assert (a != b).all() if "restarts" in next(iter(change)) else (b > a).all()


def test_the_end_to_end_bound_contains_the_errors_of_the_forward_pass():
    x, do, dlse = example()
    model = backward_model(arithmetic.model("mma_sm80", "bf16"))
    stage, end = (bound_of(x, do, model, dlse=dlse, given=g) for g in (forward_of(x), None))
    for name in ("dq", "dk", "dv"):
        assert (getattr(end, name) > getattr(stage, name)).all()
    assert np.median(end.dq / stage.dq) > 2  # D is made from an O that was rounded to 8 bits
    coarse = bound_of(x, do, model, dlse=dlse, forward_bc=8)
    assert (coarse.dv >= end.dv).all() and (coarse.dv > end.dv).any()  # more tiles, more roundings of the LSE


def test_defaults_follow_the_forward_path():
    sm80 = backward_model(arithmetic.model("mma_sm80", "fp16"))
    assert (sm80.s_roundings, sm80.lse_roundings, sm80.argument_roundings) == (1, 2, 1)
    assert (sm80.ds_unit, sm80.ds_tiny, sm80.out_format) == (2.0**-11, 2.0**-25, "fp16")
    assert sm80.dq_restarts and not sm80.dkv_restarts
    simd = backward_model(arithmetic.model("muladd_f32", "bf16"))
    assert simd.s_roundings == 2 and simd.ds_unit == 0.0 and simd.dq_restarts and simd.dkv_restarts
    assert backward_model(arithmetic.model("amx_bf16", "bf16"), ds_unit=0.0).ds_unit == 0.0
    with pytest.raises(TypeError, match="no_such_field"):
        backward_model(arithmetic.model("amx_bf16", "bf16"), no_such_field=1)


def test_sums_over_tiles_count_the_terms_that_are_not_zero():
    counts = np.array([[16, 3, 0, 1], [0, 0, 0, 0]])
    fma, block = arithmetic.model("fma_f32", "float32"), arithmetic.model("mma_sm80", "bf16")
    carried, restarted = (tile_sum(fma, counts, 16, restarts=r, additions=2) for r in (False, True))
    assert list(carried.steps) == [20, 0] and carried.extra == 2
    assert list(restarted.steps) == [16, 0] and list(restarted.extra) == [5, 2]
    assert list(tile_sum(block, counts, 16, restarts=False).steps) == [2 + 2 + 1, 0]  # blocks of 8 products
    assert list(tile_sum(block, counts, 16, restarts=True).steps) == [2, 0]
    amx = arithmetic.model("amx_fp16_planes", "fp16")
    assert list(tile_sum(amx, counts, 16, restarts=False).steps) == [3 * 3 + 17, 17]


@pytest.mark.parametrize("name, dtype", PATHS, ids=IDS)
def test_empty_rows_and_unseen_keys_have_a_bound_of_zero(name, dtype):
    model = backward_model(arithmetic.model(name, dtype))
    x, do, dlse = example("random_mask", dtype=dtype, seed=2)
    visible = x.mask & (np.arange(40) < 30)
    visible[[0, 3]] = False
    for given in (None, forward_of(x)):
        found = bound_of(x, do, model, visible=visible, dlse=dlse, given=given)
        rows, keys = visible.any(axis=1), visible.any(axis=0)
        assert rows.sum() == 4 and 0 < keys.sum() < 30
        assert not found.dq[~rows].any() and not found.dk[~keys].any() and not found.dv[~keys].any()
        assert (found.dq[rows] > 0).all() and (found.dk[keys] > 0).all() and (found.dv[keys] > 0).all()
    nothing = backward(*(np.ones((n, 8)) for n in (2, 0, 0, 2)), scale=1.0, model=model, br=16, bc=16)
    assert nothing.dq.shape == (2, 8) and not nothing.dq.any() and nothing.dk.shape == (0, 8)
    nobody = backward(*(np.ones((n, 8)) for n in (0, 3, 3, 0)), scale=1.0, model=model, br=16, bc=16)
    assert nobody.dk.shape == (3, 8) and not nobody.dk.any() and not nobody.dv.any()


def test_what_no_row_sees_does_not_enter_the_bounds():
    x, do, dlse = example()
    visible = np.arange(40) < np.array([10, 20, 30, 30, 0, 5])[:, None]
    model = backward_model(arithmetic.model("mma_sm80", "bf16"))
    o, lse = (a.copy() for a in forward_of(x))
    lse[4] = -np.inf
    arrays = [*x, do, dlse, o, lse]
    poisoned = [a.copy() for a in arrays]
    for n in (1, 2):
        poisoned[n][30:] = np.nan
    for n in (0, 3, 4, 5):
        poisoned[n][4] = np.inf
    a, b = (
        backward(q, k, v, g, scale=0.25, visible=visible, dlse=gl, given=(o, l), model=model, br=16, bc=16)
        for q, k, v, g, gl, o, l in (arrays, poisoned)
    )
    for name in ("dq", "dk", "dv", "dq_order"):
        assert (getattr(a, name) == getattr(b, name)).all()


def test_rows_are_handled_in_chunks_of_any_size(monkeypatch):
    x, do, dlse = example("causal_bottom_right", shape=(40, 50, 16, 8))
    model = backward_model(arithmetic.model("amx_bf16", "bf16"))
    whole = bound_of(x, do, model, dlse=dlse)
    monkeypatch.setattr(float64, "CHUNK", 100)
    chunked = bound_of(x, do, model, dlse=dlse)
    for name in ("dq", "dk", "dv"):
        assert getattr(chunked, name) == pytest.approx(getattr(whole, name), rel=1e-12)


def test_rows_and_keys_can_be_sampled():
    x, do, dlse = example("causal_bottom_right", shape=(40, 50, 16, 8))
    model = backward_model(arithmetic.model("mma_sm80", "bf16"))
    o, lse = forward_of(x)
    whole = bound_of(x, do, model, dlse=dlse, given=(o, lse))
    rows, keys = [0, 13, 39], [2, 17, 49]
    same = {"scale": x.scale, "model": model, "br": 16, "bc": 16}
    some = backward(
        *(x.q[rows], x.k, x.v, do[rows]), **same, visible=x.mask[rows], dlse=dlse[rows], given=(o[rows], lse[rows])
    )
    assert some.dq == pytest.approx(whole.dq[rows], rel=1e-12)
    some = backward(x.q, x.k[keys], x.v[keys], do, **same, visible=x.mask[:, keys], dlse=dlse, given=(o, lse))
    assert some.dk == pytest.approx(whole.dk[keys], rel=1e-12) and some.dv == pytest.approx(whole.dv[keys], rel=1e-12)


@pytest.mark.parametrize("name, dtype", PATHS, ids=IDS)
def test_bounds_are_finite_wherever_the_domain_is(name, dtype):
    model = backward_model(arithmetic.model(name, dtype))
    inside = 0
    for family in inputs.FAMILIES:
        x, do, dlse = example(family, dtype=dtype, seed=0)
        bound = bound_of(x, do, model, dlse=dlse)
        args = {"scale": x.scale, "visible": x.mask, "dlse": dlse, "model": model, "bound": bound}
        if outside_backward_domain(*x, do, **args) is None:
            inside += 1
            assert all(np.isfinite(b).all() and (b >= 0).all() for b in (bound.dq, bound.dk, bound.dv))
    assert inside >= len(inputs.FAMILIES) - 1


def test_a_small_bound_is_a_small_fraction_of_the_gradient():
    """N(0, 1) in bf16, gradients in bf16, 128 x 512, d = 64; the largest gradient is about 0.5."""
    x, do, _ = example(shape=(128, 512, 64, 64))
    model = backward_model(arithmetic.model("mma_sm80", "bf16"))
    stage = bound_of(x, do, model, br=64, bc=64, given=forward_of(x))
    end = bound_of(x, do, model, br=64, bc=64)
    assert np.median(stage.dq) < 3e-3 < np.median(end.dq) < 3e-2
    assert np.median(stage.dk) < np.median(end.dk) / 2


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"do": 2.0**125}, r"sum\|dO\|\|V\| or \|dLSE\| reaches 2\^1\d\d, limit 2\^124"),
        ({"dlse": 2.0**125}, r"sum\|dO\|\|V\| or \|dLSE\| reaches 2\^125, limit 2\^124"),
        ({"do": 2.0**110, "q": 2.0**40, "k": 2.0**-40}, r"N \|dS\| max\(\|q\|, \|k\|\) reaches 2\^1\d\d, limit 2\^126"),
        ({"do": 2.0**118, "v": 2.0**-60}, r"N max\|dO\| reaches 2\^120, limit 2\^117"),
        ({"do": np.nan}, "do, dlse, or the given o or lse has NaN"),
        ({"dlse": np.inf}, "do, dlse, or the given o or lse has NaN"),
        ({"lse": np.nan}, "do, dlse, or the given o or lse has NaN"),
        ({"lse": 2.0**22}, r"logits reach 2\^25 in base 2"),
        ({"q": np.nan}, "q has NaN"),
        ({"q": 2.0**19}, r"logits reach 2\^\d+ in base 2"),
    ],
    ids=lambda change: "-".join(change) if isinstance(change, dict) else "",
)
def test_outside_the_domain_the_reason_is_given(change, reason):
    a = {"q": np.ones((2, 16)), "k": np.ones((5, 16)), "v": np.ones((5, 8)), "do": np.ones((2, 8)), "dlse": np.ones(2)}
    a |= {"o": np.ones((2, 8)), "lse": np.full(2, 4.0 + np.log(5))}
    model = backward_model(arithmetic.model("mma_sm80", "bf16"))

    def ask(a, visible):
        q, k, v, do, dlse, o, lse = (a[n] for n in ("q", "k", "v", "do", "dlse", "o", "lse"))
        same = {"scale": 0.25, "visible": visible, "dlse": dlse, "given": (o, lse), "model": model}
        with np.errstate(all="ignore"):
            clean = {n: np.nan_to_num(x, nan=1.0, posinf=1.0) for n, x in a.items()}
            given = clean["o"], np.minimum(clean["lse"], 1e4)
            inputs_ = (clean[n] for n in ("q", "k", "v", "do"))
            bound = backward(*inputs_, **{**same, "dlse": clean["dlse"], "given": given}, br=16, bc=16)
        return outside_backward_domain(q, k, v, do, **same, bound=bound)

    everything = np.ones((2, 5), bool)
    assert ask(a, everything) is None
    changed = {n: x * change.get(n, 1.0) for n, x in a.items()}
    assert re.search(reason, ask(changed, everything))
    assert ask(changed, ~everything) is None  # what nobody sees is no reason


def test_fp16_gradients_and_ds_beyond_its_range_are_outside_the_domain():
    x, do, _ = example(dtype="fp16")
    model = backward_model(arithmetic.model("mma_sm80", "fp16"))

    def reason(factor, model):
        bound = bound_of(x, do * factor, model)
        return outside_backward_domain(*x, do * factor, scale=x.scale, model=model, bound=bound)

    assert reason(1.0, model) is None
    assert re.search("dS reaches .* more than the largest fp16", reason(2.0**20, model))
    wide = backward_model(arithmetic.model("fma_f32", "fp16"))
    assert re.search("a gradient reaches .* more than the largest fp16", reason(2.0**20, wide))
    assert reason(2.0**20, backward_model(arithmetic.model("fma_f32", "fp16", debug=True))) is None


def test_bad_requests_are_refused():
    x, do, _ = example()
    model = backward_model(arithmetic.model("mma_sm80", "bf16"))
    with pytest.raises(ValueError, match="6 rows are not 4 query heads"):
        bound_of(x, do, model, heads=4)
    with pytest.raises(ValueError, match="finite"):
        bound_of(x, do * np.nan, model)
    with pytest.raises(ValueError, match="given lse"):
        bound_of(x, do, model, given=(do, np.zeros(3)))
    assert stack_group(None, np.ones((2, 3, 4)))[0] is None
