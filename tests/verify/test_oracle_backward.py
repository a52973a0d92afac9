"""The tiers of the backward oracle certify one another, and the loss itself certifies the formulas."""

import subprocess
import sys
from itertools import chain, pairwise

import mpmath
import numpy as np
import pytest

from verify import inputs
from verify.compare import assert_within
from verify.oracle import backward_balls, backward_float64, backward_multiprecision, float64, multiprecision
from verify.oracle.backward_reference import stack_group

TIERS = [backward_float64, backward_balls, backward_multiprecision]
NAMES = ("dq", "dk", "dv")
DTYPES = ["bf16", "fp16", "float32"]


def example(family, shape=(4, 40, 16, 5), *, dtype="bf16", seed=3):
    """(q, k, v, do) and the keyword arguments of `gradients`, dlse included."""
    x = inputs.FAMILIES[family](*shape, dtype=dtype, seed=seed)
    rng = np.random.default_rng([seed, shape[1]])
    do = inputs._representable(rng.standard_normal((shape[0], shape[3])), dtype)
    return (x.q, x.k, x.v, do), {"scale": x.scale, "visible": x.mask, "dlse": rng.standard_normal(shape[0])}


def stored_forward(arrays, more):
    """O and LSE as a 16-bit kernel would store them: not those of exact attention."""
    found = float64.attention(*arrays[:3], scale=more["scale"], visible=more["visible"])
    return inputs._representable(found.o, "bf16"), found.lse.astype(np.float32)


def both_forms(arrays, more):
    return [more, {**more, "given": stored_forward(arrays, more)}]


def assert_agree(a, b):
    for n in NAMES:
        error, other = getattr(a, f"{n}_err"), getattr(b, f"{n}_err")
        assert_within(getattr(a, n), getattr(b, n), error, want_error=other, name=n)


def flat(rows):
    return list(chain.from_iterable(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", inputs.FAMILIES)
def test_float64_is_within_its_own_bound_of_the_enclosure(family, dtype):
    arrays, more = example(family, (5, 70, 24, 8), dtype=dtype, seed=11)
    for form in both_forms(arrays, more):
        assert_agree(backward_float64.gradients(*arrays, **form), backward_balls.gradients(*arrays, **form))


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0, 60.0])
@pytest.mark.parametrize("nq, nk, d", [(1, 1, 8), (33, 17, 16), (3, 200, 64)])
def test_float64_bound_holds_for_any_spread_of_logits_and_is_small(nq, nk, d, spread):
    for dtype in DTYPES:
        arrays, more = example("gaussian", (nq, nk, d, 4), dtype=dtype)
        more["scale"] *= spread * spread
        for form in both_forms(arrays, more):
            t0 = backward_float64.gradients(*arrays, **form)
            assert_agree(t0, backward_balls.gradients(*arrays, **form))
            for n, x in (("dq", arrays[1]), ("dk", arrays[0]), ("dv", arrays[3])):
                factor = 1.0 if n == "dv" else more["scale"]
                assert (getattr(t0, f"{n}_err") <= 1e-9 * factor * np.abs(x).max() * max(nq, 4)).all()


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
@pytest.mark.parametrize("family", ["gaussian", "late_max", "huge_logits", "mixed_scales", "random_mask", "deep_gap"])
def test_mpmath_values_lie_inside_the_balls(family, dtype):
    import flint

    arrays, more = example(family, (3, 20, 16, 5), dtype=dtype, seed=4)
    for form in both_forms(arrays, more):
        t1 = backward_balls.gradients(*arrays, **form)
        t2 = backward_multiprecision.gradients(*arrays, **form)
        with flint.ctx.workprec(400):
            for n in NAMES:
                digits = flat(getattr(t2, f"{n}_digits"))
                balls = flat(getattr(t1, f"{n}_balls"))
                size = max(1.0, *(abs(float(x)) for x in digits), *(float(np.abs(a).max()) ** 2 for a in arrays))
                for value, ball in zip(digits, balls, strict=True):
                    exact = flint.arb(mpmath.nstr(value, 90, strip_zeros=False))
                    assert abs(exact - ball.mid()) - ball.rad() < flint.arb(10) ** -49 * size


@pytest.mark.parametrize("family", ["gaussian", "late_max", "huge_logits"])
def test_fifty_digits_agree_with_eighty(family):
    arrays, more = example(family, (2, 12, 8, 4), dtype="float32", seed=9)
    size = max(1.0, *(float(np.abs(a).max()) ** 2 for a in arrays))
    for form in both_forms(arrays, more):
        a, b = (backward_multiprecision.gradients(*arrays, **form, digits=d) for d in (50, 80))
        for n in NAMES:
            pairs = zip(flat(getattr(a, f"{n}_digits")), flat(getattr(b, f"{n}_digits")), strict=True)
            with mpmath.workdps(100):
                assert all(abs(mpmath.mpf(p) - mpmath.mpf(q)) <= mpmath.mpf(10) ** -49 * size for p, q in pairs)


