"""What a certificate states, and how it is collected from verdicts.

certificate.json lies in the package's folder and names the digest of the content that it was made for. Per device and
path it has, for O, LSE, dQ, dK and dV: cases, the worst err/bound in the eyes of each judge and where, the distribution
of err/bound, the worst absolute error, and the same for the plain formula in the same precision. The judges of a
gradient hear it stage-wise, at the O and LSE that the kernel read; "end_to_end" is its bound against the gradient of
exact attention, from which the absolute errors are counted too.

Holds always: figures of one device replace only that device's; figures for other content are dropped, never mixed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path as Folder
from typing import Any

import numpy as np

from codegen.errors import RequestError
from verify import packages
from verify.cases import Array
from verify.devices import Device, Path
from verify.judge_backward import END_TO_END
from verify.verdict import GRADIENTS, OUTPUTS, Figure, Verdict

FORMAT = "tileproof certificate 1"
FILE = "certificate.json"
QUANTILES = (0.5, 0.9, 0.99, 0.999)
# Bars of the printed distribution of err/bound.
BARS = (1e-4, 1e-3, 1e-2, 0.1, 0.25, 0.5, 0.75, 1.0)


def short(x: float) -> float:
    """Four digits: enough for a figure that people read, and a certificate that stays small."""
    return float(f"{x:.4g}")


class Distribution:
    """err/bound of many elements, kept as counts: 64 bins a decade, so a quantile is known to 3.7 %."""

    DECADES, PER_DECADE = 12, 64

    def __init__(self) -> None:
        self.counts = np.zeros(self.DECADES * self.PER_DECADE + 2, dtype=np.int64)
        self.largest = 0.0

    def add(self, ratios: Array) -> None:
        ratios = ratios.ravel()
        if not ratios.size:
            return
        self.largest = max(self.largest, float(ratios.max()))
        with np.errstate(divide="ignore"):
            place = np.ceil((np.log10(ratios) + self.DECADES) * self.PER_DECADE)
        last = len(self.counts) - 1
        place = np.clip(np.nan_to_num(place, neginf=0, posinf=last), 0, last).astype(np.int64)
        self.counts += np.bincount(place, minlength=last + 1)

    def merged(self, other: Distribution) -> Distribution:
        """Both together."""
        both = Distribution()
        both.counts, both.largest = self.counts + other.counts, max(self.largest, other.largest)
        return both

    @property
    def elements(self) -> int:
        return int(self.counts.sum())

    def quantile(self, q: float) -> float:
        """An upper limit of the q-quantile, within one bin."""
        if not self.elements:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self.counts), math.ceil(q * self.elements)))
        return 0.0 if at == 0 else min(self.largest, 10.0 ** (at / self.PER_DECADE - self.DECADES))

    def bars(self) -> list[int]:
        """Elements at or below each of BARS and above the one before; what is above the last is a violation."""
        edges = [round((math.log10(x) + self.DECADES) * self.PER_DECADE) + 1 for x in BARS]  # bins up to x
        below = np.concatenate([[0], np.cumsum(self.counts)])
        total = [int(below[e]) for e in edges]
        return [total[0], *(b - a for a, b in pairwise(total))]

    def describe(self) -> dict[str, Any]:
        return {
            "elements": self.elements,
            "max": self.largest,
            **{f"q{q:g}": short(self.quantile(q)) for q in QUANTILES},
            "histogram": {"up_to": list(BARS), "elements": self.bars()},
        }


class OutputRecord:
    """One output of one path, over all cases."""

    def __init__(self) -> None:
        self.judges: dict[str, tuple[Figure, str]] = {}
        self.heard: Counter[str] = Counter()
        self.spread = Distribution()
        self.families: dict[str, dict[str, float]] = {}

    def add(self, verdict: Verdict, output: str) -> None:
        figures = [f for f in verdict.figures if f.output == output]
        for figure in figures:
            self.heard[figure.judge] += figure.elements
            before = self.judges.get(figure.judge)
            if before is None or figure.ratio > before[0].ratio:
                self.judges[figure.judge] = (figure, verdict.case.name)
        self.spread.add(verdict.ratios[output])
        family = self.families.setdefault(verdict.case.family, {})
        found = {
            "error": verdict.worst_error[output],
            "plain_error": verdict.plain_error[output],
            "ratio": max((f.ratio for f in figures if f.judge != END_TO_END), default=0.0),
            "plain_ratio": verdict.plain_ratio[output],
        }
        for f in figures:
            if f.judge == END_TO_END:
                found[END_TO_END] = f.ratio
        for key, value in found.items():
            family[key] = max(family.get(key, 0.0), value)

    @property
    def worst(self) -> float:
        """Of the judges; a gradient's bound end to end is another statement."""
        return max((f.ratio for judge, (f, _) in self.judges.items() if judge != END_TO_END), default=0.0)

    def describe(self) -> dict[str, Any]:
        return {
            "max_ratio": self.worst,
            "judges": {
                judge: {
                    "max_ratio": f.ratio,
                    "case": case,
                    "element": list(f.element),
                    "got": f.got,
                    "want": f.want,
                    "bound": f.bound,
                    "elements": self.heard[judge],
                }
                for judge, (f, case) in self.judges.items()
            },
            "distribution": self.spread.describe(),
            "families": {name: {key: short(x) for key, x in row.items()} for name, row in self.families.items()},
        }


