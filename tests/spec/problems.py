"""Random problems for the tests of `spec`: small, ragged, with every mask and option of the language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from spec import masks, roundoff, standard
from spec.dropout import Dropout
from spec.head import Head


@dataclass
class Problem:
    """One head with its options, and tile sizes that need not divide anything."""

    q: Any
    k: Any
    v: Any
    do: Any
    br: int
    bc: int
    options: dict[str, Any]

    @property
    def inputs(self):
        return self.q, self.k, self.v

    @property
    def tiles(self) -> int:
        """The larger of Tr and Tc."""
        return max(-(-len(self.q) // self.br), -(-len(self.k) // self.bc), 1)

    @property
    def head(self) -> Head:
        return Head.of(*self.inputs, **self.options)


MASKS = (
    lambda rng, nq, nk: None,
    lambda rng, nq, nk: masks.Causal(masks.BOTTOM_RIGHT),
    lambda rng, nq, nk: masks.Causal(masks.TOP_LEFT),
    lambda rng, nq, nk: masks.Window(int(rng.integers(0, 9)), int(rng.integers(0, 9))),
    lambda rng, nq, nk: rng.random((nq, nk)) < rng.random((nq, 1)),  # rows from empty to full
    lambda rng, nq, nk: masks.Documents(np.sort(rng.integers(0, 4, nq)), np.sort(rng.integers(0, 4, nk))),
    lambda rng, nq, nk: masks.prefix(int(rng.integers(0, nk + 1)), masks.TOP_LEFT) & masks.KeyPadding(max(nk - 3, 0)),
    lambda rng, nq, nk: masks.KeyPadding(2) | masks.Window(4, None, masks.TOP_LEFT),
)


def random_problem(seed: int, *, largest: int = 50) -> Problem:
    """The mask cycles with the seed; sizes, tiles, bias, soft cap, dropout and amplitude are drawn."""
    rng = np.random.default_rng([seed, 2205_14135])
    nq, nk = (int(x) for x in rng.integers(0, largest, 2))
    d, dv = (int(x) for x in rng.integers(1, 20, 2))
    br, bc = (int(rng.choice([1, 2, 3, 8, 16, 17, 64])) for _ in range(2))
    options: dict[str, Any] = {"mask": MASKS[seed % len(MASKS)](rng, nq, nk)}
    if rng.random() < 0.3:
        options["bias"] = rng.normal(size=(nq, nk)) if rng.random() < 0.5 else rng.normal(size=(1, nk))
    if rng.random() < 0.3:
        options["softcap"] = float(rng.uniform(0.5, 20))
    if rng.random() < 0.3:
        options["dropout"] = Dropout(p=float(rng.uniform(0, 0.9)), seed=seed, b=1, h=2)
    if rng.random() < 0.3:
        options["scale"] = float(rng.uniform(0.01, 3))
    amplitude = rng.choice([1.0, 1.0, 30.0])
    q, k, v = amplitude * rng.normal(size=(nq, d)), rng.normal(size=(nk, d)), rng.normal(size=(nk, dv))
    return Problem(q, k, v, rng.normal(size=(nq, dv)), br, bc, options)


def assert_within(got, want, bound, name: str) -> None:
    """|got - want| <= bound everywhere; -inf only where -inf is wanted; no NaN on any side."""
    got, want, bound = (np.asarray(x) for x in (got, want, bound))
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    assert not np.isnan(got).any() and not np.isnan(want).any() and not np.isnan(bound).any(), f"{name}: NaN"
    error = np.abs(np.where(got == want, 0.0, got - np.where(got == want, 0.0, want)))
    if not (error <= bound).all():
        index = np.unravel_index(int(np.argmax(error - bound)), error.shape)
        raise AssertionError(f"{name}{list(map(int, index))} = {got[index]}, want {want[index]}, bound {bound[index]}")


def assert_attention(out, problem: Problem, *, tiles: int | None = None, parts: int | None = None) -> None:
    """`out` against Algorithm 0: each is within `roundoff.forward` of the truth, so they are within twice that."""
    tiles = tiles or problem.tiles
    bound = roundoff.forward(problem.head, tiles) if parts is None else roundoff.merged(problem.head, tiles, parts)
    want = standard.forward(*problem.inputs, **problem.options)
    assert_within(out.o, want.o, 2 * bound.o, "O")
    assert_within(out.lse, want.lse, 2 * bound.lse, "LSE")


def assert_gradients(got, problem: Problem, dlse=None) -> None:
    """`got` against Algorithm 3, likewise by `roundoff.backward`."""
    bound = roundoff.backward(problem.head, problem.do, problem.tiles, dlse)
    want = standard.backward(*problem.inputs, problem.do, dlse=dlse, **problem.options)
    for name in ("dq", "dk", "dv"):
        assert_within(getattr(got, name), getattr(want, name), 2 * getattr(bound, name), name)
    assert (got.dbias is None) == (want.dbias is None)
    if want.dbias is not None:
        assert_within(got.dbias, want.dbias, 2 * bound.dbias, "dbias")