@pytest.mark.parametrize("dtype", ["bf16", "float64"])
@pytest.mark.parametrize("family", ["gaussian", "far_below_zero", "random_mask", "all_masked_row"])
def test_the_literal_formula_gives_the_same_fifty_digits(family, dtype):
    arrays, more = example(family, (3, 9, 6, 3), dtype=dtype, seed=1)
    fast = backward_multiprecision.gradients(*arrays, **more)
    literal = backward_multiprecision.textbook(*arrays, **more)
    size = max(1.0, *(float(np.abs(a).max()) ** 2 for a in arrays))
    with mpmath.workdps(70):
        for n, want in zip(NAMES, literal, strict=True):
            for p, q in zip(flat(getattr(fast, f"{n}_digits")), flat(want), strict=True):
                assert abs(mpmath.mpf(p) - mpmath.mpf(q)) <= mpmath.mpf(10) ** -49 * size


@pytest.mark.parametrize("family", ["gaussian", "random_mask", "odd_scale"])
def test_the_gradients_are_slopes_of_the_loss(family):
    """Central differences of sum(dO o O) + sum(dLSE o LSE), extrapolated four times: 15 digits from another formula."""
    (q, k, v, do), more = example(family, (2, 4, 3, 2), seed=6)
    dlse, fixed = more["dlse"], {"scale": more["scale"], "visible": more["visible"]}
    found = backward_float64.gradients(q, k, v, do, **more)

    def loss(arrays):
        o, lse = multiprecision.textbook(*arrays, **fixed, digits=60)
        terms = [float(a) * b for r, s in zip(do, o, strict=True) for a, b in zip(r, s, strict=True)]
        terms += [float(a) * b for a, b in zip(dlse, lse, strict=True) if b != mpmath.ninf]
        return sum(terms)

    with mpmath.workdps(60):
        for number, name in enumerate(NAMES):
            for index in np.ndindex(found.__dict__[name].shape):
                slopes = []
                for step in 2.0 ** -np.arange(6, 11):
                    plus, minus = ([a.copy() for a in (q, k, v)] for _ in range(2))
                    plus[number][index] += step
                    minus[number][index] -= step
                    slopes.append((loss(plus) - loss(minus)) / (2 * mpmath.mpf(step)))
                for level in range(1, 5):  # Richardson: removes step^2, step^4, ...
                    slopes = [b + (b - a) / (4**level - 1) for a, b in pairwise(slopes)]
                assert abs(found.__dict__[name][index] - slopes[0]) < 1e-15 + found.__dict__[f"{name}_err"][index]


@pytest.mark.parametrize("tier", TIERS)
def test_empty_rows_and_unseen_keys_have_gradient_zero_exactly(tier):
    arrays, more = example("gaussian", (4, 6, 8, 5))
    more["visible"] = np.ones((4, 6), bool)
    more["visible"][[0, 2]] = False
    more["visible"][:, 3] = False
    for form in both_forms(arrays, more):
        found = tier.gradients(*arrays, **form)
        assert not found.dq[[0, 2]].any() and not found.dk[3].any() and not found.dv[3].any()
        assert not found.dq_err[[0, 2]].any() and not found.dk_err[3].any() and not found.dv_err[3].any()
        assert found.dq[[1, 3]].all() and found.dk[[0, 5]].all() and found.dv[[0, 5]].all()
        alone = tier.gradients(*(a[[1, 3]] if len(a) == 4 else a for a in arrays), **only_rows(form, [1, 3]))
        assert_agree(found_rows(found, [1, 3]), alone)
    for nq, nk in ((3, 0), (0, 3), (0, 0)):
        none = tier.gradients(np.ones((nq, 8)), np.ones((nk, 8)), np.ones((nk, 5)), np.ones((nq, 5)), scale=1.0)
        assert none.dq.shape == (nq, 8) and none.dk.shape == (nk, 8) and none.dv.shape == (nk, 5)
        assert not none.dq.any() and not none.dk.any() and not none.dv.any()


def only_rows(form, rows):
    given = None if form.get("given") is None else tuple(a[rows] for a in form["given"])
    return {**form, "visible": form["visible"][rows], "dlse": form["dlse"][rows], "given": given}


def found_rows(found, rows):
    changed = {**vars(found), "dq": found.dq[rows], "dq_err": found.dq_err[rows]}
    return type(found)(**changed)


