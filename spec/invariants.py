"""The invariants of tiled attention, checked after every tile.

An InvariantChecker is an observer (`on_tile=`). It computes its own scores and, for the keys seen so far, its own
sums by definition: tile t contributes a_t = sum exp(S - mu_t) and B_t = exp(S - mu_t) V relative to the tile's own
maximum, and

    l = sum_t exp(mu_t - m) a_t        U = sum_t exp(mu_t - m) B_t

are N2/N3 and D2/D3 with no recurrence, hence no rescaling that could be wrong in the same way.

Exact, whatever the arithmetic:
    masked scores are -inf and no others; no tile is seen twice and no visible key is left out
    m is the maximum of the scores seen (lagged form: r never falls, 0 <= rowmax S - r <= t)
    a row has m = -inf, l = 0, o = 0 until it has seen a score above -inf, and 1 <= l <= keys seen from then on (lagged
    form: 1 <= l <= e^t keys)
    a row that has seen NaN or +inf has l = NaN: NaN is not hidden
To within a bound:
    the scores, l, and o. The bound is derived in `roundoff.py`; a caller with another arithmetic passes `tolerance`.

Source: the induction in Dao et al. (arXiv:2205.14135), proof of Theorem 1; 1 <= l <= keys from Milakov and Gimelshein
(arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from spec import roundoff
from spec.errors import InvariantError
from spec.head import Array, Head, divide_rows, finite_or_zero, log_sum, sum_over_visible, times
from spec.observer import DEFERRED, TileState
from spec.rounding import format_named


@dataclass(frozen=True, eq=False)
class Reference:
    """What the state of a row tile should be, by definition, for the keys seen so far."""

    m: Array  # (br_i,): the shift of l and o, as the state has it
    l: Array  # (br_i,)
    o: Array  # (br_i, dv): in the form of the state
    keys: Array  # (br_i,): visible keys seen with a score above -inf
    tiles: int  # tiles seen
    lag: float | None  # threshold of the lagged form
    vmax: Array  # (dv,): largest finite |v| among the keys seen that some row of the tile may see, times the largest Z


Tolerance = Callable[[TileState, Reference], tuple[Array, Array]]  # -> allowed error of l (br_i,) and of o (br_i, dv)


@dataclass(eq=False)
class _Prefix:
    """Per row tile: what has been seen."""

    rows: slice
    seen: Array  # (Nk,) bool: keys whose tile has been processed
    top: Array  # running maximum of the scores
    m: Array  # the state's m after the last tile
    keys: Array
    vmax: Array
    mu: list[Array] = field(default_factory=list)
    a: list[Array] = field(default_factory=list)
    b: Array | None = None  # (tiles, br_i, dv), grown by doubling
    last: Reference | None = None


class InvariantChecker:
    """Observer that raises InvariantError at the first state that breaks an invariant.

    Args: those of `spec.head.Head.of`, the same as the algorithm gets, and
        tolerance: allowed errors of l and o; default: `roundoff.state` for the arithmetic of this package.
    """

    def __init__(
        self,
        q: npt.ArrayLike,
        k: npt.ArrayLike,
        v: npt.ArrayLike,
        *,
        tolerance: Tolerance | None = None,
        **arguments: Any,
    ) -> None:
        self.head = Head.of(q, k, v, **arguments)
        self.tolerance = tolerance or self._derived
        self._prefixes: dict[int, _Prefix] = {}
        self._finals: dict[int, tuple[slice, Array, Reference, str]] = {}

    @np.errstate(invalid="ignore", over="ignore")
    def __call__(self, state: TileState) -> None:
        prefix = self._prefix(state)
        visible = self._check_scores(state)
        top = np.maximum(prefix.top, state.s.max(axis=1))
        self._check_maximum(state, top, prefix.m)
        prefix.top, prefix.m = top, state.m
        reference = self._advance(prefix, state, visible)
        self._check_sums(state, reference, top)
        prefix.last = reference
        self._finals[state.rows.start] = (state.rows, prefix.seen, reference, state.form)

    def finish(self, o: Array, lse: Array, keys: tuple[int, int] | None = None) -> None:
        """Check the exit: every visible key was seen, O = attention over them, LSE = m + ln l."""
        head, u = self.head, roundoff.unit(self.head.dtype)
        start, stop = keys or (0, head.nk)
        covered = np.zeros(head.nq, dtype=bool)
        for rows, seen, reference, form in self._finals.values():
            covered[rows] = True
            missed = head.mask.visible(rows, slice(0, head.nk), head.nq, head.nk) & ~seen
            missed[:, :start], missed[:, stop:] = False, False
            if missed.any():
                row, key = (int(x[0]) for x in np.nonzero(missed))
                raise InvariantError(f"row {rows.start + row} may see key {key}, but no tile with it was processed")
            want_o = divide_rows(reference.o, reference.l) if form == DEFERRED else reference.o
            bound = self._bound(reference)
            allowed = (2.0 * (bound.u + bound.l) + 4.0 * u) / (1.0 - bound.l) * reference.vmax
            allowed = roundoff.rounded_output(want_o, allowed + self._absolute(reference), head.rounding.o)
            _compare("output O", o[rows], want_o, allowed, rows, None)
            want_lse = log_sum(reference.m, reference.l)
            size = np.where(np.isfinite(want_lse), np.abs(want_lse), 0.0)
            log_l = np.where(reference.l > 0, np.abs(np.log(np.where(reference.l > 0, reference.l, 1.0))), 0.0)
            allowed = 2.0 * (bound.l / (1.0 - bound.l) + 2 * roundoff.ULPS * u * log_l + u * size)
            _compare("LSE", lse[rows], want_lse, allowed, rows, None, logs=True)
        alone = np.flatnonzero(~covered)
        if len(alone):
            seen_keys = head.mask.visible(slice(0, head.nq), slice(start, stop), head.nq, head.nk)[alone]
            if seen_keys.any():
                raise InvariantError(f"row {int(alone[seen_keys.any(axis=1)][0])} was never processed")
            if (o[alone] != 0.0).any() or not np.isneginf(lse[alone]).all():
                raise InvariantError("a row that sees no key has O != 0 or LSE != -inf")

    def _prefix(self, state: TileState) -> _Prefix:
        """The record of this row tile, with this tile's keys marked as seen."""
        head, rows = self.head, state.rows
        br, key = rows.stop - rows.start, rows.start
        if key not in self._prefixes:
            if state.form == DEFERRED:
                self._prefixes.clear()  # Q outer: earlier row tiles are done
            if key in self._finals:
                raise InvariantError(f"row tile {state.i} is processed twice")
            self._prefixes[key] = _Prefix(
                rows=rows,
                seen=np.zeros(head.nk, dtype=bool),
                top=np.full(br, -np.inf, head.dtype),
                m=np.full(br, -np.inf, head.dtype),
                keys=np.zeros(br, dtype=np.int64),
                vmax=np.zeros(head.dv),
            )
        prefix = self._prefixes[key]
        if prefix.rows != rows or prefix.seen[state.cols].any():
            raise InvariantError(f"tile ({state.i}, {state.j}): rows regrouped, or keys processed twice")
        prefix.seen[state.cols] = True
        return prefix

    def _check_scores(self, state: TileState) -> Array | None:
        """S of this tile against the checker's own; returns the tile's mask (None = all visible)."""
        head, rows, cols = self.head, state.rows, state.cols
        visible = head.visible(rows, cols)
        if visible is not None and not np.isneginf(state.s[~visible]).all():
            raise InvariantError(f"tile ({state.i}, {state.j}): a masked score is not -inf")
        want = head.scores(rows, cols, visible)
        _compare("score S", state.s, want, 2.0 * roundoff.scores(head, rows, cols, want), rows, state, logs=True)
        return visible

    def _check_maximum(self, state: TileState, top: Array, before: Array) -> None:
        """N1, D1: m is the maximum, exactly; lagged form: a reference that trails it by at most t."""
        m = state.m
        if state.lag is None:
            wrong = ~((m == top) | (np.isnan(m) & np.isnan(top)))
            what = "m is not the maximum of the scores seen"
        else:
            behind = np.where(m == top, 0.0, top - m)  # 0 also for a row still at -inf, or at +inf
            wrong = ~((behind >= 0.0) & (behind <= state.lag) & (m >= before))
            wrong &= ~(np.isnan(m) & np.isnan(top))
            what = f"the reference r does not trail the maximum by at most {state.lag}, or fell"
        if wrong.any():
            r = int(np.flatnonzero(wrong)[0])
            raise InvariantError(f"{_where(state, r)}: {what}: m={m[r]!r}, maximum {top[r]!r}, m before {before[r]!r}")

    def _advance(self, prefix: _Prefix, state: TileState, visible: Array | None) -> Reference:
        """Add this tile to the sums by definition, and state them relative to the state's m."""
        head, n = self.head, len(prefix.mu)
        mu = finite_or_zero(state.s.max(axis=1))
        w = np.exp(state.s - mu[:, None])
        z = head.z(state.rows, state.cols)
        v = head.v[state.cols]
        b = sum_over_visible(times(w, z), v, visible)
        if prefix.b is None or n == len(prefix.b):
            grown = np.zeros((max(4, 2 * n), *b.shape), head.dtype)
            if prefix.b is not None:
                grown[:n] = prefix.b
            prefix.b = grown
        prefix.mu.append(np.where(w.sum(axis=1) == 0.0, -np.inf, mu))
        prefix.a.append(w.sum(axis=1))
        prefix.b[n] = b
        prefix.keys = prefix.keys + (state.s != -np.inf).sum(axis=1)
        seen_v = v if visible is None else v[visible.any(axis=0)]
        factor = 1.0 if head.dropout is None else head.dropout.scale
        largest = np.where(np.isfinite(seen_v), np.abs(seen_v), 0.0).max(axis=0, initial=0.0)
        prefix.vmax = np.maximum(prefix.vmax, factor * largest)
        share = np.exp(np.stack(prefix.mu) - finite_or_zero(state.m))  # (tiles, br_i)
        l = (share * np.stack(prefix.a)).sum(axis=0)
        u = np.einsum("tr,trc->rc", share, prefix.b[: n + 1])
        o = u if state.form == DEFERRED else divide_rows(u, l)
        return Reference(state.m, l, o, prefix.keys, n + 1, state.lag, prefix.vmax)

    def _check_sums(self, state: TileState, reference: Reference, top: Array) -> None:
        """Emptiness and 1 <= l <= keys exactly, then N2, N3 / D2, D3 within the tolerance."""
        empty = np.isneginf(top)
        broken = empty & ((state.l != 0.0) | (state.o != 0.0).any(axis=1))
        if broken.any():
            raise InvariantError(f"{_where(state, int(np.flatnonzero(broken)[0]))}: no key seen, but l or o is not 0")
        most = reference.keys.astype(np.float64)
        if state.lag is not None:
            most = most * np.exp(state.lag) * (1.0 + self._bound(reference).l)
        poisoned = np.isnan(reference.l)
        bad = ~empty & ~poisoned & ~((state.l >= 1.0) & (state.l <= most))
        if bad.any():
            r = int(np.flatnonzero(bad)[0])
            raise InvariantError(f"{_where(state, r)}: l={state.l[r]!r} is outside [1, {most[r]}]")
        allowed_l, allowed_o = self.tolerance(state, reference)
        _compare("row sum l", state.l, reference.l, allowed_l, state.rows, state)
        _compare("output o", state.o, reference.o, allowed_o, state.rows, state)

    def _derived(self, state: TileState, reference: Reference) -> tuple[Array, Array]:
        """Errors of the state and of the reference together, by `roundoff.state`."""
        bound = self._bound(reference)
        tiny = roundoff.underflow(keys=self.head.nk, tiles=reference.tiles, dtype=self.head.dtype)
        l = np.where(np.isnan(reference.l), 0.0, reference.l)
        allowed_l = 2.0 * bound.l / (1.0 - bound.l) * l + tiny
        if state.form == DEFERRED:
            allowed_o = 2.0 * bound.u / (1.0 - bound.u) * l[:, None] * reference.vmax[None, :]
        else:
            u = roundoff.unit(self.head.dtype)
            allowed_o = np.broadcast_to(
                (2.0 * (bound.u + bound.l) + 4.0 * u) / (1.0 - bound.l) * reference.vmax, state.o.shape
            )
        return allowed_l, allowed_o + self._absolute(reference)

    def _bound(self, reference: Reference) -> roundoff.StateBound:
        p = self.head.rounding.p
        return roundoff.state(
            keys=int(reference.keys.max(initial=0)),
            tiles=reference.tiles,
            u=roundoff.unit(self.head.dtype),
            lag=reference.lag,
            u_p=0.0 if p is None else format_named(p).unit,
        )

    def _absolute(self, reference: Reference) -> Array:
        """Absolute error of o from underflow, that of a rounded P included, (dv,)."""
        tiny = roundoff.underflow(keys=self.head.nk, tiles=reference.tiles, dtype=self.head.dtype)
        p = self.head.rounding.p
        eta = 0.0 if p is None else format_named(p).eta
        return np.asarray(tiny * (1.0 + reference.vmax) + eta * int(reference.keys.max(initial=0)) * reference.vmax)


