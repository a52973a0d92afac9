"""The calls whose traffic is counted: shapes with an edge in every loop of a kernel, for the judge and for the spec.

A shape is a `guarded_problems.Problem`. Traffic depends on shapes, masks and lengths, never on values: inputs are drawn
from N(0, 1) and rounded. Layouts are part of the grid because a kernel must move the same bytes whatever the strides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from codegen.errors import RequestError
from spec.io_kernels import Call
from verify.cases import CAUSAL, Case, representable
from verify.guarded_problems import Problem, problems

# Rows and keys at which the tables give one head in figures; the emulator runs the first, formulas reach the second.
SHOWN, FAR = 512, 4096
LONGEST = 16384  # that a command may ask for: minutes, and a few hundred megabytes


def grid(br: int, bc: int) -> list[Problem]:
    """The shapes of a kernel with tiles of br rows and bc keys: ragged, causal, GQA, lengths, no keys, Nq > Nk."""
    return [
        *problems(br, bc),
        Problem("three times as many rows as keys", 2 * br + 5, br // 2 + 3, hq=2, hkv=1),
        Problem("more rows than keys, causal", br + bc, bc + 1, hq=2, hkv=1, causal="bottom_right"),
        Problem("more rows than keys, causal from the top left", br + bc, bc + 1, causal="top_left"),
        Problem("square, causal", 2 * max(br, bc) + 1, 2 * max(br, bc) + 1, causal="bottom_right"),
        Problem("no keys, causal", br + 1, 0, b=2, hq=2, hkv=2, causal="bottom_right"),
        Problem("key lengths on tile edges", br + 1, 2 * bc, b=4, hq=2, hkv=2, lengths=(bc, 2 * bc, bc - 1, bc + 1)),
        Problem("key lengths, GQA, causal from the top left", 2 * br, br + bc, b=3, hq=4, hkv=1, causal="top_left",
                lengths=(0, br + bc, br - 1), layout="bnhd"),
    ]  # fmt: skip


def shown() -> list[Problem]:
    """One head at SHOWN rows and keys, without and with a causal mask."""
    return squares([SHOWN], ["none", "bottom_right"])


def squares(lengths: Sequence[int], causal: Sequence[str]) -> list[Problem]:
    """One head at each length, under each mask."""
    words = {"none": "", "bottom_right": ", causal", "top_left": ", causal from the top left"}
    return [Problem(f"N={n}{words[c]}", n, n, causal=c) for n in lengths for c in causal]


def asked(lengths: str | None, causal: str | None) -> list[Problem] | None:
    """What the options of a command ask for: squares of those lengths under those masks; None for the whole grid.

    Raises: RequestError for a list that cannot be read.
    """
    if lengths is None:
        if causal is not None:
            raise RequestError("--causal needs --n", "try --n 512,1000 --causal bottom_right")
        return None
    sizes = [word.strip() for word in lengths.split(",") if word.strip()]
    masks = [word.strip() for word in (causal or "none,bottom_right").split(",") if word.strip()]
    if not sizes or not all(re.fullmatch("0*[1-9][0-9]*", word) for word in sizes):
        raise RequestError(f"--n {lengths}: not a list of whole numbers above 0", "try --n 512,1000")
    if max(map(len, sizes)) > len(str(LONGEST)) or max(map(int, sizes)) > LONGEST:
        raise RequestError(f"--n {lengths}: every shape is emulated, up to {LONGEST} rows", "try --n 512,1000")
    if not masks or not set(masks) <= set(CAUSAL):
        raise RequestError(f"--causal {causal}: unknown", f"known: {', '.join(CAUSAL)}")
    return squares([int(word) for word in sizes], masks)


def call(problem: Problem, *, d: int, dv: int) -> Call:
    """The problem in the words of the spec."""
    return Call(
        nq=problem.nq, nk=problem.nk, dk=d, dv=dv, batch=problem.b, hq=problem.hq, hkv=problem.hkv,
        causal=None if problem.causal == "none" else problem.causal, key_lengths=problem.lengths,
    )  # fmt: skip


def case(problem: Problem, dtype: str, *, d: int, dv: int, seed: int = 0) -> Case:
    """The problem as the judge holds it, with values."""
    assert problem.causal in CAUSAL
    rng = np.random.default_rng(seed)

    def drawn(heads: int, rows: int, width: int) -> Any:
        return representable(rng.standard_normal((problem.b, heads, rows, width)), dtype)

    return Case(
        name=problem.name, family="io", dtype=dtype, q=drawn(problem.hq, problem.nq, d),
        k=drawn(problem.hkv, problem.nk, d), v=drawn(problem.hkv, problem.nk, dv), scale=d**-0.5,
        causal=problem.causal, key_lengths=problem.lengths, layout=problem.layout, seed=seed,
    )  # fmt: skip


def describe(problem: Problem) -> dict[str, Any]:
    """JSON types: what is not the default."""
    plain = Problem("", 0, 0)
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(problem).items()
        if value != getattr(plain, name) or name in ("name", "nq", "nk")
    }
