"""Special values: masked is absent, empty rows are 0 and -inf with zero gradients, NaN is never hidden.

Every algorithm of the package is held to the same table.
"""

from __future__ import annotations

import numpy as np
import pytest

from spec import flash1, flash2, masks, roundoff, split, standard
from spec.errors import FormatError, MaskError, ScaleError, ShapeError, TileError
from spec.head import Head
from tests.spec.problems import Problem, assert_attention

FORWARD = {
    "standard": lambda q, k, v, **o: standard.forward(q, k, v, **o),
    "flash1": lambda q, k, v, **o: flash1.forward(q, k, v, br=4, bc=8, **o),
    "flash2": lambda q, k, v, **o: flash2.forward(q, k, v, br=4, bc=8, **o),
    "lagged": lambda q, k, v, **o: flash2.forward(q, k, v, br=4, bc=8, lag=5.5, **o),
    "split": lambda q, k, v, **o: split.forward(q, k, v, parts=3, br=4, bc=8, **o),
}


def backward(name, q, k, v, do, **options):
    """Gradients by the backward algorithm that goes with a forward one."""
    if name == "standard":
        return standard.backward(q, k, v, do, **options)
    if name == "flash1":
        out = flash1.forward(q, k, v, br=4, bc=8, **options)
        return flash1.backward(q, k, v, out.o, out.m, out.l, do, br=4, bc=8, **options)
    out = FORWARD[name](q, k, v, **options)
    return flash2.backward(q, k, v, out.o, out.lse, do, br=4, bc=8, **options)


@pytest.fixture(params=FORWARD)
def name(request):
    return request.param


def arrays(nq=9, nk=20, d=5, dv=3, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=s) for s in ((nq, d), (nk, d), (nk, dv), (nq, dv)))


@pytest.mark.field("R001", "R011", "R026")
def test_a_row_that_sees_no_key_is_zero_with_zero_gradients(name):
    q, k, v, do = arrays()
    seen = np.ones((9, 20), bool)
    seen[[0, 4, 8]] = False
    o, lse = FORWARD[name](q, k, v, mask=seen)[:2]
    assert (o[[0, 4, 8]] == 0).all() and np.isneginf(lse[[0, 4, 8]]).all()
    assert np.isfinite(o).all() and np.isfinite(lse[[1, 2, 3, 5, 6, 7]]).all()
    grads = backward(name, q, k, v, do, mask=seen)
    assert (grads.dq[[0, 4, 8]] == 0).all() and all(np.isfinite(g).all() for g in grads[:3])
    # the empty rows contribute nothing: the same gradients without them
    rest = [1, 2, 3, 5, 6, 7]
    bound = roundoff.backward(Head.of(q, k, v, mask=seen), do, 3)
    alone = standard.backward(q[rest], k, v, do[rest])
    assert (np.abs(grads.dk - alone.dk) <= 2 * bound.dk).all() and (np.abs(grads.dv - alone.dv) <= 2 * bound.dv).all()


@pytest.mark.field("R001")
def test_a_float_mask_is_a_bias_and_a_bool_mask_a_selector(name):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(8, 8)) for _ in range(3))
    seen = np.zeros((8, 8), bool)
    seen[:4, :4] = True
    masked, biased = FORWARD[name](q, k, v, mask=seen), FORWARD[name](q, k, v, bias=seen.astype(float))
    assert (masked.o[4:] == 0).all() and np.isneginf(masked.lse[4:]).all() and np.isfinite(masked.o).all()
    assert np.isfinite(biased.lse).all() and (biased.o != masked.o).any(axis=1).all()
    plain = FORWARD[name](q, k, v)
    assert (biased.o[4:] == plain.o[4:]).all()  # a bias of 0
    grads = backward(name, q, k, v, np.ones((8, 8)), mask=seen)
    assert (grads.dq[4:] == 0).all() and (grads.dk[4:] == 0).all() and (grads.dv[4:] == 0).all()


