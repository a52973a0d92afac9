"""The backward bound: how far dQ, dK and dV of a tiled kernel can be from the exact ones, element by element.

Two statements from one derivation. Stage-wise (`given`): against the exact formula at the O and LSE that the kernel
read, which is what certifies a backward kernel, because the forward pass has a bound of its own. End to end: against
the gradients of exact attention, what a user gets; several times wider, because D is made from a rounded O.

Notation of verify/bounds/README.md: s scaled scores, a = scale sum|q||k|, u the unit roundoff of the working format,
gamma_n = (1+u)^n - 1, g_S, g_P, g_Q, g_K the factors of the sums in scores, dP, dQ, and dK and dV; a hat is a computed
value. B_O, B_LSE are the forward bounds, both 0 stage-wise. All errors are bounds on absolute values, per pair (i, k).

**1. Weights.** P^ = exp2 of a rounded S^ c - LSE^ log2 e; a number of roundings of each size, counted in the model:

    E = g_S a + flushed operands + underflow                                        as in README step 1
    G = (E + B_LSE + s_roundings u (|s| + E) + lse_roundings u (|LSE| + B_LSE)
           + argument_roundings u (|s - LSE| + E + B_LSE)) (1 + 8u) - ln(1 - exp2_error)    |ln P^/P|

    and P^ may be 0 where the result is below exp2_flush: the loss is at most f = min(P e^G, exp2_flush). A weight is
    not normalised again, so unlike in the forward pass nothing cancels: |LSE| counts. (Blanchard, Higham and Higham,
    IMA J. Numer. Anal. 41(4), 2021: the form exp(s - LSE) loses accuracy with |LSE|.)

**2. dP and D.** F = g_P sum|dO||V| + flushed operands + underflow;  D' = D - dLSE, a dv-term sum in any order, from O^:

    B_D = sum|dO| B_O + gamma_dv sum|dO| (|O| + B_O) + u (|D'| + ...)       the last only where a dLSE is subtracted

**3. dS = P (dP - D').** The weight's error meets |dP - D'|, the others meet the weight:

    X0 = P expm1(G) |dP - D'| + P e^G (F + B_D) + f (|dP - D'| + F + B_D)
    X  = X0 + gamma_2 (|dS| + X0) + underflow          subtraction and product
    R  = ds_unit (|dS| + X) + min(ds_tiny, |dS| + X)   rounding to the operand's format;   M = |dS| + X + R

**4. dQ and dK.** scale [ (X + R) |K| + (g_Q + dropped) M |K| + flushed operands + underflow ], dropped being the plane
products that a split leaves out; then gamma_f for the scale and its product, then the output format as in README
step 8. dK likewise with the transpose and |Q|, summed over the rows of all query heads that share the key.

**5. dV.** With r = p_unit P e^G + min(p_tiny, P e^G), the rounding of P as an operand, Y = P expm1(G) + f + r and
W = P e^G + r: Y^T |dO| + (g_K + dropped) W^T |dO| + flushed operands + underflow; then the output format.

A masked pair is exactly 0 in P and dS and costs nothing; an empty row and an unseen key have a bound of 0.

**Order of summation.** Where dQ of the key tiles is added in no fixed order (atomics), two runs differ by at most
`dq_order` = 2 scale gamma_T (1 + g) M |K|, and one rounding of each run afterwards: everything before is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verify.arithmetic import ArithmeticModel, Sum, gamma
from verify.bounds.backward_model import BackwardModel
from verify.bounds.output import HUGE, INFLATE, ForwardBound, forward
from verify.bounds.weights import subnormal_part
from verify.formats import FORMATS
from verify.oracle.backward_reference import Given, Problem
from verify.oracle.exact import TINY
from verify.oracle.float64 import row_chunks, softmax


@dataclass(frozen=True)
class BackwardBound:
    """|gradient - exact| <= dq, dk, dv; 0 on empty rows and on keys that no row sees, where only 0 is right.

    dq_order: two runs that add the key tiles of dQ in different orders differ by no more.
    largest_ds, largest_out: what dS and the gradients can reach, errors included: `outside_backward_domain` asks.
    """

    dq: np.ndarray  # (Nq, d)
    dk: np.ndarray  # (Nk, d)
    dv: np.ndarray  # (Nk, dv)
    dq_order: np.ndarray  # (Nq, d)
    largest_ds: float
    largest_out: float


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    *,
    scale: float,
    visible: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    given: Given | None = None,
    model: BackwardModel,
    br: int,
    bc: int,
    heads: int = 1,
    forward_bc: int | None = None,
    read: ForwardBound | None = None,
) -> BackwardBound:
    """Bound of one head, or of the query heads of one K/V head (`oracle.backward_reference.stack_group`).

    For dq of sampled rows pass q[rows], do[rows] and so on; stage-wise, for dk and dv of sampled keys k[keys], v[keys].

    Args:
        q (Nq, d), k (Nk, d), v (Nk, dv), do (Nq, dv), dlse (Nq,) or None: the exact inputs, finite where visible.
        given: (o, lse) that the kernel read, for the stage-wise bound; None for the end-to-end bound.
        br, bc: rows and keys per tile of the backward kernel; tiles start at multiples of them in each head.
        heads: q and do hold this many query heads, stacked.
        forward_bc: keys per tile of the forward kernel, for the end-to-end bound; None if it is bc.
        read: the bound of that kernel's O and LSE, if its arithmetic is not model.path's or the bound is known already.
    Raises:
        ValueError: shapes disagree, an input that matters is not finite, or Nq is not a multiple of heads.
    Error: never below the true bound by more than float64 rounding; INFLATE covers it, and TINY its underflow.
    """
    x = Problem.of(q, k, v, do, scale=scale, visible=visible, dlse=dlse, given=given).finite("bounds.backward")
    if heads < 1 or len(x.q) % heads:
        raise ValueError(f"{len(x.q)} rows are not {heads} query heads of equal length")
    if x.given is None:
        f = read or forward(
            x.q, x.k, x.v, scale=scale, visible=x.visible, model=model.path, bc=forward_bc or bc, failure=None
        )
        spread = f.o, f.lse
    else:
        spread = np.zeros_like(x.do), np.zeros(len(x.q))
    return _Bound(x, model, spread, has_dlse=dlse is not None).run(br, bc, heads)


@dataclass(frozen=True)
class _Pairs:
    """Steps 1 to 3 for a block of rows, arrays (R, Nk); 0 at masked pairs."""

    p: np.ndarray
    ds: np.ndarray
    p_error: np.ndarray  # Y
    p_most: np.ndarray  # W
    ds_error: np.ndarray  # X + R
    ds_most: np.ndarray  # M


class _Side:
    """A gradient under construction: its value, the errors of its operands, and the size of its terms."""

    def __init__(self, shape: tuple[int, ...], x: np.ndarray, path: ArithmeticModel):
        self.value, self.error, self.size, self.lost = (np.zeros(shape) for _ in range(4))
        self.x, self.abs = x, np.abs(x)
        lost = subnormal_part(x, path) if path.flushes_operands else np.zeros_like(x)
        self.flushed = lost if lost.any() else None

    def add(self, rows: slice, at: slice, w: np.ndarray, error: np.ndarray, most: np.ndarray) -> None:
        """value[rows] += w @ x[at], and what can be wrong with it."""
        self.value[rows] += w @ self.x[at]
        self.error[rows] += error @ self.abs[at]
        self.size[rows] += most @ self.abs[at]
        if self.flushed is not None:
            self.lost[rows] += most @ self.flushed[at]


class _Bound:
    def __init__(self, x: Problem, model: BackwardModel, spread: tuple[np.ndarray, np.ndarray], *, has_dlse: bool):
        self.x, self.model, self.path, self.has_dlse = x, model, model.path, has_dlse
        self.b_o, self.b_lse = spread
        self.u = model.path.unit

    def run(self, br: int, bc: int, heads: int) -> BackwardBound:
        x = self.x
        (nq, nk), everything = x.visible.shape, slice(None)
        dq = _Side(x.q.shape, x.k, self.path)
        dk, dv = _Side(x.k.shape, x.q, self.path), _Side(x.v.shape, x.do, self.path)
        largest_ds = 0.0
        for rows in row_chunks(nq, nk):
            c = self._pairs(rows)
            dq.add(rows, everything, c.ds, c.ds_error, c.ds_most)
            dk.add(everything, rows, c.ds.T, c.ds_error.T, c.ds_most.T)
            dv.add(everything, rows, c.p.T, c.p_error.T, c.p_most.T)
            largest_ds = max(largest_ds, float(c.ds_most.max(initial=0.0)))
        keys_per_tile = _per_tile(x.visible, bc, 1)
        rows_per_tile = _per_tile(x.visible.T, br, heads)
        q_sum, k_sum = self.model.dq_sum(keys_per_tile, bc), self.model.dkv_sum(rows_per_tile, br, heads)
        final = self.model.final_roundings
        bounds = {
            "dq": self._store(dq, q_sum, keys_per_tile, x.scale, final),
            "dk": self._store(dk, k_sum, rows_per_tile, x.scale, final),
            "dv": self._store(dv, k_sum, rows_per_tile, 1.0, 0),
        }
        values = {"dq": x.scale * dq.value, "dk": x.scale * dk.value, "dv": dv.value}
        largest_out = max(float((np.abs(values[n]) + bounds[n]).max(initial=0.0)) for n in bounds)
        return BackwardBound(
            **bounds,
            dq_order=self._order(dq, q_sum, bounds["dq"]),
            largest_ds=largest_ds,
            largest_out=largest_out,
        )

    def _pairs(self, rows: slice) -> _Pairs:
        x, m, path, u = self.x, self.model, self.path, self.u
        s = softmax(x.q[rows], x.k, x.scale, x.visible[rows])
        seen, do = s.visible, x.do[rows]
        lse = s.m + np.log(s.total) if x.given is None else x.given[1][rows]
        exponent = np.where(seen, (s.m - lse)[:, None] - s.gap, 0.0)
        p = s.p if x.given is None else np.where(seen, np.exp(np.minimum(exponent, HUGE)), 0.0)

        # Step 1
        n = x.q.shape[1]
        E = float(path.score_sum(n).g) * s.magnitude + s.log_error
        E += x.scale * (_flushed(x.q[rows], x.k, path) + (2 * n + 2) * path.s_planes * path.operation_tiny)
        b_lse = self.b_lse[rows][:, None]
        G = E + b_lse + m.s_roundings * u * (np.abs(s.m[:, None] - s.gap) + E)
        G += m.lse_roundings * u * (np.abs(lse)[:, None] + b_lse)
        G += m.argument_roundings * u * (np.abs(exponent) + E + b_lse)
        G = G * (1 + 8 * u) - math.log1p(-path.exp2_error) + 4 * path.operation_tiny
        G = np.where(seen, np.minimum(G, HUGE), 0.0)
        p_error = np.where(seen, p * np.expm1(G) + 4 * TINY, 0.0)
        p_most = p + p_error
        flushed = np.minimum(p_most, path.exp2_flush)

        # Step 2
        n = x.v.shape[1]
        dp = do @ x.v.T
        F = float(path.score_sum(n).g) * (np.abs(do) @ np.abs(x.v).T)
        F += _flushed(do, x.v, path) + (2 * n + 2) * path.s_planes * path.operation_tiny
        D, b_d = self._row_sums(rows, p, dp)

        # Step 3
        far = np.where(seen, np.abs(dp - D[:, None]), 0.0)
        rest = F + b_d[:, None]
        ds = np.where(seen, p * (dp - D[:, None]), 0.0)
        X = p_error * far + p_most * rest + flushed * (far + rest)
        X += gamma(m.ds_roundings, u) * (np.abs(ds) + X) + path.operation_tiny * (1 + p_most) + 4 * TINY
        X = np.where(seen, X, 0.0)
        R = m.ds_unit * (np.abs(ds) + X) + np.minimum(m.ds_tiny, np.abs(ds) + X)
        rounding = path.p_unit * p_most + np.minimum(path.p_tiny, p_most)
        return _Pairs(p, ds, p_error + flushed + rounding, p_most + rounding, X + R, np.abs(ds) + X + R)

    def _row_sums(self, rows: slice, p: np.ndarray, dp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """D - dLSE and its error."""
        x, u, n = self.x, self.u, self.x.v.shape[1]
        do, b_o = np.abs(x.do[rows]), self.b_o[rows]
        if x.given is None:
            D, o = (p * dp).sum(axis=1), np.abs(p @ x.v)
        else:
            D, o = (x.do[rows] * x.given[0][rows]).sum(axis=1), np.abs(x.given[0][rows])
        error = (do * b_o).sum(axis=1) + gamma(n, u) * (do * (o + b_o)).sum(axis=1)
        error += 2 * (n + 1) * self.path.operation_tiny
        D = D - x.dlse[rows]
        if self.has_dlse:
            error += u * (np.abs(D) + error)
        return D, error

    def _store(self, side: _Side, total: Sum, counts: np.ndarray, scale: float, final: int) -> np.ndarray:
        """Steps 4 and 5: the sum over tiles, the scale, the output format."""
        path = self.path
        live = (counts.sum(axis=1) > 0)[:, None]
        terms = counts.sum(axis=1)[:, None]
        factor = np.broadcast_to(total.g, live.shape[:1])[:, None] + path.dropped
        underflow = (path.operation_tiny + TINY) * (2 * terms * path.o_planes + 2 * counts.shape[1] + 2)
        error = scale * (side.error + factor * side.size + side.lost + underflow)
        value = scale * np.abs(side.value)
        roundings = float(gamma(final, self.u))
        error = error * (1 + roundings) + roundings * value + path.operation_tiny + 2 * TINY
        if self.model.out_format is not None:
            out = FORMATS[self.model.out_format]
            error = error * (1 + out.unit) + out.unit * value + out.half_subnormal
        return np.where(live, error * INFLATE, 0.0)

    def _order(self, side: _Side, total: Sum, bound: np.ndarray) -> np.ndarray:
        """What the order of adding key tiles can change: sums of the same numbers, then the same operations."""
        x, path = self.x, self.path
        if not self.model.dq_restarts:
            return np.zeros_like(bound)
        tiles = np.broadcast_to(np.asarray(total.extra), bound.shape[:1])
        partial = (1 + gamma(total.steps, path.step_unit)) * path.magnitude
        spread = 2 * x.scale * (gamma(tiles, self.u) * partial)[:, None] * side.size
        spread += 4 * path.operation_tiny * tiles[:, None]
        unit = float(gamma(self.model.final_roundings, self.u))
        tiny = path.operation_tiny
        if self.model.out_format is not None:
            out = FORMATS[self.model.out_format]
            unit = (1 + unit) * (1 + out.unit) - 1
            tiny += out.half_subnormal
        value = np.abs(x.scale * side.value) + bound
        return np.where(bound > 0, (spread * (1 + unit) + 2 * unit * value + 2 * tiny) * INFLATE, 0.0)


def _flushed(a: np.ndarray, b: np.ndarray, path: ArithmeticModel) -> np.ndarray | float:
    """sum|a||b| over the terms where an operand is subnormal and the unit takes it for 0."""
    if not path.flushes_operands:
        return 0.0
    a_lost, b_lost = subnormal_part(a, path), subnormal_part(b, path)
    if not (a_lost.any() or b_lost.any()):
        return 0.0
    return a_lost @ np.abs(b).T + np.abs(a) @ b_lost.T


def _per_tile(seen: np.ndarray, size: int, heads: int) -> np.ndarray:
    """(n, heads T): how many of each tile's positions are visible; the second axis holds `heads` runs of tiles."""
    n, width = seen.shape
    width //= heads
    runs = seen.reshape(n, heads, width)
    tiles = -(-width // size)
    padded = np.zeros((n, heads, tiles * size), bool)
    padded[:, :, :width] = runs
    return padded.reshape(n, heads * tiles, size).sum(axis=2)
