"""Compiles one mma.sync kernel with nvcc and reads what ptxas says of it: shared by the sweep and the tests."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from codegen import problem, render
from codegen.plans import sm80
from codegen.plans.sm80 import Sm80Plan

ARCHS = ("sm_80", "sm_90")  # the first target of the kernel and the card that it is timed on


@dataclass(frozen=True)
class Report:
    """What ptxas says of one kernel. `spilled_bytes` counts stack, stores and loads."""

    spilled_bytes: int
    registers: int
    static_shared_bytes: int


def nvcc() -> str | None:
    """The nvcc of PATH or of the usual folder; None without one."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def ptxas() -> str | None:
    """The ptxas that belongs to `nvcc`."""
    command = nvcc()
    if command is None:
        return None
    steps = subprocess.run([command, "--dryrun", "-cubin", "-x", "cu", "/dev/null"], capture_output=True, text=True)
    home = re.search(r"^#\$ TOP=(.*)$", steps.stderr, re.MULTILINE)
    inside = shutil.which("ptxas", path=str(Path(home[1]) / "bin")) if home else None
    return inside or shutil.which("ptxas")


def write(folder: Path, plan: Sm80Plan, dtypes: tuple[str, ...] = ("bf16",), *, debug: bool = False) -> Path:
    """The kernel of `plan` and its headers, written to `folder`; also of a plan that the planner would not make."""
    asked = problem.make(sram_bytes=2**20, d=plan.d, dv=plan.dv, dtypes=dtypes, archs=["sm80"], debug=debug)
    context = {**sm80.context(asked, plan, "sm80", dtypes), "problem": asked, "header": ["A kernel of the test suite."]}
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "forward_sm80.cu"
    source.write_bytes(render.render("sm80/forward_sm80.cu.j2", context))
    (folder / "forward.h").write_bytes(render.render("package/csrc/forward.h.j2", context))
    (folder / "ptx_sm80.cuh").write_bytes(render.render("sm80/ptx_sm80.cuh", {}))
    return source


def to_ptx(source: Path) -> Path:
    """The PTX of a kernel for sm_80; every newer architecture takes it."""
    command = nvcc()
    assert command is not None
    ptx = source.with_suffix(".ptx")
    subprocess.run([command, "-std=c++17", "-O3", "-arch=compute_80", "-ptx", str(source), "-o", str(ptx)], check=True)
    return ptx


def assemble(ptx: Path, arch: str, cubin: Path | None = None) -> list[Report]:
    """What ptxas says of each kernel in `ptx`."""
    command = ptxas()
    assert command is not None
    line = [command, "-v", "-O3", f"-arch={arch}", str(ptx), "-o", str(cubin or "/dev/null")]
    said = subprocess.run(line, check=True, capture_output=True, text=True).stderr
    reports = [
        Report(sum(map(int, spills)), int(registers), int(shared or 0))
        for *spills, registers, shared in re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s+"
            r"ptxas info\s*: Used (\d+) registers(?:.*?, (\d+) bytes smem)?",
            said,
        )
    ]
    assert reports, said
    return reports
