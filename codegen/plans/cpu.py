"""The CPU target: which kernels a package has, and the files that they are printed to.

Every type gets a vector kernel per instruction set (`cpu_vector.py`), bf16 and fp16 an AMX kernel as well
(`cpu_amx.py`). The gradients: a vector kernel per instruction set and type (`cpu_backward.py`), bf16 an AMX kernel
(`cpu_backward_amx.py`). One translation unit per pass and instruction set, chosen at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codegen.errors import PlanError
from codegen.plan import Change, Decision, Rejection, Variant
from codegen.plans import cpu_amx, cpu_backward, cpu_backward_amx, exp2_coefficients
from codegen.plans.cpu_isa import VECTOR_ISAS, Groups, Isa, Limits
from codegen.plans.cpu_vector import CODE, ELEMENT, KEY_GRANULE, ROW_GRANULE, CpuPlan, plan_vector
from codegen.problem import Problem

AMX_ARITHMETIC = {"bf16": "amx_bf16", "fp16": "amx_fp16_planes"}
AMX_BACKWARD = ("bf16",)  # dtypes; fp16 gradients of a machine with AMX come from its vector kernel

Files = Mapping[str, tuple[str, Mapping[str, Any]]]
Found = tuple[Any, tuple[Change, ...], tuple[Rejection, ...]]  # what the planner of one kernel returns


class _Kernels:
    """The kernels of one pass and how they were found, in the words of Decision."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.variants: list[Variant] = []
        self.changes: dict[str, tuple[Change, ...]] = {}
        self.rejected: dict[str, tuple[Rejection, ...]] = {}

    def add(self, isa: str, dtype: str, arithmetic: str, found: Found) -> None:
        plan, changes, rejected = found
        variant = Variant(target=self.arch, isa=isa, dtype=dtype, arithmetic=arithmetic, plan=plan)
        self.variants.append(variant)
        self.changes |= {variant.key: changes} if changes else {}
        self.rejected |= {variant.key: rejected} if rejected else {}


def decide(problem: Problem, arch: str) -> Decision:
    """Every kernel of the CPU target: per dtype, best instruction set first.

    A tile that only the AMX kernel cannot have turns that kernel down: the vector kernels serve its types.
    Raises: PlanError when an override is illegal for the vector kernels, or nothing fits.
    """
    limits = Limits(fast_memory_bytes=problem.sram_bytes)
    forward = _forward(problem, arch, limits)
    backward = _backward(problem, arch, limits, forward) if problem.backward else _Kernels(arch)
    return Decision(
        arch=arch,
        limit_bytes=limits.fast_memory_bytes,
        limit_reason="--sram, read as the share of the L2 cache that one thread may fill",
        variants=tuple(forward.variants),
        changes=forward.changes,
        rejected=forward.rejected,
        backward=tuple(backward.variants),
        backward_changes=backward.changes,
        backward_rejected=backward.rejected,
    )


def _forward(problem: Problem, arch: str, limits: Limits) -> _Kernels:
    kernels = _Kernels(arch)
    for dtype in problem.dtypes:
        vector = [(isa, plan_vector(problem, dtype, isa, limits)) for isa in VECTOR_ISAS]
        if dtype in AMX_ARITHMETIC:
            try:
                kernels.add("amx", dtype, AMX_ARITHMETIC[dtype], cpu_amx.plan_amx(problem, dtype, limits))
            except PlanError as error:
                br, bc = problem.br or ROW_GRANULE, problem.bc or KEY_GRANULE
                why = str(error).splitlines()[0]
                kernels.rejected[f"amx/{dtype}"] = (Rejection(br=br, bc=bc, why=why),)
        for isa, found in vector:
            kernels.add(isa.name, dtype, isa.arithmetic[found[0].scalar], found)
    return kernels


def _backward(problem: Problem, arch: str, limits: Limits, forward: _Kernels) -> _Kernels:
    """An AMX kernel is there where the forward pass has one: it shares that kernel's tile code."""
    kernels = _Kernels(arch)
    for dtype in problem.dtypes:
        vector = [(isa, cpu_backward.plan_backward(problem, dtype, isa, limits)) for isa in VECTOR_ISAS]
        if dtype in AMX_BACKWARD and any((v.isa, v.dtype) == ("amx", dtype) for v in forward.variants):
            try:
                kernels.add("amx", dtype, AMX_ARITHMETIC[dtype], cpu_backward_amx.plan_backward(problem, limits))
            except PlanError as error:
                smallest = Rejection(br=cpu_amx.PANEL_ROWS, bc=cpu_amx.KEY_GRANULE, why=str(error).splitlines()[0])
                kernels.rejected[f"amx/{dtype}"] = (smallest,)
        for isa, found in vector:
            kernels.add(isa.name, dtype, isa.arithmetic[found[0].scalar], found)
    return kernels


def files(problem: Problem, decision: Decision) -> Files:
    """Every file of the CPU target under csrc/: its template, and the context that this adds to the package's."""
    exp2 = {"float_exp2": exp2_coefficients.FLOAT32, "double_exp2": exp2_coefficients.FLOAT64}
    has = {f"has_{dtype}": dtype in problem.dtypes for dtype in ("float64", "bf16", "fp16")}
    found: dict[str, tuple[str, Mapping[str, Any]]] = {
        "csrc/simd.h": ("cpu/simd.h.j2", {**exp2, **has}),
        "csrc/storage_simd.h": ("cpu/storage_simd.h.j2", has),
        "csrc/block_simd.h": ("cpu/block_simd.h.j2", {}),
        "csrc/forward_simd.h": ("cpu/forward_simd.h.j2", {}),
    }
    for isa in VECTOR_ISAS:
        kernels = [_kernel(v, isa) for v in decision.variants if v.isa == isa.name]
        found[f"csrc/forward_cpu_{isa.name}.cpp"] = ("cpu/forward_cpu_unit.cpp.j2", {"isa": isa, "kernels": kernels})
    amx = tuple(v for v in decision.variants if v.isa == "amx")
    if amx:
        found.update(cpu_amx.files_amx(problem, amx))
    vector = {(v.isa, v.dtype): v.plan for v in decision.backward if isinstance(v.plan, cpu_backward.BackwardPlan)}
    if vector:
        found.update(cpu_backward.files(problem, vector))
    for v in decision.backward:
        if isinstance(v.plan, cpu_backward_amx.AmxBackwardPlan):
            found.update(cpu_backward_amx.files(v.plan))
    return found


def _kernel(variant: Variant, isa: Isa) -> dict[str, Any]:
    """What the unit prints of one kernel."""
    plan = variant.plan
    assert isinstance(plan, CpuPlan)
    sizes = (plan.vectors, 1)
    return {
        "dtype": variant.dtype,
        "code": CODE[variant.dtype],
        "element": ELEMENT[variant.dtype],
        "plan": plan,
        "blocks": [_block(plan, n, isa.groups[n]) for n in sizes],
        "aarch64_blocks": [_block(plan, n, isa.aarch64_groups[n]) for n in sizes] if isa.aarch64_groups else None,
    }


def _block(plan: CpuPlan, vectors: int, groups: Groups) -> str:
    """The C++ type of the block kernel with `vectors` vectors per panel."""
    return f"BlockKernel<{plan.scalar}, {plan.lanes}, {vectors}, {groups.keys}, {groups.columns}>"
