"""Each family makes what its name says, in numbers that its dtype has."""

import numpy as np
import pytest

from verify import inputs
from verify.formats import FORMATS, round_to
from verify.oracle import float64

DTYPES = ["bf16", "fp16", "float32", "float64"]
SHAPES = [(1, 1, 8), (5, 33, 16), (3, 0, 24), (2, 130, 40)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", inputs.FAMILIES)
def test_values_are_representable_finite_and_reproducible(family, dtype):
    make = inputs.FAMILIES[family]
    assert make.name == family and len(make.attacks) > 10
    for nq, nk, d in SHAPES:
        x = make(nq, nk, d, 8, dtype=dtype, seed=3)
        assert x.q.shape == (nq, d) and x.k.shape == (nk, d) and x.v.shape == (nk, 8)
        assert x.mask.shape == (nq, nk) and x.mask.dtype == bool
        exists = slice(None) if x.length is None else slice(0, x.length)
        for a in (x.q, x.k[exists], x.v[exists]):
            assert a.dtype == np.float64 and np.isfinite(a).all()
            assert (round_to(a, dtype) == a).all()
        again = make(nq, nk, d, 8, dtype=dtype, seed=3)
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(x, again, strict=True))


def test_seeds_and_shapes_give_different_data():
    a = inputs.FAMILIES["gaussian"](4, 4, 8, seed=0)
    assert not np.array_equal(a.q, inputs.FAMILIES["gaussian"](4, 4, 8, seed=1).q)
    assert not np.array_equal(a.q, inputs.FAMILIES["random_mask"](4, 4, 8, seed=0).q)


def logits(x):
    return x.scale * x.q @ x.k.T


def test_late_max_rises_and_falling_max_falls():
    assert (np.diff(logits(inputs.late_max(3, 64, 16, seed=1)), axis=1) >= -1).all()
    assert (logits(inputs.late_max(3, 64, 16, seed=1)).argmax(axis=1) > 48).all()
    assert (logits(inputs.falling_max(3, 64, 16, seed=1)).argmax(axis=1) < 16).all()


def test_far_below_zero_is_far_below_zero():
    x = inputs.far_below_zero(3, 2, 16)
    assert (np.abs(logits(x) - [-256.0, -257.0]) < 2).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_equal_weights_lie_just_under_a_midpoint_of_p(dtype):
    x = inputs.equal_weights_at_a_midpoint(2, 40, 16, dtype=dtype, seed=0)
    s = logits(x)
    weight = np.exp(s - s.max(axis=1, keepdims=True))[0, 1:]
    spacing = 2.0 ** -FORMATS[dtype].precision
    offset = (weight / spacing) % 1.0
    assert np.ptp(weight) == 0 and (x.v == 1).all()
    assert ((offset > 0.4) & (offset < 0.5)).all()


def test_subnormal_families_are_subnormal():
    for dtype in ("bf16", "fp16", "float32"):
        normal = FORMATS[dtype].smallest_normal
        assert (np.abs(inputs.subnormal_values(2, 9, 8, dtype=dtype).v) < normal).mean() > 0.9
        assert (np.abs(inputs.subnormal_scores(2, 9, 8, dtype=dtype).k) < normal).mean() > 0.8


def test_some_rows_are_empty_and_the_first_tile_is_masked():
    assert not inputs.all_masked_row(6, 20, 8).mask[0].any()
    assert not inputs.first_tile_masked(4, 200, 8).mask[:, :128].any()
    assert inputs.first_tile_masked(4, 1, 8).mask.all()


def test_causal_corners():
    bottom, top = inputs.causal_bottom_right(3, 5, 8).mask, inputs.causal_top_left(3, 5, 8).mask
    assert bottom.sum(axis=1).tolist() == [3, 4, 5] and top.sum(axis=1).tolist() == [1, 2, 3]
    assert inputs.causal_bottom_right(5, 3, 8).mask.sum(axis=1).tolist() == [0, 0, 1, 2, 3]


def test_what_lies_beyond_the_length_is_poison():
    x = inputs.poisoned_padding(3, 20, 8, seed=2)
    assert x.length is not None and np.isnan(x.k[x.length :]).all() and not x.mask[:, x.length :].any()
    assert np.isfinite(float64.attention(*x, scale=x.scale, visible=x.mask).o).all()


def test_values_unpack_as_the_style_guide_shows():
    q, k, v = inputs.late_max(nq=4, nk=6, d=16, seed=7)
    assert q.shape == (4, 16) and v.shape == (6, 16) and k.shape == (6, 16)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("toward_zero", [False, True])
def test_rounding_agrees_with_ml_dtypes_and_numpy(name, toward_zero):
    import ml_dtypes

    native = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "float32": np.float32, "float64": np.float64}[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal(4000) * np.exp2(rng.integers(-160, 140, 4000))
    limit = FORMATS[name].largest
    x = np.concatenate([x, [0.0, -0.0, np.inf, -np.inf, limit, -limit, limit * (1 + 2.0**-20), 1e300]])
    with np.errstate(over="ignore", under="ignore"):
        # float64 -> float32 -> bf16 rounds twice in ml_dtypes: start from float32 values
        x = x if name in ("float32", "float64", "fp16") else x.astype(np.float32).astype(np.float64)
        want = x.astype(native).astype(np.float64)
    got = round_to(x, name, toward_zero=toward_zero)
    if not toward_zero:
        assert np.array_equal(got, want)
        return
    assert (np.abs(got) <= np.abs(x)).all()
    finite = np.isfinite(x)
    assert (np.abs(got[finite]) <= limit).all()
    assert np.isinf(got[~finite]).all()
    near = finite & (np.abs(x) < limit)
    got, x = got[near], x[near]
    assert (np.abs(got - x) <= 2 * np.maximum(FORMATS[name].unit * np.abs(x), FORMATS[name].half_subnormal)).all()
