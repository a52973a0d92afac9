"""What a planner decides: the words that every target shares.

A target's planner (`codegen/plans/<target>.py`) exports

    decide(problem: Problem, arch: str) -> Decision

and raises PlanError when nothing fits, or when an override (problem.br, problem.bc) is illegal.
A target's own plan class satisfies the protocol `Plan`; templates get it as `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """One named piece of the fast memory that the kernel really allocates."""

    name: str  # "Q tile", "K stages", ...
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Change:
    """One step from the paper's tile to the legal plan."""

    what: str  # "Bc 192 -> 96"
    why: str  # "S and O accumulators need 270 registers per thread, 255 exist"


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A candidate that was turned down, with its one reason."""

    br: int
    bc: int
    why: str


class Plan(Protocol):
    """What every target's plan offers. All `_bytes` are bytes; other sizes count elements."""

    @property
    def br(self) -> int:
        """Query rows per tile."""
        ...

    @property
    def bc(self) -> int:
        """Keys per tile."""
        ...

    @property
    def memory(self) -> tuple[MemoryPart, ...]: ...

    @property
    def fast_memory_bytes(self) -> int: ...

    def as_dict(self) -> dict[str, Any]:
        """Every figure of the plan, JSON types only: goes into plan.json, `--explain --json`, attn.path()."""
        ...


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel of a package: a row of plan.json and of the dispatch table in op.py."""

    target: str  # "cpu", "sm80", "sm86", ...: the arch asked for
    isa: str  # cpu: "baseline", "v3", "v4", "amx"; CUDA: equal to target
    dtype: str
    causal: str = "any"  # "any", "full", "causal"
    length_class: str = "any"
    arithmetic: str  # row of verify/calibration that describes its rounding
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The variants of one target, and the story of how they were found."""

    arch: str
    limit_bytes: int  # min(--sram, what the device allows)
    limit_reason: str
    variants: tuple[Variant, ...]
    # keyed like the variants: "amx/bf16" -> changes
    changes: dict[str, tuple[Change, ...]]
    rejected: dict[str, tuple[Rejection, ...]]