class PassRecord:
    """One pass, forward or backward, of one path over all its cases."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cases: Counter[str] = Counter()
        self.masks: Counter[str] = Counter()
        self.rows_mpmath = self.keys_mpmath = 0
        self.unclaimed: Counter[str] = Counter()
        self.outputs: dict[str, OutputRecord] = {}

    def add(self, verdict: Verdict, *, is_first: bool = True) -> None:
        """is_first: not another run of a case that counts already."""
        self.cases[verdict.case.family] += is_first
        self.masks[verdict.case.causal + ("+lengths" if verdict.case.key_lengths is not None else "")] += is_first
        self.rows_mpmath += verdict.rows_mpmath
        self.keys_mpmath += verdict.keys_mpmath
        self.unclaimed.update(f"{statement}: {why}" for statement, why in verdict.unclaimed.items())
        for name in verdict.outputs:
            self.outputs.setdefault(name, OutputRecord()).add(verdict, name)

    def describe(self) -> dict[str, Any]:
        p = self.path
        return {
            "arithmetic": p.arithmetic,
            "br": p.br,
            "bc": p.bc,
            "cases": sum(self.cases.values()),
            "masks": dict(self.masks),
            "rows_mpmath": self.rows_mpmath,
        }


class PathRecord:
    """One path, all that it runs: the outputs of its forward pass, and the gradients of its backward pass."""

    def __init__(self) -> None:
        self.passes: dict[bool, PassRecord] = {}  # is it the backward pass?

    def add(self, verdict: Verdict, *, is_first: bool = True) -> None:
        is_backward = bool(set(verdict.outputs) & set(GRADIENTS))
        if is_backward not in self.passes:
            self.passes[is_backward] = PassRecord(verdict.path)
        self.passes[is_backward].add(verdict, is_first=is_first)

    @property
    def first(self) -> PassRecord:
        """The forward pass, of a path that has one."""
        return self.passes[min(self.passes)]

    @property
    def path(self) -> Path:
        return self.first.path

    @property
    def cases(self) -> Counter[str]:
        return self.first.cases

    @property
    def outputs(self) -> dict[str, OutputRecord]:
        found = {name: x for one in self.passes.values() for name, x in one.outputs.items()}
        return {name: found[name] for name in (*OUTPUTS, *GRADIENTS) if name in found}

    def describe(self) -> dict[str, Any]:
        p, backward = self.path, self.passes.get(True)
        found = {"path": str(p), "isa": p.isa, "dtype": p.dtype, **self.first.describe()}
        if backward is not None:
            found["backward"] = {
                **backward.describe(),
                "keys_mpmath": backward.keys_mpmath,
                "deterministic": backward.path.deterministic,
                "cases_without_a_claim": dict(backward.unclaimed),
            }
        return found | {"outputs": {name: record.describe() for name, record in self.outputs.items()}}


class Record:
    """All verdicts of one device, as they come in."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.paths: dict[str, PathRecord] = {}
        self.families: Counter[str] = Counter()
        self.gradients: Counter[str] = Counter()
        self.violations: list[str] = []
        self.runs = self.backward_runs = 0
        self.float64_in_balls = 0.0
        self.balls = False

    def add(
        self, verdicts: Iterable[Verdict], how: str, *, float64_in_balls: float | None, again_takes_path: bool = True
    ) -> None:
        """Add the verdicts of one case, forward; `how` is the command that makes the case again."""
        heard = list(verdicts)
        if heard:
            self.families[heard[0].case.family] += 1
        self.runs += len(heard)
        self._add(heard, how, float64_in_balls, again_takes_path)

    def add_backward(
        self, verdicts: Iterable[Verdict], how: str, *, float64_in_balls: float | None, again_takes_path: bool = True
    ) -> None:
        """The same for the backward pass of a case."""
        heard = list(verdicts)
        if heard:
            self.gradients[heard[0].case.gradient] += 1
        self.backward_runs += len(heard)
        self._add(heard, how, float64_in_balls, again_takes_path)

    def _add(self, heard: list[Verdict], how: str, float64_in_balls: float | None, again_takes_path: bool) -> None:
        if float64_in_balls is not None:
            self.balls = True
            self.float64_in_balls = max(self.float64_in_balls, float64_in_balls)
            if heard and not float64_in_balls <= 1:
                self.violations.append(
                    f"{heard[0].case.name}: the float64 oracle is outside its own bound ({float64_in_balls:.3g})"
                )
        before: set[str] = set()
        for verdict in heard:
            name = str(verdict.path)
            self.paths.setdefault(name, PathRecord()).add(verdict, is_first=name not in before)
            before.add(name)
            if not verdict.holds:
                again = f"{how} --path {verdict.path}" if again_takes_path else how
                self.violations.append(verdict.message(again))

    @property
    def cases(self) -> int:
        return sum(self.families.values())

    @property
    def backward_cases(self) -> int:
        return sum(self.gradients.values())

    def describe(self, machine: dict[str, Any]) -> dict[str, Any]:
        return {
            "machine": machine,
            "seed": self.seed,
            "holds": not self.violations,
            "violations": len(self.violations),
            "cases": self.cases,
            "runs": self.runs,
            "backward_cases": self.backward_cases,
            "backward_runs": self.backward_runs,
            "families": dict(self.families),
            "gradients": dict(self.gradients),
            "float64_error_over_its_bound": self.float64_in_balls if self.balls else None,
            "judges": ["spec", "mpmath", "float64", *(["balls"] if self.balls else [])],
            "paths": [record.describe() for record in self.paths.values()],
        }


