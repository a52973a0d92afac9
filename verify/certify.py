"""Certify a package: run the suite on every path that the machine can force and let every judge hear every case.

    python -m verify certify generated/attn_d128_sram192k --device cpu

A case is one set of inputs; it is run on each path of its dtype, and the oracles' answers are shared by the paths.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path as Folder
from types import ModuleType
from typing import Any

import numpy as np

from spec.errors import InvariantError
from verify import devices, judge, judge_backward, packages, suite
from verify.cases import Array, Case
from verify.certificate import Record
from verify.devices import Device, Path
from verify.progress import Step, silent
from verify.verdict import Verdict

# Whole outputs go through balls up to this many visible pairs times head width; larger cases get mpmath rows.
BALLS_WORK = 200 * 300 * 128 * 4
BACKWARD_BALLS_WORK = BALLS_WORK // 16  # of gradients other than float64's, whose only judge of whole outputs they are


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to certify. `only` and `path` narrow a run down to what a violation's message names."""

    seed: int = 0
    per_dtype: int = suite.PER_DTYPE
    only: str | None = None
    path: str | None = None
    balls: bool = True


def command(folder: Folder | str, device: Device, options: Options, case: Case) -> str:
    """The command that makes one case again."""
    return (
        f"python -m verify certify {shlex.quote(str(folder))} {device.asked} --seed {options.seed} "
        f"--cases {options.per_dtype} --only {shlex.quote(case.name)}"
    )


def certify(
    folder: Folder,
    device: Device,
    options: Options | None = None,
    *,
    step: Step = silent,
    attn: ModuleType | None = None,
) -> Record:
    """Judge the package in `folder` on `device`.

    Raises: RequestError when `only` or `path` names nothing; what building the package raises.
    """
    chosen = options or Options()
    module = attn if attn is not None else packages.load(folder)
    record = Record(chosen.seed)
    for case in cases(folder, device, chosen, module):
        how = command(folder, device, chosen, case)
        hear_case(module, case, device, record, how, only_path=chosen.path, with_balls=chosen.balls, seed=chosen.seed)
        step(note=case.name)
    return record


def cases(folder: Folder, device: Device, options: Options, attn: ModuleType) -> list[Case]:
    """The suite for this package on this device, narrowed down by `only`."""
    plan = packages.plan(folder)
    request = plan["request"]
    found: list[Case] = []
    for dtype in devices.dtypes_of(plan, device.name):
        small = suite.smallest(dtype, d=request["d"], dv=request["dv"])
        masks = (small, replace(small, causal="bottom_right"))  # a kernel may be for one of them
        paths = [p for mask in masks for p in device.paths(attn, dtype, mask)]
        paths += device.backward_paths(attn, dtype, small)
        tiles = [(p.br, p.bc) for p in paths]
        found += suite.cases(
            dtype, d=request["d"], dv=request["dv"], tiles=tiles, count=options.per_dtype, seed=options.seed
        )
    return [c for c in found if options.only in (None, c.name)]


def hear_case(
    attn: ModuleType,
    case: Case,
    device: Device,
    record: Record,
    how: str,
    *,
    only_path: str | None = None,
    with_balls: bool = True,
    spec: bool = True,
    rows: int = judge.ROWS,
    compare_plain: bool = True,
    seed: int = 0,
    again_takes_path: bool = True,
) -> None:
    """Run one case twice on its paths (the bits must agree), forward and backward; put the verdicts into `record`.

    again_takes_path: whether the command `how` has the option --path. Other words as `judge.hear` takes them.
    """
    paths = device.paths(attn, case.dtype, case)
    one = _Hearing(device, case, record, how, again_takes_path)
    words: dict[str, Any] = {"spec": spec, "rows": rows, "compare_plain": compare_plain, "seed": seed}
    runs = []
    for path in _chosen(paths, only_path):
        found = one.agreeing(path, partial(_twice, device, partial(device.run, attn, case, path)))
        if found:
            runs.append((path, *found[0]))
    if runs:
        truth = judge.Truth(case, with_balls=with_balls and work(case) <= BALLS_WORK)
        verdicts = one.heard(lambda: judge.hear(case, runs, truth=truth, device=device.name, **words))
        inside = truth.certify_float64() if truth.balls is not None else None
        record.add(verdicts, how, float64_in_balls=inside, again_takes_path=again_takes_path)
    backward_paths = [] if case.do is None else _chosen(device.backward_paths(attn, case.dtype, case), only_path)
    if backward_paths:
        source = judge_backward.forward_source(paths, case)
        if source not in _chosen(paths, only_path):
            runs = [(source, *found) for found in one.agreeing(source, lambda: [device.run(attn, case, source)])]
        read = next((run for run in runs if run[0] == source), None)
        if read is not None:  # else its fault is a violation already
            _hear_gradients(attn, one, read, backward_paths, with_balls, words)


