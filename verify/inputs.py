"""Input families, each named for what it attacks, with values that the dtype represents exactly.

    q, k, v = late_max(nq=33, nk=70, d=16, seed=7)          # or keep the whole: `case = late_max(...)`; case.scale
    for name in FAMILIES: case = FAMILIES[name](nq, nk, d, dtype="fp16", seed=0)

Every family is a function of (nq, nk, d, dv, dtype, seed) and nothing else. Random data alone misses about a quarter
of seeded kernel bugs whatever the acceptance rule; these inputs are where those bugs show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from verify.formats import FORMATS, round_to


@dataclass(frozen=True)
class Inputs:
    """One head. q (Nq, d), k (Nk, d), v (Nk, dv): float64 arrays that hold values of `dtype`.

    visible: (Nq, Nk) bool, or None for all. length: keys from here on do not exist (they hold NaN), or None.
    random: nearest-rounding errors average out, so the probabilistic bound is worth asking for.
    """

    family: str
    dtype: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    visible: np.ndarray | None = None
    length: int | None = None
    random: bool = False

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.q, self.k, self.v))

    @property
    def mask(self) -> np.ndarray:
        """(Nq, Nk): what each row sees, key length included."""
        shape = (len(self.q), len(self.k))
        seen = np.ones(shape, bool) if self.visible is None else self.visible
        return seen if self.length is None else seen & (np.arange(shape[1]) < self.length)


@dataclass
class _Draft:
    """N(0, 1) data that a family bends."""

    rng: np.random.Generator
    dtype: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    visible: np.ndarray | None = None
    length: int | None = None

    @property
    def first_axis(self) -> np.ndarray:
        e = np.zeros(self.q.shape[1])
        e[0] = 1.0
        return e

    def set_logits(self, logits: np.ndarray, noise: float = 0.0) -> None:
        """Make scale * q.k equal to `logits` (per key) up to rounding, the same for all rows; noise on all axes."""
        self.q = noise * self.q + self.first_axis / self.scale
        self.k = noise * self.k
        self.k[:, 0] = logits


Bend = Callable[[_Draft], None]


@dataclass(frozen=True)
class Family:
    """A named way to make inputs. `attacks` says which mistakes it shows."""

    name: str
    attacks: str
    bend: Bend
    random: bool

    def __call__(
        self, nq: int, nk: int, d: int, dv: int | None = None, *, dtype: str = "bf16", seed: int = 0
    ) -> Inputs:
        rng = np.random.default_rng([seed, nq, nk, d, sum(map(ord, self.name))])
        q, k, v = (rng.standard_normal(s) for s in ((nq, d), (nk, d), (nk, dv or d)))
        draft = _Draft(rng, dtype, q, k, v, scale=d**-0.5)
        self.bend(draft)
        q, k, v = (_representable(a, dtype) for a in (draft.q, draft.k, draft.v))
        if draft.length is not None:
            k[draft.length :] = v[draft.length :] = np.nan
        return Inputs(self.name, dtype, q, k, v, draft.scale, draft.visible, draft.length, random=self.random)


FAMILIES: dict[str, Family] = {}


def _family(attacks: str, *, random: bool = False) -> Callable[[Bend], Family]:
    def register(bend: Bend) -> Family:
        FAMILIES[bend.__name__] = Family(bend.__name__, attacks, bend, random)
        return FAMILIES[bend.__name__]

    return register


def _representable(x: np.ndarray, dtype: str) -> np.ndarray:
    limit = FORMATS[dtype].largest
    return round_to(np.clip(x, -limit, limit), dtype)


@_family("anything gross; the only family on which nearest-rounding errors are independent", random=True)
def gaussian(x: _Draft) -> None:
    pass


@_family("sums whose rounding errors all point one way", random=True)
def all_positive(x: _Draft) -> None:
    x.q, x.k, x.v = np.abs(x.q), np.abs(x.k), np.abs(x.v) + 1.0


@_family("rescaling of O and l: the maximum rises in every tile, and most in the last")
def late_max(x: _Draft) -> None:
    x.set_logits(np.linspace(0.0, x.rng.uniform(3.0, 300.0), len(x.k)), noise=0.02)


@_family("taking a tile's maximum for the running one")
def falling_max(x: _Draft) -> None:
    x.set_logits(np.linspace(0.0, -x.rng.uniform(3.0, 300.0), len(x.k)), noise=0.02)


@_family("m that starts at 0 or at a finite stand-in for -inf; a mask added after the maximum")
def far_below_zero(x: _Draft) -> None:
    x.set_logits(-256.0 - (np.arange(len(x.k)) % 2), noise=0.0)


@_family("lanes left out of the maximum; P of a weight that is exactly 1")
def one_dominant_key(x: _Draft) -> None:
    x.k *= 0.05
    if len(x.k):
        x.k[x.rng.integers(len(x.k))] = np.sign(x.q[0]) * x.rng.uniform(1.0, 6.0)


@_family("weights that all round the same way in P: O = 1 exactly, a correct kernel is off by almost the bound")
def equal_weights_at_a_midpoint(x: _Draft) -> None:
    precision = FORMATS[x.dtype].precision
    grid = 2.0 ** -min(precision - 1, 9)  # a multiple of P's spacing in [1/2, 1) that is even
    under = 0.97 * 2.0 ** -(precision + 1)  # just below the midpoint to the next
    weight = 0.5 + x.rng.integers(0, 3) * x.rng.integers(0, int(0.25 / grid)) * grid + under
    _equal_below_one(x, np.log(weight))
    x.v = np.ones_like(x.v)


@_family("P in the subnormal range of its format, and below it, while l still counts it")
def subnormal_weights(x: _Draft) -> None:
    low = {"fp16": 9.0, "float64": 690.0}.get(x.dtype, 80.0)
    x.set_logits(-x.rng.uniform(low, low * 1.4, len(x.k)), noise=0.01)
    if len(x.k):
        x.k[0, 0] = 0.0
        x.v[0] = 0.0
    x.v = np.abs(x.v)


@_family("l in a format that cannot count; ties of the maximum")
def identical_logits(x: _Draft) -> None:
    x.k[:] = x.k[:1]


@_family("exponent arithmetic: logits to 1e4, with the difference in the last digits")
def huge_logits(x: _Draft) -> None:
    size = np.sqrt(10.0 ** x.rng.uniform(2.0, 4.0))
    x.q, x.k = x.q * size, x.k * size


@_family("values that are subnormal in the dtype")
def subnormal_values(x: _Draft) -> None:
    x.v *= 2.0 ** (FORMATS[x.dtype].emin - 3)


@_family("queries and keys that are subnormal in the dtype")
def subnormal_scores(x: _Draft) -> None:
    size = 2.0 ** (max(FORMATS[x.dtype].emin, -500) - 2)
    x.q, x.k, x.scale = x.q * size, x.k * size, 1.0


@_family("cancellation in P V: large values of both signs, a small sum")
def cancelling_values(x: _Draft) -> None:
    x.k *= 0.01
    x.v[::2] = 100.0 * np.abs(x.v[::2])
    pairs = len(x.v) // 2
    x.v[1::2] = -x.v[::2][:pairs] + 1e-3 * x.v[1::2]


@_family("overflow of the un-normalised O")
def huge_values(x: _Draft) -> None:
    x.v = np.clip(x.v, -3.0, 3.0) / 3.0 * (6e4 if x.dtype == "fp16" else 1e30)


@_family("errors of the weights: with one value for all keys they cancel, and nothing else is left")
def constant_values(x: _Draft) -> None:
    x.v[:] = x.v[:1]


@_family("O accumulated in a narrow format: 1024 and more equal weights, v in [1, 2)")
def drift(x: _Draft) -> None:
    x.k[:] = 0.0
    x.v = 1.0 + x.rng.random(x.v.shape)


@_family("weights of many magnitudes with values of many magnitudes")
def mixed_scales(x: _Draft) -> None:
    limit = 2.0 if x.dtype == "fp16" else 3.0
    x.q *= np.exp(x.rng.normal(0.0, 2.0, x.q.shape))
    x.k *= np.exp(x.rng.normal(0.0, 2.0, x.k.shape))
    x.v *= np.exp(x.rng.normal(0.0, limit, x.v.shape))


@_family("keys so far below the maximum that exp2 flushes them")
def deep_gap(x: _Draft) -> None:
    x.set_logits(-x.rng.uniform(80.0, 110.0, len(x.k)), noise=0.1)
    if len(x.k):
        one = x.rng.integers(len(x.k))
        x.k[one, 0] = 0.0
        x.v[one] = 0.0


@_family("a scale that float32 cannot hold, and one that is not 1/sqrt(d)")
def odd_scale(x: _Draft) -> None:
    x.scale = 0.1 + 1e-9


@_family("masks of any shape", random=True)
def random_mask(x: _Draft) -> None:
    x.visible = x.rng.random((len(x.q), len(x.k))) < x.rng.uniform(0.05, 0.95)


@_family("rows without a key: O = 0, LSE = -inf; and rows that see only the second half of the keys")
def all_masked_row(x: _Draft) -> None:
    nq, nk = len(x.q), len(x.k)
    x.visible = np.repeat(x.rng.random((nq, 1)) < 0.5, nk, axis=1)
    x.visible[:, : nk // 2] &= x.rng.random((nq, 1)) < 0.5
    if nq:
        x.visible[0] = False


@_family("a running maximum that is still -inf after the first tile")
def first_tile_masked(x: _Draft) -> None:
    x.visible = np.ones((len(x.q), len(x.k)), bool)
    x.visible[:, : max(0, min(128, len(x.k) - 1))] = False


@_family("causal with the last query at the last key", random=True)
def causal_bottom_right(x: _Draft) -> None:
    nq, nk = len(x.q), len(x.k)
    x.visible = np.arange(nk)[None] <= np.arange(nq)[:, None] + (nk - nq)


@_family("causal with the first query at the first key", random=True)
def causal_top_left(x: _Draft) -> None:
    x.visible = np.arange(len(x.k))[None] <= np.arange(len(x.q))[:, None]


@_family("reads beyond the key length: what lies there is NaN")
def poisoned_padding(x: _Draft) -> None:
    x.length = int(x.rng.integers(0, len(x.k) + 1))


def _equal_below_one(x: _Draft, logit: float) -> None:
    """One key with weight 1, the others with weight exp(logit) as closely as the dtype allows (two axes)."""
    x.q = np.tile(x.first_axis / x.scale, (len(x.q), 1))
    x.k = np.zeros_like(x.k)
    coarse = float(_representable(np.array(logit), x.dtype))
    x.k[1:, 0] = coarse
    x.q[:, 1] = x.q[:, 0]
    x.k[1:, 1] = logit - coarse
