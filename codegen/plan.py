"""What a planner decides: the words that every target shares.

A target's planner (`codegen/plans/<target>.py`) exports

    decide(problem: Problem, arch: str) -> Decision

and raises PlanError when nothing fits, or when an override (problem.br, problem.bc) is illegal.
A target's own plan class satisfies the protocol `Plan`; templates get it as `plan`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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


CAUSAL_FORMS = ("any", "full", "causal")  # "causal": both alignments


# Length class -> the most query rows (Nq) of a call that belongs to it; None: no limit. In ascending order. A variant
# is for one of these or for "any".
LENGTH_CLASSES: dict[str, int | None] = {"short": 1024, "medium": 4096, "long": None}


def label_of(isa: str, causal: str, length_class: str) -> str:
    """What --explain calls the kernels of one isa: "sm80", "sm90a_causal", "sm90a_full_short"."""
    return "_".join((isa, *(one for one in (causal, length_class) if one != "any")))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel of a package: a row of plan.json and of the dispatch table in op.py."""

    target: str  # "cpu", "sm80", "sm86", ...: the arch asked for
    isa: str  # cpu: "baseline", "v3", "v4", "amx"; CUDA: equal to target
    dtype: str
    causal: str = "any"  # the masks that it takes: one of CAUSAL_FORMS
    length_class: str = "any"  # the query lengths that it takes: "any" or one of LENGTH_CLASSES
    arithmetic: str  # row of verify/calibration that describes its rounding
    plan: Plan
    compiled_as: str | None = None  # a unit of its own: see `with_units`

    @property
    def unit(self) -> str:
        """What its file and its entry point are called after: csrc/forward_<unit>.cu, attention_forward_<unit>."""
        return self.compiled_as or self.isa

    @property
    def key(self) -> str:
        """The key of Decision.changes and Decision.rejected: "amx/bf16", "sm90a_causal/fp16"."""
        return f"{self.label}/{self.dtype}"

    @property
    def label(self) -> str:
        return label_of(self.isa, self.causal, self.length_class)

    @property
    def most_rows(self) -> int | None:
        """The largest Nq that it takes; None: any."""
        return LENGTH_CLASSES.get(self.length_class)

    def takes(self, other: Variant) -> bool:
        """Whether every call that `other` takes is one that this kernel takes."""
        same = (self.target, self.isa, self.dtype) == (other.target, other.isa, other.dtype)
        masks = self.causal in ("any", other.causal)
        return same and masks and (self.most_rows is None or (other.most_rows or math.inf) <= self.most_rows)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The variants of one target, and the story of how they were found."""

    arch: str
    limit_bytes: int  # min(--sram, what the device allows)
    limit_reason: str
    variants: tuple[Variant, ...]  # of those with one isa and dtype, the first that takes a call's mask and length runs
    # keyed like the variants (Variant.key): "amx/bf16" -> changes
    changes: dict[str, tuple[Change, ...]]
    rejected: dict[str, tuple[Rejection, ...]]
    # The kernels of the gradients and their story, keyed in the same way. Empty: none, for this target or this request.
    backward: tuple[Variant, ...] = ()
    backward_changes: dict[str, tuple[Change, ...]] = field(default_factory=dict)
    backward_rejected: dict[str, tuple[Rejection, ...]] = field(default_factory=dict)


def with_units(decision: Decision) -> Decision:
    """The decision of a target whose kernels are compiled one by one: a unit per distinct plan, "sm90a_0" the first."""
    plans = list(dict.fromkeys(v.plan for v in decision.variants))
    return replace(
        decision,
        variants=tuple(replace(v, compiled_as=f"{v.isa}_{plans.index(v.plan)}") for v in decision.variants),
    )


def require_dispatch(variants: Sequence[Variant]) -> None:
    """Raise ValueError, which is a planner's fault, unless every call has a variant and every variant a call.

    Of the variants with one isa and dtype, a call runs the first that takes its mask and its length.
    """
    for i, v in enumerate(variants):
        if v.causal not in CAUSAL_FORMS or v.length_class not in ("any", *LENGTH_CLASSES):
            raise ValueError(f"{v.key}: causal is {v.causal!r}, length_class {v.length_class!r}")
        before = [w for w in variants[:i] if w.takes(v)]
        if before:
            raise ValueError(f"{before[0].key} takes every call of {v.key}, which comes after it")
        for form in CAUSAL_FORMS[1:]:
            if not any(w.takes(replace(v, causal=form, length_class="any")) for w in variants):
                raise ValueError(f"{v.isa}/{v.dtype}: no kernel takes every length of {form} calls")
