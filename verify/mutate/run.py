"""Break everything, one bug at a time, and report what noticed it."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from codegen.errors import RequestError
from verify import machine
from verify.mutate import isolate, targets, targets_backward, targets_sm90a, units
from verify.mutate.kill import CHECKS, Result
from verify.mutate.mutant import Mutant
from verify.mutate.synchronisation import SUFFIX, Synchronisation, archs
from verify.mutate.synchronisation_backward import BackwardSynchronisation
from verify.progress import Step, silent

TIMEOUT_S = 300.0  # one mutant, compilation included
TARGETS: dict[str, Callable[[], targets.Target]] = {
    "spec": targets.Spec,
    "cpu": targets.vector,
    "cpu-amx": targets.matrix,
    "sm80": targets.sm80,
    "sm90a": targets_sm90a.sm90a,
    "spec-backward": targets_backward.SpecBackward,
    "cpu-backward": targets_backward.vector,
    "cpu-amx-backward": targets_backward.matrix,
    "sm80-backward": targets_backward.sm80,
}
for _arch in archs():
    TARGETS[f"{_arch}{SUFFIX}"] = partial(Synchronisation, _arch)
TARGETS["sm80-backward-sync"] = BackwardSynchronisation


def here() -> list[str]:
    """The targets that this machine can run."""
    return [name for name in TARGETS if not name.startswith("cpu-amx") or units.runs_here("amx")]


def run(
    of: Sequence[str] = (),
    *,
    names: Sequence[str] = (),
    sample: int | None = None,
    jobs: int | None = None,
    step: Step = silent,
) -> dict[str, Any]:
    """Examine the mutants of the targets `of` (none: all that this machine can run).

    Args:
        names: only mutants of these names or catalogue numbers.
        sample: so many mutants per target, the same at every run.
        jobs: mutants at a time; default: one per core.
    Raises:
        RequestError for an unknown target or name; CheckFailed when the unbroken code does not pass;
        ValueError for a mutant that does not fit its text, ToolError for one that does not compile.
    """
    unknown = [name for name in of if name not in TARGETS]
    if unknown:
        raise RequestError(f"--of {unknown[0]}: unknown", f"known: {', '.join(TARGETS)}")
    missing = [name for name in of if name not in here()]
    if missing:
        raise RequestError(f"--of {missing[0]}: this machine cannot run it", f"it can: {', '.join(here())}")
    start, found = time.monotonic(), []
    for name in of or here():
        target = TARGETS[name]()
        chosen = select(target.mutants, names, sample)
        if chosen:
            found.append(examine(target, chosen, jobs=jobs or os.cpu_count() or 1, step=step))
    if not found:
        raise RequestError(f"--name {', '.join(names)}: no mutant is called so", "try --json without --name for a list")
    return {
        "kind": "mutate",
        "device": "cpu",
        "machine": machine.describe("cpu"),
        "seconds": round(time.monotonic() - start, 1),
        "holds": all(one["holds"] for one in found),
        "targets": found,
    }


def select(mutants: Sequence[Mutant], names: Sequence[str], sample: int | None) -> list[Mutant]:
    """The mutants asked for, in the order of the catalogue."""
    chosen = [m for m in mutants if not names or m.name in names or m.number in names]
    if sample is None or sample >= len(chosen):
        return chosen
    lot = sorted(chosen, key=lambda m: hashlib.sha256(m.name.encode()).digest())[:sample]
    return [m for m in chosen if m in lot]


def examine(target: targets.Target, mutants: Sequence[Mutant], *, jobs: int, step: Step = silent) -> dict[str, Any]:
    """Examine some mutants of one target; what its part of the report says."""
    step(0, f"{target.name} as it is")
    facts = target.prepare(mutants)
    results: dict[str, Result] = {}
    for mutant, result in isolate.each(
        mutants,
        target.examine,
        jobs=jobs,
        timeout_s=TIMEOUT_S,
        lost=lambda m, how, seconds: targets.crashed(target.name, m, how, seconds),
    ):
        results[mutant.name] = result
        step(1, f"{target.name} {mutant.name}")
    return stated(target, facts, [results[m.name] for m in mutants])


def stated(target: targets.Target, facts: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """One target's part of the report."""
    by_check = Counter(r.kill.check for r in results if r.kill is not None)
    return {
        "target": target.name,
        **facts,
        "mutants": len(results),
        "killed": sum(r.noticed for r in results),
        "equivalent": sum(r.mutant.equivalent is not None for r in results),
        "by_check": {check: by_check[check] for check in CHECKS if by_check[check]},
        "by_expected_probe": sum(r.kill is not None and r.kill.probe == r.mutant.probe for r in results),
        "wrong": [r.mutant.name for r in results if not r.holds],
        "holds": all(r.holds for r in results),
        "inapplicable": [vars(one) for one in target.inapplicable],
        "results": [r.describe() for r in results],
    }
