"""Every tiled algorithm computes attention: against Algorithm 0 and 3, to within derived bounds, on random problems."""

from __future__ import annotations

import numpy as np
import pytest

from spec import block_sparse, flash1, flash2, masks, roundoff, split, standard
from spec.head import Head
from tests.spec.problems import Problem, assert_attention, assert_gradients, assert_within, random_problem

SEEDS = range(64)


@pytest.mark.parametrize("seed", SEEDS)
def test_forward_algorithms_agree(seed):
    p = random_problem(seed)
    lagged = flash2.forward(*p.inputs, br=p.br, bc=p.bc, **p.options, lag=0.0)
    assert_attention(flash1.forward(*p.inputs, br=p.br, bc=p.bc, **p.options), p)
    assert_attention(flash2.forward(*p.inputs, br=p.br, bc=p.bc, **p.options), p)
    assert_attention(lagged, p)
    assert_attention(split.forward(*p.inputs, parts=3, br=p.br, bc=p.bc, **p.options), p, parts=3)


@pytest.mark.parametrize("seed", SEEDS)
def test_backward_algorithms_agree(seed):
    """Gradients of O and of LSE together."""
    p = random_problem(seed)
    dlse = np.random.default_rng(seed).normal(size=len(p.q))
    f1 = flash1.forward(*p.inputs, br=p.br, bc=p.bc, **p.options)
    f2 = flash2.forward(*p.inputs, br=p.br, bc=p.bc, **p.options)
    tiled = {"br": p.br, "bc": p.bc, "dlse": dlse} | p.options
    assert_gradients(flash1.backward(*p.inputs, f1.o, f1.m, f1.l, p.do, **tiled), p, dlse)
    assert_gradients(flash2.backward(*p.inputs, f2.o, f2.lse, p.do, **tiled), p, dlse)


@pytest.mark.parametrize("lag", [0.5, 8 * np.log(2)])
@pytest.mark.parametrize("seed", range(24))
def test_the_lagged_maximum_changes_nothing_but_rounding(seed, lag):
    """L and U are relative to r instead of m: the exponents' rounding grows by 2 u lag per key."""
    p = random_problem(seed)
    bound, u = roundoff.forward(p.head, p.tiles), 2.0**-53
    want = standard.forward(*p.inputs, **p.options)
    got = flash2.forward(*p.inputs, br=p.br, bc=p.bc, lag=lag, **p.options)
    scale = 1.0 if p.head.dropout is None else p.head.dropout.scale
    vmax = scale * np.abs(p.v).max(axis=0, initial=0.0)
    extra = np.expm1(2 * lag * u)  # relative, of each weight; O moves by at most extra (|v| + |O|) / (1 - extra)
    assert_within(got.o, want.o, 2 * bound.o + 2 * extra / (1 - extra) * vmax, "O")
    # LSE = r + ln l with ln l up to lag + ln Nk: log is within 4 ulp of it
    assert_within(got.lse, want.lse, 2 * bound.lse + extra + 8 * u * (lag + np.log(max(len(p.k), 1))), "LSE")


@pytest.mark.parametrize("br, bc", [(1, 1), (1, 7), (7, 1), (100, 100), (3, 100), (100, 3), (16, 8), (8, 16)])
@pytest.mark.parametrize("align", [masks.BOTTOM_RIGHT, masks.TOP_LEFT])
def test_tiles_of_any_size_give_the_same_answer(br, bc, align):
    rng = np.random.default_rng(br * 1000 + bc)
    q, k, v, do = (rng.normal(size=s) for s in ((23, 5), (19, 5), (19, 6), (23, 6)))
    p = Problem(q, k, v, do, br, bc, {"mask": masks.Causal(align)})
    out = flash2.forward(q, k, v, br=br, bc=bc, **p.options)
    assert_attention(out, p)
    assert_gradients(flash2.backward(q, k, v, out.o, out.lse, do, br=br, bc=bc, **p.options), p)
    assert_attention(flash1.forward(q, k, v, br=br, bc=bc, **p.options), p)


