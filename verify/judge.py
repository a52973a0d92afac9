"""Hear every judge on one case: is each element of O and LSE within its own proven bound of the truth?

Judges (each gives a value and a bound on its own error, which widens the kernel's bound):
  float64   T0, every element of every case.
  balls     T1, enclosures at 50 digits, every element, where python-flint is installed.
  mpmath    T2, at 50 digits, at least ROWS rows of every case: tile edges and the worst rows of all paths.
  spec      the readable reference: FlashAttention-2 forward at the path's own Br and Bc, its invariant checked
            after every tile.
A judge with an own bound as wide as a float64 kernel's would prove little, so float64 kernels answer to balls in place
of T0; where flint is absent T0 is heard all the same, and mpmath is what proves something.

Holds always: NaN never passes as a number, and what must be NaN (verify/special.py) never passes as a number either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from verify import arithmetic, bounds, plain, special, tiles, verdict
from verify.cases import Array, Case
from verify.compare import ratio
from verify.devices import Device, Path, torch_device
from verify.oracle import balls, float64, multiprecision
from verify.oracle.reference import Reference
from verify.verdict import OUTPUTS, Found, Verdict

ROWS = 8  # rows of a case that mpmath hears, at least; all of them in a smaller case


class Truth:
    """The oracles' answers on one case, computed once and shared by every path that runs it."""

    def __init__(self, case: Case, *, with_balls: bool = True) -> None:
        self.case = case
        self.keys: list[tuple[int, int]] = []
        self._bounds: dict[Any, bounds.ForwardBound] = {}
        self._spec: dict[Any, Reference] = {}
        self.expected: list[special.Expected] = []
        self.float64: list[Reference] = []
        self.balls: list[Reference] | None = [] if with_balls and balls.AVAILABLE else None
        for b, h, q, k, v in case.heads():
            length = None if case.key_lengths is None else case.key_lengths[b]
            e = special.expect(q, k, v, visible=case.visible(b), length=length)
            self.keys.append((b, h))
            self.expected.append(e)
            self.float64.append(float64.attention(e.q, e.k, e.v, scale=case.scale, visible=e.visible))
            if self.balls is not None:
                self.balls.append(balls.attention(e.q, e.k, e.v, scale=case.scale, visible=e.visible))

    def bound(self, head: int, path: Path) -> bounds.ForwardBound:
        """The kernel's bound on one head; paths with the same arithmetic and Bc share it."""
        made = model_of(path)
        key = (head, made, path.bc)
        if key not in self._bounds:
            e = self.expected[head]
            self._bounds[key] = bounds.forward(
                e.q, e.k, e.v, scale=self.case.scale, visible=e.visible, model=made, bc=path.bc, failure=None
            )
        return self._bounds[key]

    def spec(self, head: int, path: Path) -> Reference:
        """The readable reference at the path's tiles."""
        key = (head, path.br, path.bc)
        if key not in self._spec:
            self._spec[key] = tiles.reference(self.expected[head], scale=self.case.scale, br=path.br, bc=path.bc)
        return self._spec[key]

    def mpmath(self, head: int, rows: Iterable[int]) -> Reference:
        e = self.expected[head]
        return multiprecision.attention(
            e.q, e.k, e.v, scale=self.case.scale, visible=e.visible, rows=np.asarray(sorted(rows), dtype=np.int64)
        )

    def certify_float64(self) -> float:
        """Max |T0 - T1| / (T0's bound + T1's radius) over O and LSE: at most 1, or the oracle itself is wrong."""
        worst = 0.0
        for t0, t1 in zip(self.float64, self.balls or [], strict=False):
            for output in OUTPUTS:
                got, want = getattr(t0, output), getattr(t1, output)
                r = ratio(got, want, getattr(t0, f"{output}_err"), want_error=getattr(t1, f"{output}_err"))
                worst = max(worst, float(r.max(initial=0.0)))
        return worst


@dataclass
class _Run:
    """One path's outputs with their bounds, head by head, while a case is being heard."""

    path: Path
    o: Array
    lse: Array
    bounds: list[bounds.ForwardBound]


def hear(
    case: Case,
    runs: Sequence[tuple[Path, Array, Array]],
    *,
    truth: Truth | None = None,
    spec: bool = True,
    rows: int = ROWS,
    seed: int = 0,
    device: str = "cpu",
    compare_plain: bool = True,
) -> list[Verdict]:
    """Judge the outputs (path, o, lse) of one case; one verdict per run, in order.

    rows: how many of them mpmath hears at least (0: none). compare_plain: also run the plain formula.
    """
    known = truth if truth is not None else Truth(case)
    heard = [_Run(path, o, lse, [known.bound(head, path) for head in range(len(known.keys))]) for path, o, lse in runs]
    chosen = _rows_for_mpmath(known, heard, rows, seed)
    exact = [known.mpmath(head, picked) if picked else None for head, picked in enumerate(chosen)]
    beside = plain.attention(case, device=torch_device(device)) if compare_plain else None
    return [_verdict(known, run, exact, beside, spec) for run in heard]


def model_of(path: Path) -> arithmetic.ArithmeticModel:
    """The rounding constants of the kernel on `path`: its model, what was calibrated, and its plan's figures."""
    return arithmetic.model(path.arithmetic, path.dtype, debug=path.debug, device=path.unit, **path.plan)


