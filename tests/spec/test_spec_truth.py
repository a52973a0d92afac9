"""The reference against mpmath at 50 digits: the textbook formula, and its derivative by differences.

Small shapes only; what is proven here is that the formulas of `spec` are attention and its gradient, and that the
bounds of `spec.roundoff` hold against the true value.
"""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from spec import flash1, flash2, masks, roundoff, standard
from spec.dropout import Dropout
from tests.spec.problems import Problem, assert_within

DIGITS = 50


def textbook(q, k, v, *, scale, seen, z, softcap, bias):
    """O and LSE in mpf, by the definition; lists of lists."""
    o, lse = [], []
    for i, qi in enumerate(q):
        weights = []
        for j, kj in enumerate(k):
            s = scale * mpmath.fdot(qi, kj)
            if softcap is not None:
                s = softcap * mpmath.tanh(s / softcap)
            weights.append(mpmath.exp(s + bias[i][j]) if seen[i][j] else mpmath.mpf(0))
        total = mpmath.fsum(weights)
        columns = range(len(v[0]))
        if total == 0:
            o.append([mpmath.mpf(0) for _ in columns])
            lse.append(mpmath.mpf("-inf"))
            continue
        o.append([mpmath.fsum(w * z[i][j] * v[j][c] for j, w in enumerate(weights)) / total for c in columns])
        lse.append(mpmath.log(total))
    return o, lse


def case(seed):
    rng = np.random.default_rng(seed)
    nq, nk, d, dv = 3, 5, 2, 2
    q, k, v, do = (rng.normal(size=s) for s in ((nq, d), (nk, d), (nk, dv), (nq, dv)))
    seen = rng.random((nq, nk)) < 0.7
    if seed % 3 == 0:
        seen[1] = False
    options = {
        "mask": seen,
        "scale": [None, 0.3, 2.5][seed % 3],
        "softcap": [None, 1.5][seed % 2],
        "bias": rng.normal(size=(nq, nk)) if seed % 2 else None,
        "dropout": Dropout(p=0.3, seed=seed) if seed % 4 == 1 else None,
    }
    return Problem(3 * q, k, v, do, 2, 2, {n: x for n, x in options.items() if x is not None})


def exact(p: Problem, q=None, k=None, v=None, bias=None):
    h = p.head
    z = np.ones((h.nq, h.nk)) if h.dropout is None else h.z(slice(0, h.nq), slice(0, h.nk))
    lists = [mpmath.matrix(x).tolist() for x in (p.q, p.k, p.v)]
    given = [own if other is None else other for own, other in zip(lists, (q, k, v), strict=True)]
    if bias is None:
        bias = mpmath.matrix(np.zeros((h.nq, h.nk)) if h.bias is None else h.bias).tolist()
    # the scale, Z and soft cap that were used are doubles, so exact inputs
    return textbook(
        *given, scale=mpmath.mpf(h.scale), seen=p.options["mask"], z=z.tolist(), softcap=h.softcap, bias=bias
    )


def as_floats(rows):
    return np.array([[float(x) for x in row] for row in rows])


@pytest.mark.parametrize("seed", range(12))
def test_forward_is_within_its_bound_of_the_truth(seed):
    p = case(seed)
    bound = roundoff.forward(p.head, p.tiles)
    with mpmath.workdps(DIGITS):
        o, lse = exact(p)
    o, lse = as_floats(o), np.array([float(x) for x in lse])
    u = 2.0**-53  # the truth, rounded to double for the comparison
    for out in (
        standard.forward(*p.inputs, **p.options),
        flash1.forward(*p.inputs, br=2, bc=2, **p.options),
        flash2.forward(*p.inputs, br=2, bc=2, **p.options),
    ):
        assert_within(out.o, o, bound.o + u * np.abs(o), "O")
        assert_within(out.lse, lse, bound.lse + u * np.where(np.isinf(lse), 0, np.abs(lse)), "LSE")


