"""Gradients of O and of LSE for a case, each named for what it attacks, with values that the dtypes represent exactly.

    case = attach(case, "cancelling", dlse="normal", seed=7)          # dO, dLSE; case.do_layout is the one that fits it

A gradient is a function of the case and the seed and nothing else. It is scaled by a power of two, if it has to be, so
that every sum of the backward pass stays inside the domain of the bound (verify/bounds/backward_domain.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from verify.cases import Array, Case, representable
from verify.formats import FORMATS

Draw = Callable[[np.random.Generator, Case], Array]


@dataclass(frozen=True)
class Gradient:
    """A named way to make dO. `layout`: the one that it is for, or None for any with a row of its own per row."""

    name: str
    attacks: str
    draw: Draw
    layout: str | None


GRADIENTS: dict[str, Gradient] = {}
DLSE = ("none", "normal", "large", "alone")  # alone: dO is 0, so that dS = P dLSE


def _gradient(attacks: str, layout: str | None = None) -> Callable[[Draw], Draw]:
    def register(draw: Draw) -> Draw:
        GRADIENTS[draw.__name__] = Gradient(draw.__name__, attacks, draw, layout)
        return draw

    return register


def _shape(case: Case) -> tuple[int, ...]:
    return (*case.q.shape[:3], case.v.shape[3])


@_gradient("anything gross")
def normal(rng: np.random.Generator, case: Case) -> Array:
    return rng.standard_normal(_shape(case))


@_gradient("dP - D of large numbers that are almost equal: dO points along a value")
def cancelling(rng: np.random.Generator, case: Case) -> Array:
    group = case.q.shape[1] // max(case.k.shape[1], 1)
    do = np.ones(_shape(case))
    if case.v.shape[2] and do.size:
        do[:] = np.nan_to_num(np.repeat(case.v, group, axis=1)[:, :, :1], nan=1.0, posinf=1.0, neginf=1.0)
    top = np.abs(do).max(initial=0.0)
    return do * (8.0 / top if top > 8.0 else 1.0)


@_gradient("sums whose rounding errors all point one way")
def positive(rng: np.random.Generator, case: Case) -> Array:
    return np.abs(rng.standard_normal(_shape(case))) + 0.5


@_gradient("gradients of many magnitudes")
def mixed_scales(rng: np.random.Generator, case: Case) -> Array:
    return rng.standard_normal(_shape(case)) * np.exp(rng.normal(0.0, 2.0, _shape(case)))


@_gradient("rows and tiles taken for each other: one row alone has a gradient")
def one_row(rng: np.random.Generator, case: Case) -> Array:
    do = np.zeros(_shape(case))
    if do.size:
        row = rng.integers(do.shape[2])
        do[:, :, row] = rng.standard_normal(do[:, :, row].shape)
    return do


@_gradient("gradients that are subnormal in the dtype")
def subnormal(rng: np.random.Generator, case: Case) -> Array:
    return rng.standard_normal(_shape(case)) * 2.0 ** (FORMATS[case.dtype].emin - 2)


@_gradient("large gradients, as a scaled loss has them")
def large(rng: np.random.Generator, case: Case) -> Array:
    return rng.standard_normal(_shape(case)) * 2.0**10


@_gradient("strides of 0: every row has the same gradient", "expanded")
def same_row(rng: np.random.Generator, case: Case) -> Array:
    return np.broadcast_to(rng.standard_normal(_shape(case)[3]), _shape(case)).copy()


@_gradient("strides of 0, the last one too: O.sum().backward()", "scalar")
def ones(rng: np.random.Generator, case: Case) -> Array:
    return np.ones(_shape(case))


def attach(
    case: Case,
    gradient: str,
    *,
    dlse: str = "none",
    layout: str = "contiguous",
    wanted: tuple[bool, bool, bool] = (True, True, True),
    seed: int = 0,
) -> Case:
    """`case` with dO of that name and dLSE of that kind. `layout` is that of dO where its values allow it."""
    made = GRADIENTS[gradient]
    rng = np.random.default_rng([seed, *case.q.shape, sum(map(ord, gradient + dlse))])
    do = made.draw(rng, case)
    rows = None if dlse == "none" else rng.standard_normal(case.q.shape[:3])
    if dlse == "large":
        rows = 100.0 * rows if rows is not None else None
    if dlse == "alone":
        do = np.zeros_like(do)
    factor = 2.0 ** -max(0, math.ceil(math.log2(_need(case, do, rows) / _room(case.dtype))))
    return replace(
        case,
        do=representable(do * factor, case.dtype),
        dlse=None if rows is None else representable(rows * factor, case.lse_dtype),
        gradient=gradient if dlse == "none" else f"{gradient}, dLSE {dlse}",
        wanted=wanted,
        do_layout=made.layout or layout,
    )


def _need(case: Case, do: Array, dlse: Array | None) -> float:
    """What the largest number of a backward pass can be, dS and the gradients included; at least 1."""

    def top(x: Array) -> float:
        return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))

    rows = case.q.shape[2] * (case.q.shape[1] // max(case.k.shape[1], 1))
    most = float(np.abs(do).sum(axis=-1).max(initial=0.0)) * top(case.v) + (0.0 if dlse is None else top(dlse))
    return max(1.0, 2 * most * max(1.0, case.scale * top(case.k), case.scale * rows * top(case.q)), rows * top(do))


def _room(dtype: str) -> float:
    """fp16 holds dS and the gradients below 65504; the other formats are wide, and sums are float32."""
    return FORMATS[dtype].largest / 8 if dtype == "fp16" else 2.0**110
