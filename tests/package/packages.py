"""Packages for the tests of the package templates: emitted for a planner and kernels of the tests' own.

The kernels are plain loops (`reference_kernel.cpp.j2`), so a whole package compiles in about two seconds and
the tests depend on no real planner. Everything else is what the generator emits.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from codegen import emit, package, planners, problem, render
from codegen.plan import Decision, MemoryPart, Variant

HERE = Path(__file__).parent
ISAS = ("baseline", "v3")
CODES = {"float32": 0, "float64": 1, "bf16": 2, "fp16": 3}


@dataclass(frozen=True)
class Plan:
    """The least that a plan must offer."""

    br: int = 16
    bc: int = 16
    scratch_bytes: int = 4

    @property
    def memory(self) -> tuple[MemoryPart, ...]:
        return (MemoryPart(name="tile", bytes=1024),)

    @property
    def fast_memory_bytes(self) -> int:
        return 1024

    def as_dict(self) -> dict[str, Any]:
        return {"br": self.br, "bc": self.bc}


def decide(request: Any, arch: str) -> Decision:
    """One variant per instruction set and dtype; v3 has no float64, so that units differ in their dtypes.

    Of the gradients v3 has no fp16 either, so that the pass back may run another unit. sm90a has four kernels: short
    calls without a mask and the others, medium calls with one and longer ones; its gradients are sm80's.
    """
    if arch == "sm90a":
        rows = tuple(
            Variant(target=arch, isa=arch, dtype=dtype, causal=causal, length_class=length, arithmetic="reference",
                    plan=Plan(br=br))
            for dtype in request.dtypes if dtype in ("bf16", "fp16")
            for causal, length, br in (
                ("full", "short", 8), ("full", "any", 16), ("causal", "medium", 24), ("causal", "any", 32),
            )
        )  # fmt: skip
        return Decision(
            arch=arch, limit_bytes=request.sram_bytes, limit_reason="--sram", variants=rows, changes={}, rejected={}
        )
    rows = tuple(
        Variant(target=arch, isa=isa, dtype=dtype, arithmetic="reference", plan=Plan())
        for isa in reversed(ISAS if arch == "cpu" else (arch,))
        for dtype in request.dtypes
        if (isa, dtype) != ("v3", "float64") and (arch == "cpu" or dtype in ("bf16", "fp16"))
    )
    backward = tuple(v for v in rows if request.backward and (v.isa, v.dtype) != ("v3", "fp16"))
    return Decision(
        arch=arch, limit_bytes=request.sram_bytes, limit_reason="--sram", variants=rows, changes={}, rejected={},
        backward=backward,
    )  # fmt: skip


def files(request: Any, decision: Decision) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    if decision.arch != "cpu":
        found["csrc/ptx_reference.cuh"] = ("reference/ptx_reference.cuh", {})
        for unit in dict.fromkeys(v.unit for v in decision.variants):
            context = {"unit": unit, "scratch": decision.arch == "sm90a"}
            found[f"csrc/forward_{unit}.cu"] = ("reference/reference_kernel.cu.j2", context)
        for unit in dict.fromkeys(v.unit for v in decision.backward):
            found[f"csrc/backward_{unit}.cu"] = ("reference/reference_backward.cu.j2", {"unit": unit})
        return found
    found["csrc/reference_elements.h"] = ("reference/reference_elements.h", {})
    for isa in ISAS:
        codes = [CODES[v.dtype] for v in decision.variants if v.isa == isa]
        context = {"isa": isa, "codes": codes, "bc": Plan().bc}
        found[f"csrc/forward_cpu_{isa}.cpp"] = ("reference/reference_kernel.cpp.j2", context)
        codes = [CODES[v.dtype] for v in decision.backward if v.isa == isa]
        if codes:
            context = {"isa": isa, "codes": codes}
            found[f"csrc/backward_cpu_{isa}.cpp"] = ("reference/reference_backward.cpp.j2", context)
    return found


def emitted(out: Path, name: str = "attn_test", *, archs: tuple[str, ...] = ("cpu",), **request: Any) -> Path:
    """Emit a package with reference kernels to `out`/<name>; returns its folder."""
    templates = out / ".templates"
    if not templates.exists():
        templates.mkdir(parents=True)
        (templates / "package").symlink_to(render.TEMPLATES / "package")
        (templates / "reference").symlink_to(HERE)
    asked = problem.make(**{"sram_bytes": 192 * 1024, "d": 16, "archs": archs, **request})
    with _own_planner():
        rendered = package.render_package(asked, name, templates)
    return emit.write_files(rendered, out)


@contextmanager
def _own_planner() -> Iterator[None]:
    """Let every target be planned by this module."""
    before = dict(planners.TARGETS)
    sys.modules["tileproof_tests_planner"] = sys.modules[__name__]
    try:
        for arch, target in before.items():
            planners.TARGETS[arch] = replace(target, module="tileproof_tests_planner")
        yield
    finally:
        planners.TARGETS.update(before)
        del sys.modules["tileproof_tests_planner"]


def imported(folder: Path, name: str | None = None) -> ModuleType:
    """Import the package in `folder` afresh, under another name if one is given."""
    name = name or folder.name
    for old in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
        del sys.modules[old]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def python(script: str, *, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script in a process of its own, in `cwd`, with a few variables of the environment changed."""
    return subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
