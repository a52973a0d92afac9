"""The three tiers of the oracle certify one another."""

import mpmath
import numpy as np
import pytest

from verify import inputs
from verify.compare import assert_within
from verify.oracle import balls, float64, multiprecision

FINITE = [f for f in inputs.FAMILIES if f != "poisoned_padding"]
DTYPES = ["bf16", "fp16", "float32"]


def close(a, b, digits, size=1):
    """a and b agree to `digits` digits relative to `size`."""
    return abs(mpmath.mpf(a) - mpmath.mpf(b)) <= mpmath.mpf(10) ** -digits * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FINITE)
def test_float64_is_within_its_own_bound_of_the_enclosure(family, dtype):
    x = inputs.FAMILIES[family](4, 70, 24, 8, dtype=dtype, seed=11)
    t0 = float64.attention(*x, scale=x.scale, visible=x.visible)
    t1 = balls.attention(*x, scale=x.scale, visible=x.visible)
    assert_within(t0.o, t1.o, t0.o_err, want_error=t1.o_err, name="o")
    assert_within(t0.lse, t1.lse, t0.lse_err, want_error=t1.lse_err, name="lse")


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0, 60.0])
@pytest.mark.parametrize("n, d", [(1, 8), (33, 16), (200, 64), (500, 128)])
def test_float64_bound_holds_for_any_spread_of_logits_and_is_small(n, d, spread):
    for dtype in DTYPES:
        x = inputs.FAMILIES["gaussian"](3, n, d, 4, dtype=dtype, seed=2)
        scale = spread * spread * x.scale
        t0 = float64.attention(*x, scale=scale)
        t1 = balls.attention(*x, scale=scale)
        assert_within(t0.o, t1.o, t0.o_err, want_error=t1.o_err, name="o")
        assert_within(t0.lse, t1.lse, t0.lse_err, want_error=t1.lse_err, name="lse")
        assert (t0.o_err <= 1e-9 * np.abs(x.v).max()).all()  # four orders below the tightest float32 bound


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
@pytest.mark.parametrize("family", ["gaussian", "late_max", "huge_logits", "mixed_scales", "random_mask", "deep_gap"])
def test_mpmath_values_lie_inside_the_balls(family, dtype):
    import flint

    x = inputs.FAMILIES[family](3, 40, 16, 5, dtype=dtype, seed=4)
    t1 = balls.attention(*x, scale=x.scale, visible=x.visible)
    t2 = multiprecision.attention(*x, scale=x.scale, visible=x.visible)
    size = float(np.abs(x.v).max())
    with flint.ctx.workprec(400):
        for i in range(3):
            if not x.mask[i].any():
                continue
            # 10^-50 relative to the largest |v|: weights are kept to an absolute 2^-wp.
            pairs = [*zip(t2.o_digits[i], t1.o_balls[i], strict=True), (t2.lse_digits[i], t1.lse_balls[i])]
            for value, ball in pairs:
                exact = flint.arb(mpmath.nstr(value, 90, strip_zeros=False))
                distance = abs(exact - ball.mid()) - ball.rad()
                assert distance < flint.arb(10) ** -49 * max(size, 1.0, abs(float(value)))


@pytest.mark.parametrize("family", ["gaussian", "late_max", "mixed_scales", "huge_logits"])
def test_fifty_digits_agree_with_eighty(family):
    x = inputs.FAMILIES[family](2, 24, 16, 4, dtype="float32", seed=9)
    a = multiprecision.attention(*x, scale=x.scale, digits=50)
    b = multiprecision.attention(*x, scale=x.scale, digits=80)
    with mpmath.workdps(100):
        for i in range(2):
            size = float(np.abs(x.v).max())
            assert all(close(p, q, 49, size) for p, q in zip(a.o_digits[i], b.o_digits[i], strict=True))
            assert close(a.lse_digits[i], b.lse_digits[i], 49, max(1.0, abs(a.lse[i])))