def key(device: Device) -> str:
    """What a certificate calls a device: one entry per target that the emulator runs."""
    return f"{device.name} {device.arch}" if hasattr(device, "arch") else device.name


def stated_devices(folder: Folder) -> dict[str, Any]:
    """What the package's certificate says, by device: nothing where it is of other files than these, or damaged."""
    try:
        before = json.loads((folder / FILE).read_text())
        if before.get("digest") == packages.plan(folder)["digest"] and before.get("format") == FORMAT:
            found = before["devices"].items()
            return {name: x for name, x in found if isinstance(x, dict) and isinstance(x.get("cases"), int)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}


def is_poorer(stated: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether figures without a violation have fewer cases than those before, or lack their debug form.

    Figures are of one run, never put together from two: what is poorer in one thing does not replace what was there.
    """
    lacks_debug_form = "debug_form" in before and "debug_form" not in stated
    return bool(stated["holds"]) and (bool(stated["cases"] < before["cases"]) or lacks_debug_form)


def why_kept(device: str, stated: dict[str, Any], before: dict[str, Any]) -> str:
    """What a run is told whose figures are poorer, and how to have them written all the same."""
    extents = [
        f"{x['cases']} case{'s' * (x['cases'] != 1)}{' and the debug form' * ('debug_form' in x)}"
        for x in (before, stated)
    ]
    hint = "--replace writes these instead"
    if "debug_form" in before and "debug_form" not in stated and stated["cases"] >= before["cases"]:
        hint = f"--debug-form judges that too, {hint}"
    return f"{FILE} keeps its figures on {device}, of {extents[0]}: these are of {extents[1]}; {hint}"


def write(folder: Folder, device: str, stated: dict[str, Any]) -> Folder:
    """Put one device's figures into the package's certificate; returns its path.

    Raises: RequestError when the package's files are not those of its digest; ToolError when it cannot be written.
    """
    plan, file = packages.plan(folder), folder / FILE
    changed = packages.changed(folder)
    if changed:
        raise RequestError(
            f"{folder}: {changed[0]} is not the file that plan.json names, so the package gets no {FILE}",
            "try codegen --check, or emit it again",
        )
    devices = stated_devices(folder)
    devices[device] = stated
    packages.write_json(
        file,
        {"format": FORMAT, "name": plan["name"], "digest": plan["digest"], "devices": dict(sorted(devices.items()))},
    )
    return file
