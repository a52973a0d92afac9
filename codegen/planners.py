"""Which planner serves which target: the one table that a new target adds a row to.

A planner module exports `decide(problem, arch) -> Decision` and `files(problem, decision)` (see `plan.py`
and `package.py`). It is imported only when its target is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from .devices import ARCHS, DEVICES, FEATURE_TARGETS
from .errors import RequestError
from .plan import Decision

# Relative path in the package ("csrc/forward_sm80.cu") -> (template below codegen/templates, its context).
Files = Mapping[str, tuple[str, Mapping[str, Any]]]


class Planner(Protocol):
    """What a module of `codegen/plans/` offers."""

    def decide(self, problem: Any, arch: str) -> Decision: ...

    def files(self, problem: Any, decision: Decision) -> Files: ...


@dataclass(frozen=True)
class Target:
    """One --arch: its planner module and the dtypes that its kernels take."""

    module: str
    dtypes: tuple[str, ...]
    # Another target whose kernels every package with this one carries as well: they take the calls, and the devices,
    # that this target's cannot. It is planned as if it had been asked for alone: --br and --bc are not for it.
    companion: str | None = None
    reads_tables: bool = False  # with --tiling tuned it takes measured plans; other targets keep the paper's rule


_MMA_SYNC = Target("codegen.plans.sm80", ("bf16", "fp16"))

TARGETS: dict[str, Target] = {
    "cpu": Target("codegen.plans.cpu", ("float32", "float64", "bf16", "fp16")),
    "sm80": _MMA_SYNC,
    "sm86": _MMA_SYNC,
    "sm87": _MMA_SYNC,
    "sm89": _MMA_SYNC,
    "sm90": _MMA_SYNC,
    "sm90a": Target("codegen.plans.sm90a", ("bf16", "fp16"), companion="sm80", reads_tables=True),
    "sm120": _MMA_SYNC,
}


def planner(arch: str) -> Planner:
    """The planner module of `arch`.

    Raises: RequestError for a target that we do not know, or know and have no kernel for.
    """
    require(arch)
    return cast(Planner, import_module(TARGETS[arch].module))


def companions(archs: Iterable[str]) -> dict[str, str]:
    """Companion -> the target among `archs` that brings it."""
    return {own: arch for arch in archs if arch in TARGETS and (own := TARGETS[arch].companion) is not None}


def require(arch: str) -> None:
    """Raise RequestError unless `arch` is a target with kernels."""
    if arch in TARGETS:
        return
    today = f"today: {', '.join(a for a in ARCHS if a in TARGETS)}"
    if arch in DEVICES or arch in FEATURE_TARGETS:
        row = FEATURE_TARGETS.get(arch, arch)
        raise RequestError(f"--arch {arch}: known ({DEVICES[row].cards}), but its kernels come later", today)
    near = [name for name in ARCHS if name == arch.lower().replace("_", "")]
    raise RequestError(f"--arch {arch}: no such target", *(f"did you mean {name}?" for name in near), today)
