"""The forward bound: how far O and LSE of a tiled kernel can be from the exact ones, element by element.

README.md has the derivation; comments `# step n` name its steps. Deterministic bounds hold for every input inside the
domain (`outside_domain`). Probabilistic ones take nearest-rounding errors as independent with mean zero, which inputs
can defeat (equal weights, weights in P's subnormal range): a second gate for random inputs only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from verify.arithmetic import ArithmeticModel, gamma
from verify.bounds.weights import LogErrors, log_errors, subnormal_part
from verify.formats import FORMATS
from verify.oracle.float64 import Softmax, row_chunks, softmax
from verify.oracle.reference import checked_inputs

INFLATE = 1 + 1e-9  # covers the float64 evaluation of the bound itself
HUGE = 300.0  # larger log-errors say nothing: the range of V takes over
ELEMENTWISE = 1 << 23  # most (query, key, column) triples for the sharp form of the spread term


@dataclass(frozen=True)
class ForwardBound:
    """|O - exact| <= o and |LSE - exact| <= lse; 0 on rows without keys, where only O = 0, LSE = -inf is right.

    The probabilistic pair holds with probability 1 - failure for all elements together, on random inputs; None if not
    asked for.
    """

    o: np.ndarray  # (Nq, dv)
    lse: np.ndarray  # (Nq,)
    o_probabilistic: np.ndarray | None
    lse_probabilistic: np.ndarray | None


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    visible: np.ndarray | None = None,
    model: ArithmeticModel,
    bc: int,
    failure: float | None = 1e-6,
) -> ForwardBound:
    """Bound of one head. Evaluate sampled rows by passing q[rows] and visible[rows].

    Args:
        q (Nq, d), k (Nk, d), v (Nk, dv): the exact inputs, finite where visible.
        scale: the exact scale, > 0; the kernel's own rounding of it is in the model.
        bc: keys per tile; tiles start at multiples of bc.
        failure: total failure probability of the probabilistic bounds, None to leave them out.
    Error: never below the true bound by more than float64 rounding, which INFLATE covers.
    """
    q, k, v, visible = checked_inputs(q, k, v, scale, visible)
    model = model.at(bc)
    seen = np.asarray(visible.any(axis=0))
    # What no row sees may be poison; what some row sees is inside the domain.
    k, v = np.where(seen[:, None], k, 0.0), np.where(seen[:, None], v, 0.0)
    (nq, nk), dv = visible.shape, v.shape[1]
    names = ("o", "lse") if failure is None else ("o", "lse", "o_probabilistic", "lse_probabilistic")
    out: dict[str, Any] = {n: np.zeros((nq, dv) if n.startswith("o") else nq) for n in names}
    if nk > 0:
        values = _Values(v, model, sharp=nq * nk * dv <= ELEMENTWISE)
        confidence = None if failure is None else math.sqrt(2 * math.log(2 * max(nq, 1) * (dv + 1) / failure))
        for rows in row_chunks(nq, nk):
            s = softmax(q[rows], k, scale, visible[rows])
            errors = log_errors(s, q[rows], k, scale=scale, model=model, bc=bc, confidence=confidence)
            block = _Block(s, errors, values, model, bc)
            found = [block.o(), block.lse()]
            if confidence is not None:
                found += [block.o_probable(confidence), block.lse_probable(confidence)]
                found[2], found[3] = np.minimum(found[2], found[0]), np.minimum(found[3], found[1])
            for name, bound in zip(names, found, strict=True):
                live = s.live if bound.ndim == 1 else s.live[:, None]
                out[name][rows] = np.where(live, bound * INFLATE, 0.0)
    return ForwardBound(out["o"], out["lse"], out.get("o_probabilistic"), out.get("lse_probabilistic"))


class _Values:
    """V and what the bound needs of it, computed once per call."""

    def __init__(self, v: np.ndarray, model: ArithmeticModel, *, sharp: bool):
        self.v = v
        self.abs = np.abs(v)
        self.max = self.abs.max(axis=0, initial=0.0)
        # Powers of two keep squares in range and change no digit.
        self.unit = np.ldexp(1.0, np.clip(np.frexp(np.where(self.max > 0, self.max, 1.0))[1], -1000, 1000))
        self.scaled = v / self.unit
        self.squared = self.scaled**2
        lost = subnormal_part(v, model) if model.flushes_operands else np.zeros_like(v)
        self.lost = lost if lost.any() else None
        self.sharp = sharp

    def spread(self, w: np.ndarray, o: np.ndarray) -> np.ndarray:
        """sum_k w_k |v_k - o|, or an upper bound of it from three matrix products (Cauchy-Schwarz)."""
        if self.sharp:
            return np.stack([(w * np.abs(self.v[:, j] - o[:, j, None])).sum(axis=1) for j in range(o.shape[1])], axis=1)
        total = w.sum(axis=1, keepdims=True)
        return np.sqrt(total * self._moment(w, o, total)) * self.unit

    def root_sum_square(self, w: np.ndarray, o: np.ndarray) -> np.ndarray:
        """sqrt(sum_k w_k^2 (v_k - o)^2)."""
        w = w * w
        return np.sqrt(self._moment(w, o, w.sum(axis=1, keepdims=True))) * self.unit

    def _moment(self, w: np.ndarray, o: np.ndarray, total: np.ndarray) -> np.ndarray:
        """sum_k w_k (v_k - o)^2 in scaled units, raised by what cancellation may have taken."""
        o = o / self.unit
        second = w @ self.squared
        first = w @ self.scaled
        lost = 4 * (w.shape[1] + 10) * 2.0**-53 * (second + 2 * np.abs(o * first) + o * o * total)
        return np.maximum(second - 2 * o * first + o * o * total, 0.0) + lost


class _Block:
    """The bound on one block of rows."""

    def __init__(self, s: Softmax, errors: LogErrors, values: _Values, model: ArithmeticModel, bc: int):
        self.s, self.errors, self.values, self.model = s, errors, values, model
        self.u = model.unit
        # Steps 4 and 5: a masked key adds an exact 0, so only visible ones round.
        self.o_sum = model.o_sum(errors.counts, bc, errors.rescales)
        self.l_roundings = model.l_roundings(errors.counts, bc, errors.rescales)
        self.l_o_roundings = self.l_roundings
        self.p_unit, self.h_p = model.p_unit, 0.0
        if model.l_of_rounded_p:
            # The divisor has the same rounding errors as the numerator: they are errors of the weights.
            self.l_o_roundings = model.l_roundings(errors.counts, bc, errors.rescales, rounded=True)
            self.p_unit, self.h_p = 0.0, -math.log1p(-model.p_unit)
        self.exact_o = s.p @ values.v
        self.exact_lse = s.m + np.log(s.total)
        self.h_max = np.minimum(errors.h_o.max(axis=1, initial=0.0) + self.h_p, HUGE)
        # Step 6: 1 / l in the kernel's own units.
        self.top = np.exp(np.minimum(errors.top_error, HUGE))
        self.inverse_l = self.top * np.minimum(1.0, np.exp(2 * self.h_max) / s.total)

    def o(self) -> np.ndarray:
        s, values = self.s, self.values
        h = np.minimum(self.errors.h_o + self.h_p, HUGE)
        w = s.p * np.expm1(h)
        raised, lowered = s.p + w, (s.p * np.exp(-h)).sum(axis=1, keepdims=True)
        g_o = self.o_sum.g[:, None]
        g_l = gamma(self.l_o_roundings, self.u)[:, None]
        relative = self.p_unit + self.model.dropped + g_o * (1 + self.p_unit)
        absolute, cap_absolute = self._p_tiny(raised)
        numerator = values.spread(w, self.exact_o) + relative * (raised @ values.abs) + absolute  # steps 2, 4
        numerator += g_l * np.abs(self.exact_o) * raised.sum(axis=1, keepdims=True)  # step 5
        before = _over(numerator, (1 - g_l) * lowered)
        return self._store(np.minimum(before, self._cap(relative, g_l, cap_absolute)) + self._underflow())

    def o_probable(self, confidence: float) -> np.ndarray:
        m, s, values, errors = self.model, self.s, self.values, self.errors
        assert errors.h_o_bias is not None and errors.h_random is not None
        bias = np.minimum(errors.h_o_bias, HUGE)
        both = np.minimum(errors.h_o_bias + errors.h_random + confidence * self.h_p, HUGE)
        w_bias = s.p * np.expm1(bias)
        raised = s.p * np.exp(both)
        w_random = raised - s.p * np.exp(bias)
        lowered = (s.p * np.exp(-both)).sum(axis=1, keepdims=True)
        g_bias, g_random = self.o_sum.g_probable(confidence)
        g_o = (g_bias + g_random)[:, None]
        g_l = (confidence * np.sqrt(self.l_o_roundings) * self.u)[:, None]
        p_random = np.sqrt((raised * raised) @ values.squared) * values.unit
        absolute, _ = self._p_tiny(raised)
        numerator = values.spread(w_bias, self.exact_o) + values.root_sum_square(w_random, self.exact_o)
        numerator += confidence * self.p_unit * p_random + (m.dropped + g_o) * (raised @ values.abs) + absolute
        numerator += g_l * np.abs(self.exact_o) * raised.sum(axis=1, keepdims=True)
        return self._store(_over(numerator, (1 - g_l) * lowered) + self._underflow())

    def _p_tiny(self, raised: np.ndarray) -> tuple[np.ndarray | float, np.ndarray | float]:
        """What P's absolute rounding and flushed operands may cost the numerator; the same for the cap."""
        m, values = self.model, self.values
        absolute: np.ndarray | float = 0.0
        cap: np.ndarray | float = 0.0
        seen = self.s.visible.astype(np.float64)
        if m.p_tiny > 0:
            step = (m.p_tiny * np.exp(self.h_max) * self.inverse_l)[:, None]
            mass = seen @ values.abs
            cap = (m.p_tiny * self.top)[:, None] * mass
            # The sharp form costs a matrix product and matters only for a coarse format (fp16).
            absolute = np.minimum(raised, step) @ values.abs if m.p_tiny > 2.0**-100 else step * mass
            if m.l_of_rounded_p:
                keys = seen.sum(axis=1, keepdims=True) * np.abs(self.exact_o)
                absolute, cap = absolute + step * keys, cap + (m.p_tiny * self.top)[:, None] * keys
        if values.lost is not None:
            absolute = absolute + raised @ values.lost
            cap = cap + seen @ values.lost
        return absolute, cap

    def _cap(self, relative: np.ndarray, g_l: np.ndarray, absolute: np.ndarray | float) -> np.ndarray:
        """A computed average stays in the range of the visible V, whatever the weights (step 7)."""
        cap = np.full(self.exact_o.shape, np.inf)
        absolute = np.broadcast_to(absolute, cap.shape)
        for i in np.flatnonzero((self.h_max > 0.1) & self.s.live):
            v = self.values.v[self.s.visible[i]]
            o = self.exact_o[i]
            far = np.maximum(v.max(axis=0) - o, o - v.min(axis=0))
            size = np.abs(v).max(axis=0)
            cap[i] = (far + relative[i] * size + g_l[i] * np.abs(o)) / max(1 - float(g_l[i, 0]), 0.5) + absolute[i]
        return cap

    def _underflow(self) -> np.ndarray:
        """Results of exp2 below its limit and of single operations may be flushed (step 6)."""
        m, rescales = self.model, self.errors.rescales
        n = self.s.p.shape[1]
        weights = 3 * n * m.exp2_flush * 2.0**m.lag_log2
        numerator = weights * self.values.max + (m.operation_tiny * (2 * n * m.o_planes + 2 * rescales + 2))[:, None]
        denominator = (weights + m.operation_tiny * (2 * n + 2 * rescales + 2))[:, None] * np.abs(self.exact_o)
        return (numerator + denominator) * self.inverse_l[:, None]

    def _store(self, before: np.ndarray) -> np.ndarray:
        """Division by l and rounding to the output format (step 8)."""
        m = self.model
        last = float(gamma(m.final_roundings, self.u))
        abs_o = np.abs(self.exact_o)
        error = before * (1 + last) + last * abs_o + m.operation_tiny
        if m.out_format is None:
            return error
        out = FORMATS[m.out_format]
        return error * (1 + out.unit) + out.unit * abs_o + out.half_subnormal

    def lse(self) -> np.ndarray:
        return self._store_lse(self._log_raised(self.errors.h_lse), gamma(self.l_roundings, self.u))

    def _log_raised(self, h: np.ndarray) -> np.ndarray:
        """ln sum_k p_k e^h_k per row. Where float64 cannot hold e^h, or may have lost p, from ln p = -gap - ln L."""
        s = self.s
        raised = np.log1p((s.p * np.expm1(np.minimum(h, HUGE))).sum(axis=1))
        for i in np.flatnonzero(self._far(h)):
            x = (h[i] - s.gap[i])[s.visible[i]]
            top = x.max()
            raised[i] = top + np.log(np.exp(x - top).sum()) - np.log(s.total[i])
        return raised

    def _far(self, h: np.ndarray) -> np.ndarray:
        return np.asarray(h.max(axis=1, initial=0.0) > HUGE)

    def lse_probable(self, confidence: float) -> np.ndarray:
        errors = self.errors
        assert errors.h_lse_bias is not None and errors.h_random is not None
        bias = np.minimum(errors.h_lse_bias, HUGE)
        random = self.s.p * np.exp(np.minimum(bias + errors.h_random, HUGE)) - self.s.p * np.exp(bias)
        linear = (self.s.p * np.expm1(bias)).sum(axis=1)
        weights = np.log1p(linear + np.sqrt((random * random).sum(axis=1)))
        # Of errors this large only the sum of all that can happen is known.
        weights = np.where(self._far(errors.h_lse), self._log_raised(errors.h_lse), weights)
        return self._store_lse(weights, confidence * np.sqrt(self.l_roundings) * self.u)

    def _store_lse(self, weights: np.ndarray, g_l: np.ndarray) -> np.ndarray:
        """ln l, its sum with the reference, and their rounding (step 9)."""
        m, s = self.model, self.s
        n = s.p.shape[1]
        flushed = (3 * n * m.exp2_flush * 2.0**m.lag_log2 + 2 * m.operation_tiny * n) * self.inverse_l
        base = weights + g_l / (1 - g_l) + flushed
        reference = np.abs(s.m) + m.lag + self.errors.top_score_error
        log_l = np.abs(np.log(s.total)) + m.lag + base
        error = base + m.lse_m_unit * reference + m.log_tiny + m.log_error * log_l
        return error * (1 + self.u) + self.u * np.abs(np.where(s.live, self.exact_lse, 0.0))


def _over(numerator: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """numerator / weights; inf beyond 1e308, a bound that says nothing."""
    with np.errstate(over="ignore"):
        return np.asarray(numerator / np.maximum(weights, 1e-300))
