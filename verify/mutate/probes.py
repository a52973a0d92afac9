"""The problems on which a broken kernel shows: named cases at a kernel's own tiles, the cheapest that show most first.

Source: the probes of the catalogue of seeded bugs. What a bug needs to show is in the name of the probe: a maximum that
rises, a key length with NaN beyond it, d that is no power of two, heads in groups, 600 equal weights, ...
All are small: every tile edge is met with one tile and a few rows or keys more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from verify import special
from verify.cases import Case, representable
from verify.inputs import FAMILIES
from verify.mutate.probes_spec import clear_logits
from verify.suite import Shape, case

LOST_ROWS = "lost rows"
ROUNDED_WEIGHTS = "rounded weights"  # judged by definition as well: see judge_kernel.py


def probes(dtype: str, *, d: int, dv: int, br: int, bc: int, seed: int = 3) -> list[Case]:
    """The cases for a kernel with tiles of br rows and bc keys; q, k, v hold values of `dtype`."""

    def drawn(name: str, family: str = "gaussian", **sizes: object) -> Case:
        return case(FAMILIES[family], Shape(**sizes), name, dtype=dtype, d=d, dv=dv, seed=seed)  # type: ignore[arg-type]

    def with_logits(name: str, logits: Any, nq: int = 2, **more: object) -> Case:
        """Every row has about these scaled scores; they are exact up to the dtype's rounding of the inputs."""
        rng = np.random.default_rng(len(logits))
        q, k = np.zeros((1, 1, nq, d)), np.zeros((1, 1, len(logits), d))
        q[..., 0], k[..., 0] = np.sqrt(d), logits
        v = rng.standard_normal((1, 1, len(logits), dv))
        made = Case(name=name, family="logits", dtype=dtype, q=q, k=k, v=v, scale=d**-0.5, seed=seed, **more)  # type: ignore[arg-type]
        return made.with_dtype(dtype)

    far = -256.0 - np.arange(2)
    second, first = np.zeros(bc), np.zeros(bc)
    second[bc - 2], first[1] = 100.0, 100.0
    tall = bc + 4
    beside_nan = with_logits("falling maximum beside a NaN query", np.concatenate([np.zeros(bc), np.full(4, -200.0)]))
    beside_nan.q[:, :, 1] = np.nan
    # One key 4 nats above 40 others, with the opposite value: the balance of the two shows any error of the exponent.
    two_levels = with_logits("two levels", np.concatenate([[0.0], np.full(40, -4.0)]))
    two_levels.v[...] = 1.0
    two_levels.v[:, :, 0] = -1.0
    found = [
        drawn("one key", nq=2, nk=1, hq=2),
        drawn("causal square", nq=bc + 4, nk=bc + 4, hq=2, hkv=1, causal="bottom_right"),
        drawn("causal wide", nq=5, nk=bc + 8, causal="bottom_right"),
        drawn("causal tall", nq=24, nk=5, causal="bottom_right"),
        drawn("causal top left", nq=5, nk=bc + 8, causal="top_left"),
        drawn("ragged tail", nq=5, nk=bc + 1),
        drawn("whole tiles", nq=br + 1, nk=3 * bc),
        with_logits("rising maximum", np.repeat([0.0, 3.0, 6.0], bc), br),
        with_logits("falling maximum", np.concatenate([np.zeros(bc), np.full(4, -200.0)])),
        beside_nan,
        with_logits("rising to a large maximum", np.concatenate([np.zeros(bc), np.full(4, 200.0)])),
        with_logits("far below zero", far),
        with_logits("masked keys above", np.concatenate([far, np.zeros(9)]), 11, causal="top_left"),
        with_logits("maximum in the second half", second),
        with_logits("maximum in the first half", first),
        with_logits("deep logits", np.array([-1.3e5, -1.3e5 - 2048.0]) if dtype != "fp16" else -6.0e4 * np.ones(2)),
        drawn("no keys", nq=3, nk=0),
        drawn("key lengths", nq=3, nk=2 * bc + 3, b=4, hq=4, hkv=2, lengths=(0.0, 0.4, 1.0, 0.51)),
        drawn("key lengths with causal", nq=tall, nk=tall, b=2, causal="bottom_right", lengths=(0.3, 0.9)),
        drawn("heads in groups", nq=3, nk=9, b=2, hq=6, hkv=2),
        drawn("heads in groups, causal", nq=3, nk=9, b=2, hq=4, hkv=2, causal="bottom_right"),
        drawn("one query, heads in groups", nq=1, nk=bc + 3, b=2, hq=4, hkv=2),
        drawn("strided", nq=br + 2, nk=bc + 2, b=2, hq=4, hkv=4, layout="bnhd"),
        drawn("padded rows", nq=5, nk=bc + 3, hq=2, hkv=2, layout="padded"),
        drawn("three query tiles", nq=2 * br + 3, nk=bc + 3, causal="bottom_right"),
        drawn("one dominant key", "one_dominant_key", nq=5, nk=2 * bc),
        drawn("constant values", "constant_values", nq=5, nk=2 * bc + 1),
        drawn("subnormal weights", "subnormal_weights", nq=4, nk=bc),
        drawn("weights at a midpoint", "equal_weights_at_a_midpoint", nq=2, nk=9),
        drawn("a scale of 0.1", "odd_scale", nq=5, nk=bc + 1),
        drawn("huge logits", "huge_logits", nq=5, nk=bc + 3),
        two_levels,
        with_logits(ROUNDED_WEIGHTS, clear_logits(np.random.default_rng(seed), bc, dtype if dtype == "fp16" else "bf16",
                                                  distance=0.02), 3),
        _lost_rows(dtype, d=d, dv=dv, bc=bc, seed=seed),
        with_logits("equal logits", np.zeros(600), 1),
        drawn("drift", "drift", nq=2, nk=1),
    ]  # fmt: skip
    table = list(special.table(dtype, d=d, dv=dv, bc=bc, seed=seed))
    late = _late_first_key(dtype, d=d, dv=dv, bc=bc, seed=seed)
    return [*found[:-2], late, *table, *found[-2:]]


def _lost_rows(dtype: str, *, d: int, dv: int, bc: int, seed: int) -> Case:
    """Logits so large that the rounding of m c alone can push every weight of a row below what float32 holds. mma_sm80
    claims no bound here; still no row may pass for one without keys, and that is all that is asked of this case."""
    rng = np.random.default_rng([seed, bc])
    size = 2.0**14 if dtype == "fp16" else 2.0**19
    q, k, v = (rng.standard_normal((1, 1, n, w)) for n, w in ((24, d), (bc + 3, d), (bc + 3, dv)))
    made = Case(name=LOST_ROWS, family="special", dtype=dtype, q=q * size, k=k * size, v=v, scale=d**-0.5, seed=seed)
    return made.with_dtype(dtype)


def _late_first_key(dtype: str, *, d: int, dv: int, bc: int, seed: int) -> Case:
    """The first tile is visible and has only scores of -inf: the maximum is still -inf when it has been seen."""
    rng = np.random.default_rng([seed, bc])
    q, k, v = (representable(rng.standard_normal((1, 1, n, w)), dtype) for n, w in ((4, d), (bc + 9, d), (bc + 9, dv)))
    q[..., 0] = 1.0
    k[:, :, :bc] = 0.0
    k[:, :, :bc, 0] = -np.inf
    return Case(name="late first key", family="special", dtype=dtype, q=q, k=k, v=v, scale=d**-0.5, seed=seed)