@pytest.mark.parametrize("tier", TIERS)
def test_what_nobody_sees_has_no_influence(tier):
    arrays, more = example("gaussian", (4, 10, 8, 5))
    more["visible"] = np.broadcast_to(np.arange(10) < 7, (4, 10)).copy()
    more["visible"][2] = False
    clean = tier.gradients(*arrays, **more)
    q, k, v, do = (a.copy() for a in arrays)
    k[7:], v[7:] = np.nan, np.inf
    q[2], do[2], dlse = np.nan, np.inf, more["dlse"].copy()
    dlse[2] = np.nan
    poisoned = tier.gradients(q, k, v, do, **{**more, "dlse": dlse})
    for n in NAMES:
        assert (getattr(poisoned, n) == getattr(clean, n)).all()


@pytest.mark.parametrize("tier", TIERS)
def test_a_given_lse_of_minus_infinity_is_an_empty_row(tier):
    arrays, more = example("gaussian", (3, 6, 8, 5))
    o, lse = stored_forward(arrays, more)
    lse[1] = -np.inf
    hidden = more["visible"].copy()
    hidden[1] = False
    a = tier.gradients(*arrays, **more, given=(o, lse))
    b = tier.gradients(*arrays, **{**more, "visible": hidden}, given=(o, lse))
    assert all((getattr(a, n) == getattr(b, n)).all() for n in NAMES) and not a.dq[1].any()


@pytest.mark.parametrize("tier", [backward_balls, backward_multiprecision])
def test_sampled_rows_and_keys_are_those_of_the_whole(tier):
    arrays, more = example("random_mask", (7, 12, 8, 5), dtype="fp16", seed=8)
    for form in both_forms(arrays, more):
        whole = tier.gradients(*arrays, **form)
        for rows, keys in ([5, 0], [3, 11]), ([], [1]), ([2], []), (None, [4]), ([6], None):
            some = tier.gradients(*arrays, **form, rows=rows, keys=keys)
            i, j = (slice(None) if index is None else index for index in (rows, keys))
            assert list(some.rows) == list(np.arange(7)[i]) and list(some.keys) == list(np.arange(12)[j])
            assert (some.dq == whole.dq[i]).all() and some.dq_err == pytest.approx(whole.dq_err[i], rel=1e-12)
            assert (some.dk == whole.dk[j]).all() and (some.dv == whole.dv[j]).all()


ROW, KEY, COLUMN = 1, 4, 2
# where a NaN or an infinity stands -> which elements of dq, dk, dv it makes NaN; row 1 sees keys 0..5, row 3 none
NAN_ROWS_OF = {
    "q": ([ROW], [*range(6)], [*range(6)]),
    "do": ([ROW], [*range(6)], []),
    "dlse": ([ROW], [*range(6)], []),
    "o": ([ROW], [*range(6)], []),
    "lse": ([ROW], [*range(6)], [*range(6)]),
    "k": ([0, 1, 2], [*range(8)], [*range(8)]),
    "v": ([0, 1, 2], [*range(8)], []),
}


@pytest.mark.parametrize(
    "name, value",
    [(n, x) for n in NAN_ROWS_OF for x in (np.nan, np.inf, -np.inf) if (n, x) != ("lse", -np.inf)],  # an empty row
)
def test_what_depends_on_a_nan_or_an_infinity_is_nan_and_the_rest_is_unchanged(name, value):
    arrays, more = example("gaussian", (4, 9, 8, 5))
    more["visible"] = np.arange(9) < np.array([8, 6, 8, 0])[:, None]
    given = stored_forward(arrays, more)
    whole = dict(zip(("q", "k", "v", "do"), (a.copy() for a in arrays), strict=True))
    whole |= {"dlse": more["dlse"].copy(), "o": given[0].copy(), "lse": given[1].copy()}
    if name in ("q", "k") and np.isinf(value):  # one element decides the sign of the logit: make it +inf everywhere
        other = "k" if name == "q" else "q"
        whole[other][:, COLUMN] = np.copysign(1.0, value) * (0.5 + np.abs(whole[other][:, COLUMN]))
    clean = ask(whole, more)
    target = whole[name]
    target[(KEY if name in "kv" else ROW, COLUMN)[: target.ndim]] = value
    found = ask(whole, more)
    for gradient, lines in zip(NAMES, NAN_ROWS_OF[name], strict=True):
        nan = np.zeros(getattr(found, gradient).shape, bool)
        nan[lines] = True
        if name == "do" and gradient == "dv":
            nan[:6, COLUMN] = True
        got, before = getattr(found, gradient), getattr(clean, gradient)
        assert (np.isnan(got) == nan).all() and (got[~nan] == before[~nan]).all()
        assert not getattr(found, f"{gradient}_err")[nan].any()


