"""The problems on which a broken backward kernel shows: named cases at a kernel's own tiles, with dO and dLSE.

A probe carries what a forward pass would have given: O and LSE of exact attention, rounded to the formats that the
kernel reads. So no forward kernel takes part. What a bug needs to show is in the name of the probe: rows without a key,
query heads in groups, a large LSE, dS that drifts over 1024 keys, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verify import special
from verify.cases import Array, Case, representable
from verify.formats import round_to
from verify.inputs import FAMILIES
from verify.oracle import float64
from verify.suite import Shape, case

WRONG_LSE = "an LSE of other scores"
DRIFT_KEYS = 1024


@dataclass(frozen=True, eq=False)
class BackwardProbe:
    """A case with dO and maybe dLSE, and the O (B,Hq,Nq,dv) and LSE (B,Hq,Nq) of the forward pass."""

    case: Case
    o: Array
    lse: Array
    in_order: bool = False  # where a kernel has a choice: sums in a fixed order

    @property
    def name(self) -> str:
        return f"{self.case.name}, in order" if self.in_order else self.case.name

    @property
    def do(self) -> Array:
        assert self.case.do is not None
        return self.case.do

    @property
    def dlse(self) -> Array | None:
        return self.case.dlse


def of_case(made: Case, *, dlse: bool = False, do: Array | None = None) -> BackwardProbe:
    """`made` with dO (drawn unless given) and, if asked, dLSE; O and LSE of exact attention, NaN rows as rows of 0."""
    sizes = made.sizes
    rows = (sizes["B"], sizes["Hq"], sizes["Nq"])
    rng = np.random.default_rng([made.seed, *sizes.values()])
    drawn = representable(rng.standard_normal((*rows, sizes["dv"])), made.dtype)
    by_lse = round_to(rng.standard_normal(rows), made.lse_dtype) if dlse else None
    o, lse = np.zeros_like(drawn), np.zeros(rows)
    for b, h, q, k, v in made.heads():
        length = None if made.key_lengths is None else made.key_lengths[b]
        e = special.expect(q, k, v, visible=made.visible(b), length=length)
        exact = float64.attention(e.q, e.k, e.v, scale=made.scale, visible=e.visible)
        o[b, h], lse[b, h] = exact.o, exact.lse
    asked = replace(made, do=drawn if do is None else do, dlse=by_lse, gradient="gaussian")
    return BackwardProbe(asked, representable(o, made.dtype), round_to(lse, made.lse_dtype))


def probes(dtype: str, *, d: int, dv: int, br: int, bc: int, seed: int = 3) -> list[BackwardProbe]:
    """The probes for a kernel with tiles of br rows and bc keys, the cheapest that show most first."""

    def drawn(name: str, family: str = "gaussian", **sizes: Any) -> Case:
        return case(FAMILIES[family], Shape(**sizes), name, dtype=dtype, d=d, dv=dv, seed=seed)

    def plain(name: str, family: str = "gaussian", *, dlse: bool = False, **sizes: Any) -> BackwardProbe:
        return of_case(drawn(name, family, **sizes), dlse=dlse)

    tall = plain("rows without a key", nq=bc + 7, nk=bc - 3, hq=2, causal="bottom_right", dlse=True)
    for x in (tall.do, tall.dlse, tall.o, tall.case.q):
        x[:, :, :10] = np.nan  # type: ignore[index]  # they are there, and nobody looks
    spoilt = plain("NaN in dO", nq=br + 3, nk=bc + 5, hq=2, hkv=1)
    spoilt.do[:, 0, 4, 3] = np.nan
    spoilt_v = plain("NaN in V", nq=bc + 4, nk=bc + 4, causal="bottom_right")
    spoilt_v.case.v[:, :, bc + 2, 1] = spoilt_v.o[:, :, bc + 2 :, 1] = np.nan  # rows before bc + 2 do not see it
    spoilt_lse = plain("NaN in dLSE", nq=7, nk=bc + 5, dlse=True)
    spoilt_lse.dlse[:, :, 4] = np.nan  # type: ignore[index]
    infinite = plain("an LSE of +inf", nq=5, nk=bc + 3, hq=2)
    infinite.lse[:, 0, 1] = np.inf
    unseen = plain("an LSE of -inf", nq=5, nk=bc + 3, hq=2, hkv=1)
    unseen.lse[:, 0, 1] = -np.inf  # the row counts as one without a key, whatever the mask says
    wrong = plain(WRONG_LSE, nq=5, nk=bc + 3)
    one = drawn("one key", nq=2, nk=1, hq=2, hkv=1)
    return [
        of_case(one, dlse=True),
        plain("causal square", nq=bc + 4, nk=bc + 4, hq=2, hkv=1, causal="bottom_right", dlse=True),
        plain("causal wide", nq=5, nk=bc + 8, causal="bottom_right"),
        plain("causal top left", nq=5, nk=2 * bc + 8, causal="top_left"),
        plain("ragged tail", nq=br + 1, nk=bc + 1),
        plain("whole tiles", nq=2 * br, nk=2 * bc),
        plain("three query tiles", nq=2 * br + 3, nk=2 * bc + 3, causal="bottom_right", dlse=True),
        plain("heads in groups", nq=9, nk=bc + 9, b=2, hq=6, hkv=2),
        plain("key lengths", nq=br + 3, nk=2 * bc + 3, b=4, hq=2, hkv=1, lengths=(0.0, 0.4, 1.0, 0.51)),
        plain("key lengths with causal", nq=bc + 4, nk=bc + 4, b=2, causal="bottom_right", lengths=(0.3, 0.9)),
        plain("rising maximum", "late_max", nq=br + 2, nk=2 * bc),
        _large_lse(drawn("large LSE", nq=br + 2, nk=bc + 9)),
        plain("constant values", "constant_values", nq=5, nk=2 * bc + 1, dlse=True),
        _with(plain("strided", nq=br + 2, nk=bc + 2, b=2, hq=4, hkv=4, layout="bnhd"), do_layout="transposed"),
        plain("padded rows", nq=5, nk=bc + 3, hq=2, hkv=2, layout="padded"),
        plain("a scale of 0.1", "odd_scale", nq=5, nk=bc + 1),
        _with(plain("dQ alone", nq=br + 3, nk=bc + 5, hq=2, hkv=1, dlse=True), wanted=(True, False, False)),
        _with(plain("dK alone", nq=br + 3, nk=bc + 5, hq=2, hkv=1), wanted=(False, True, False)),
        _with(plain("dV alone", nq=br + 3, nk=bc + 5, hq=2, hkv=1), wanted=(False, False, True)),
        tall,
        spoilt,
        spoilt_v,
        spoilt_lse,
        infinite,
        unseen,
        replace(wrong, lse=np.full_like(wrong.lse, -1e5)),
        _absent_keys(drawn("scores of -inf", nq=bc + 5, nk=bc + 5, causal="top_left")),
        plain("no keys", nq=3, nk=0),
        plain("no rows", nq=0, nk=3),
        _drift(dtype, d=d, dv=dv, seed=seed),
    ]


def both_ways(found: Sequence[BackwardProbe]) -> list[BackwardProbe]:
    """Each probe as it is, and then with sums in a fixed order."""
    return [*found, *(replace(probe, in_order=True) for probe in found)]


def _with(probe: BackwardProbe, **words: Any) -> BackwardProbe:
    return replace(probe, case=replace(probe.case, **words))


def _large_lse(made: Case) -> BackwardProbe:
    """Scores of about 8192: a relative error of what LSE is multiplied by counts 8192 times."""
    q, k = made.q, made.k
    q[..., 0], k[..., 0] = 16.0, 8192.0 / (16.0 * made.scale)
    return of_case(replace(made, q=q, k=representable(k, made.dtype)))


def _absent_keys(made: Case) -> BackwardProbe:
    """Keys 0 to 2 have scores of -inf in all rows: weight 0, and their infinity must not meet the 0. Rows 0 to 2 see no
    others, so they count as rows without a key, whatever their dO holds."""
    q, k = made.q, made.k
    q[..., 0] = np.abs(q[..., 0]) + 0.5
    k[:, :, :3] = 0.0
    k[:, :, :3, 0] = -np.inf
    found = of_case(replace(made, q=representable(q, made.dtype)))
    found.do[:, :, :3] = np.nan
    return found


def _drift(dtype: str, *, d: int, dv: int, seed: int) -> BackwardProbe:
    """1024 equal weights, and dS that is negative in the first half and then positive: dQ grows to many times what one
    tile adds, so that an accumulator in a narrow format loses each addition."""
    made = case(FAMILIES["drift"], Shape(nq=2, nk=DRIFT_KEYS), "drift", dtype=dtype, d=d, dv=dv, seed=seed)
    n = made.k.shape[2]
    rng = np.random.default_rng(seed)
    k, v = np.zeros_like(made.k), np.zeros_like(made.v)
    k[..., 1] = 1.0 + rng.random(n)  # the query has nothing there: the scores stay equal
    v[..., 0] = np.where(np.arange(n) < n // 2, -1.0, 1.0) * (1.0 + rng.random(n))
    q = made.q.copy()
    q[..., 1] = 0.0
    k, v = representable(k, dtype), representable(v, dtype)
    q = representable(q, dtype)
    do = np.zeros((1, 1, 2, dv))
    do[..., 0] = 1.0
    return of_case(replace(made, q=q, k=k, v=v), do=do)