@pytest.mark.parametrize("seed", range(16))
def test_block_sparse_is_attention_under_the_block_mask(seed):
    rng = np.random.default_rng(seed)
    nq, nk, br, bc = (int(x) for x in rng.integers((1, 1, 1, 1), (50, 50, 17, 17)))
    live = rng.random((-(-nq // br), -(-nk // bc))) < 0.4
    seen = np.repeat(np.repeat(live, br, axis=0), bc, axis=1)[:nq, :nk]
    other = masks.Causal(masks.BOTTOM_RIGHT) if seed % 2 else None
    both = seen & masks.dense(other or masks.NoMask(), nq, nk)
    q, k, v, do = (rng.normal(size=s) for s in ((nq, 4), (nk, 4), (nk, 3), (nq, 3)))
    p = Problem(q, k, v, do, br, bc, {"mask": both})
    out = block_sparse.forward(q, k, v, blocks=live, br=br, bc=bc, mask=other)
    assert_attention(out, p)
    assert_gradients(block_sparse.backward(q, k, v, out.o, out.m, out.l, do, blocks=live, br=br, bc=bc, mask=other), p)


def test_block_sparse_touches_live_tiles_only():
    rng = np.random.default_rng(5)
    live = rng.random((4, 5)) < 0.5
    q, k, v = rng.normal(size=(30, 4)), rng.normal(size=(37, 4)), rng.normal(size=(37, 4))
    touched = np.zeros_like(live)

    def watch(state):
        touched[state.i, state.j] = True

    block_sparse.forward(q, k, v, blocks=live, br=8, bc=8, on_tile=watch)
    assert (touched == live).all()


@pytest.mark.field("R014")
def test_full_tiles_declared_partial_change_no_bit():
    class Cautious(masks.Causal):
        def tile_class(self, rows, cols, nq, nk):
            return min(super().tile_class(rows, cols, nq, nk), masks.TileClass.PARTIAL)

    rng = np.random.default_rng(0)
    q, k, v, do = (rng.normal(size=s) for s in ((64, 8), (96, 8), (96, 8), (64, 8)))
    results = []
    for mask in (masks.Causal(masks.BOTTOM_RIGHT), Cautious(masks.BOTTOM_RIGHT)):
        o, lse = flash2.forward(q, k, v, br=16, bc=16, mask=mask)
        results.append((o, lse, *flash2.backward(q, k, v, o, lse, do, br=16, bc=16, mask=mask)[:3]))
    assert all((a == b).all() for a, b in zip(*results, strict=True))


@pytest.mark.field("R083", "R013")
@pytest.mark.parametrize("mask", [None, masks.Causal(masks.BOTTOM_RIGHT), masks.Causal(masks.TOP_LEFT)])
def test_backward_honours_the_mask_of_the_forward(mask):
    rng = np.random.default_rng(2)
    q, k, v, do = (rng.normal(size=s) for s in ((64, 16), (160, 16), (160, 16), (64, 16)))
    p = Problem(q, k, v, do, 16, 32, {"mask": mask})
    out = flash2.forward(q, k, v, br=16, bc=32, mask=mask)
    assert_gradients(flash2.backward(q, k, v, out.o, out.lse, do, br=16, bc=32, mask=mask), p)


@pytest.mark.field("R082")
def test_the_gradient_of_the_lse():
    """loss = lse.sum(): dQ = scale P K, dK = scale P^T Q, dV = 0."""
    rng = np.random.default_rng(4)
    q, k, v = rng.normal(size=(9, 5)), rng.normal(size=(12, 5)), rng.normal(size=(12, 3))
    mask = masks.Causal(masks.BOTTOM_RIGHT)
    P, zero, one = standard.probabilities(q, k, v, mask=mask), np.zeros((9, 3)), np.ones(9)
    bound = roundoff.backward(Head.of(q, k, v, mask=mask), zero, 4, one)
    out = flash2.forward(q, k, v, br=4, bc=4, mask=mask)
    got = flash2.backward(q, k, v, out.o, out.lse, zero, br=4, bc=4, mask=mask, dlse=one)
    scale = 1 / np.sqrt(5)
    assert_within(got.dq, scale * (P @ k), 2 * bound.dq, "dQ")
    assert_within(got.dk, scale * (P.T @ q), 2 * bound.dk, "dK")
    assert (got.dv == 0).all()


@pytest.mark.field("R087")
@pytest.mark.parametrize("shape", [(), (1,), (12,), (1, 12), (9, 1), (9, 12), (1, 1)])
def test_the_bias_gradient_has_the_shape_of_the_bias(shape):
    rng = np.random.default_rng(6)
    q, k, v, do = (rng.normal(size=s) for s in ((9, 5), (12, 5), (12, 3), (9, 3)))
    p = Problem(q, k, v, do, 4, 4, {"bias": rng.normal(size=shape)})
    out = flash2.forward(q, k, v, br=4, bc=4, **p.options)
    got = flash2.backward(q, k, v, out.o, out.lse, do, br=4, bc=4, **p.options)
    assert got.dbias.shape == shape
    assert_gradients(got, p)


def test_alibi_is_a_bias():
    """-slope |i + delta - j| makes the weight of a key fall by exp(-slope) per step of distance (q = 0)."""
    slope, nq, nk = 0.5, 3, 8
    distance = np.abs(np.arange(nq)[:, None] + nk - nq - np.arange(nk)[None, :])
    P = standard.probabilities(np.zeros((nq, 2)), np.ones((nk, 2)), np.ones((nk, 1)), bias=-slope * distance)
    want = np.exp(-slope * distance)
    want /= want.sum(axis=1, keepdims=True)
    assert (np.abs(P - want) <= 2 * roundoff.compound(nk, 1, 2.0**-53) * want * (1 + slope * nk)).all()


@pytest.mark.parametrize("seed", range(8))
def test_float32_stays_float32_and_within_its_bound(seed):
    p = random_problem(seed)
    p.options["dtype"] = np.float32
    out = flash2.forward(*p.inputs, br=p.br, bc=p.bc, **p.options)
    assert out.o.dtype == out.lse.dtype == np.float32
    assert_attention(out, p)
    gradients = flash2.backward(*p.inputs, out.o, out.lse, p.do, br=p.br, bc=p.bc, **p.options)
    assert all(g.dtype == np.float32 for g in gradients[:3])
    assert_gradients(gradients, p)


class TestExactRelations:
    """Relations that hold bit for bit, because every rounding commutes with them."""

    rng = np.random.default_rng(11)
    q, k, v = rng.normal(size=(40, 8)), rng.normal(size=(50, 8)), rng.normal(size=(50, 6))
    mask = masks.Causal(masks.BOTTOM_RIGHT)

    def run(self, q=q, k=k, v=v, **options):
        return flash2.forward(q, k, v, br=16, bc=16, **({"mask": self.mask} | options))

    def test_doubling_and_negating_v(self):
        assert (self.run(v=2 * self.v).o == 2 * self.run().o).all()
        assert (self.run(v=-self.v).o == -self.run().o).all()

    def test_splitting_the_queries_at_a_tile_edge(self):
        whole, top = self.run(mask=None), self.run(q=self.q[:16], mask=None)
        assert (whole.o[:16] == top.o).all() and (whole.lse[:16] == top.lse).all()

    def test_a_fully_masked_tile_more(self):
        k, v = (np.concatenate([x, np.full((16, x.shape[1]), 7.0)]) for x in (self.k[:48], self.v[:48]))
        short, long = self.run(k=k[:48], v=v[:48], mask=None), self.run(k=k, v=v, mask=masks.KeyPadding(48))
        assert (short.o == long.o).all() and (short.lse == long.lse).all()

    def test_the_state_after_a_tile_is_the_result_of_the_shorter_problem(self):
        states = []
        self.run(mask=None, on_tile=states.append)
        for state in states:
            out = self.run(k=self.k[: state.cols.stop], v=self.v[: state.cols.stop], mask=None)
            assert (out.o[state.rows] == state.o / state.l[:, None]).all()

    def test_v_of_ones_gives_l_over_l(self):
        """O = 1 to within the summation of P V against that of l: gamma of twice the keys."""
        o = self.run(v=np.ones((50, 1))).o
        assert (np.abs(o - 1) <= roundoff.gamma(2 * 50 + 2, 2.0**-53)).all()


def test_key_order_does_not_matter():
    rng = np.random.default_rng(12)
    q, k, v, mask = (rng.normal(size=s) for s in ((9, 5), (40, 5), (40, 3), (9, 40)))
    mask, order = mask < 0, rng.permutation(40)
    p = Problem(q, k, v, v, 4, 8, {"mask": mask})
    assert_attention(flash2.forward(q, k[order], v[order], br=4, bc=8, mask=mask[:, order]), p)


def test_constant_v_and_zero_q():
    """q = 0: the mean over the visible keys and LSE = ln(count), whatever K is."""
    rng = np.random.default_rng(13)
    k, v, mask = rng.normal(size=(20, 4)), rng.normal(size=(20, 3)), masks.Causal(masks.TOP_LEFT)
    out, u = flash2.forward(np.zeros((20, 4)), k, v, br=8, bc=8, mask=mask), 2.0**-53
    count = np.arange(1, 21)
    for i in range(20):
        mean, size = v[: i + 1].sum(axis=0) / (i + 1), np.abs(v[: i + 1]).sum(axis=0) / (i + 1)
        assert (np.abs(out.o[i] - mean) <= 2 * roundoff.gamma(2 * (i + 2), u) * size).all()
    # l is a sum of ones, exact; both sides take a log within 4 ulp = 8u
    assert (np.abs(out.lse - np.log(count)) <= 2 * 8 * u * np.log(count)).all()