def ask(x, more):
    form = {**more, "dlse": x["dlse"], "given": (x["o"], x["lse"])}
    return backward_float64.gradients(x["q"], x["k"], x["v"], x["do"], **form)


def test_a_logit_of_minus_infinity_is_an_absent_pair():
    arrays, more = example("gaussian", (3, 6, 8, 5))
    q, k, v, do = (a.copy() for a in arrays)
    q[:, 0], k[4, 0] = 1.0, -np.inf
    for form in both_forms((q, np.where(np.isfinite(k), k, 0.0), v, do), more):
        hidden = {**form, "visible": form["visible"] & (np.arange(6) != 4)}
        a = backward_float64.gradients(q, k, v, do, **form)
        b = backward_float64.gradients(q, np.where(np.isfinite(k), k, 0.0), v, do, **hidden)
        assert all((getattr(a, n) == getattr(b, n)).all() for n in NAMES) and not a.dk[4].any()
    k[:, 0] = -np.inf
    nothing = backward_float64.gradients(q, k, v, do, **more)
    assert not nothing.dq.any() and not nothing.dk.any() and not nothing.dv.any()


@pytest.mark.parametrize("tier", TIERS)
def test_query_heads_of_a_group_add_up(tier):
    rng = np.random.default_rng(0)
    q, do, k, v = (rng.standard_normal(s) for s in ((2, 3, 4), (2, 3, 5), (6, 4), (6, 5)))
    dlse, seen = rng.standard_normal((2, 3)), rng.random((2, 3, 6)) < 0.7
    rows, grads, loss, visible = stack_group(q, do, dlse, seen)
    whole = tier.gradients(rows, k, v, grads, scale=0.5, visible=visible, dlse=loss)
    each = [tier.gradients(q[h], k, v, do[h], scale=0.5, visible=seen[h], dlse=dlse[h]) for h in range(2)]
    assert whole.dq == pytest.approx(np.concatenate([g.dq for g in each]), abs=1e-14)
    assert whole.dk == pytest.approx(each[0].dk + each[1].dk, abs=1e-14)
    assert whole.dv == pytest.approx(each[0].dv + each[1].dv, abs=1e-14)


@pytest.mark.parametrize("tier", [backward_balls, backward_multiprecision])
@pytest.mark.parametrize("place", ["q", "k", "v", "do", "dlse", "o", "lse"])
def test_high_precision_tiers_refuse_what_is_not_a_number(tier, place):
    arrays, more = example("gaussian", (2, 3, 4, 5))
    o, lse = stored_forward(arrays, more)
    names = dict(zip(("q", "k", "v", "do", "dlse", "o", "lse"), (*arrays, more["dlse"], o, lse), strict=True))
    names[place] = names[place] * np.nan
    q, k, v, do, dlse, o, lse = names.values()
    with pytest.raises(ValueError, match="finite"):
        tier.gradients(q, k, v, do, **{**more, "dlse": dlse}, given=(o, lse))


@pytest.mark.parametrize("tier", TIERS)
def test_wrong_requests_are_refused(tier):
    q, k, v, do = np.ones((2, 4)), np.ones((3, 4)), np.ones((3, 5)), np.ones((2, 5))
    for change, match in [
        ({"do": np.ones((2, 4))}, "do: want"),
        ({"do": np.ones((2, 5), int)}, "do: want"),
        ({"dlse": np.ones(3)}, "dlse: want"),
        ({"given": (np.ones((2, 4)), np.ones(2))}, "given o"),
        ({"given": (np.ones((2, 5)), np.ones((2, 1)))}, "given lse"),
        ({"scale": -1.0}, "scale"),
        ({"visible": np.ones((3, 2), bool)}, "visible"),
    ]:
        with pytest.raises(ValueError, match=match):
            tier.gradients(q, k, v, **{"do": do, "scale": 1.0, **change})


def test_global_precisions_are_left_alone():
    import flint

    before = (mpmath.mp.prec, flint.ctx.prec)
    arrays, more = example("gaussian", (2, 5, 8, 3))
    for tier in TIERS:
        tier.gradients(*arrays, **more)
    with pytest.raises(ValueError):
        backward_balls.gradients(arrays[0] * np.nan, *arrays[1:], **more)
    assert (mpmath.mp.prec, flint.ctx.prec) == before


def test_float64_and_the_bounds_need_neither_torch_nor_flint_nor_mpmath():
    code = (
        "import sys\n"
        "for name in ('torch', 'flint', 'mpmath'): sys.modules[name] = None\n"
        "import verify.bounds.backward_domain, verify.simulator_backward\n"
        "from verify.oracle import backward_float64\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