@pytest.mark.field("R002")
def test_first_tiles_that_are_fully_masked(name):
    """An additive -inf for j > i and for j <= i - 10, x all ones: every row is the same constant."""
    n, d = 640, 4
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    bias = np.where((j > i) | (j <= i - 10), -np.inf, 0.0)
    x = np.ones((n, d))
    o, lse = FORWARD[name](x, x, x, bias=bias)[:2]
    assert np.isfinite(o).all()
    bound = roundoff.merged(Head.of(x, x, x, bias=bias), -(-n // 8) + 3, 3)
    assert (np.abs(o - 1.0) <= bound.o).all()
    want = 2.0 + np.log(np.minimum(i[:, 0] + 1, 10))
    assert (np.abs(lse - want) <= bound.lse + (8 + 1) * 2.0**-53 * want).all()  # `want` has a log and a sum of its own


@pytest.mark.field("R004")
def test_a_row_of_the_most_negative_finite_bias_attends(name):
    """finfo.min on a whole row is a bias like any other. In exact arithmetic it cancels; here adding it absorbs the
    scores, so the row is the uniform mean. Multiplied by log2(e) it would overflow; natural logarithms do not."""
    q, k, v, _ = arrays(3, 3, 4, 4)
    for dtype in (np.float32, np.float64):
        bias = np.ones((3, 3))
        bias[0] = np.finfo(dtype).min
        o, lse = FORWARD[name](q, k, v, bias=bias, dtype=dtype)[:2]
        assert np.isfinite(o).all() and np.isfinite(lse).all()
        if name == "split":  # partial LSEs are all finfo.min, ln l is below their last bit: some average of V
            assert (v.min(axis=0) <= o[0]).all() and (o[0] <= v.max(axis=0)).all()
        else:
            mean = v.astype(dtype).astype(float).mean(axis=0)
            assert (np.abs(o[0] - mean) <= roundoff.compound(6, 1, np.finfo(dtype).eps / 2) * np.abs(v).max()).all()
        assert lse[0] == np.finfo(dtype).min


@pytest.mark.field("R005", "R006", "R007")
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e300])
def test_masked_keys_and_values_are_absent(name, junk):
    """Junk behind the mask changes no bit of any result, forward or backward."""
    q, k, v, do = arrays()
    rng = np.random.default_rng(1)
    seen = rng.random((9, 20)) < 0.5
    seen[:, [3, 10, 19]] = False
    clean = FORWARD[name](q, k, v, mask=seen), backward(name, q, k, v, do, mask=seen)
    for column in (slice(None), 1):
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[[3, 10, 19], column] = junk
        bad_v[[3, 10, 19], column] = junk
        with np.errstate(all="ignore"):
            got = FORWARD[name](q, bad_k, bad_v, mask=seen), backward(name, q, bad_k, bad_v, do, mask=seen)
        bound = roundoff.merged(Head.of(q, k, v, mask=seen), 3, 3)
        assert (np.abs(got[0].o - clean[0].o) <= 2 * bound.o).all() and (got[0].lse == clean[0].lse).all()
        grads = roundoff.backward(Head.of(q, k, v, mask=seen), do, 6)
        for a, b, room in zip(got[1][:3], clean[1][:3], grads[:3], strict=True):
            assert (np.abs(a - b) <= 2 * room).all()


@pytest.mark.field("R005")
def test_a_value_seen_by_some_rows_only_poisons_those(name):
    q, k, v, do = arrays()
    v[19] = np.nan
    mask = masks.Causal(masks.BOTTOM_RIGHT)  # only the last row sees the last key
    o, lse = FORWARD[name](q, k, v, mask=mask)[:2]
    assert np.isfinite(o[:8]).all() and np.isnan(o[8]).all() and np.isfinite(lse).all()
    grads = backward(name, q, k, v, do, mask=mask)
    assert np.isfinite(grads.dq[:8]).all() and np.isnan(grads.dq[8]).all()


@pytest.mark.field("R037")
def test_nan_in_a_visible_input_is_not_hidden(name):
    q, k, v, _ = arrays()
    mask = masks.Causal(masks.BOTTOM_RIGHT)
    for array, row, nan_rows in ((q, 4, [4]), (k, 15, [4, 5, 6, 7, 8])):
        saved = array[row].copy()
        array[row, 2] = np.nan
        o, lse = FORWARD[name](q, k, v, mask=mask)[:2]
        assert np.isnan(lse).tolist() == [i in nan_rows for i in range(9)]
        assert np.isnan(o).tolist() == [[i in nan_rows] * 3 for i in range(9)]
        array[row] = saved
    v[2, 1] = np.nan
    o, lse = FORWARD[name](q, k, v, mask=mask)[:2]
    assert np.isnan(o[:, 1]).all() and np.isfinite(o[:, [0, 2]]).all() and np.isfinite(lse).all()


@pytest.mark.field("R037")
def test_all_nan_queries_give_nan_not_zero(name):
    o, lse = FORWARD[name](np.full((16, 8), np.nan), np.ones((16, 8)), np.ones((16, 8)))[:2]
    assert np.isnan(o).all() and np.isnan(lse).all()


def test_a_nan_row_that_sees_no_key_is_empty(name):
    """(O, LSE) is a function of q and the visible keys only; of none, it is the identity of the merge."""
    q, k, v, _ = arrays()
    q[3] = np.nan
    seen = np.ones((9, 20), bool)
    seen[3] = False
    o, lse = FORWARD[name](q, k, v, mask=seen)[:2]
    assert (o[3] == 0).all() and np.isneginf(lse[3])