@pytest.mark.parametrize("dtype", ["bf16", "float64"])
@pytest.mark.parametrize("family", ["gaussian", "far_below_zero", "random_mask", "all_masked_row"])
def test_the_literal_formula_gives_the_same_fifty_digits(family, dtype):
    x = inputs.FAMILIES[family](3, 11, 8, 3, dtype=dtype, seed=1)
    fast = multiprecision.attention(*x, scale=x.scale, visible=x.visible)
    o, lse = multiprecision.textbook(*x, scale=x.scale, visible=x.visible)
    with mpmath.workdps(70):
        for i in range(3):
            if not x.mask[i].any():
                assert lse[i] == fast.lse_digits[i] == mpmath.ninf and not any(o[i]) and not any(fast.o_digits[i])
                continue
            assert all(close(p, q, 50, 4) for p, q in zip(o[i], fast.o_digits[i], strict=True))
            assert close(lse[i], fast.lse_digits[i], 50, max(1.0, abs(fast.lse[i])))


@pytest.mark.parametrize("tier", [float64, balls, multiprecision])
def test_no_key_gives_zero_and_minus_infinity(tier):
    q = np.ones((3, 8))
    empty = tier.attention(q, np.zeros((0, 8)), np.zeros((0, 5)), scale=1.0)
    assert empty.o.shape == (3, 5) and not empty.o.any() and np.isneginf(empty.lse).all()
    visible = np.ones((3, 4), bool)
    visible[1] = False
    some = tier.attention(q, np.ones((4, 8)), np.ones((4, 5)), scale=1.0, visible=visible)
    assert not some.o[1].any() and np.isneginf(some.lse[1]) and (some.o[[0, 2]] == 1).all()
    assert not some.o_err[1].any() and some.lse_err[1] == 0
    nothing = tier.attention(np.zeros((0, 8)), np.ones((4, 8)), np.ones((4, 5)), scale=1.0)
    assert nothing.o.shape == (0, 5) and nothing.lse.shape == (0,)


@pytest.mark.parametrize("tier", [float64, balls, multiprecision])
def test_invisible_poison_has_no_influence(tier):
    x = inputs.FAMILIES["poisoned_padding"](4, 30, 8, dtype="bf16", seed=12)
    assert 0 < x.length < 30
    poisoned = tier.attention(*x, scale=x.scale, visible=x.mask)
    cut = tier.attention(x.q, x.k[: x.length], x.v[: x.length], scale=x.scale)
    if tier is float64:  # other shapes, another order of summation
        assert_within(poisoned.o, cut.o, poisoned.o_err, want_error=cut.o_err)
    else:
        assert (poisoned.o == cut.o).all() and (poisoned.lse == cut.lse).all()


@pytest.mark.parametrize("tier", [balls, multiprecision])
def test_sampled_rows_are_the_rows_of_the_whole(tier):
    x = inputs.FAMILIES["random_mask"](7, 20, 8, dtype="fp16", seed=8)
    whole = tier.attention(*x, scale=x.scale, visible=x.visible)
    some = tier.attention(*x, scale=x.scale, visible=x.visible, rows=[5, 0])
    assert list(some.rows) == [5, 0]
    assert (some.o == whole.o[[5, 0]]).all() and (some.lse == whole.lse[[5, 0]]).all()


def test_special_values_of_float64():
    q, k, v = (np.array(a, dtype=np.float64) for a in ([[1, 0], [0, 1]], [[1, 2], [3, 4], [5, 6]], [[1], [2], [3]]))

    def with_(a, index, value):
        a = a.copy()
        a[index] = value
        return a

    nan_q = float64.attention(with_(q, (0, 0), np.nan), k, v, scale=1.0)
    assert np.isnan(nan_q.o[0]).all() and np.isnan(nan_q.lse[0]) and np.isfinite(nan_q.o[1]).all()
    nan_v = float64.attention(q, k, with_(v, (0, 0), np.nan), scale=1.0)
    assert np.isnan(nan_v.o).all() and np.isfinite(nan_v.lse).all()
    inf_v = float64.attention(q, k, with_(v, (0, 0), -np.inf), scale=1.0)
    assert np.isneginf(inf_v.o).all()
    plus = float64.attention(np.ones((1, 2)), with_(k, (1, 0), np.inf), v, scale=1.0)
    assert np.isnan(plus.o).all() and np.isnan(plus.lse).all()
    minus = float64.attention(np.ones((1, 2)), with_(k, (1, 0), -np.inf), v, scale=1.0)
    without = float64.attention(np.ones((1, 2)), k[[0, 2]], v[[0, 2]], scale=1.0)
    assert minus.o == without.o and minus.lse == without.lse
    hidden = np.ones((2, 3), bool)
    hidden[:, 1] = False
    masked = float64.attention(q, with_(k, (1, 0), np.nan), with_(v, (1, 0), np.nan), scale=1.0, visible=hidden)
    assert np.isfinite(masked.o).all() and np.isfinite(masked.lse).all()
    assert nan_v.o_err[0, 0] == 0 and plus.lse_err[0] == 0


