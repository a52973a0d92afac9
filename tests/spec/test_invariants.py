"""The invariants hold after every tile, and the checker notices each seeded bug of the tiled algorithms.

A mutant is the source of an algorithm with one fragment replaced; a fragment that is no longer in the source is an
error, so the list follows the code.
"""

from __future__ import annotations

import inspect
from types import ModuleType

import numpy as np
import pytest

from spec import flash1, flash2, invariants, masks, roundoff, split
from spec.dropout import Dropout
from spec.errors import InvariantError
from spec.observer import DEFERRED
from tests.spec.problems import random_problem

LAG = 8 * np.log(2)
U = 2.0**-53


@pytest.mark.parametrize("seed", range(40))
def test_the_invariants_hold_after_every_tile(seed):
    p = random_problem(seed)
    options = {"br": p.br, "bc": p.bc} | p.options
    invariants.check(flash1.forward, *p.inputs, **options)
    invariants.check(flash2.forward, *p.inputs, **options)
    for lag in (0.0, 0.7, LAG):
        invariants.check(flash2.forward, *p.inputs, lag=lag, **options)
    invariants.check(flash2.forward, *p.inputs, **options | {"dtype": np.float32})
    for keys in split.key_ranges(len(p.k), 3):
        invariants.check(flash2.forward, *p.inputs, keys=keys, **options)


@pytest.mark.parametrize("seed", range(24))
def test_the_consequences_hold(seed):
    """m never falls, 1 <= l <= keys seen, O in the convex hull of the V rows seen (no dropout), L the same for all."""
    p = random_problem(seed)
    p.options.pop("dropout", None)
    last = {}

    def watch(state):
        before = last.get((state.form, state.i))
        if before is not None:
            assert (state.m >= before.m).all()
        last[state.form, state.i] = state
        keys = p.head.mask.visible(state.rows, slice(0, state.cols.stop), p.head.nq, p.head.nk)
        some = keys.any(axis=1)
        assert (state.l[some] >= 1).all() and (state.l <= keys.sum(axis=1)).all()
        assert (state.l[~some] == 0).all() and np.isneginf(state.m[~some]).all() and (state.o[~some] == 0).all()
        o = state.o[some] / (state.l[some, None] if state.form == DEFERRED else 1.0)
        v = np.broadcast_to(p.v[: state.cols.stop], (len(o), state.cols.stop, p.v.shape[1]))
        seen = keys[some][:, :, None]
        bound = roundoff.state(keys=state.cols.stop, tiles=state.j + 1, u=U)
        slack = ((bound.u + bound.l) / (1 - bound.l) + U) * np.abs(p.v).max(initial=0)
        assert (o <= np.where(seen, v, -np.inf).max(axis=1, initial=-np.inf) + slack).all()
        assert (o >= np.where(seen, v, np.inf).min(axis=1, initial=np.inf) - slack).all()

    for algorithm in (flash1.forward, flash2.forward):
        algorithm(*p.inputs, br=p.br, bc=p.bc, on_tile=watch, **p.options)


@pytest.mark.parametrize("seed", range(16))
def test_the_lagged_form_bounds_p_and_l(seed):
    """exp(S - r) <= e^t and l <= e^t keys: with t = 8 ln 2, 2^8 and 256 Nk."""
    p = random_problem(seed)

    def watch(state):
        bound = roundoff.state(keys=state.cols.stop, tiles=state.j + 1, u=U, lag=LAG)
        top = np.where(np.isneginf(state.m), 0.0, state.m)
        assert (state.s - top[:, None] <= LAG).all()
        assert (state.l <= 256 * state.cols.stop * (1 + bound.l)).all()

    flash2.forward(*p.inputs, br=p.br, bc=p.bc, lag=LAG, on_tile=watch, **p.options)


def test_a_caller_can_supply_the_tolerance():
    rng = np.random.default_rng(5)
    q, k, v = rng.normal(size=(8, 4)), rng.normal(size=(24, 4)), rng.normal(size=(24, 3))
    calls = []

    def tolerance(state, reference):
        calls.append((reference.tiles, reference.keys.max()))
        return np.zeros_like(state.l), np.full(state.o.shape, -1.0)  # nothing passes

    with pytest.raises(InvariantError, match="allowed error"):
        invariants.check(flash2.forward, q, k, v, br=4, bc=4, tolerance=tolerance)
    assert calls[0] == (1, 4)