@pytest.mark.parametrize("seed", range(8))
def test_gradients_are_the_derivative_of_the_textbook_formula(seed):
    """Central differences in mpmath: step 1e-15 at 50 digits, so truncation (1e-30) and cancellation (1e-35) vanish."""
    p = case(seed)
    h = mpmath.mpf("1e-15")
    dlse = np.random.default_rng(seed + 100).normal(size=len(p.q))

    def loss(**changed):
        o, lse = exact(p, **changed)
        total = mpmath.fsum(do * x for r, row in enumerate(o) for do, x in zip(p.do[r], row, strict=True))
        return total + mpmath.fsum(g * x for g, x in zip(dlse, lse, strict=True) if x != mpmath.mpf("-inf"))

    def derivative(name, array):
        result = np.zeros(array.shape)
        for r, c in np.ndindex(array.shape):
            values = []
            for step in (h, -h):
                moved = mpmath.matrix(array).tolist()
                moved[r][c] += step
                values.append(loss(**{name: moved}))
            result[r, c] = float((values[0] - values[1]) / (2 * h))
        return result

    with mpmath.workdps(DIGITS):
        want = {"dq": derivative("q", p.q), "dk": derivative("k", p.k), "dv": derivative("v", p.v)}
        if p.head.bias is not None:
            want["dbias"] = derivative("bias", p.head.bias)
    bound = roundoff.backward(p.head, p.do, p.tiles, dlse)
    f1 = flash1.forward(*p.inputs, br=2, bc=2, **p.options)
    f2 = flash2.forward(*p.inputs, br=2, bc=2, **p.options)
    tiled = {"br": 2, "bc": 2, "dlse": dlse} | p.options
    for got in (
        standard.backward(*p.inputs, p.do, dlse=dlse, **p.options),
        flash1.backward(*p.inputs, f1.o, f1.m, f1.l, p.do, **tiled),
        flash2.backward(*p.inputs, f2.o, f2.lse, p.do, **tiled),
    ):
        for name, x in want.items():
            assert_within(getattr(got, name), x, getattr(bound, name) + 2.0**-53 * np.abs(x), name)


@pytest.mark.parametrize("function", ["exp", "log", "tanh"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_numpy_is_as_accurate_as_the_bounds_assume(function, dtype):
    """The premise of spec.roundoff: within ULPS units in the last place, on vectors, and exp(0) = 1."""
    rng = np.random.default_rng(1)
    limit = 700.0 if dtype == np.float64 else 80.0
    x = np.concatenate([-limit * rng.random(400), -rng.random(400), -(10.0 ** rng.uniform(-12, 0, 200))]).astype(dtype)
    if function == "log":
        x = np.concatenate([1 + rng.random(300), 1 + 10.0 ** rng.uniform(-6, 4, 300)]).astype(dtype)
    got = getattr(np, function)(x)
    with mpmath.workdps(DIGITS):
        for a, b in zip(x, got, strict=True):
            truth = getattr(mpmath, function)(mpmath.mpf(float(a)))
            # an ulp of the truth is at most 2u |truth|
            assert abs(mpmath.mpf(float(b)) - truth) <= roundoff.ULPS * 2 * roundoff.unit(dtype) * abs(truth)
    assert np.exp(np.zeros(9, dtype)).tolist() == [1.0] * 9


@pytest.mark.parametrize("logit", [0.0, 60.0, -60.0])
def test_the_mean_gap_is_at_most_the_log_of_the_keys(logit):
    """sum P (m - S) = entropy(P) - ln l <= ln n: why rounding the exponents costs l only u ln n."""
    rng = np.random.default_rng(2)
    for n in (1, 2, 50):
        s = logit * rng.random(n)
        w = np.exp(s - s.max())
        assert (w * (s.max() - s)).sum() / w.sum() <= np.log(n) * (1 + roundoff.compound(n, 1, 2.0**-53))


@pytest.mark.field("R022")
@pytest.mark.parametrize("n", [257])
def test_bias_and_causal_mask_together_at_a_ragged_length(n):
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(n, 8)) for _ in range(3))
    bias = (np.arange(n)[:, None] - np.arange(n)[None, :]).astype(float)
    p = Problem(q, k, v, np.full((n, 8), 0.01 / (8 * n)), 64, 64, {"bias": bias, "mask": masks.Causal("top_left")})
    out = flash2.forward(q, k, v, br=64, bc=64, **p.options)
    gradients = flash2.backward(q, k, v, out.o, out.lse, p.do, br=64, bc=64, **p.options)
    bound = roundoff.backward(p.head, p.do, p.tiles)
    want = standard.backward(q, k, v, p.do, **p.options)
    for name in ("dq", "dk", "dv", "dbias"):
        assert_within(getattr(gradients, name), getattr(want, name), 2 * getattr(bound, name), name)
