"""The fuzz command: one package, a set of packages built for it, the reference over all masks, and seeded mutants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from typing import Any

from rich.table import Table

from codegen import package as rendered
from codegen.errors import PlanError, RequestError
from verify import fuzz, mutants, packages
from verify.certificate import BARS, Distribution
from verify.devices import Device
from verify.progress import Step, silent
from verify.verdict import GRADIENTS, OUTPUTS

SRAM = "2MB"  # room for every tile of the set: the set varies tiles, not budgets
WITHIN = 300  # examples in which a mutant must be found


@dataclass
class Report:
    """All that one fuzz command found."""

    device: str
    seed: int
    machine: dict[str, Any]
    packages: list[tuple[str, fuzz.Outcome]] = field(default_factory=list)
    spec: fuzz.SpecOutcome | None = None
    mutants: list[mutants.Hunt] = field(default_factory=list)

    @property
    def examples(self) -> int:
        return sum(outcome.examples for _, outcome in self.packages)

    def failures(self) -> list[str]:
        """What did not hold, one text each."""
        found = [o.failure for _, o in self.packages if o.failure]
        found += [self.spec.failure] if self.spec is not None and self.spec.failure else []
        found += [f"mutant {h.name} ({h.what}) survived {h.examples} examples" for h in self.mutants if not h.found]
        return found

    def describe(self) -> dict[str, Any]:
        tiles = [o.record.paths for _, o in self.packages if o.record is not None]
        shapes = {
            (p.path.dtype, p.path.br, p.path.bc, name)
            for paths, (name, _) in zip(tiles, self.packages, strict=False)
            for p in paths.values()
        }
        return {
            "kind": "fuzz",
            "device": self.device,
            "machine": self.machine,
            "seed": self.seed,
            "examples": self.examples,
            "backward_examples": sum(o.record.backward_cases for _, o in self.packages if o.record is not None),
            "violations": len([o for _, o in self.packages if o.failure]),
            "packages": len(self.packages),
            "kernels": len(shapes),
            "packages_with_br_other_than_bc": sum(
                any(p.path.br != p.path.bc for p in paths.values()) for paths in tiles
            ),
            "paths": self._by_path(),
            "spec": self.spec.describe() if self.spec is not None else None,
            "mutants": [h.describe() for h in self.mutants],
            "per_package": [{"package": name, **o.describe()} for name, o in self.packages],
        }

    def _by_path(self) -> list[dict[str, Any]]:
        """The distribution of err/bound per path over all packages."""
        records = [p for _, o in self.packages if o.record is not None for p in o.record.paths.values()]
        found = []
        for name, group in groupby(sorted(records, key=lambda r: str(r.path)), key=lambda r: str(r.path)):
            members = list(group)
            row: dict[str, Any] = {
                "path": name,
                "packages": len(members),
                "cases": sum(sum(m.cases.values()) for m in members),
            }
            for output in (*OUTPUTS, *GRADIENTS):
                spreads = [m.outputs[output].spread for m in members if output in m.outputs]
                if spreads:
                    row[output] = reduce(Distribution.merged, spreads).describe()
            found.append(row)
        return found


def run(
    package: str | None,
    where: Device,
    *,
    examples: int,
    packages_wanted: int,
    mutants_wanted: bool,
    spec_examples: int,
    seed: int,
    step: Step = silent,
) -> Report:
    """Fuzz on the device `where` as the command's options say."""
    report = Report(where.name, seed, where.describe())
    if package is not None:
        folder = packages.find(package)
        report.packages.append((folder.name, fuzz.fuzz_package(folder, where, examples=examples, seed=seed, step=step)))
    if packages_wanted:
        fuzz_set(report, where, packages_wanted, examples=examples, seed=seed, step=step)
    if spec_examples:
        step(0, "reference")
        report.spec = fuzz.fuzz_spec(examples=spec_examples, seed=seed, step=step)
    if mutants_wanted:
        report.mutants = mutants.hunt_all(where, examples=WITHIN, seed=seed, step=step)
    report.machine |= {key: value for key, value in where.describe().items() if key == "emulator"}  # what ran on it
    return report


def fuzz_set(report: Report, where: Device, count: int, *, examples: int, seed: int, step: Step = silent) -> None:
    """Build `count` packages of one dtype and tile each, and spread the examples over them.

    Raises: RequestError when the planner accepts fewer than `count` of the shapes tried.
    """
    arch = "cpu" if where.name == "cpu" else getattr(where, "arch", "sm80")
    dtypes = ("float32", "bf16", "fp16", "float64") if arch == "cpu" else ("bf16", "fp16")
    chosen = fuzz.shapes(count, lambda s: legal(s, arch), seed=seed, dtypes=dtypes)
    if len(chosen) < count:
        raise RequestError(f"--packages {count}: only {len(chosen)} of the shapes tried are legal", "try fewer")
    for number, shape in enumerate(chosen):
        step(0, f"building {shape}")
        folder = packages.emit(_request(shape, arch))
        share = examples // count + (number < examples % count)
        outcome = fuzz.fuzz_package(folder, where, examples=max(1, share), seed=seed + number, step=step)
        report.packages.append((str(shape), outcome))


def _request(shape: fuzz.Shape, arch: str) -> Any:
    return packages.request(
        sram=SRAM if arch == "cpu" else "227KB", d=shape.d, dv=shape.dv, dtypes=(shape.dtype,), archs=(arch,),
        br=shape.br, bc=shape.bc,
    )  # fmt: skip


def legal(shape: fuzz.Shape, arch: str) -> bool:
    """Whether the planner takes this tile for every path of the target."""
    try:
        rendered.decide(_request(shape, arch))
    except PlanError:
        return False
    return True


def tables(figures: dict[str, Any]) -> list[Table]:
    """The distribution of err/bound per path, then the mutants."""
    made = []
    if figures["paths"]:
        title = (
            f"{figures['examples']} examples, {figures['backward_examples']} of them backward too, "
            f"{figures['packages']} packages, {figures['violations']} violations"
        )
        made.append(_distribution(title, [(row["path"], row) for row in figures["paths"]]))
    if figures["spec"]:
        made.append(_distribution(f"reference, {figures['spec']['examples']} examples", [("spec", figures["spec"])]))
    if figures["mutants"]:
        found = Table(title=f"mutants, found within {WITHIN} examples", title_justify="left")
        for name in ("mutant", "of", "found after", "what"):
            found.add_column(name)
        for row in figures["mutants"]:
            found.add_row(row["name"], row["of"], str(row["first_failure"] or "NOT FOUND"), row["what"])
        made.append(found)
    return made


def _distribution(title: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    made = Table(
        title=title, title_justify="left", caption="elements by err/bound, in per cent", caption_justify="left"
    )
    for name in ("path", "output", "elements", "max", *(f"<= {x:g}" for x in BARS)):
        made.add_column(name, justify="right")
    for path, row in rows:
        for output in (name for name in (*OUTPUTS, *GRADIENTS) if name in row):
            d = row[output]
            shares = (f"{100 * n / max(1, d['elements']):.4g}" for n in d["histogram"]["elements"])
            made.add_row(path, output, str(d["elements"]), f"{d['max']:.3f}", *shares)
    return made