def test_infinite_logits(name):
    """+inf gives a NaN row; -inf from a visible key has weight 0, and a row of them is empty."""
    q, k, v = np.ones((3, 2)), np.ones((20, 2)), np.arange(20.0)[:, None]
    k[12, 0] = np.inf
    o, lse = FORWARD[name](q, k, v)[:2]
    assert np.isnan(o).all() and np.isnan(lse).all()
    k[12, 0] = -np.inf
    got, want = FORWARD[name](q, k, v), FORWARD[name](q, np.delete(k, 12, 0), np.delete(v, 12, 0))
    bound = roundoff.merged(Head.of(q, np.delete(k, 12, 0), np.delete(v, 12, 0)), 3, 3)
    assert (np.abs(got.o - want.o) <= 2 * bound.o).all() and (np.abs(got.lse - want.lse) <= 2 * bound.lse).all()
    k[:, 0] = -np.inf
    o, lse = FORWARD[name](q, k, v)[:2]
    assert (o == 0).all() and np.isneginf(lse).all()


def test_infinity_in_a_visible_value(name):
    q, k, v, _ = arrays()
    v[5, 1] = np.inf
    o, lse = FORWARD[name](q, k, v)[:2]
    assert not np.isfinite(o[:, 1]).any() and np.isfinite(o[:, [0, 2]]).all() and np.isfinite(lse).all()