def attacks():
    """Inputs that each bug must face: what they are for is in the name."""
    rng = np.random.default_rng(0)
    nq, nk, d = 9, 24, 4
    q, v = np.zeros((nq, d)), rng.normal(size=(nk, 3))
    q[:, 0] = 1.0
    k = np.zeros((nk, d))

    def logits(values):
        keys = k.copy()
        keys[:, 0] = values
        return q, keys, v, {"scale": 1.0}

    yield "rising maximum", *logits(np.repeat([0.0, 3.0, 6.0], 8))
    yield "falling maximum", *logits(np.repeat([0.0, -5.0, -200.0], 8))
    yield "all logits low", *logits(np.repeat([-256.0, -257.0, -258.0], 8))
    yield "maximum in the last column", *logits(np.arange(nk) * 5.0)
    first_hidden = np.ones((nq, nk), bool)
    first_hidden[:, :8] = False
    first_hidden[2] = False
    *arrays, options = logits(np.repeat([9.0, 1.0, 2.0], 8))
    yield "first tile hidden and an empty row", *arrays, options | {"mask": first_hidden}
    g = [rng.normal(size=s) for s in ((nq, d), (nk, d), (nk, 3))]
    yield "causal", *g, {"mask": masks.Causal(masks.BOTTOM_RIGHT)}
    yield "dropout", *g, {"dropout": Dropout(p=0.4, seed=1)}
    yield "soft cap and bias", *g, {"softcap": 2.0, "bias": rng.normal(size=(nq, nk))}


def survives(forward, br=4, bc=8, **more):
    """Names of the attacks that the algorithm passes."""
    passed = []
    for name, q, k, v, options in attacks():
        try:
            with np.errstate(all="ignore"):
                invariants.check(forward, q, k, v, br=br, bc=bc, **options, **more)
        except InvariantError:
            continue
        passed.append(name)
    return passed


def mutant(module, old, new):
    """`module` with one fragment of its source replaced, wherever it occurs in `forward`."""
    source = inspect.getsource(module)
    head, tail = source.split("def backward", 1)
    assert old in head, f"{old!r} is nowhere in {module.__name__}.forward"
    broken = ModuleType(f"{module.__name__}_mutant")
    exec(compile(head.replace(old, new) + "def backward" + tail, broken.__name__, "exec"), broken.__dict__)
    return broken.forward


ALL = sum(1 for _ in attacks())


@pytest.mark.parametrize("algorithm", [flash1.forward, flash2.forward])
def test_the_right_algorithms_survive_every_attack(algorithm):
    assert len(survives(algorithm)) == ALL


FLASH2 = {
    "O not rescaled": ("alpha[:, None] * Oi + PVij", "Oi + PVij"),
    "O rescaled after the product": ("alpha[:, None] * Oi + PVij", "alpha[:, None] * (Oi + PVij)"),
    "O divided by alpha, as published": ("alpha[:, None] * Oi", "Oi / alpha[:, None]"),
    "l not rescaled": ("alpha * li", "li"),
    "alpha inverted": ("np.exp(mi - finite_or_zero(mi_new))", "np.exp(mi_new - finite_or_zero(mi))"),
    "alpha without the shift": ("np.exp(mi - finite_or_zero(mi_new))", "np.exp(mi)"),
    "m starts at 0": ("np.full(br_i, -np.inf, head.dtype)", "np.zeros(br_i)"),
    "m starts at the smallest normal": ("np.full(br_i, -np.inf, head.dtype)", "np.full(br_i, 1.2e-38)"),
    "m starts at a finite sentinel": ("np.full(br_i, -np.inf, head.dtype)", "np.full(br_i, -5e4)"),
    "m is the tile's": ("np.maximum(mi, Sij.max(axis=1))", "Sij.max(axis=1)"),
    "m is stale": ("mi = mi_new", "mi = np.where(np.isneginf(mi), mi_new, mi)"),
    "maximum over half of the columns": ("Sij.max(axis=1)", "Sij[:, : (Sij.shape[1] + 1) // 2].max(axis=1)"),
    "maximum before the mask": ("Sij.max(axis=1)", "head.scores(rows, cols, None).max(axis=1)"),
    "mask missing": ("head.scores(rows, cols, visible)", "head.scores(rows, cols, None)"),
    "scale squared": ("head.scores(rows, cols, visible)", "head.scale * head.scores(rows, cols, visible) * 0.999"),
    "-inf guard missing": ("Sij - finite_or_zero(mi_new)[:, None]", "Sij - mi_new[:, None]"),
    "l == 0 guard missing": ("divide_rows(Oi, li)", "Oi / li[:, None]"),
    "division missing": ("divide_rows(Oi, li)", "Oi"),
    "first tile skipped": ("tile == TileClass.EMPTY", "tile == TileClass.EMPTY or j == 0"),
    "last tile skipped": ("tiles(stop, bc, start)", "tiles(stop - 1, bc, start)"),
    "V of the first tile": ("head.v[cols]", "head.v[: cols.stop - cols.start]"),
    "dropout in l": (
        "li = alpha * li + Pij.sum(axis=1)",
        "li = alpha * li + times(Pij, head.z(rows, cols)).sum(axis=1)",
    ),
    "dropout of the first tile": ("head.z(rows, cols)", "head.z(rows, slice(0, cols.stop - cols.start))"),
    "dropout missing": ("times(Pij, head.z(rows, cols))", "Pij"),
    "LSE without the maximum": ("log_sum(mi, li)", "np.log(li)"),
    "LSE in base 2": ("log_sum(mi, li)", "log_sum(mi, li) / np.log(2)"),
    "l one key too many": ("Pij.sum(axis=1)", "(Pij.sum(axis=1) + Pij[:, 0])"),
    "l rounded to float32": ("Pij.sum(axis=1)", "Pij.astype(np.float32).sum(axis=1)"),
    "P rounded to bf16": (
        "times(Pij, head.z(rows, cols))",
        "__import__('spec.rounding').rounding.round_to(Pij, 'bf16')",
    ),
    "rows of the last tile lost": ("tiles(head.nq, br)", "tiles(head.nq - head.nq % br, br)"),
}


