"""The wgmma kernel as a target of the arithmetic mutants: on the emulator, in one schedule; a finding kills as well.

The kernel's own file and the headers that are parts of it are one text, so that a mutant may be in any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codegen import package as rendered
from codegen.problem import Problem
from verify import packages
from verify.cases import Array, Case
from verify.devices import takes
from verify.emulator import build
from verify.emulator.device import Call
from verify.emulator.emulator import SCHEDULES, Emulator
from verify.mutate import catalogue_sm90a, texts
from verify.mutate.judge_kernel import Judge
from verify.mutate.targets import Emulated, Host


class Wgmma(Emulated):
    """The wgmma kernel of one plan."""

    def problem(self, dtype: str, *, debug: bool) -> Problem:
        tile = {"br": 128, "bc": 32}
        return packages.request(sram="227KB", d=24, dv=40, dtypes=(dtype,), archs=(self.isa,), debug=debug, **tile)

    def host(self, dtype: str) -> Host:
        found = super().host(dtype)
        assert isinstance(found.judge, Judge)
        row = _row(found.files[""], self.isa, dtype)
        found.judge.cases = [case for case in found.judge.cases if takes(row, case)]
        return found

    def load(self, files: Mapping[str, bytes], dtype: str, *, debug: bool) -> Any:
        unit = _unit(_row(files, self.isa, dtype))
        path = f"csrc/forward_{unit}.cu"
        text, includes = texts.flat(files, path), [texts.written(files)]
        emulator = Emulator(build.library(text, includes=includes, flags=build.QUICK, name=path.removeprefix("csrc/")))
        emulator.configure(SCHEDULES[0])

        def run(case: Case) -> tuple[Array, Array]:
            call = Call.of(case, debug=debug, tma=True)
            call.launch(emulator, unit).check()
            return call.result("o"), call.result("lse")

        return run


def _row(files: Mapping[str, bytes], arch: str, dtype: str) -> dict[str, Any]:
    """The kernel's row of plan.json."""
    rows = rendered.read_plan(files[rendered.PLAN_FILE])["variants"]
    return next(dict(row) for row in rows if (row["target"], row["dtype"]) == (arch, dtype))


def _unit(row: Mapping[str, Any]) -> str:
    return str(row.get("unit", row["isa"]))


def sm90a() -> Wgmma:
    """The wgmma kernel, on the emulator."""
    return Wgmma("sm90a", catalogue_sm90a.MUTANTS, catalogue_sm90a.INAPPLICABLE, "bf16", "sm90a")
