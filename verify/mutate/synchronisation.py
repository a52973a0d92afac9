"""The target of the synchronisation mutants of one CUDA template: each has to be reported by the emulator's checker.

A wrong result does not count: on hardware a missing wait mostly gives the right one. The mutants are read off the
emitted texts of a few packages (`sync.py`), run over a few shapes in every schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path as Folder
from typing import Any

from codegen import package as rendered
from codegen import planners
from codegen.devices import DEVICES
from codegen.errors import CheckFailed
from codegen.plans.sm90a import COUNTER_FROM
from verify import packages
from verify.cases import Case
from verify.devices import takes
from verify.emulator import build
from verify.emulator.device import Call
from verify.emulator.emulator import SCHEDULES, Emulator, Run
from verify.inputs import FAMILIES
from verify.mutate import sync, texts
from verify.mutate.judge_kernel import Judge
from verify.mutate.kill import ERROR, FINDING, Kill, Result
from verify.mutate.mutant import Inapplicable, Mutant
from verify.mutate.targets import Jury, path_of_variant
from verify.suite import Shape, case

SUFFIX = "-sync"

# The packages whose texts are mutated, by target: between them every branch of the template. Words of packages.request.
HOSTS: dict[str, tuple[dict[str, Any], ...]] = {
    "sm80": (
        {"d": 64, "br": 64, "bc": 32},  # the next K is copied before the softmax
        {"d": 128, "br": 64, "bc": 64},  # after it
        {"d": 16, "dv": 128, "br": 64, "bc": 32},  # O is larger than Q and K together, and takes the place of V too
    ),
}
_ANY: tuple[dict[str, Any], ...] = ({"d": 64}, {"d": 128})  # of a target that is not listed
# Query tiles of one more case, for a template that schedules long causal problems by another branch.
MANY_TILES = {"sm90a": COUNTER_FROM + 1}

_O_IN_PLACE_OF_Q = (
    "where dv = d, O takes the place of Q alone, which was last read before the barrier after Q K^T; "
    "with d = 16, dv = 128 the same statement is reported"
)
# Target, package, statement and edit -> why nothing reports it. Checked: such a mutant must not be reported.
EXPLAINED: dict[str, str] = {
    **{f"sm80 {host} kernel: __syncthreads 3 is left out": _O_IN_PLACE_OF_Q for host in ("d=64 64x32", "d=128 64x64")},
    **{
        f"sm90a {host} kernel: setmaxnreg_inc 1 is left out": "ptxas then gives the consumers the registers of the "
        "launch: spills, which `verify ptxas` reports, and no wrong result"
        for host in ("d=64 64x256", "d=128 128x176")
    },
    "sm90a d=64 64x256 load_values: fence_proxy_async 1 is left out": "P is in shared memory here, and the consumers' "
    "fence for it stands between their wait for V and the product: it orders these stores as well; with P in registers "
    "(d = 128) the same statement is reported",
    "sm90a d=64 64x256 kernel: setmaxnreg_dec 1 is left out": "one consumer warpgroup: the registers of the block are "
    "enough for it even if the producer keeps its own",
    **{
        f"sm90a d=128 128x176 {statement} is left out": "turns keep the consumers out of each other's way on the "
        "matrix units: they order no data"
        for statement in ("consume.take_turn: bar_sync 1", "consume: take_turn 2")
    },
}


def archs() -> list[str]:
    """One target per CUDA template."""
    by_module: dict[str, str] = {}
    for arch, target in planners.TARGETS.items():
        if arch != "cpu":
            by_module.setdefault(target.module, arch)
    return list(by_module.values())


Ran = tuple[Run, Callable[[], Kill | None]]  # what the checker saw; what is wrong with the results


@dataclass(frozen=True)
class Host:
    """One kernel of a package: its texts, the folder with the rest of what it includes, the judge of its results."""

    label: str
    path: str  # of the kernel's file
    files: Mapping[str, bytes]  # of the package
    includes: Folder
    judge: Jury
    call: Callable[[Emulator, Any], Ran]  # of one case of the judge


class Synchronisation:
    """All synchronisation mutants of one target."""

    inapplicable: Sequence[Inapplicable] = ()
    explained: Mapping[str, str] = EXPLAINED

    def __init__(self, arch: str) -> None:
        self.arch, self.name = arch, f"{arch}{SUFFIX}"

    @cached_property
    def hosts(self) -> list[Host]:
        made = []
        for words in HOSTS.get(self.arch, _ANY):
            folder = packages.emit(sram="227KB", dtypes=("bf16",), archs=(self.arch,), **words)
            files = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
            d, dv = words["d"], words.get("dv", words["d"])
            units: dict[str, list[dict[str, Any]]] = {}
            for row in rendered.read_plan(files[rendered.PLAN_FILE])["variants"]:
                if row["target"] == self.arch:
                    units.setdefault(row.get("unit", row["isa"]), []).append(row)
            for unit, rows in units.items():
                path = path_of_variant(rows[0], unit, debug=False)
                asked = _cases(d=d, dv=dv, br=path.br, bc=path.bc, many=MANY_TILES.get(self.arch))
                cases = [c for c in asked if any(takes(row, c) for row in rows)]
                label = f"d={d}{f' dv={dv}' if dv != d else ''} {path.br}x{path.bc}"
                if len(units) > 1:
                    label += f" {unit.removeprefix(f'{self.arch}_')}"
                judge = Judge({"": path}, cases)
                call = partial(self._forward, unit, judge)
                made.append(Host(label, f"csrc/forward_{unit}.cu", files, folder / "csrc", judge, call))
        return made

    def _forward(self, unit: str, judge: Judge, emulator: Emulator, one: Case) -> Ran:
        call = Call.of(one, tma=self.arch in DEVICES and DEVICES[self.arch].is_exact)
        run = call.launch(emulator, unit)
        return run, lambda: judge.hear(one, "", call.result("o"), call.result("lse"))

    @cached_property
    def mutants(self) -> Sequence[Mutant]:
        return [
            replace(m, name=name, equivalent=self.explained.get(f"{self.arch} {name}"))
            for host in self.hosts
            for part in texts.parts(host.files, host.path)
            for m in sync.statements(part, host.files[part].decode())
            for name in (f"{host.label} {_place(host, part, m.name)}",)
        ]

    def prepare(self, mutants: Iterable[Mutant]) -> dict[str, Any]:
        for host in self.hosts:
            host.judge.prepare({})
            kill, _ = self._notice(host, host.files)
            if kill is not None:
                raise CheckFailed(f"{self.name} {host.label} is not clean as it is", f"{kill.probe}: {kill.message}")
        cases = max(len(host.judge.cases) for host in self.hosts)
        schedules = ", ".join(schedule.name for schedule in SCHEDULES)
        return {"what": f"{', '.join(h.label for h in self.hosts)}; {schedules}", "probes": cases * len(SCHEDULES)}

    def examine(self, mutant: Mutant) -> Result:
        start = time.monotonic()
        host = next(h for h in self.hosts if mutant.name.startswith(f"{h.label} "))
        kill, seen = self._notice(host, mutant.changed(host.files))
        return Result(self.name, mutant, kill, seen, time.monotonic() - start, wants=FINDING)

    def _notice(self, host: Host, files: Mapping[str, bytes]) -> tuple[Kill | None, int]:
        """The first finding of any run, else the first wrong result; and the number of runs."""
        text, name = texts.flat(files, host.path), host.path.removeprefix("csrc/")
        emulator = Emulator(build.library(text, includes=[host.includes], name=name))
        wrong, runs = None, 0
        for schedule in SCHEDULES:
            emulator.configure(schedule)
            for one in host.judge.cases:
                run, hear = host.call(emulator, one)
                runs += 1
                where = f"{one.name}, {schedule.name}"
                if run.findings:
                    return Kill(FINDING, where, None, run.findings[0].sentence), runs
                if run.code:
                    return Kill(ERROR, where, None, f"the launch returned CUDA error {run.code}"), runs
                wrong = wrong or hear()
        return wrong, runs


def _place(host: Host, part: str, name: str) -> str:
    """The name of a mutant in one part of a host: "kernel" is the kernel of the host's own file."""
    return name if part == host.path else name.replace("kernel", Folder(part).stem, 1)


def _cases(*, d: int, dv: int, br: int, bc: int, many: int | None) -> list[Case]:
    """More than one tile each way, with edges; whole tiles; key lengths, one of them 0; one key; `many` query tiles."""
    shapes = {
        "causal": Shape(nq=br + 9, nk=3 * bc + 5, hq=2, hkv=1, causal="bottom_right"),
        "whole tiles": Shape(nq=2 * br, nk=2 * bc),
        "key lengths": Shape(nq=9, nk=2 * bc + 3, b=3, lengths=(0.0, 1.0, 0.4)),
        "one key": Shape(nq=1, nk=1),
    }
    if many:
        shapes["many tiles"] = Shape(nq=(many - 1) * br + 1, nk=bc + 1, causal="top_left")
    family = FAMILIES["gaussian"]
    return [case(family, shape, name, dtype="bf16", d=d, dv=dv, seed=1) for name, shape in shapes.items()]
