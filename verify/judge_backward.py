"""Hear every judge on the gradients of one case: is each element of dQ, dK and dV within its proven bound?

Two statements, each with its own bound (verify/bounds/backward_output.py):
  stage-wise   against the exact formula at the O and LSE that the kernel read: what certifies a backward kernel.
  end_to_end   against the gradients of exact attention: what a user gets; wider, because O was rounded before.

Judges of the stage-wise statement, as for the forward pass (verify/judge.py):
  float64   T0, every element of every case.
  balls     T1, at 50 digits, every element, where python-flint is installed.
  mpmath    T2, at 50 digits: dQ of at least ROWS rows, dK and dV of at least ROWS keys of every case.
  spec      FlashAttention-2 backward at the path's own Br and Bc, and its invariant.
float64 kernels answer to balls in place of T0, stage-wise, as in the forward pass. The paths of one case read the same
O and LSE, so that they share the oracles: those of one forward path, another one from case to case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from verify import bounds, judge, plain, special, tiles_backward, verdict
from verify.bounds.backward_domain import outside_backward_domain
from verify.bounds.backward_model import BackwardModel, of_path
from verify.bounds.backward_output import BackwardBound, backward
from verify.cases import Array, Case, representable
from verify.compare import ratio
from verify.devices import Device, Path, torch_device
from verify.oracle import backward_balls, backward_float64, backward_multiprecision, balls
from verify.oracle.backward_reference import Given, Gradients, Problem
from verify.special_backward import ExpectedGradients
from verify.verdict import GRADIENTS, Found, Verdict

ROWS = judge.ROWS
STAGE, END_TO_END = "stage-wise", "end_to_end"
_FORWARD = ("q", "k", "v", "scale", "visible")  # what a forward bound takes of a problem
Triple = tuple[Array, Array, Array]


def model_of(path: Path) -> BackwardModel:
    """The rounding constants of the backward kernel on `path`."""
    return of_path(judge.model_of(path), path.plan)


def read_by_kernel(case: Case, o: Array, lse: Array) -> Given:
    """O and LSE as a backward kernel reads them: a debug form's float32 O is rounded to the dtype before."""
    return representable(o, case.dtype), lse


@dataclass
class _Group:
    """The query heads of one K/V head, stacked, with what the oracles say of them."""

    batch: int
    kv_head: int
    heads: slice
    stage: ExpectedGradients
    exact: ExpectedGradients
    t0: Gradients
    t0_exact: Gradients | None  # where something is said end to end
    t1: Gradients | None = None
    made: dict[Any, tuple[BackwardBound, str | None]] = field(default_factory=dict)
    spec: dict[tuple[int, int], Gradients] = field(default_factory=dict)
    read: bounds.ForwardBound | None = None  # of the forward kernel whose O and LSE are read

    @property
    def count(self) -> int:
        return self.heads.stop - self.heads.start