def check(attn: ModuleType, case: Case, *, on: Device | None = None, spec: bool = False) -> list[Verdict]:
    """Run `case` on every path of `attn` that this machine can force, and judge each.

    Raises: AssertionError, with the failing element, both values, err/bound and the tile, when one does not hold; and
    what `device.run` raises.
    """
    from verify import devices

    device = on if on is not None else devices.Cpu()
    runs = [(path, *device.run(attn, case, path)) for path in device.paths(attn, case.dtype, case)]
    verdicts = hear(case, runs, spec=spec, device=device.name)
    bad = [v.message() for v in verdicts if not v.holds]
    if bad:
        raise AssertionError("\n".join(bad))
    return verdicts


def _rows_for_mpmath(known: Truth, runs: Sequence[_Run], least: int, seed: int) -> list[list[int]]:
    """Which rows of each head T2 hears: first and last row, tile edges, the worst of T0, then random ones."""
    nq, heads = known.case.q.shape[2], len(known.keys)
    if least == 0:
        return [[]] * heads
    if nq * heads <= least:
        return [list(range(nq))] * heads
    edges = {0, nq - 1} | {x for run in runs for x in (run.path.br - 1, run.path.br) if x < nq}
    score = np.zeros((heads, nq))
    for run in runs:
        for head, (b, h) in enumerate(known.keys):
            t0, bound = known.float64[head], run.bounds[head]
            score[head] = np.maximum(score[head], ratio(run.lse[b, h], t0.lse, bound.lse + t0.lse_err))
            score[head] = np.maximum(score[head], ratio(run.o[b, h], t0.o, bound.o + t0.o_err).max(axis=1, initial=0.0))
    rng = np.random.default_rng([seed, nq])
    picked: set[tuple[int, int]] = {(rng.integers(heads).item(), row) for row in sorted(edges)}
    worst = np.argsort(-score, axis=None, kind="stable")[: least // 2]
    picked |= {(int(i) // nq, int(i) % nq) for i in worst}
    while len(picked) < least:
        picked.add((rng.integers(heads).item(), rng.integers(nq).item()))
    return [sorted(row for head, row in picked if head == mine) for mine in range(heads)]


def _verdict(known: Truth, run: _Run, exact: list[Reference | None], beside: plain.Plain | None, spec: bool) -> Verdict:
    """Every judge on one run."""
    found = Found()
    broken: list[str] = []
    spread: dict[str, list[Array]] = {name: [] for name in OUTPUTS}
    error, plain_error, plain_ratio = (dict.fromkeys(OUTPUTS, 0.0) for _ in range(3))
    rows_mpmath = elements_balls = 0
    wide = run.path.dtype == "float64"

    for head, (b, h) in enumerate(known.keys):
        e, bound = known.expected[head], run.bounds[head]
        got = {"o": run.o[b, h], "lse": run.lse[b, h]}
        classes = {"o": e.o, "lse": e.lse}
        judges: list[tuple[str, Reference]] = []
        if known.balls is not None:
            judges.append(("balls", known.balls[head]))
            elements_balls += e.o.size + e.lse.size
        if not (wide and judges):
            judges.append(("float64", known.float64[head]))
        if exact[head] is not None:
            judges.append(("mpmath", exact[head]))  # type: ignore[arg-type]
            rows_mpmath += exact[head].rows.size  # type: ignore[union-attr]
        if spec:
            judges.append(("spec", known.spec(head, run.path)))
        for output in OUTPUTS:
            broken += verdict.broken(got[output], classes[output], output, verdict.at_rows((b, h), range(len(e.lse))))
            number = special.must_be_number(got[output], classes[output])
            for judge, truth in judges:
                at = truth.rows
                room = getattr(bound, output)[at] + getattr(truth, f"{output}_err")
                want, mine, heard = getattr(truth, output), got[output][at], number[at]
                r = np.where(heard, ratio(mine, want, room), 0.0)
                found.keep(judge, output, r, mine, want, room, verdict.at_rows((b, h), at), int(heard.sum()))
            best = judges[0][1]
            want, room = getattr(best, output), getattr(bound, output) + getattr(best, f"{output}_err")
            spread[output].append(ratio(got[output], want, room)[number])
            error[output] = max(error[output], verdict.largest(got[output], want, number))
            if beside is None:
                continue
            theirs = getattr(beside, output)[b, h]
            comparable = number & np.isfinite(theirs) & np.isfinite(want)
            plain_error[output] = max(plain_error[output], verdict.largest(theirs, want, comparable))
            theirs_ratio = ratio(theirs, want, room)[comparable]
            plain_ratio[output] = max(plain_ratio[output], float(theirs_ratio.max(initial=0.0)))
    return Verdict(
        case=known.case,
        path=run.path,
        figures=found.figures,
        ratios={
            name: np.concatenate([x.ravel() for x in parts]) if parts else np.zeros(0) for name, parts in spread.items()
        },
        worst_error=error,
        plain_error=plain_error,
        plain_ratio=plain_ratio,
        broken_classes=broken,
        rows_mpmath=rows_mpmath,
        elements_balls=elements_balls,
    )
