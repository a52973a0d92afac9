"""The mma.sync backward unit at the gate of `verify.ptxas`: its kernels, and the shared memory that it asks for.

A unit holds six entry functions per dtype: `prepare` and `key_tiles` with and without dQ, `finish_dq`, `query_tiles`.
Its two large kernels have a plan each, so the text states two numbers of bytes; every launch passes through `start`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from codegen import problem, render
from codegen.plans import sm80_backward
from codegen.plans.sm80_backward import Sm80BackwardPlan
from verify.ptxas_output import Limits, device_of

KERNELS = 6  # per dtype
CONSTANTS = ("kSharedBytes", "kQuerySharedBytes")
HEADERS = {
    "forward.h": "package/csrc/forward.h.j2",
    "backward.h": "package/csrc/backward.h.j2",
    "ptx_sm80.cuh": "sm80/ptx_sm80.cuh",
}


def is_backward(source: Path) -> bool:
    return source.name.startswith("backward_")


def limits(plan: Mapping[str, Any], d: int, dv: int) -> Limits:
    """What a plan promises, as plan.json has it. Threads: of the larger block, which has the fewer registers."""
    what = f"{plan['br']} x {plan['bc']} and {plan['query_br']} x {plan['query_bc']}, d={d}, dv={dv}"
    return Limits(
        threads=max(plan["threads"], 32 * plan["query_warps"]), shared_bytes=plan["fast_memory_bytes"], plan=what
    )


def text_of(source: Path) -> str:
    """The unit's text with that of its own headers, where the numbers stand."""
    arch = source.stem.removeprefix("backward_")
    parts = [source.with_name(f"backward_{part}_{arch}.cuh") for part in sm80_backward.PARTS]
    return "".join(one.read_text() for one in (source, *parts))


def shared_memory(text: str, allowed: Limits, archs: Sequence[str]) -> list[str]:
    """Findings about the dynamic shared memory: both numbers stated once, the larger the plan's, and launched."""
    found, stated = [], {}
    for name in CONSTANTS:
        numbers = re.findall(rf"\bconstexpr int {name} = (\d+);", text)
        if len(numbers) != 1:
            found.append(f"shared memory: {name} is stated {len(numbers)} times")
        stated[name] = max(map(int, numbers), default=0)
    if max(stated.values()) != allowed.shared_bytes:
        found.append(f"shared memory: {stated}, the plan has {allowed.shared_bytes} bytes")
    for kernel, name in (("key_tiles<", "kSharedBytes"), ("query_tiles<", "kQuerySharedBytes")):
        launches = re.findall(rf"start\((?:c\.sums \? )?{kernel}[^;]*;", text)
        if not launches or any(name not in one for one in launches):
            found.append(f"shared memory: {kernel}> is not launched with {name}")
    if text.count("cudaLaunchKernelEx") != 1 or ".dynamicSmemBytes = shared_bytes;" not in text:
        found.append("shared memory: a launch does not pass through start")
    for arch in archs:
        most = device_of(arch).smem_per_block_bytes
        if allowed.shared_bytes > most:
            found.append(f"shared memory: the plan has {allowed.shared_bytes} bytes, a block on {arch} at most {most}")
    return found


def write(folder: Path, plan: Sm80BackwardPlan, dtypes: Sequence[str], *, debug: bool = False) -> Path:
    """Write the unit of one plan to `folder`; also of a plan that no request leads to. Returns its source."""
    keys = plan.keys
    asked = problem.make(sram_bytes=2**20, d=keys.d, dv=keys.dv, dtypes=dtypes, archs=["sm80"], debug=debug)
    shared = {"problem": asked, "header": ["One plan."], "exact": []}
    files = sm80_backward.files(asked, {("sm80", dtype): plan for dtype in dtypes})
    folder.mkdir(parents=True, exist_ok=True)
    for path, (template, context) in files.items():
        (folder / Path(path).name).write_bytes(render.render(template, {**shared, **context}))
    for name, template in HEADERS.items():
        (folder / name).write_bytes(render.render(template, shared))
    return folder / "backward_sm80.cu"