def check(
    algorithm: Callable[..., Any],
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    tolerance: Tolerance | None = None,
    **arguments: Any,
) -> Any:
    """Run a tiled forward algorithm with its invariants checked after every tile and at exit; return its output.

    algorithm: `flash1.forward` or `flash2.forward`. Raises InvariantError.
    """
    own = {name: x for name, x in arguments.items() if name not in ("br", "bc", "lag", "keys")}
    checker = InvariantChecker(q, k, v, tolerance=tolerance, **own)
    out = algorithm(q, k, v, on_tile=checker, **arguments)
    checker.finish(out.o, out.lse, arguments.get("keys"))
    return out


def _compare(
    name: str, got: Array, want: Array, allowed: Array, rows: slice, state: TileState | None, *, logs: bool = False
) -> None:
    """got within `allowed` of want where want is finite; infinite or NaN where want is.

    logs: scores and LSE, where -inf means "no key" and must be -inf. (In an output, the order of the sums decides
    whether an infinite V gives inf or, times a weight of 0, NaN.)
    """
    with np.errstate(invalid="ignore", over="ignore"):
        good = np.where(np.isfinite(want), np.abs(got - want) <= allowed, ~np.isfinite(got))
    if logs:
        good &= np.isneginf(got) | ~np.isneginf(want)
    if good.all():
        return
    index = tuple(int(x[0]) for x in np.nonzero(~good))
    limit = np.broadcast_to(allowed, good.shape)[index]
    place = f"row {rows.start + index[0]}" if state is None else _where(state, index[0])
    column = "" if len(index) == 1 else f", column {index[1]}"
    raise InvariantError(
        f"{place}{column}: {name} = {got[index]!r}, by definition {want[index]!r}, allowed error {limit:.3e}"
    )


def _where(state: TileState, row: int) -> str:
    return f"tile ({state.i}, {state.j}), row {state.rows.start + row}"