@pytest.mark.field("R056", "R057", "R058", "R059")
@pytest.mark.parametrize("nq, nk", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("mask", [None, masks.Causal(masks.BOTTOM_RIGHT), masks.KeyPadding(3)])
def test_no_queries_or_no_keys(name, nq, nk, mask):
    q, k, v, do = arrays(nq, nk)
    o, lse = FORWARD[name](q, k, v, mask=mask)[:2]
    assert o.shape == (nq, 3) and (o == 0).all() and lse.shape == (nq,) and np.isneginf(lse).all()
    grads = backward(name, q, k, v, do, mask=mask)
    assert [g.shape for g in grads[:3]] == [q.shape, k.shape, v.shape]
    assert all((g == 0).all() for g in grads[:3])


@pytest.mark.field("R025")
@pytest.mark.parametrize("logit", [-2.45e5, -5e4, -1.3e5, -1e300, 1e300])
def test_no_finite_number_stands_for_minus_infinity(name, logit):
    """One key: O is V and LSE the logit, exactly, however low; a fully masked row beside it is still empty."""
    q, k, v = np.array([[1.0], [1.0]]), np.array([[logit]]), np.array([[3.0, -2.0]])
    o, lse = FORWARD[name](q, k, v, scale=1.0, mask=np.array([[True], [False]]))[:2]
    assert o.tolist() == [[3.0, -2.0], [0.0, 0.0]] and lse.tolist() == [logit, -np.inf]


@pytest.mark.field("R025")
def test_shifting_every_logit_shifts_the_lse_only(name):
    """A shift by a power of two that loses no bit of the scores changes no bit of O.

    Except in a merge by LSE, which at 2^40 no longer holds ln l to the last bit: there `roundoff.merged` says how much.
    """
    rng = np.random.default_rng(2)
    bias = rng.integers(-64, 64, (9, 20)) / 8.0
    q, k, v = np.zeros((9, 4)), np.zeros((20, 4)), rng.normal(size=(20, 3))
    plain, shifted = FORWARD[name](q, k, v, bias=bias), FORWARD[name](q, k, v, bias=bias - 2.0**40)
    if name == "split":
        bound = roundoff.merged(Head.of(q, k, v, bias=bias - 2.0**40), 3, 3)
        assert (np.abs(plain.o - shifted.o) <= 2 * bound.o).all()
    else:
        assert (plain.o == shifted.o).all()


@pytest.mark.field("R027")
def test_the_smallest_problem(name):
    """One key: P = 1, so dQ = dK = 0 and dV = dO."""
    rng = np.random.default_rng(3)
    q, k, v = (3 * rng.normal(size=(1, 16)) for _ in range(3))
    grads = backward(name, q, k, v, np.ones((1, 16)))
    assert (FORWARD[name](q, k, v).o == v).all()
    bound = roundoff.backward(Head.of(q, k, v), np.ones((1, 16)), 3)
    assert (np.abs(grads.dq) <= bound.dq).all() and (np.abs(grads.dk) <= bound.dk).all()
    assert (np.abs(grads.dv - 1) <= bound.dv).all()


@pytest.mark.field("R028")
@pytest.mark.parametrize("nq", [76, 34, 146])
def test_many_queries_one_key_causal(name, nq):
    """Bottom-right: only the last query sees the key."""
    rng = np.random.default_rng(nq)
    q, k, v = 3 * rng.normal(size=(nq, 32)), 3 * rng.normal(size=(1, 32)), 3 * rng.normal(size=(1, 32))
    do, mask = rng.normal(size=(nq, 32)), masks.Causal(masks.BOTTOM_RIGHT)
    o, lse = FORWARD[name](q, k, v, mask=mask)[:2]
    assert (o[:-1] == 0).all() and np.isneginf(lse[:-1]).all() and (o[-1] == v[0]).all()
    grads = backward(name, q, k, v, do, mask=mask)
    bound = roundoff.backward(Head.of(q, k, v, mask=mask), do, nq)
    assert (grads.dq[:-1] == 0).all()
    assert (np.abs(grads.dq) <= bound.dq).all() and (np.abs(grads.dk) <= bound.dk).all()
    assert (np.abs(grads.dv - do[-1]) <= bound.dv).all()


@pytest.mark.field("R029")
@pytest.mark.parametrize("size", [1e6, 1e8])
def test_backward_at_huge_logits_does_not_blow_up(name, size):
    """P = exp(S - LSE) has relative error about u |LSE|: at 1e8 in float64 that is 1e-8, and the bound says so."""
    rng = np.random.default_rng(5)
    q, k, v, do = np.full((4, 1), size), 1 + rng.random((9, 1)) * 1e-7, rng.normal(size=(9, 3)), rng.normal(size=(4, 3))
    bound, want = roundoff.backward(Head.of(q, k, v), do, 9), standard.backward(q, k, v, do)
    got = backward(name, q, k, v, do)
    for a, b, room in zip(got[:3], want[:3], bound[:3], strict=True):
        assert np.isfinite(room).all() and (np.abs(a - b) <= 2 * room).all()


@pytest.mark.field("R039")
def test_one_array_as_q_k_and_v(name):
    x = np.random.default_rng(6).normal(size=(30, 8))
    before = x.copy()
    assert_attention(FORWARD[name](x, x, x), Problem(x, x, x, x, 4, 8, {}), parts=3)
    backward(name, x, x, x, x)
    assert (x == before).all()


@pytest.mark.field("R060", "R061")
@pytest.mark.parametrize("nk", [7, 8, 9, 17, 257])
def test_a_single_query_at_tile_edges(name, nk):
    q, k, v, do = arrays(1, nk, 32, 32)
    assert_attention(FORWARD[name](q, k, v), Problem(q, k, v, do, 4, 8, {}), parts=3)


@pytest.mark.field("R036")
@pytest.mark.parametrize("scale", [0.0, -0.125, np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_positive_and_finite_is_refused(name, scale):
    q, k, v, _ = arrays()
    with pytest.raises(ScaleError, match="positive, finite"):
        FORWARD[name](q, k, v, scale=scale)


@pytest.mark.field("R035")
def test_the_soft_cap_is_applied(name):
    """s' = c tanh(s / c); a cap that is not positive is refused."""
    q, k, v, _ = arrays()
    cap = 30.0
    s = cap * np.tanh(12 * (q @ k.T) / cap)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    want = p @ v / p.sum(axis=1, keepdims=True)
    got = FORWARD[name](q, k, v, scale=12.0, softcap=cap)
    bound = roundoff.merged(Head.of(q, k, v, scale=12.0, softcap=cap), 3, 3)
    assert (np.abs(got.o - want) <= 2 * bound.o).all()
    assert (np.abs(want - FORWARD[name](q, k, v, scale=12.0).o) > 2 * bound.o).any()
    with pytest.raises(ScaleError, match="softcap"):
        FORWARD[name](q, k, v, softcap=0.0)


def test_wrong_requests_are_refused_with_the_shapes(name):
    q, k, v, do = arrays()
    run = FORWARD[name]
    with pytest.raises(ShapeError, match=r"q\(9, 5\), k\(20, 4\)"):
        run(q, k[:, :4], v)
    with pytest.raises(ShapeError, match=r"v\(19, 3\)"):
        run(q, k, v[:19])
    with pytest.raises(ShapeError, match="at least 1"):
        run(q[:, :0], k[:, :0], v)
    with pytest.raises(ShapeError, match=r"bias\(9, 19\)"):
        run(q, k, v, bias=np.zeros((9, 19)))
    with pytest.raises(MaskError, match="Nk=20"):
        run(q, k, v, mask=np.ones((9, 19), bool))
    with pytest.raises(MaskError, match="bias"):
        run(q, k, v, mask=np.ones((9, 20)))
    with pytest.raises(FormatError, match="float32"):
        run(q, k, v, dtype=np.float16)
    with pytest.raises(ShapeError, match="do"):
        standard.backward(q, k, v, do[:3])


@pytest.mark.parametrize("br, bc", [(0, 4), (4, 0), (-1, 4)])
def test_a_tile_size_below_one_is_refused(br, bc):
    q, k, v, _ = arrays()
    for algorithm in (flash1.forward, flash2.forward):
        with pytest.raises(TileError, match="at least 1"):
            algorithm(q, k, v, br=br, bc=bc)
