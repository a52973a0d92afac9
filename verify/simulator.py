"""A tiled kernel that rounds the way an arithmetic model allows, in NumPy: what the bounds are tested against.

Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1, one head, all rows at once. Every intermediate is a value of
the format that the kernel would hold. Limits that a model leaves open (the error of exp2, of ln l, of the reference
in the LSE) are used up by `Errors`: at random, or always in one direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verify.arithmetic import LAZY_LOG2, ArithmeticModel
from verify.formats import FORMATS, round_to


@dataclass(frozen=True)
class Errors:
    """How exp2, ln and the LSE's reference err: "random", "low", "high" or "none"."""

    direction: str = "random"
    seed: int = 0

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray | float:
        if self.direction == "random":
            return rng.uniform(-1.0, 1.0, shape)
        return {"low": -1.0, "high": 1.0, "none": 0.0}[self.direction]


Tile = Callable[[int, np.ndarray, np.ndarray, np.ndarray], None]


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    visible: np.ndarray,
    model: ArithmeticModel,
    bc: int,
    errors: Errors = Errors(),
    on_tile: Tile | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) in float64. Inputs must be finite where some row sees them.

    on_tile(j, m, l, o) gets the state after each tile that some row sees: m in natural units of the scaled score.
    """
    return _Kernel(model, scale, errors).run(q, k, v, visible, bc, on_tile)


class _Kernel:
    def __init__(self, model: ArithmeticModel, scale: float, errors: Errors):
        self.model, self.scale, self.errors = model, scale, errors
        self.rng = np.random.default_rng(errors.seed)
        # Products of working numbers are exact (float32) or almost (float64) in the wider format.
        self.narrow = np.float32 if model.working == "float32" else np.float64
        self.wide = np.float64 if model.working == "float32" else np.longdouble
        self.flushes = model.operation_tiny > FORMATS[model.working].half_subnormal
        self.c = self.fl(np.asarray(np.longdouble(scale) / np.log(np.longdouble(2))))

    def fl(self, x: np.ndarray) -> np.ndarray:
        """One rounding to the working format."""
        with np.errstate(over="ignore", under="ignore"):
            y = np.asarray(x).astype(self.narrow).astype(self.wide)
        return np.where(np.abs(y) < np.finfo(self.narrow).tiny, 0.0, y) if self.flushes else y

    def run(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, bc: int, on_tile: Tile | None
    ) -> tuple[np.ndarray, np.ndarray]:
        x = self.model
        (nq, nk), dv = visible.shape, v.shape[1]
        exists = np.asarray(visible.any(axis=0))[:, None]
        q, k, v = (a.astype(self.wide) for a in (q, np.where(exists, k, 0.0), np.where(exists, v, 0.0)))
        m: np.ndarray = np.full(nq, -np.inf, dtype=self.wide)
        l_lanes = np.zeros((nq, x.l_lanes), dtype=self.wide)
        l_rounded = np.zeros((nq, 1), dtype=self.wide)
        o = np.zeros((nq, dv), dtype=self.wide)
        order = range(-(-nk // bc))
        for j in reversed(order) if x.last_tile_first else order:
            tile = slice(j * bc, (j + 1) * bc)
            seen = visible[:, tile]
            if not seen.any():
                continue
            s = self.dot(np.zeros((nq, seen.shape[1]), dtype=self.wide), q, k[tile], x.s_planes)
            s = np.where(seen, s, -np.inf)
            m, base, alpha = self.reference(m, s, bc)
            p = self.weights(s, base)
            p_operand = self.round_p(p)
            l_lanes = self.add_rows(l_lanes, p, alpha, x.l_restarts)
            l_rounded = self.add_rows(l_rounded, p_operand.sum(axis=0), alpha, x.l_restarts)
            o = self.add_values(o, p_operand, v[tile], alpha)
            if on_tile is not None:
                natural = m * np.log(2.0) if x.lse_shares_c else m * self.scale
                on_tile(j, *(np.asarray(a, dtype=np.float64) for a in (natural, self.merge(l_lanes), o)))
        return self.finish(m, self.merge(l_lanes), self.merge(l_rounded) if x.l_of_rounded_p else None, o)

    # ---- products

    def dot(self, c: np.ndarray, a: np.ndarray, b: np.ndarray, planes: int) -> np.ndarray:
        """c + a b^T, c (R, C), a (R, n), b (C, n)."""
        x = self.model
        if x.product in ("fma", "muladd"):
            for t in range(a.shape[1]):
                product = a[:, t, None] * b[None, :, t]
                c = self.fl(c + (product if x.product == "fma" else self.fl(product)))
            return c
        if x.product == "block":
            for t in range(0, a.shape[1], x.block):
                c = self._truncating_block(c, a[:, t : t + x.block], b[:, t : t + x.block])
            return c
        pairs = [(a, b)]
        if planes > 1:
            (a0, a1), (b0, b1) = _planes(a), _planes(b)
            pairs = [(a1, b1), (a1, b0), (a0, b1), (a0, b0)][4 - planes :]  # small ones first
        for t in range(0, a.shape[1], x.block):
            for left, right in pairs:
                c = self._amx_block(c, left[:, t : t + x.block], right[:, t : t + x.block])
        return c

    def _amx_block(self, c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = (np.where(np.abs(y) < 2.0**-126, 0.0, y) for y in (a, b))
        chain = [np.zeros_like(c), np.zeros_like(c)]
        for t in range(a.shape[1]):
            chain[t % 2] = self.fl(chain[t % 2] + a[:, t, None] * b[None, :, t])
        return self.fl(c + self.fl(chain[0] + chain[1]))

    def _truncating_block(self, c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """All addends aligned to the largest exponent, cut to F bits, summed, cut to 24 bits."""
        products = a[:, None, :] * b[None, :, :]
        exponents = np.frexp(a)[1][:, None, :] + np.frexp(b)[1][None, :, :] - 1  # of the product before carrying
        exponents = np.where(products == 0, -4096, exponents)
        top = np.maximum(exponents.max(axis=2), np.where(c == 0, -4096, np.frexp(c)[1]))
        unit = np.ldexp(1.0, np.maximum(top - 1 - self.model.fraction_bits, -1070))
        total = (np.trunc(products / unit[..., None]).sum(axis=2) + np.trunc(c / unit)) * unit
        cut = round_to(total, "float32", toward_zero=True)
        return np.where(np.abs(cut) < 2.0**-126, 0.0, cut) if self.flushes else cut

    # ---- softmax

    def reference(self, m: np.ndarray, s: np.ndarray, bc: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(new m, m with 0 for -inf, alpha)."""
        x = self.model
        top = s.max(axis=1)
        if x.lse_shares_c:
            old = np.where(np.isneginf(m), 0.0, m)
            with np.errstate(over="ignore"):
                sums = np.exp2(s * self.c - old[:, None]).sum(axis=1)
            if np.isneginf(m).any() or (sums > x.most_weight * bc).any():
                new = np.maximum(m, np.floor(self.fl(top * self.c)))
            else:
                new = m
            base = np.where(np.isneginf(new), 0.0, new)
            return new, base, np.exp2(m - base)
        new = np.maximum(m, top)
        if x.lag_log2 > 0:
            with np.errstate(invalid="ignore"):  # (-inf) - (-inf): nothing was seen, and nothing moves
                asks = self.fl(self.fl(new - m) * self.c) > LAZY_LOG2
            new = np.where(asks, new, m)
        base = np.where(np.isneginf(new), 0.0, new)
        return new, base, self.exp2(self.scaled(self.fl(m - base)))

    def scaled(self, difference: np.ndarray) -> np.ndarray:
        return self.fl(difference * self.c) if self.model.gap_roundings > 1 else difference * self.c

    def weights(self, s: np.ndarray, base: np.ndarray) -> np.ndarray:
        x = self.model
        if x.lse_shares_c:
            return self.exp2(self.fl(s * self.c - base[:, None]))
        if x.m_roundings:
            return self.exp2(self.fl(s * self.c - self.fl(base * self.c)[:, None]))
        return self.exp2(self.scaled(self.fl(s - base[:, None])))

    def exp2(self, t: np.ndarray) -> np.ndarray:
        x = self.model
        with np.errstate(under="ignore", over="ignore"):
            y = np.exp2(t)
            room = max(x.exp2_error - 1.001 * x.unit, 0.0)
            y = self.fl(y * (1 + room * self.errors.draw(self.rng, y.shape)))
        return np.where(t == 0, 1.0, np.where(y < x.exp2_flush, 0.0, y))

    def round_p(self, p: np.ndarray) -> np.ndarray:
        """(planes, R, C): P as the operand of the second product."""
        x = self.model
        if x.p_format is None:
            return p[None]
        if x.p_format == "bf16 planes":
            return np.stack(_planes(p))
        return round_to(p, x.p_format)[None]

    # ---- sums over tiles

    def add_rows(self, lanes: np.ndarray, p: np.ndarray, alpha: np.ndarray, restarts: bool) -> np.ndarray:
        """l alpha + row sums; key t of the tile belongs to lane t mod lanes."""
        n = lanes.shape[1]
        total = np.zeros_like(lanes) if restarts else self.fl(lanes * alpha[:, None])
        for t in range(p.shape[1]):
            total[:, t % n] = self.fl(total[:, t % n] + p[:, t])
        return self.scale_add(lanes, alpha, total) if restarts else total

    def scale_add(self, old: np.ndarray, alpha: np.ndarray, new: np.ndarray) -> np.ndarray:
        product = old * alpha[:, None]
        return self.fl((self.fl(product) if self.model.product == "muladd" else product) + new)

    def add_values(self, o: np.ndarray, p: np.ndarray, v: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        if self.model.o_restarts:
            return self.scale_add(o, alpha, self.dot(np.zeros_like(o), p[0], v.T, 1))
        o = self.fl(o * alpha[:, None])
        return self.dot(o, p.sum(axis=0), v.T, self.model.o_planes)

    def merge(self, lanes: np.ndarray) -> np.ndarray:
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = self.fl(lanes[:, :half] + lanes[:, half:])
        return lanes[:, 0]

    # ---- results

    def finish(
        self, m: np.ndarray, l: np.ndarray, l_rounded: np.ndarray | None, o: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        x = self.model
        empty = l == 0
        divisor = np.where(empty, 1.0, l if l_rounded is None else l_rounded)
        o = np.where(empty[:, None], 0.0, self.fl(o * self.fl(1.0 / divisor)[:, None]))
        if x.out_format is not None:
            o = round_to(np.asarray(o, dtype=np.float64), x.out_format)
        log_l = np.log(np.where(empty, 1.0, l))
        log_l = log_l + (x.log_error * np.abs(log_l) + x.log_tiny) * self.errors.draw(self.rng, log_l.shape)
        unit = np.log(np.longdouble(2)).astype(self.wide) if x.lse_shares_c else self.wide(self.scale)
        with np.errstate(invalid="ignore"):
            reference = np.where(empty, 0.0, m) * unit * (1 + x.lse_m_unit * self.errors.draw(self.rng, m.shape))
        lse = np.where(empty, -np.inf, self.fl(reference + log_l))
        return np.asarray(o, dtype=np.float64), np.asarray(lse, dtype=np.float64)


def _planes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x as two bf16 numbers, nearest of what is left."""
    first = round_to(x, "bf16")
    return first, round_to(x - first, "bf16")