@pytest.mark.parametrize("tier", [balls, multiprecision])
def test_high_precision_tiers_refuse_what_is_not_a_number(tier):
    q, k, v = np.ones((1, 2)), np.ones((2, 2)), np.array([[1.0], [np.inf]])
    with pytest.raises(ValueError, match="finite"):
        tier.attention(q, k, v, scale=1.0)


@pytest.mark.parametrize("tier", [float64, balls, multiprecision])
@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_a_scale_that_is_not_positive_is_refused(tier, scale):
    with pytest.raises(ValueError, match="scale"):
        tier.attention(np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2)), scale=scale)


def test_wrong_shapes_are_refused():
    q, k, v = np.ones((2, 4)), np.ones((3, 4)), np.ones((3, 4))
    with pytest.raises(ValueError, match="shapes"):
        float64.attention(q, k[:, :3], v, scale=1.0)
    with pytest.raises(ValueError, match="shapes"):
        float64.attention(q, k, v[:2], scale=1.0)
    with pytest.raises(ValueError, match="visible"):
        float64.attention(q, k, v, scale=1.0, visible=np.ones((3, 2), bool))
    with pytest.raises(ValueError, match="visible"):
        float64.attention(q, k, v, scale=1.0, visible=np.ones((2, 3)))
    with pytest.raises(ValueError, match="2-D"):
        float64.attention(q[0], k, v, scale=1.0)


def test_global_precisions_are_left_alone():
    import flint

    before = (mpmath.mp.prec, flint.ctx.prec)
    x = inputs.FAMILIES["gaussian"](2, 5, 8)
    balls.attention(*x, scale=x.scale)
    multiprecision.attention(*x, scale=x.scale)
    multiprecision.textbook(*x, scale=x.scale)
    with pytest.raises(ValueError):
        balls.attention(x.q * np.nan, x.k, x.v, scale=x.scale)
    assert (mpmath.mp.prec, flint.ctx.prec) == before


@pytest.mark.parametrize("broken", ["missing", "raises", "wrong"])
def test_mpmath_without_its_private_exponential_gives_the_same_digits(monkeypatch, broken):
    from mpmath.libmp import libelefun

    x = inputs.FAMILIES["gaussian"](2, 9, 8, dtype="float32")
    want = multiprecision.attention(*x, scale=x.scale)
    if broken == "missing":
        monkeypatch.delattr(libelefun, "exp_fixed")
    elif broken == "raises":
        monkeypatch.setattr(libelefun, "exp_fixed", lambda: None)
    else:
        monkeypatch.setattr(libelefun, "exp_fixed", lambda x, prec, ln2=None: (1 << prec) + x)
    multiprecision._fixed_exp.cache_clear()
    try:
        got = multiprecision.attention(*x, scale=x.scale)
    finally:
        multiprecision._fixed_exp.cache_clear()
    with mpmath.workdps(70):
        assert all(close(p, q, 50, 4) for i in range(2) for p, q in zip(got.o_digits[i], want.o_digits[i], strict=True))


def test_float64_needs_neither_torch_nor_flint_nor_mpmath():
    import subprocess
    import sys

    code = (
        "import sys\n"
        "for name in ('torch', 'flint', 'mpmath'): sys.modules[name] = None\n"
        "import verify.bounds, verify.compare, verify.inputs, verify.simulator\n"
        "from verify.oracle import float64\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
