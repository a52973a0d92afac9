"""What can be broken: `spec`, and the kernels of one unit; each builds a mutant and says how it died."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from codegen import package as rendered
from codegen.errors import CheckFailed
from codegen.problem import Problem
from verify import packages
from verify.cases import Array, Case
from verify.devices import Path
from verify.emulator import build
from verify.emulator.device import Call
from verify.emulator.emulator import SCHEDULES, Emulator
from verify.mutate import catalogue_amx, catalogue_cpu, catalogue_sm80, catalogue_spec, probes, probes_spec, units
from verify.mutate.judge_kernel import FORMS, Judge, Run
from verify.mutate.kill import ERROR, Kill, Result
from verify.mutate.mutant import Inapplicable, Mutant
from verify.mutate.reference import copy_of_spec


class Target(Protocol):
    """What the runner asks for."""

    @property
    def name(self) -> str: ...

    @property
    def mutants(self) -> Sequence[Mutant]: ...

    @property
    def inapplicable(self) -> Sequence[Inapplicable]: ...

    def prepare(self, mutants: Iterable[Mutant]) -> dict[str, Any]:
        """Build and hear what is not broken, ahead of these mutants; facts for the report.

        Raises: CheckFailed when the unbroken code does not pass.
        """
        ...

    def examine(self, mutant: Mutant) -> Result:
        """Break it and see. Raises: ValueError when the change does not fit, ToolError when it does not compile."""
        ...


class Spec:
    """`spec`, with a bug anywhere in the package."""

    name = "spec"
    mutants: Sequence[Mutant] = catalogue_spec.MUTANTS
    inapplicable: Sequence[Inapplicable] = catalogue_spec.INAPPLICABLE
    judge: Any = probes_spec  # has probes() and hear(copy, probe)

    def prepare(self, mutants: Iterable[Mutant]) -> dict[str, Any]:
        found = self.judge.probes()
        refuse(self.name, filter(None, (self.judge.hear(None, probe) for probe in found)))
        return {"what": "spec in float64", "probes": len(found)}

    def examine(self, mutant: Mutant) -> Result:
        start, seen = time.monotonic(), 0
        with copy_of_spec(mutant) as copy:
            for probe in sorted(self.judge.probes(), key=lambda p: p.name != mutant.probe):
                seen += 1
                kill = self.judge.hear(copy, probe)
                if kill is not None:
                    return Result(self.name, mutant, kill, seen, time.monotonic() - start)
        return Result(self.name, mutant, None, seen, time.monotonic() - start)


def path_of(stated: Mapping[str, Any], isa: str, dtype: str, *, debug: bool) -> Path:
    """The kernel of a package (its plan.json) on an instruction set or architecture."""
    made = next(v for v in stated["variants"] if isa in (v["isa"], v["target"]) and v["dtype"] == dtype)
    return path_of_variant(made, isa, debug=debug)


def path_of_variant(variant: Mapping[str, Any], isa: str, *, debug: bool) -> Path:
    """The kernel of one row of plan.json."""
    plan = dict(variant["plan"])
    return Path(
        device="cpu", isa=isa, unit=isa, dtype=variant["dtype"], arithmetic=variant["arithmetic"], br=plan["br"],
        bc=plan["bc"], plan=plan, debug=debug,
    )  # fmt: skip


class Jury(Protocol):
    """The judge of one kernel: `judge_kernel.Judge`, or that of another pass."""

    @property
    def cases(self) -> Sequence[Any]: ...

    def prepare(self, runs: dict[str, Any]) -> list[Kill]: ...

    def hear_all(self, runs: dict[str, Any], first: str | None) -> Iterator[tuple[Kill | None, str]]: ...


@dataclass
class Host:
    """The package that mutants of one dtype live in: its text by form, and the judge of its kernel."""

    files: dict[str, dict[str, bytes]]
    judge: Jury
    what: str  # unit and tile, for the report


@dataclass
class Kernels:
    """The kernels of one instruction set or architecture; subclasses say how they are built."""

    name: str
    mutants: Sequence[Mutant]
    inapplicable: Sequence[Inapplicable]
    dtype: str  # of a mutant that does not choose
    isa: str
    hosts: dict[str, Host] = field(default_factory=dict)

    def problem(self, dtype: str, *, debug: bool) -> Problem:
        """The package: small tiles with Br != Bc, d != dv, neither a power of two."""
        raise NotImplementedError

    def load(self, files: Mapping[str, bytes], dtype: str, *, debug: bool) -> Any:
        """Build a text: a function of a case. Raises: ToolError when it does not compile."""
        raise NotImplementedError

    def host(self, dtype: str) -> Host:
        """What the mutants of one dtype live in."""
        files = {form: rendered.render_package(self.problem(dtype, debug=form == "debug")) for form in FORMS}
        paths = {form: self._path(files[form], dtype, form) for form in FORMS}
        asked, path = self.problem(dtype, debug=False), paths[""]
        cases = probes.probes(dtype, d=asked.d, dv=asked.dv, br=path.br, bc=path.bc)
        return Host(files, Judge(paths, cases), f"{path.isa}/{dtype} Br={path.br} Bc={path.bc}")

    def prepare(self, mutants: Iterable[Mutant]) -> dict[str, Any]:
        for dtype in dict.fromkeys(m.dtype or self.dtype for m in mutants):
            host = self.hosts[dtype] = self.host(dtype)
            runs = {form: self.load(host.files[form], dtype, debug=form == "debug") for form in FORMS}
            refuse(f"{self.name} {dtype}", host.judge.prepare(runs))
        what = ", ".join(host.what for host in self.hosts.values())
        return {"what": what, "probes": max((len(h.judge.cases) for h in self.hosts.values()), default=0)}

    def _path(self, files: Mapping[str, bytes], dtype: str, form: str) -> Path:
        return path_of(rendered.read_plan(files[rendered.PLAN_FILE]), self.isa, dtype, debug=form == "debug")

    def examine(self, mutant: Mutant) -> Result:
        start, seen, form = time.monotonic(), 0, ""
        dtype = mutant.dtype or self.dtype
        host, runs = self.hosts[dtype], _Lazy(self, mutant, dtype)
        for kill, form in host.judge.hear_all(runs.forms(host), mutant.probe):
            seen += 1
            if kill is not None:
                return Result(self.name, mutant, kill, seen, time.monotonic() - start, form)
        return Result(self.name, mutant, None, seen, time.monotonic() - start, form)


class _Lazy:
    """The mutated kernel in each form, compiled when it is first called: most mutants never meet the debug form."""

    def __init__(self, target: Kernels, mutant: Mutant, dtype: str) -> None:
        self.target, self.mutant, self.dtype = target, mutant, dtype
        self.loaded: dict[str, Run] = {}

    def forms(self, host: Host) -> dict[str, Run]:
        """Form -> a kernel. In a form whose text lacks what the mutant changes, the kernel is the unbroken one."""
        changed = {"": self.mutant.changed(host.files[""])}
        try:
            changed["debug"] = self.mutant.changed(host.files["debug"])
        except ValueError:
            changed["debug"] = host.files["debug"]
        return {form: self._runner(form, files) for form, files in changed.items()}

    def _runner(self, form: str, files: Mapping[str, bytes]) -> Run:
        def run(case: Any) -> Any:
            if form not in self.loaded:
                self.loaded[form] = self.target.load(files, self.dtype, debug=form == "debug")
            return self.loaded[form](case)

        return run


class Cpu(Kernels):
    """A unit of the CPU: compiled alone, for one dtype, and called directly."""

    def problem(self, dtype: str, *, debug: bool) -> Problem:
        tile = {"br": 64, "bc": 32} if self.isa == "amx" else {"br": 32, "bc": 16}
        return packages.request(sram="192KB", d=24, dv=40, dtypes=(dtype,), archs=("cpu",), debug=debug, **tile)

    def load(self, files: Mapping[str, bytes], dtype: str, *, debug: bool) -> Run:
        return units.Unit(units.library(files, self.isa), self.isa, dtype, debug=debug)


class Emulated(Kernels):
    """A CUDA kernel, run by the emulator in one schedule; a finding kills as well."""

    def problem(self, dtype: str, *, debug: bool) -> Problem:
        return packages.request(
            sram="163KB", d=24, dv=40, dtypes=(dtype,), archs=(self.isa,), br=64, bc=32, debug=debug
        )

    def load(self, files: Mapping[str, bytes], dtype: str, *, debug: bool) -> Run:
        text = files[f"csrc/forward_{self.isa}.cu"].decode()
        includes = [packages.emit(self.problem(dtype, debug=debug)) / "csrc"]
        emulator = Emulator(build.library(text, includes=includes, flags=build.QUICK, name=f"forward_{self.isa}.cu"))
        emulator.configure(SCHEDULES[0])

        def run(case: Case) -> tuple[Array, Array]:
            call = Call.of(case, debug=debug)
            call.launch(emulator, self.isa).check()
            return call.result("o"), call.result("lse")

        return run


def vector() -> Cpu:
    """The vector kernels of the CPU, on the middle instruction set that this machine has."""
    isa = "v3" if units.runs_here("v3") else "baseline"
    return Cpu("cpu", catalogue_cpu.MUTANTS, catalogue_cpu.INAPPLICABLE, "float32", isa)


def matrix() -> Cpu:
    """The kernels of the CPU's matrix unit."""
    return Cpu("cpu-amx", catalogue_amx.MUTANTS, catalogue_amx.INAPPLICABLE, "bf16", "amx")


def sm80() -> Emulated:
    """The mma.sync kernel, on the emulator."""
    return Emulated("sm80", catalogue_sm80.MUTANTS, catalogue_sm80.INAPPLICABLE, "bf16", "sm80")


def refuse(name: str, wrong: Iterable[Kill]) -> None:
    """Raises: CheckFailed when something is wrong with what is not broken."""
    found = [f"{kill.probe}: {kill.message}" for kill in wrong]
    if found:
        raise CheckFailed(f"{name} does not pass the probes as it is", *found[:5])


def crashed(target: str, mutant: Mutant, how: str, seconds: float) -> Result:
    """The result of a mutant that took its process with it."""
    return Result(target, mutant, Kill(ERROR, mutant.probe or "", None, how), 0, seconds)
