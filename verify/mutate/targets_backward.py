"""What can be broken of the backward pass: that of `spec`, and the backward kernels of one unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from codegen.problem import Problem
from verify import arithmetic, packages
from verify.bounds.backward_model import backward_model
from verify.mutate import (
    catalogue_amx_backward,
    catalogue_cpu_backward,
    catalogue_spec_backward,
    probes_backward,
    probes_spec_backward,
    units,
    units_backward,
)
from verify.mutate.judge_backward import BackwardJudge
from verify.mutate.judge_kernel import FORMS
from verify.mutate.mutant import Inapplicable, Mutant
from verify.mutate.targets import Host, Kernels, Spec


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
            models[form] = backward_model(path, lse_roundings=1)  # LSE log2 e in float64, rounded once
        cases = probes_backward.probes(dtype, d=asked.d, dv=asked.dv, br=made.br, bc=made.bc)
        judge = BackwardJudge(models, made.br, made.bc, cases)
        return Host(files, judge, f"{self.isa}/{dtype} Br={made.br} Bc={made.bc}")

    def load(self, files: Mapping[str, bytes], dtype: str, *, debug: bool) -> Any:
        return units_backward.Unit(units_backward.library(files, self.isa), self.isa, dtype, debug=debug)


def vector() -> CpuBackward:
    """The backward vector kernels of the CPU, on the middle instruction set that this machine has."""
    isa = "v3" if units.runs_here("v3") else "baseline"
    seeded = catalogue_cpu_backward
    return CpuBackward("cpu-backward", seeded.MUTANTS, seeded.INAPPLICABLE, "float32", isa)


def matrix() -> CpuBackward:
    """The backward kernel of the CPU's matrix unit."""
    seeded = catalogue_amx_backward
    return CpuBackward("cpu-amx-backward", seeded.MUTANTS, seeded.INAPPLICABLE, "bf16", "amx")
