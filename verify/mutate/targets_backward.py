"""What can be broken of the backward pass: that of `spec`, and the backward kernels of one unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from codegen.problem import Problem
from verify import arithmetic, packages
from verify.bounds.backward_model import of_path
from verify.emulator import build
from verify.emulator.emulator import SCHEDULES, Emulator
from verify.mutate import (
    catalogue_amx_backward,
    catalogue_cpu_backward,
    catalogue_sm80_backward,
    catalogue_spec_backward,
    emulated_backward,
    probes_backward,
    probes_spec_backward,
    texts,
    units,
    units_backward,
)
from verify.mutate.judge_backward import Answer, BackwardJudge
from verify.mutate.judge_kernel import FORMS
from verify.mutate.mutant import Inapplicable, Mutant
from verify.mutate.probes_backward import BackwardProbe
from verify.mutate.targets import Host, Kernels, Spec

# Two stages, and P shared among the warps of a key tile, as in the plans of most packages.
SM80_KEYS = {"br": 32, "bc": 64, "warps": 4, "row_warps": 2, "stages": 2}
SM80_QUERY = {"br": 64, "bc": 32, "row_tiles": 1, "stages": 2}
# Rows that see keys, all with a score of -inf, and whose dO is NaN: the matrix unit multiplies it by a weight of 0.
SM80_NOT_ASKED = ("scores of -inf",)


class SpecBackward(Spec):
    """The gradients of `spec`."""

    name = "spec-backward"
    mutants: Sequence[Mutant] = catalogue_spec_backward.MUTANTS
    inapplicable: Sequence[Inapplicable] = catalogue_spec_backward.INAPPLICABLE
    judge: Any = probes_spec_backward


class CpuBackward(Kernels):
    """A backward unit of the CPU: compiled alone, for one dtype, and called directly."""

    def problem(self, dtype: str, *, debug: bool) -> Problem:
        return packages.request(sram="2MB", d=24, dv=40, dtypes=(dtype,), archs=("cpu",), debug=debug)

    def plan(self, dtype: str) -> units_backward.Plan:
        """Small tiles with Br != Bc, neither a power of two: the sizes are those of `problem`."""
        tile = {"br": 96, "bc": 64} if self.isa == "amx" else {"br": 48, "bc": 16}
        asked = self.problem(dtype, debug=False)
        return units_backward.plan(self.isa, dtype, d=asked.d, dv=asked.dv, **tile)

    def host(self, dtype: str) -> Host:
        made, asked = self.plan(dtype), self.problem(dtype, debug=False)
        files, models = {}, {}
        for form in FORMS:
            is_debug = form == "debug"
            files[form] = units_backward.files(self.problem(dtype, debug=is_debug), self.isa, dtype, made)
            path = arithmetic.model(
                units_backward.arithmetic_of(self.isa, made), dtype, debug=is_debug, device=self.isa, **made.as_dict()
            )
            models[form] = of_path(path, {})
        cases = probes_backward.probes(dtype, d=asked.d, dv=asked.dv, br=made.br, bc=made.bc)
        judge = BackwardJudge(models, made.br, made.bc, cases)
        return Host(files, judge, f"{self.isa}/{dtype} Br={made.br} Bc={made.bc}")

    def load(self, files: Mapping[str, bytes], dtype: str, *, debug: bool) -> Any:
        return units_backward.Unit(units_backward.library(files, self.isa), self.isa, dtype, debug=debug)


class EmulatedBackward(Kernels):
    """The mma.sync backward kernels, run by the emulator in one schedule; a finding kills as well.

    Every probe is heard twice: with dQ summed in memory, and with sums in a fixed order, which is another kernel.
    """

    def problem(self, dtype: str, *, debug: bool) -> Problem:
        return packages.request(sram="163KB", d=24, dv=40, dtypes=(dtype,), archs=(self.isa,), debug=debug)

    def host(self, dtype: str) -> Host:
        asked = self.problem(dtype, debug=False)
        made = emulated_backward.plan(asked.d, asked.dv, keys=SM80_KEYS, query=SM80_QUERY)
        files, models = {}, {}
        for form in FORMS:
            is_debug = form == "debug"
            files[form] = emulated_backward.files(self.problem(dtype, debug=is_debug), dtype, made)
            path = arithmetic.model(emulated_backward.ARITHMETIC, dtype, debug=is_debug)
            models[form] = of_path(path, {"dq_restarts": False})
        found = probes_backward.probes(dtype, d=asked.d, dv=asked.dv, br=made.br, bc=made.bc)
        found = [p for p in found if p.name not in SM80_NOT_ASKED]
        judge = BackwardJudge(models, made.br, made.bc, probes_backward.both_ways(found), sums_anywhere=True)
        return Host(files, judge, f"{self.isa}/{dtype} Br={made.br} Bc={made.bc}")

    def load(self, files: Mapping[str, bytes], dtype: str, *, debug: bool) -> Any:
        path = emulated_backward.PATH
        text, includes = texts.flat(files, path), [texts.written(files)]
        emulator = Emulator(build.library(text, includes=includes, flags=build.QUICK, name=path.removeprefix("csrc/")))
        emulator.configure(SCHEDULES[0])

        def run(probe: BackwardProbe) -> Answer:
            done, call = emulated_backward.launch(emulator, probe, debug=debug)
            done.check()
            return emulated_backward.answer(call)

        return run


def vector() -> CpuBackward:
    """The backward vector kernels of the CPU, on the middle instruction set that this machine has."""
    isa = "v3" if units.runs_here("v3") else "baseline"
    seeded = catalogue_cpu_backward
    return CpuBackward("cpu-backward", seeded.MUTANTS, seeded.INAPPLICABLE, "float32", isa)


def matrix() -> CpuBackward:
    """The backward kernel of the CPU's matrix unit."""
    seeded = catalogue_amx_backward
    return CpuBackward("cpu-amx-backward", seeded.MUTANTS, seeded.INAPPLICABLE, "bf16", "amx")


def sm80() -> EmulatedBackward:
    """The mma.sync backward kernels, on the emulator."""
    seeded = catalogue_sm80_backward
    return EmulatedBackward("sm80-backward", seeded.MUTANTS, seeded.INAPPLICABLE, "bf16", emulated_backward.ARCH)
