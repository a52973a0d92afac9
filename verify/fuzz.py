"""Fuzz emitted packages and the reference with the public strategies, every example judged by its bound.

    python -m verify fuzz generated/attn_d128_sram192k --examples 500 --seed 1
    python -m verify fuzz --packages 40 --examples 2000        builds that many packages and spreads the examples

Each example runs on every path that the machine can force. T0 judges the kernels, and T1 (balls) checks on the same
example that T0 is inside its own bound. A failing example is shrunk before it is reported.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path as Folder
from types import ModuleType
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings

from verify import devices, judge, packages, strategies, tiles
from verify.cases import Case
from verify.certificate import Distribution, Record
from verify.certify import hear_case
from verify.compare import ratio
from verify.devices import Device
from verify.oracle import balls, float64
from verify.progress import Step, silent


@dataclass
class Outcome:
    """What fuzzing one target found."""

    name: str
    examples: int = 0
    failure: str | None = None
    first_failure: int | None = None  # number of the example that failed first, before shrinking
    record: Record | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "examples": self.examples, "failure": self.failure}
        found["drawn"] = dict(sorted(self.counts.items()))
        if self.record is not None:
            found["backward_examples"] = self.record.backward_cases
            found["float64_error_over_its_bound"] = self.record.float64_in_balls
            found["paths"] = [
                {
                    "path": str(p.path),
                    "arithmetic": p.path.arithmetic,
                    "br": p.path.br,
                    "bc": p.path.bc,
                    **{name: _without_histogram(output.spread) for name, output in p.outputs.items()},
                }
                for p in self.record.paths.values()
            ]
        return found


def _without_histogram(spread: Distribution) -> dict[str, Any]:
    return {key: value for key, value in spread.describe().items() if key != "histogram"}


def search(
    check: Callable[[strategies.Description], None],
    drawn: hypothesis.strategies.SearchStrategy[strategies.Description],
    *,
    examples: int,
    seed: int,
    shrink: bool = True,
) -> tuple[int, int | None, str | None]:
    """Draw `examples` and call `check` on each: (how many ran, number of the first failure, its shrunk message).

    The same seed draws the same examples. Nothing is read from or written to an example database.
    """
    seen = {"ran": 0, "failed": None}
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @hypothesis.seed(seed)
    @given(drawn)
    def run(description: strategies.Description) -> None:
        if seen["failed"] is None:
            seen["ran"] += 1  # type: ignore[operator]
        try:
            check(description)
        except AssertionError:
            if seen["failed"] is None:
                seen["failed"] = seen["ran"]
            raise

    try:
        run()
    except AssertionError as error:
        return seen["ran"] or 0, seen["failed"], str(error)
    return seen["ran"] or 0, None, None


def fuzz_package(
    folder: Folder,
    device: Device,
    *,
    examples: int,
    seed: int,
    attn: ModuleType | None = None,
    spec: bool = False,
    most: int = 160,
    shrink: bool = True,
    step: Step = silent,
) -> Outcome:
    """Fuzz one package on every path of `device`: no mask, causal both ways, key lengths, all layouts; both passes."""
    module = attn if attn is not None else packages.load(folder)
    plan = packages.plan(folder)
    request = plan["request"]
    rows = [*plan["variants"], *plan.get("backward", [])]
    on_device = [v for v in rows if (v["target"] == "cpu") == (device.name == "cpu")]
    drawn = strategies.descriptions(
        d=request["d"],
        dv=request["dv"],
        dtypes=devices.dtypes_of(plan, device.name),
        br=sorted({v["plan"]["br"] for v in on_device}),
        bc=sorted({v["plan"]["bc"] for v in on_device}),
        gradients=any((v["target"] == "cpu") == (device.name == "cpu") for v in plan.get("backward", [])),
        most=most,
    )
    outcome = Outcome(plan["name"], record=Record(seed))
    found = outcome.record
    assert found is not None

    def check(description: strategies.Description) -> None:
        case = description.case(f"fuzz/{outcome.name}")
        before = len(found.violations)
        how = f"python -m verify fuzz {shlex.quote(str(folder))} {device.asked} --examples {examples} --seed {seed}"
        hear_case(
            module, case, device, found, how,
            spec=spec, rows=0, compare_plain=False, seed=seed, again_takes_path=False,
        )  # fmt: skip
        outcome.counts[f"dtype {case.dtype}"] += 1
        outcome.counts[f"mask {case.causal}{'+lengths' if case.key_lengths is not None else ''}"] += 1
        outcome.counts.update(features(case))
        step()
        if len(found.violations) > before:
            raise AssertionError(found.violations[-1])

    outcome.examples, outcome.first_failure, outcome.failure = search(
        check, drawn, examples=examples, seed=seed, shrink=shrink
    )
    return outcome


def features(case: Case) -> list[str]:
    """What a drawn case has that a kernel may get wrong, for counting."""
    sizes, lengths = case.sizes, case.key_lengths or ()
    return [
        f"layout {case.layout}",
        *(["shared K/V heads"] if sizes["Hq"] > sizes["Hkv"] else []),
        *(["no keys"] if sizes["Nk"] == 0 else []),
        *(["key length 0"] if 0 in lengths else []),
        *([f"gradient {case.gradient.split(',')[0]}"] if case.do is not None else []),
        *(["dLSE"] if case.dlse is not None else []),
        *(["a subset of the gradients"] if case.do is not None and not all(case.wanted) else []),
    ]


@dataclass
class SpecOutcome:
    """What fuzzing the reference found: T0 against `spec`, T1 against T0, over every mask."""

    examples: int = 0
    failure: str | None = None
    first_failure: int | None = None
    spread: dict[str, Distribution] = field(default_factory=lambda: {name: Distribution() for name in judge.OUTPUTS})
    float64_in_balls: float = 0.0
    masks: Counter[str] = field(default_factory=Counter)

    def describe(self) -> dict[str, Any]:
        return {
            "name": "spec.flash2 with its invariant",
            "examples": self.examples,
            "failure": self.failure,
            "masks": dict(self.masks),
            "float64_error_over_its_bound": self.float64_in_balls,
            **{name: spread.describe() for name, spread in self.spread.items()},
        }


Attention = Callable[..., Any]


def fuzz_spec(
    *, examples: int, seed: int, step: Step = silent, reference: Attention = tiles.attention, shrink: bool = True
) -> SpecOutcome:
    """Fuzz the reference over all masks, Br and Bc. `reference` can be a broken one, to see that it is found."""
    outcome = SpecOutcome()
    drawn = strategies.descriptions(
        masks=strategies.SPEC_MASKS, dtypes=("float64", "float32", "bf16", "fp16"), most=120
    )

    def check(one: strategies.Description) -> None:
        q, k, v = one.arrays()
        outcome.masks[one.mask + ("+lengths" if one.lengths is not None else "")] += 1
        for b in range(one.batch):
            visible = one.spec_visible(b)
            head = q[b, 0], k[b, 0], v[b, 0]
            t0 = float64.attention(*head, scale=one.scale_value, visible=visible)
            got = reference(*head, scale=one.scale_value, visible=visible, br=one.br, bc=one.bc)
            t1 = balls.attention(*head, scale=one.scale_value, visible=visible) if balls.AVAILABLE else None
            for name in judge.OUTPUTS:
                own, error = getattr(t0, name), getattr(t0, f"{name}_err")
                if t1 is not None:
                    r = ratio(own, getattr(t1, name), error, want_error=getattr(t1, f"{name}_err"))
                    outcome.float64_in_balls = max(outcome.float64_in_balls, float(r.max(initial=0.0)))
                    assert r.max(initial=0.0) <= 1, f"the float64 oracle is outside its bound on {one}"
                r = ratio(getattr(got, name), own, getattr(got, f"{name}_err"), want_error=error)
                outcome.spread[name].add(np.where(np.isfinite(r), r, 0.0))
                assert r.max(initial=0.0) <= 1, f"{name} of the reference: err/bound {r.max():.3g} on {one}"
        step()

    outcome.examples, outcome.first_failure, outcome.failure = search(
        check, drawn, examples=examples, seed=seed, shrink=shrink
    )
    return outcome


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One package of the fuzzed set."""

    br: int
    bc: int
    d: int
    dv: int
    dtype: str

    def __str__(self) -> str:
        return f"Br={self.br} Bc={self.bc} d={self.d} dv={self.dv} {self.dtype}"


def shapes(count: int, legal: Callable[[Shape], bool], *, seed: int, dtypes: Sequence[str]) -> list[Shape]:
    """`count` distinct shapes that `legal` accepts, dtypes in turn, Br != Bc in at least half of them."""
    rng = np.random.default_rng(seed)
    widths = (64, 128, 32, 16, 24, 40, 8, 80, 256, 136)
    found: list[Shape] = []
    for turn in range(200 * count):
        if len(found) == count:
            break
        d = int(rng.choice(widths))
        dv = d if turn % 3 else int(rng.choice(widths))
        square = len([s for s in found if s.br == s.bc]) < count // 4
        br, bc = (int(rng.choice((16, 24, 32, 48, 64, 96, 128, 192))) for _ in range(2))
        one = Shape(
            br=br, bc=br if square and turn % 4 == 0 else bc, d=d, dv=dv, dtype=dtypes[len(found) % len(dtypes)]
        )
        if one not in found and legal(one):
            found.append(one)
    return found
