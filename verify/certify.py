"""Certify a package: run the suite on every path that the machine can force and let every judge hear every case.

    python -m verify certify generated/attn_d128_sram192k --device cpu

A case is one set of inputs; it is run on each path of its dtype, and the oracles' answers are shared by the paths.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path as Folder
from types import ModuleType

import numpy as np

from spec.errors import InvariantError
from verify import devices, judge, packages, suite
from verify.cases import Array, Case
from verify.certificate import Record
from verify.devices import Device, Path
from verify.progress import Step, silent

# Whole outputs go through balls up to this many visible pairs times head width; larger cases get mpmath rows.
BALLS_WORK = 200 * 300 * 128 * 4


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
        tiles = [(p.br, p.bc) for mask in masks for p in device.paths(attn, dtype, mask)]
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
    """Run one case twice on its paths (the bits must agree) and put the verdicts into `record`.

    again_takes_path: whether the command `how` has the option --path. Other words as `judge.hear` takes them.
    """
    paths: Sequence[Path] = [p for p in device.paths(attn, case.dtype, case) if only_path in (None, str(p))]
    runs: list[tuple[Path, Array, Array]] = []
    for path in paths:
        again = f"\n  again: {how}" + (f" --path {path}" if again_takes_path else "")
        try:
            first = device.run(attn, case, path)
            second = first if device.compares_runs else device.run(attn, case, path)
        except AssertionError as fault:
            record.violations.append(f"{case.name} on {path}: {fault}{again}")
            continue
        if not all(np.array_equal(x, y, equal_nan=True) for x, y in zip(first, second, strict=True)):
            record.violations.append(f"{case.name} on {path}: two runs differ{again}")
        runs.append((path, *first))
    if not runs:
        return
    truth = judge.Truth(case, with_balls=with_balls and work(case) <= BALLS_WORK)
    try:
        verdicts = judge.hear(
            case, runs, truth=truth, spec=spec, rows=rows, seed=seed, device=device.name, compare_plain=compare_plain
        )
    except InvariantError as error:
        record.violations.append(f"{case.name}: the reference breaks its own invariant: {error}\n  again: {how}")
        return
    inside = truth.certify_float64() if truth.balls is not None else None
    record.add(verdicts, how, float64_in_balls=inside, again_takes_path=again_takes_path)


def work(case: Case) -> int:
    """Scores times head width: what balls cost."""
    s = case.sizes
    return s["B"] * s["Hq"] * s["Nq"] * s["Nk"] * max(s["d"], s["dv"])
