"""Hypothesis strategies that draw attention problems; public, so that you can fuzz a package of your own:

    from hypothesis import given
    from verify import strategies
    from verify.judge import check

    @given(strategies.descriptions(d=64, dv=64, dtypes=("float32",), br=48, bc=96))
    def test_my_package(description):
        check(attn, description.case())        # raises with the failing element, its bound and its tile

With `gradients=True` a case has dO and perhaps dLSE, and `verify.judge_backward.check` judges its gradients.

A strategy draws a compact *description*, never element arrays; `Description.case()` derives the arrays from it,
deterministically. That is what makes failures appear early and shrink to something a person would have written
(one key with logit -200; Nq = 2, Nk = 1): the simplest alternative is always listed first, because that is where
Hypothesis shrinks to.

Holds always: a description is inside the domain of the bound by construction (nothing is filtered with `assume`).
Non-finite values are drawn only by `poisoned`, which has expected results of its own kind (verify/special.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from verify import output_gradients
from verify.cases import DO_LAYOUTS, LAYOUTS, ROOM, Array, Case, Mask, representable, visible
from verify.formats import FORMATS

DTYPES = ("float32", "bf16", "fp16", "float64")
TILES = (16, 32, 48, 64, 96, 128)
HEAD_DIMS = (16, 8, 24, 32, 64, 40, 80, 128)  # not only powers of two: 1/sqrt(d) is exact for 16 and 64
LOGITS = (0.0, 1.0, -1.0, 8.0, -8.0, 100.0, -200.0, -30000.0)
RUNS = ("one", "tile", "rest")  # how many keys one logit covers
VALUES = ("normal", "ones", "alternating", "ramp", "big", "denormal", "two_ulp")
AMPLITUDES = (1.0, 4.0, 30.0)
SCALES = ("default", "one", "tenth", "inexact")
GRADIENTS = tuple(output_gradients.GRADIENTS)
WANTED = (*(6 * ("qkv",)), "q", "k", "v", "qk", "qv", "kv")
OVERRIDES = ("zero", "large", "smallest")
# Two such factors, or one against the largest logit above, keep base-2 scores below 2^27: the domain of the bound.
LARGE_FACTOR = 2.0**11
KERNEL_MASKS = ("none", "bottom_right", "top_left")
SPEC_MASKS = (
    *KERNEL_MASKS,
    "window",
    "first_tile_hidden",
    "alternate_rows",
    "bernoulli",
    "blocks",
    "documents",
    "prefix",
)


@dataclass(frozen=True, kw_only=True)
class Description:
    """A problem in a few words. `mask` beyond KERNEL_MASKS is only for the specification, not for a kernel."""

    dtype: str
    d: int
    dv: int
    nq: int
    nk: int
    br: int = 64  # the tile whose edges the lengths straddle; a run of logits may fill `bc` keys
    bc: int = 64
    batch: int = 1
    kv_heads: int = 1
    group: int = 1  # query heads per K/V head
    mask: str = "none"
    lengths: tuple[int, ...] | None = None
    scale: str = "default"
    logits: tuple[tuple[float, str], ...] = ()  # empty: scores are random
    amplitude: float = 1.0
    values: str = "normal"
    overrides: tuple[tuple[str, int, int, str], ...] = ()  # (tensor, row, column, what)
    midpoint: bool = False
    layout: str = "contiguous"
    gradient: str | None = None  # the name of dO; None: a problem for the forward pass alone
    dlse: str = "none"
    wanted: str = "qkv"
    do_layout: str = "contiguous"
    seed: int = 0
    note: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def scale_value(self) -> float:
        """The softmax scale; "inexact" is a float32 value that no short fraction equals."""
        return {"default": 1 / math.sqrt(self.d), "one": 1.0, "tenth": 0.1, "inexact": float(np.float32(0.3) / 2)}[
            self.scale
        ]

    def arrays(self) -> tuple[Array, Array, Array]:
        """q (B,Hq,Nq,d), k (B,Hkv,Nk,d), v (B,Hkv,Nk,dv): float64 holding values of `dtype`."""
        rng = np.random.default_rng(self.seed)
        q = rng.standard_normal((self.batch, self.kv_heads * self.group, self.nq, self.d)) * self.amplitude
        k = rng.standard_normal((self.batch, self.kv_heads, self.nk, self.d))
        if self.midpoint:
            q, k = self._equal_weights(q, k)
        elif self.logits:
            q, k = self._wanted_logits(q, k)
        v = self._values(rng)
        q, k, v = (representable(x, self.dtype) for x in (q, k, v))
        for tensor, row, column, what in self.overrides:
            target = {"q": q, "k": k, "v": v}[tensor]
            if target.size:
                large = ROOM[self.dtype] if tensor == "v" else LARGE_FACTOR
                value = {"zero": 0.0, "large": large, "smallest": _smallest(self.dtype)}[what]
                target[:, :, row % target.shape[2], column % target.shape[3]] = value
        return q, k, v

    def case(self, name: str = "drawn") -> Case:
        """The problem as the judge takes it."""
        if self.mask not in KERNEL_MASKS:
            raise ValueError(f"mask {self.mask!r} is for the specification: take arrays() and spec_visible()")
        q, k, v = self.arrays()
        words = dataclasses.asdict(self)
        words.pop("note")
        made = Case(
            name=name,
            family="fuzz",
            dtype=self.dtype,
            q=q,
            k=k,
            v=v,
            scale=self.scale_value,
            causal=self.mask,
            key_lengths=self.lengths,
            layout=self.layout,
            seed=self.seed,
            note={"description": words, **self.note},
        )
        if self.gradient is None:
            return made
        wanted = ("q" in self.wanted, "k" in self.wanted, "v" in self.wanted)
        return output_gradients.attach(
            made, self.gradient, dlse=self.dlse, layout=self.do_layout, wanted=wanted, seed=self.seed
        )

    def spec_visible(self, batch: int = 0) -> Mask:
        """(nq, nk): the mask of batch `batch`, made without the specification's own mask code."""
        nq, nk = self.nq, self.nk
        length = None if self.lengths is None else self.lengths[batch]
        i, j = np.arange(nq)[:, None], np.arange(nk)[None, :]
        rng = np.random.default_rng(self.seed + 1)
        mask = visible(nq, nk, causal=self.mask if self.mask in KERNEL_MASKS else "none", length=length)
        if self.mask == "window":
            mask &= (j <= i + nk - nq) & (j >= i + nk - nq - 3)
        elif self.mask == "first_tile_hidden":
            mask &= j >= self.bc
        elif self.mask == "alternate_rows":
            mask &= i % 2 == 0
        elif self.mask == "bernoulli":
            mask &= rng.random((nq, nk)) < 0.7
        elif self.mask == "blocks":
            live = rng.random((-(-nq // self.br) or 1, -(-nk // self.bc) or 1)) < 0.6
            mask &= live[i // self.br, j // self.bc]
        elif self.mask == "documents":
            cut = max(1, nk // 3)
            mask &= (i + max(0, nk - nq)) // cut == j // cut
        elif self.mask == "prefix":
            mask &= (j < nk // 2) | (j <= i + nk - nq)
        return mask

    def _wanted_logits(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Scores chosen key by key: q = e0 / scale, k = (logit, 0, 0, ...)."""
        wanted, at = np.zeros(self.nk), 0
        for value, run in self.logits:
            n = {"one": 1, "tile": self.bc, "rest": self.nk}[run]
            wanted[at : at + n] = value
            at += n
        q, k = np.zeros_like(q), np.zeros_like(k)
        q[..., 0] = 1 / self.scale_value
        k[..., 0] = wanted
        return q, k

    def _equal_weights(self, q: Array, k: Array) -> tuple[Array, Array]:
        """One key at the maximum, every other weight just under a rounding midpoint above 1/2.

        The one input where rounding errors of P do not average out; random search does not find it.
        """
        gap = -math.log(0.5 + 0.98 * 2.0 ** -(FORMATS[self.dtype].precision + 1))
        head = float(representable(gap, self.dtype))
        tail = float(representable(gap - head, self.dtype))
        q, k = np.zeros_like(q), np.zeros_like(k)
        q[..., :2] = 1 / self.scale_value
        k[:, :, 1:, 0], k[:, :, 1:, 1] = -head, -tail
        return q, k

    def _values(self, rng: np.random.Generator) -> Array:
        shape = (self.batch, self.kv_heads, self.nk, self.dv)
        v, row = rng.standard_normal(shape), np.arange(self.nk)[:, None]
        if self.values == "ones":
            v[:] = 1.0
        elif self.values == "alternating":
            v[:] = np.where(row % 2, -1.0, 1.0)
        elif self.values == "ramp":
            v[:] = 1 + row / 64
        elif self.values == "big":
            v = np.clip(1e4 * v, -ROOM[self.dtype], ROOM[self.dtype])
        elif self.values == "denormal":
            v *= 4 * _smallest(self.dtype)
        elif self.values == "two_ulp":
            v[:] = 2 - 2.0 ** (1 - FORMATS[self.dtype].precision)
        return v


def _smallest(dtype: str) -> float:
    """The smallest positive value of `dtype`, its first subnormal."""
    form = FORMATS[dtype]
    return 2.0 ** (form.emin - form.precision + 1)


def lengths(tile: int, *, tiles: int = 3, least: int = 0, most: int | None = None) -> st.SearchStrategy[int]:
    """A length that is tiny, or at or beside a tile edge, or anything up to `tiles` tiles; shrinks to `least`."""
    top = tiles * tile if most is None else min(tiles * tile, most)

    def edge(t: int, offset: int) -> int:
        return min(max(least, t * tile + offset), top + 1)

    return st.one_of(
        st.integers(least, 4),
        st.builds(edge, st.integers(0, tiles), st.sampled_from((0, 1, -1))),
        st.integers(least, max(least, top)),
    )


@st.composite
def descriptions(
    draw: st.DrawFn,
    *,
    d: int | Sequence[int] = HEAD_DIMS,
    dv: int | Sequence[int] | None = None,
    dtypes: Sequence[str] = DTYPES,
    br: int | Sequence[int] = TILES,
    bc: int | Sequence[int] = TILES,
    masks: Sequence[str] = KERNEL_MASKS,
    layouts: Sequence[str] = LAYOUTS,
    gradients: bool = False,
    tiles: int = 3,
    most: int = 400,
) -> Description:
    """Descriptions of finite problems for kernels of one shape, or of several; with `gradients` for both passes.

    d, dv, br, bc: the value that the package has, or the values to draw from (dv=None draws dv equal to d or
    another width). `tiles` bounds lengths in tiles, `most` in rows. Lengths Nk may be 0; Nq is at least 1.
    """
    one_d = _pick(draw, d)
    one_dv = (
        _pick(draw, dv) if dv is not None else draw(st.sampled_from((one_d, *(x for x in (8, 24, 64) if x != one_d))))
    )
    one_br, one_bc = _pick(draw, br), _pick(draw, bc)
    nq = draw(lengths(one_br, tiles=min(2, tiles), least=1, most=most))
    nk = draw(lengths(one_bc, tiles=tiles, most=most))
    batch = draw(st.sampled_from((1, 2)))
    masked_keys = draw(st.booleans())
    return Description(
        dtype=draw(st.sampled_from(tuple(dtypes))),
        d=one_d,
        dv=one_dv,
        nq=nq,
        nk=nk,
        br=one_br,
        bc=one_bc,
        batch=batch,
        kv_heads=draw(st.sampled_from((1, 2))),
        group=draw(st.sampled_from((1, 2, 3))),
        mask=draw(st.sampled_from(tuple(masks))),
        lengths=tuple(draw(st.integers(0, nk)) for _ in range(batch)) if masked_keys else None,
        scale=draw(st.sampled_from(SCALES)),
        logits=tuple(draw(st.lists(st.tuples(st.sampled_from(LOGITS), st.sampled_from(RUNS)), max_size=4))),
        amplitude=draw(st.sampled_from(AMPLITUDES)),
        values=draw(st.sampled_from(VALUES)),
        overrides=tuple(draw(st.lists(_override(), max_size=3))),
        midpoint=draw(st.sampled_from((False, False, False, False, False, False, False, True))),
        layout=draw(st.sampled_from(tuple(layouts))),
        **(_gradient(draw) if gradients else {}),
        seed=draw(st.integers(0, 65535)),
    )


def _gradient(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "gradient": draw(st.sampled_from(GRADIENTS)),
        "dlse": draw(st.sampled_from(output_gradients.DLSE)),
        "wanted": draw(st.sampled_from(WANTED)),
        "do_layout": draw(st.sampled_from(DO_LAYOUTS)),
    }


def _override() -> st.SearchStrategy[tuple[str, int, int, str]]:
    place = st.integers(0, 255)
    return st.tuples(st.sampled_from(("q", "k", "v")), place, place, st.sampled_from(OVERRIDES))


def _pick(draw: st.DrawFn, choice: int | Sequence[int]) -> int:
    return choice if isinstance(choice, int) else draw(st.sampled_from(tuple(choice)))


# What `poisoned` puts in, and where.
POISONS = (math.nan, math.inf, -math.inf)


@st.composite
def poisoned(draw: st.DrawFn, **shape: Any) -> tuple[Description, tuple[str, int, int, float]]:
    """A finite problem and one non-finite element (tensor, row, column, value) to put into every head of it.

    Judge it with `verify.special.poison`: the result is a pattern of NaN and infinities, not a bound alone.
    """
    plain = draw(descriptions(**shape))
    simple = dataclasses.replace(plain, overrides=(), midpoint=False, values="normal", logits=())
    where = (
        draw(st.sampled_from(("v", "k", "q"))),
        draw(st.integers(0, 255)),
        draw(st.integers(0, 255)),
        draw(st.sampled_from(POISONS)),
    )
    return simple, where
