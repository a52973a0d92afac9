"""What the counters of a GPU saw of the same calls: bytes through L2 and DRAM, by Nsight Compute (`ncu`).

One run of ncu over `verify.io_driver`, which launches each shape once; ncu replays each of our kernels until it has
all counters, flushing the caches before every pass, so a figure is that of one cold launch.

Nothing is asserted, because a counter does not count what the formula counts:

  * L2 reads and writes of the SMs are in sectors of 32 bytes; key lengths are one sector per warp and not 8 bytes per
    thread. Rows of 16 (mod 32) bytes begin or end inside a sector, and a sector that two loads touch counts for both.
  * L2 reads equal the formula where one block runs, or where blocks share nothing. Else an H200 counts fewer: what
    neighbouring SMs ask for at the same time reaches L2 once. On two shapes ("causal from the top left" and "key
    lengths") it counted up to 1.4 times the formula; we do not know why.
  * DRAM reads are fewer: blocks that run at the same time share K and V in L2, so they lie between compulsory
    traffic and the formula. Small calls also read instructions, parameters and page tables.
  * DRAM writes are fewer, down to nothing: O and LSE stay in L2, a write-back cache, when the kernel ends.
  * All of L2 (`l2_all`) also has what moves between L2 and DRAM, and between the two halves of a large L2.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from codegen.errors import ToolError
from spec import io_kernels
from verify import io_calls, packages
from verify.guarded_problems import Problem
from verify.progress import Step, silent

if TYPE_CHECKING:
    from verify.io import Kernel

ROOT = Path(__file__).resolve().parents[1]
KERNEL = "regex:attention_forward"  # the names of our kernels, and of no other
SECTOR_BYTES = 32
# Our word -> ncu's metric, and what one unit of it is in bytes.
METRICS = {
    "l2_read": ("lts__t_sectors_srcunit_tex_op_read.sum", SECTOR_BYTES),
    "l2_written": ("lts__t_sectors_srcunit_tex_op_write.sum", SECTOR_BYTES),
    "l2_all": ("lts__t_bytes.sum", 1),
    "dram_read": ("dram__bytes_read.sum", 1),
    "dram_written": ("dram__bytes_write.sum", 1),
}
TIMEOUT_S = 240.0
NO_PERMISSION = "ERR_NVGPUCTRPERM"


@dataclass(frozen=True)
class Profiled:
    """One launch: the kernel's name as ncu prints it, and bytes by the words of METRICS."""

    kernel: str
    counted: dict[str, int]