class Truth:
    """The oracles' answers on the gradients of one case at one O and LSE, shared by every path that read them."""

    def __init__(self, case: Case, given: Given, *, source: Path | None = None, with_balls: bool = True) -> None:
        """
        Args:
            given: (o, lse) that the kernels read, of all heads.
            source: the forward path that they came from; without it nothing is said end to end.
        """
        if case.do is None:
            raise ValueError(f"{case.name} has no gradient of its output")
        self.case, self.source = case, source
        self.with_balls = with_balls and balls.AVAILABLE
        self.groups = [self._group(*one, given) for one in case.groups()]

    def _group(self, batch: int, kv_head: int, heads: slice, given: Given) -> _Group:
        case, count = self.case, heads.stop - heads.start
        assert case.do is not None
        arrays = (stacked(case.q[batch, heads]), case.k[batch, kv_head], case.v[batch, kv_head])
        words: dict[str, Any] = {
            "scale": case.scale,
            "visible": np.tile(case.visible(batch), (count, 1)),
            "dlse": None if case.dlse is None else stacked(case.dlse[batch, heads]),
        }
        do = stacked(case.do[batch, heads])
        read = stacked(given[0][batch, heads]), stacked(given[1][batch, heads])
        stage, exact = (ExpectedGradients.of(Problem.of(*arrays, do, given=g, **words)) for g in (read, None))
        t0 = backward_float64.gradients(*arrays, do, given=read, **words)
        t0_exact = None if self.source is None else backward_float64.gradients(*arrays, do, given=None, **words)
        made = _Group(batch, kv_head, heads, stage, exact, t0, t0_exact)
        if self.with_balls:
            made.t1 = backward_balls.gradients(**_arguments(stage.finite))
        return made

    def bound(self, group: _Group, path: Path) -> tuple[BackwardBound, str | None]:
        """The stage-wise bound, and why it claims nothing (None where it holds)."""
        return self._bound(group, path, group.stage.finite)

    def end_to_end(self, group: _Group, path: Path) -> tuple[BackwardBound, str | None]:
        """The bound against exact attention, with the errors of the forward path that was read."""
        assert self.source is not None
        if group.read is None:
            words = {name: x for name, x in _arguments(group.exact.finite).items() if name in _FORWARD}
            made = judge.model_of(self.source)
            group.read = bounds.forward(**words, model=made, bc=self.source.bc, failure=None)
        return self._bound(group, path, group.exact.finite, read=group.read)

    def _bound(self, group: _Group, path: Path, x: Problem, **more: Any) -> tuple[BackwardBound, str | None]:
        made = model_of(path)
        key = (made, path.br, path.bc, x.given is None)
        if key not in group.made:
            words = _arguments(x) | {"model": made}
            if self.case.dlse is None:
                words["dlse"] = None
            found = backward(**words, br=path.br, bc=path.bc, heads=max(group.count, 1), **more)
            if self._has_query_tiles(path):
                own = words | {"model": replace(made, dq_restarts=False)}
                other = backward(
                    **own, br=path.plan["query_br"], bc=path.plan["query_bc"], heads=max(group.count, 1), **more
                )
                found = replace(found, dq=other.dq, dq_order=other.dq_order)
            group.made[key] = found, outside_backward_domain(**words, bound=found)
        return group.made[key]

    def order(self, path: Path, first: Triple, second: Triple) -> float:
        """How much two runs differ, as a part of what the order in which dQ is summed can do; inf for dK and dV."""
        if not all(np.array_equal(x, y, equal_nan=True) for x, y in zip(first[1:], second[1:], strict=True)):
            return np.inf
        worst = 0.0
        for group in self.groups if first[0].size else ():
            a, b = (stacked(x[0][group.batch, group.heads]) for x in (first, second))
            r = ratio(a, b, self.bound(group, path)[0].dq_order)
            worst = max(worst, float(np.where(np.isnan(group.t0.dq), 0.0, r).max(initial=0.0)))
        return worst

    def _has_query_tiles(self, path: Path) -> bool:
        """Whether dQ comes from the kernel of a plan that owns rows: in a fixed order, and where it alone is wanted."""
        return "query_bc" in path.plan and (path.deterministic or not any(self.case.wanted[1:]))

    def spec(self, group: _Group, path: Path) -> Gradients:
        """The readable reference at the path's tiles."""
        key = (path.br, path.bc)
        if key not in group.spec:
            group.spec[key] = tiles_backward.reference(
                group.stage.finite, heads=group.count, has_dlse=self.case.dlse is not None, br=path.br, bc=path.bc
            )
        return group.spec[key]

    def mpmath(self, group: _Group, rows: Sequence[int], keys: Sequence[int]) -> Gradients:
        return backward_multiprecision.gradients(**_arguments(group.stage.finite), rows=rows, keys=keys)

    def certify_float64(self) -> float:
        """Max |T0 - T1| / (T0's bound + T1's radius): at most 1, or the oracle itself is wrong."""
        worst = 0.0
        for group in self.groups:
            for output in GRADIENTS if group.t1 is not None else ():
                got, want = getattr(group.t0, output), getattr(group.t1, output)
                lost, errors = np.isnan(got), (getattr(t, f"{output}_err") for t in (group.t0, group.t1))
                r = ratio(np.where(lost, want, got), want, sum(errors))
                worst = max(worst, float(r.max(initial=0.0)))
        return worst


def stacked(x: Array) -> Array:
    """(heads, Nq, ...) as (heads Nq, ...)."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _arguments(x: Problem) -> dict[str, Any]:
    """The words that oracles and bounds take."""
    return {name: getattr(x, name) for name in ("q", "k", "v", "do", "scale", "visible", "dlse", "given")}


@dataclass
class _Run:
    """One path's gradients while a case is being heard."""

    path: Path
    outputs: dict[str, Array]  # of the wanted ones, (B, heads, rows or keys, columns)

    def of(self, group: _Group) -> dict[str, Array]:
        found = {}
        for name, x in self.outputs.items():
            found[name] = stacked(x[group.batch, group.heads]) if name == "dq" else x[group.batch, group.kv_head]
        return found