@pytest.mark.parametrize("name", FLASH2)
def test_every_flash2_bug_is_noticed(name):
    assert len(survives(mutant(flash2, *FLASH2[name]))) < ALL


FLASH1 = {
    "a last division, as the FA2 form has it": ("head.rounding.of_o(O)", "divide_rows(O, l)"),
    "O not rescaled by alpha": ("(li * alpha)[:, None] * Oi", "li[:, None] * Oi"),
    "O not multiplied by l": ("(li * alpha)[:, None] * Oi", "alpha[:, None] * Oi"),
    "P V not rescaled by beta": ("beta[:, None] * PVij", "PVij"),
    "alpha and beta exchanged": ("alpha * li + beta * lij", "beta * li + alpha * lij"),
    "l without beta": ("beta * lij", "lij"),
    "divided by the old l": (
        "+ beta[:, None] * PVij, li_new)",
        "+ beta[:, None] * PVij, np.where(li > 0, li, li_new))",
    ),
    "m of this tile": ("np.maximum(mi, mij)", "mij"),
    "m not stored": ("O[rows], l[rows], m[rows] = Oi_new, li_new, mi_new", "O[rows], l[rows] = Oi_new, li_new"),
    "l not stored": ("O[rows], l[rows], m[rows] = Oi_new, li_new, mi_new", "O[rows], m[rows] = Oi_new, mi_new"),
    "m starts at 0": ("np.full(head.nq, -np.inf, head.dtype)", "np.zeros(head.nq)"),
    "-inf guard missing": ("Sij - finite_or_zero(mij)[:, None]", "Sij - mij[:, None]"),
    "l == 0 guard missing": ("Oi_new = divide_rows(", "Oi_new = (lambda o, x: o / x[:, None])("),
    "dropout of the first tile": ("head.z(rows, cols)", "head.z(rows, slice(0, cols.stop - cols.start))"),
    "last key tile skipped": ("tiles(head.nk, bc)", "tiles(head.nk - 1, bc)"),
}


@pytest.mark.parametrize("name", FLASH1)
def test_every_flash1_bug_is_noticed(name):
    assert len(survives(mutant(flash1, *FLASH1[name]))) < ALL


LAGGED = {
    "r never moves after the first tile": ("mi_new - mi <= lag", "(mi_new - mi <= lag) | np.isfinite(mi)"),
    "threshold taken as log2 units": ("mi_new - mi <= lag", "mi_new - mi <= lag / np.log(2)"),
    "r moves but alpha does not": ("alpha = np.exp(mi - finite_or_zero(mi_new))", "alpha = (mi > -np.inf) * 1.0"),
    "r runs ahead of the maximum": ("<= lag, mi, mi_new)", "<= lag, mi, mi_new + 1.0)"),
}


@pytest.mark.parametrize("name", LAGGED)
def test_every_bug_of_the_lagged_maximum_is_noticed(name):
    lag = 2.5  # the first attack rises by 3 per tile, more than this and less than 2.5 / ln 2
    assert len(survives(flash2.forward, lag=lag)) == ALL
    assert len(survives(mutant(flash2, *LAGGED[name]), lag=lag)) < ALL


def test_an_error_names_tile_row_and_values():
    rng = np.random.default_rng(3)
    q, k, v = rng.normal(size=(8, 4)), rng.normal(size=(24, 4)), rng.normal(size=(24, 3))
    with pytest.raises(
        InvariantError, match=r"tile \(0, 1\), row \d, column 0: output o = .* by definition .* allowed error"
    ):
        invariants.check(
            mutant(flash2, "alpha[:, None] * Oi + PVij", "0.5 * alpha[:, None] * Oi + PVij"), q, k, v, br=4, bc=8
        )


def test_skipping_or_repeating_tiles_is_noticed():
    rng = np.random.default_rng(4)
    q, k, v = rng.normal(size=(8, 4)), rng.normal(size=(24, 4)), rng.normal(size=(24, 3))
    states = []
    out = flash2.forward(q, k, v, br=8, bc=8, on_tile=states.append)
    checker = invariants.InvariantChecker(q, k, v)
    checker(states[0])
    with pytest.raises(InvariantError, match="keys processed twice"):
        checker(states[0])
    with pytest.raises(InvariantError, match="may see key 8, but no tile"):
        checker.finish(out.o, out.lse)
    with pytest.raises(InvariantError, match="never processed"):
        invariants.InvariantChecker(q, k, v).finish(out.o, out.lse)