def _hear_gradients(
    attn: ModuleType,
    one: _Hearing,
    read: tuple[Path, Array, Array],
    paths: Sequence[Path],
    with_balls: bool,
    words: dict[str, Any],
) -> None:
    """The backward part of `hear_case`: every path reads the same O and LSE."""
    case, device = one.case, one.device
    given = judge_backward.read_by_kernel(case, *read[1:])
    most = BALLS_WORK if case.dtype == "float64" else BACKWARD_BALLS_WORK
    truth = judge_backward.Truth(case, given, source=read[0], with_balls=with_balls and work(case) <= most)
    runs = []
    for path in paths:
        order = None if path.deterministic else partial(truth.order, path)
        found = one.agreeing(path, partial(device.runs_backward, attn, case, path, given), order)
        runs += [(path, result) for result in (found[:1] if path.deterministic else found)]
    if runs:
        verdicts = one.heard(lambda: judge_backward.hear(case, given, runs, truth=truth, device=device.name, **words))
        inside = truth.certify_float64() if truth.with_balls else None
        one.record.add_backward(verdicts, one.how, float64_in_balls=inside, again_takes_path=one.again_takes_path)


@dataclass(frozen=True)
class _Hearing:
    """One case while it is run and heard; what goes wrong on the way becomes a violation."""

    device: Device
    case: Case
    record: Record
    how: str
    again_takes_path: bool

    def agreeing(
        self, path: Path, run: Callable[[], list[Any]], order: Callable[[Any, Any], float] | None = None
    ) -> list[Any]:
        """The results of the runs that `run` makes, none when one shows a fault. Their bits agree.

        order: err/bound of the difference between two runs, for kernels whose sums come in no fixed order.
        """
        try:
            first, *others = found = run()
        except AssertionError as fault:
            self._violation(path, str(fault))
            return []
        for other in others:
            if all(np.array_equal(x, y, equal_nan=True) for x, y in zip(first, other, strict=True)):
                continue
            if order is None:
                self._violation(path, "two runs differ")
            elif not (ratio := order(first, other)) <= 1:
                self._violation(path, f"two runs differ by {ratio:.3g} times what the order of summation can do")
        return found

    def _violation(self, path: Path, text: str) -> None:
        again = f"\n  again: {self.how}" + (f" --path {path}" if self.again_takes_path else "")
        self.record.violations.append(f"{self.case.name} on {path}: {text}{again}")

    def heard(self, hear: Callable[[], list[Verdict]]) -> list[Verdict]:
        """What `hear` says; nothing when the reference breaks its own invariant."""
        try:
            return hear()
        except InvariantError as error:
            self.record.violations.append(
                f"{self.case.name}: the reference breaks its own invariant: {error}\n  again: {self.how}"
            )
            return []


def _twice(device: Device, run: Callable[[], Any]) -> list[Any]:
    return [run()] if device.compares_runs else [run(), run()]


def _chosen(paths: Sequence[Path], only: str | None) -> list[Path]:
    return [path for path in paths if only in (None, str(path))]


def work(case: Case) -> int:
    """Scores times head width: what balls cost."""
    s = case.sizes
    return s["B"] * s["Hq"] * s["Nq"] * s["Nk"] * max(s["d"], s["dv"])