def hear(
    case: Case,
    given: Given,
    runs: Sequence[tuple[Path, Triple]],
    *,
    truth: Truth | None = None,
    spec: bool = True,
    rows: int = ROWS,
    seed: int = 0,
    device: str = "cpu",
    compare_plain: bool = True,
) -> list[Verdict]:
    """Judge the gradients (path, (dq, dk, dv)) of one case; one verdict per run, in order.

    given: (o, lse) that all of them read. rows: how many rows, and keys, mpmath hears at least (0: none).
    A gradient that `case.wanted` leaves out is not looked at.
    """
    known = truth if truth is not None else Truth(case, given)
    wanted = [name for name, asked in zip(GRADIENTS, case.wanted, strict=True) if asked]
    heard = [
        _Run(path, {name: x for name, x in zip(GRADIENTS, found, strict=True) if name in wanted})
        for path, found in runs
    ]
    chosen = _for_mpmath(known, heard, rows, seed)
    exact = [known.mpmath(g, *picked) if any(picked) else None for g, picked in zip(known.groups, chosen, strict=True)]
    beside = plain.gradients(case, device=torch_device(device)) if compare_plain else None
    return [_verdict(known, run, exact, beside, spec) for run in heard]


def check(attn: ModuleType, case: Case, *, on: Device | None = None, spec: bool = False) -> list[Verdict]:
    """Run the backward pass of `case` on every path that this machine can force, and judge each.

    Raises: AssertionError, with the failing element, both values, err/bound and the tile, when one does not hold; and
    what the device raises.
    """
    from verify import devices

    device = on if on is not None else devices.Cpu()
    source = forward_source(device.paths(attn, case.dtype, case), case)
    given = read_by_kernel(case, *device.run(attn, case, source))
    runs = [
        (path, device.run_backward(attn, case, path, given)) for path in device.backward_paths(attn, case.dtype, case)
    ]
    truth = Truth(case, given, source=source)
    verdicts = hear(case, given, runs, truth=truth, spec=spec, device=device.name)
    bad = [v.message() for v in verdicts if not v.holds]
    if bad:
        raise AssertionError("\n".join(bad))
    return verdicts


def forward_source(paths: Sequence[Path], case: Case) -> Path:
    """The forward path whose O and LSE the backward paths of `case` read."""
    return paths[case.seed % len(paths)]