def ncu() -> str | None:
    """ncu on PATH, in the CUDA toolkit, or where its own installer puts it."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    folders = [str(Path(home) / "bin") for home in homes if home]
    folders += [str(folder) for folder in sorted(Path("/opt/nvidia/nsight-compute").glob("*"), reverse=True)]
    return shutil.which("ncu") or shutil.which("ncu", path=os.pathsep.join(folders))


def shapes(kernel: Kernel) -> list[Problem]:
    """What is profiled: the grid, and shapes large enough that a launch fills the GPU and K and V outgrow nothing."""
    return [
        *io_calls.grid(kernel.br, kernel.bc),
        Problem("16 heads, N=4096", 4096, 4096, hq=16, hkv=16),
        Problem("16 heads, N=4096, causal", 4096, 4096, hq=16, hkv=16, causal="bottom_right"),
        Problem("16 heads over 2, N=4096", 4096, 4096, hq=16, hkv=2),
    ]


def counters(kernels: Sequence[Kernel], *, step: Step = silent) -> dict[str, Any]:
    """Profile one dtype of every kernel; {"available": False, "why": ...} where the machine does not let us.

    Raises: ToolError when ncu ran and what it printed cannot be matched to the calls.
    """
    command = ncu()
    if command is None:
        return _unavailable("ncu is not on PATH, in the CUDA toolkit or under /opt/nvidia/nsight-compute")
    calls = [(kernel, problem) for kernel in kernels for problem in shapes(kernel)]
    for kernel in kernels:  # compiled here: the profiler would slow nvcc down and count its time
        packages.part(packages.load(kernel.folder), "build").library("cuda")
    step(note="ncu")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "calls.json"
        file.write_text(json.dumps([
            {"folder": str(kernel.folder.resolve()), "dtype": kernel.dtypes[0], "d": kernel.d, "dv": kernel.dv,
             "shape": io_calls.describe(problem)}
            for kernel, problem in calls
        ]))  # fmt: skip
        words = [
            command, "--csv", "--page", "raw", "--print-units", "base", "--target-processes", "all",
            "--clock-control", "none",  # bytes do not depend on clocks, and the machine's stay as they are
            "--kernel-name", KERNEL, "--metrics", ",".join(metric for metric, _ in METRICS.values()),
            sys.executable, "-m", "verify.io_driver", str(file),
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        try:
            done = subprocess.run(
                words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, errors="replace",
                timeout=TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return _unavailable(f"ncu was not done after {TIMEOUT_S:.0f} s")
    said = done.stdout + done.stderr
    if NO_PERMISSION in said:
        return _unavailable(
            f"this machine does not let us read the GPU's counters ({NO_PERMISSION}): its administrator would have to "
            "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or run the container with CAP_SYS_ADMIN"
        )
    profiled = read(done.stdout)
    if not profiled:
        return _unavailable(f"ncu exited with {done.returncode} and profiled nothing: {_last_lines(said)}")
    if len(profiled) != len(calls):
        raise ToolError(f"ncu profiled {len(profiled)} launches of {len(calls)} calls", _last_lines(said))
    return {
        "available": True,
        "command": " ".join(["ncu", *words[1:-4], "python -m verify.io_driver CALLS.json"]),
        "rows": [describe(*call, launch) for call, launch in zip(calls, profiled, strict=True)],
    }


def describe(kernel: Kernel, problem: Problem, launch: Profiled) -> dict[str, Any]:
    """One launch beside the formula and compulsory traffic, in bytes."""
    call = io_calls.call(problem, d=kernel.d, dv=kernel.dv)
    formula = kernel.formula(call)
    written = kernel.o_itemsize * call.batch * call.hq * call.nq * call.dv
    return {
        "package": kernel.folder.name,
        "shape": problem.name,
        "formula_read": sum(formula.read.values()),
        "formula_written": sum(formula.written.values()),
        "compulsory_read": kernel.itemsize * io_kernels.compulsory(call) - written,
        **launch.counted,
    }


def read(text: str) -> list[Profiled]:
    """The launches in ncu's raw CSV page: a line of names, a line of units, then a line per launch."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    head, _, *rest = csv.reader(line for line in lines[start:] if line.startswith('"'))
    found = []
    for values in rest:
        by_name = dict(zip(head, values, strict=True))
        counted = {
            word: round(float(by_name[metric].replace(",", "")) * unit)
            for word, (metric, unit) in METRICS.items()
            if by_name.get(metric, "") not in ("", "n/a")
        }
        found.append(Profiled(by_name["Kernel Name"], counted))
    return found


def _unavailable(why: str) -> dict[str, Any]:
    return {"available": False, "why": why, "rows": []}


def _last_lines(said: str) -> str:
    return " / ".join(line.strip() for line in said.strip().splitlines()[-4:])


COLUMNS = {
    "L2 read / formula": ("l2_read", "formula_read"),
    "L2 written / formula": ("l2_written", "formula_written"),
    "DRAM read / formula": ("dram_read", "formula_read"),
    "DRAM read / compulsory": ("dram_read", "compulsory_read"),
    "DRAM written / formula": ("dram_written", "formula_written"),
}


def ratios(one: dict[str, Any]) -> list[str]:
    """The ratios of COLUMNS for one launch; "-" where there is nothing to divide or by."""
    return [
        f"{one[above] / one[below]:.3f}" if one.get(above) is not None and one[below] else "-"
        for above, below in COLUMNS.values()
    ]


def tables(figures: dict[str, Any]) -> list[Any]:
    """The counters for a terminal, or why there are none."""
    if not figures["available"]:
        return [f"no counters: {figures['why']}"]
    made = Table(title="hardware counters, bytes (cold caches; explained in verify/io_ncu.py)", title_justify="left")
    for name in ("package", "shape", "formula read", *COLUMNS):
        made.add_column(name, justify="left" if name in ("package", "shape") else "right", overflow="fold")
    for one in figures["rows"]:
        made.add_row(one["package"], one["shape"], f"{one['formula_read']:,}", *ratios(one))
    return [made]