def _for_mpmath(known: Truth, runs: Sequence[_Run], least: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Which rows and which keys of each group T2 hears: tile edges, the worst of T0, then random ones."""
    rows = _picked(known, runs, least, seed, ("dq",))
    keys = _picked(known, runs, least, seed + 1, ("dk", "dv"))
    return list(zip(rows, keys, strict=True))


def _picked(known: Truth, runs: Sequence[_Run], least: int, seed: int, outputs: tuple[str, ...]) -> list[list[int]]:
    names = [name for name in outputs if any(name in run.outputs for run in runs)]
    sizes = [len(getattr(g.t0, outputs[0])) for g in known.groups]
    if least == 0 or not names or not sum(sizes):
        return [[] for _ in sizes]
    if sum(sizes) <= least:
        return [list(range(n)) for n in sizes]
    n, groups = sizes[0], len(sizes)
    score = np.zeros((groups, n))
    edges = {0, n - 1}
    for run in runs:
        size = run.path.br if outputs == ("dq",) else run.path.bc
        edges |= {x for x in (size - 1, size) if x < n}
        for i, group in enumerate(known.groups):
            bound, got = known.bound(group, run.path)[0], run.of(group)
            for name in (name for name in names if name in got):
                want = getattr(group.t0, name)
                room = getattr(bound, name) + getattr(group.t0, f"{name}_err")
                r = np.where(np.isnan(want), 0.0, ratio(np.where(np.isnan(want), 0.0, got[name]), want, room))
                score[i] = np.maximum(score[i], r.max(axis=1, initial=0.0))
    rng = np.random.default_rng([seed, n])
    some = rng.permutation(sorted(edges))[: least // 2]
    picked: set[tuple[int, int]] = {(rng.integers(groups).item(), int(at)) for at in some}
    picked |= {(int(i) // n, int(i) % n) for i in np.argsort(-score, axis=None, kind="stable")[: least // 2]}
    while len(picked) < least:
        picked.add((rng.integers(groups).item(), rng.integers(n).item()))
    return [sorted(at for group, at in picked if group == mine) for mine in range(groups)]


def _verdict(
    known: Truth, run: _Run, exact: Sequence[Gradients | None], beside: plain.PlainGradients | None, spec: bool
) -> Verdict:
    """Every judge on one run."""
    found, broken = Found(), []
    names = tuple(run.outputs)
    spread: dict[str, list[Array]] = {name: [] for name in names}
    error, plain_error, plain_ratio = (dict.fromkeys(names, 0.0) for _ in range(3))
    unclaimed: dict[str, str] = {}
    rows_mpmath = keys_mpmath = elements_balls = 0
    product, wide = model_of(run.path).path.product, run.path.dtype == "float64"
    theirs = None if beside is None else _Run(run.path, {name: getattr(beside, name) for name in names})

    for group, digits in zip(known.groups, exact, strict=True):
        got, where = run.of(group), _places(known.case, group)
        length = None if known.case.key_lengths is None else known.case.key_lengths[group.batch]
        classes = group.stage.classes(group.t0, product, length)
        numbers = {name: special.must_be_number(got[name], classes[name]) for name in names}
        for name in names:
            broken += verdict.broken(got[name], classes[name], name, where[name])

        bound, reason = known.bound(group, run.path)
        if reason is not None:
            unclaimed[STAGE] = reason
        else:
            judges = [] if group.t1 is None else [("balls", group.t1)]
            judges += [] if wide and judges else [("float64", group.t0)]
            judges += [] if digits is None else [("mpmath", digits)]
            judges += [("spec", known.spec(group, run.path))] if spec else []
            for judge_name, truth in judges:
                for name in names:
                    _hear_one(found, judge_name, name, truth, bound, got[name], numbers[name], where[name])
            best = judges[0][1]
            for name in names:
                room = getattr(bound, name) + getattr(best, f"{name}_err")
                spread[name].append(ratio(got[name], getattr(best, name), room)[numbers[name]])
            elements_balls += 0 if group.t1 is None else sum(got[name].size for name in names)
            rows_mpmath += 0 if digits is None else digits.rows.size
            keys_mpmath += 0 if digits is None else digits.keys.size

        if known.source is None or not group.exact.is_finite:
            continue
        bound, reason = known.end_to_end(group, run.path)
        if reason is not None:
            unclaimed[END_TO_END] = reason
            continue
        assert group.t0_exact is not None
        truth = group.t0_exact
        beside_us = None if theirs is None else theirs.of(group)
        for name in names:
            _hear_one(found, END_TO_END, name, truth, bound, got[name], numbers[name], where[name])
            want = getattr(truth, name)
            error[name] = max(error[name], verdict.largest(got[name], want, numbers[name]))
            if beside_us is not None:
                comparable = np.isfinite(beside_us[name])
                plain_error[name] = max(plain_error[name], verdict.largest(beside_us[name], want, comparable))
                r = ratio(beside_us[name], want, getattr(bound, name) + getattr(truth, f"{name}_err"))[comparable]
                plain_ratio[name] = max(plain_ratio[name], float(r.max(initial=0.0)))
    return Verdict(
        case=known.case,
        path=run.path,
        figures=found.figures,
        ratios={name: np.concatenate([np.zeros(0), *(x.ravel() for x in parts)]) for name, parts in spread.items()},
        worst_error=error,
        plain_error=plain_error,
        plain_ratio=plain_ratio,
        broken_classes=broken,
        rows_mpmath=rows_mpmath,
        keys_mpmath=keys_mpmath,
        elements_balls=elements_balls,
        unclaimed=unclaimed,
    )


def _hear_one(
    found: Found,
    judge_name: str,
    output: str,
    truth: Gradients,
    bound: BackwardBound,
    got: Array,
    number: npt.NDArray[np.bool_],
    where: verdict.Where,
) -> None:
    """One judge on one output of a group."""
    at = truth.rows if output == "dq" else truth.keys
    want, mine, heard = getattr(truth, output), got[at], number[at]
    room = getattr(bound, output)[at] + getattr(truth, f"{output}_err")
    r = np.where(heard, ratio(mine, want, room), 0.0)
    found.keep(judge_name, output, r, mine, want, room, lambda i: where((int(at[i[0]]), *i[1:])), int(heard.sum()))


def _places(case: Case, group: _Group) -> dict[str, verdict.Where]:
    """How the elements of a group's results are called: dQ by query head, dK and dV by K/V head."""
    nq, first = max(case.q.shape[2], 1), group.heads.start
    by_key = verdict.at_rows((group.batch, group.kv_head), range(case.k.shape[2]))
    return {
        "dq": lambda at: (group.batch, first + at[0] // nq, at[0] % nq, *at[1:]),
        "dk": by_key,
        "dv": by_key,
    }
