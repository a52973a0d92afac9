"""Run every CUDA kernel of a package under compute-sanitizer, and show that each tool finds a fault planted for it.

    python -m verify sanitize generated/attn_d128_sram192k --faults

memcheck: no access outside an allocation, none misaligned. racecheck: no two accesses to shared memory without a
barrier between them, copies by cp.async included. initcheck: nothing read that nobody wrote. synccheck: no barrier
that some threads of a warp miss. The calls are those of `verify.guarded`: outputs poisoned with NaN and between guard
bytes, no caching of memory, ragged, strided, causal and padded shapes.

A clean report proves nothing unless the tool sees such faults in this kernel. So each planted fault is a change of
the emitted text, sealed and built as a package of its own; a change that finds nothing to change is an error.

Holds always: `holds` of the figures says that each of the four tools ran on each package, and on each fault where
faults are planted, to its end and as it should. What was left out, by choice or for lack of time, is in `missing`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from codegen.errors import RequestError, ToolError
from codegen.problem import Problem
from verify import guarded, machine, mutants, packages, processes
from verify.mutate.mutant import Mutant
from verify.progress import Step, silent

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SLOWEST_FIRST = ("racecheck", "initcheck", "memcheck", "synccheck")
TIMEOUT_S = 400.0  # one tool on one package
LEAST_S = 5.0  # with less time left a tool is not started: it takes longer to attach
# The end of what each tool says: all errors, then those left out for --print-limit; hazards, be they called errors or
# warnings.
_SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:error|hazard)")
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fault:
    """A mistake in the emitted kernel that `tool` must report. `arch`: of the package that it is planted in."""

    tool: str
    mutant: Mutant
    arch: str = "sm80"

    def package(self) -> Path:
        """The package with the mistake in it."""
        return mutants.package(self.mutant, host(self.arch))


FAULTS = (
    Fault("memcheck", Mutant(
        "row_bound_dropped", "rows beyond Nq are written to O",
        "row < rows; row += kThreads / kLanes", "row < kBr; row += kThreads / kLanes",
    )),
    Fault("memcheck", Mutant(
        "load_bound_dropped", "rows beyond Nq and Nk are read",
        "const bool exists = r < rows_left && ", "const bool exists = ",
    )),
    Fault("racecheck", Mutant(
        "no_barrier_before_output", "a warp reads rows of O that another has yet to put into shared memory",
        "  __syncthreads();\n  constexpr int kLanes = kPanelDv / 8;", "  constexpr int kLanes = kPanelDv / 8;",
    )),
    Fault("racecheck", Mutant(
        "no_barrier_after_copy", "a warp reads V while others still copy their part of it",
        "    __syncthreads();  // Vj is there; nobody reads Kj any more\n", "",
    )),
    Fault("initcheck", Mutant(
        "last_row_not_written", "the last row of each query tile is left out of O",
        "row < rows; row += kThreads / kLanes", "row < rows - 1; row += kThreads / kLanes",
    )),
    Fault("initcheck", Mutant(
        "length_ignored", "keys beyond the length are read",
        "const int64_t length = p.key_lengths ? ld_global_s64(p.key_lengths + tile.batch) : p.nk;",
        "const int64_t length = p.nk;",
    )),
    Fault("synccheck", Mutant(
        "divergent_barrier", "half of each warp misses a barrier",
        "  __syncthreads();  // nobody reads Q, K or V any more",
        "  if (threadIdx.x % 32 < 16) __syncthreads();",
    )),
)  # fmt: skip

# In the wgmma kernel. racecheck has none: what orders its accesses to shared memory are mbarriers, and without one of
# them the kernel hangs or faults before a hazard is reported; `verify mutate` has those mistakes, on the emulator.
_WGMMA, _OUTPUT = "csrc/forward_sm90a", "csrc/output_sm90a"
WGMMA_FAULTS = (
    Fault("memcheck", Mutant(
        "row_bound_dropped", "rows beyond Nq are written to O",
        "if (row + 8 * h < p.nq && c + 8 * t < kDv) st_global_b128", "if (c + 8 * t < kDv) st_global_b128", _OUTPUT,
    ), "sm90a"),
    Fault("initcheck", Mutant(
        "last_row_not_written", "the last row of O is left out",
        "if (row + 8 * h < p.nq && c + 8 * t < kDv)", "if (row + 8 * h < p.nq - 1 && c + 8 * t < kDv)", _OUTPUT,
    ), "sm90a"),
    Fault("synccheck", Mutant(
        "divergent_barrier", "half of each warp misses a barrier",
        "  __syncthreads();\n  if (warp < 4) {", "  if (threadIdx.x % 32 < 16) __syncthreads();\n  if (warp < 4) {",
        _WGMMA,
    ), "sm90a"),
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What one tool said of one package."""

    tool: str
    package: str
    errors: int | None  # None: the tool came to no end
    calls: int | None  # None: the calls were not all made, or something about their results did not hold; 0: no kernel
    seconds: float
    text: str  # what it said, shortened; empty when clean
    fault: str | None = None  # the planted one

    @property
    def holds(self) -> bool:
        """Clean, or the planted fault was found."""
        return bool(self.errors) if self.fault else self.errors == 0 and bool(self.calls)

    def describe(self) -> dict[str, Any]:
        return {**vars(self), "holds": self.holds}


def host(arch: str = "sm80") -> Problem:
    """The package that faults are planted in: a few small tiles."""
    return packages.request(sram="163KB", d=64, dtypes=("bf16",), archs=(arch,), br=64, bc=32)


def sanitizer(folder: Path) -> str:
    """The compute-sanitizer of PATH or of the CUDA toolkit that the package in `folder` is built with.

    Raises: RequestError when neither has one.
    """
    home = packages.part(packages.load(folder), "toolchain").cuda_toolkit().home
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(home / "bin"))
    if found is None:
        raise RequestError(
            f"compute-sanitizer is neither on PATH nor in {home}/bin",
            "it comes with the CUDA toolkit: install it there",
        )
    return found


def code_for(arch: str) -> str:
    """nvcc's word for machine code for `arch` ("sm_90a") and nothing else.

    `-arch=sm_90a` would make PTX for compute_90 as well (nvcc 13.0), which has no wgmma.
    """
    return f"--generate-code=arch={arch.replace('sm', 'compute')},code={arch}"


def launchers(folder: Path) -> dict[str, Path]:
    """Unit ("forward_sm80", "backward_sm80") -> a library with its C entry point and line numbers, for the GPU here.

    Raises: ToolError when it does not compile.
    """
    attn = packages.load(folder)
    recipe, facts = packages.part(attn, "recipe"), packages.plan(folder)
    nvcc = packages.part(attn, "toolchain").cuda_toolkit().nvcc.command
    import torch

    capability = recipe.capability_of(torch.device("cuda"))
    units = dict.fromkeys(recipe.CUDA_TARGETS, f"sm_{capability}")
    for own, names in getattr(recipe, "EXACT_TARGETS", {}).values():
        units |= {unit: f"sm_{own}a" for unit in names if own == capability}
    made = {}
    for unit, on in units.items():
        command = [*nvcc, "-O3", "-std=c++17", "-lineinfo", code_for(on), "-Xcompiler=-fPIC", "-shared"]
        key = hashlib.sha256("\0".join([facts["digest"], *command]).encode()).hexdigest()[:16]
        for source in sorted((folder / "csrc").glob(f"*ward_{unit}.cu")):  # forward and backward
            library = packages.cache() / "launchers" / f"{source.stem}-{key}.so"
            if not library.exists():
                library.parent.mkdir(parents=True, exist_ok=True)
                beside = library.with_name(f".{library.name}.{os.getpid()}")
                done = subprocess.run([*command, str(source), "-o", str(beside)], capture_output=True, text=True)
                if done.returncode:
                    raise ToolError(f"{source} does not compile: {' '.join(command)}", *done.stderr.splitlines()[:12])
                beside.replace(library)
            made[source.stem] = library
    return made


def build(folder: Path) -> dict[str, Path]:
    """Build the op's CUDA library and the launchers, ahead of any tool."""
    packages.part(packages.load(folder), "build").library("cuda")
    return launchers(folder)


def examine(folder: Path, tool: str, *, fault: str | None = None, timeout_s: float = TIMEOUT_S) -> Report:
    """Run the guarded calls of the package in `folder` under `tool`."""
    words = [f"--launcher={unit}={library}" for unit, library in build(folder).items()]
    command = [sanitizer(folder), "--tool", tool, "--print-limit", "3"]
    command += [sys.executable, "-m", "verify.guarded", str(folder), *words, "--tool", tool]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    start = time.monotonic()
    done = processes.run(command, seconds=timeout_s, env=environment, merged=True)
    text = done.stdout
    if done.returncode == processes.OUT_OF_TIME:
        text += f"\nno end after {timeout_s:.0f} s"
    errors, calls = read(text)
    report = Report(tool, folder.name, errors, calls, round(time.monotonic() - start, 1), "", fault)
    clean = report.errors == 0 and bool(report.calls)
    return report if clean else Report(**{**vars(report), "text": shortened(text)})


def read(text: str) -> tuple[int | None, int | None]:
    """(errors, calls) that the output of a tool states; None for what it does not."""
    summary = _SUMMARY.findall(text)
    calls = re.search(rf"^{guarded.DONE} (\d+)$", text, re.MULTILINE)
    return max(map(int, summary), default=None), (int(calls[1]) if calls else None)


def shortened(text: str, lines: int = 8) -> str:
    """The first lines of what a tool says of the device and the last lines of all.

    Without the host's call stacks, and without the folder that the project lies in.
    """
    text = text.replace(f"{ROOT}/", "")
    stack = re.compile(r"Host Frame|host backtrace|^frame #|^=*\s*$")
    said = [line.removeprefix("=========").rstrip() for line in text.splitlines() if not stack.search(line)]
    return "\n".join(said if len(said) <= 2 * lines else [*said[:lines], "...", *said[-lines:]])


@dataclass(frozen=True)
class Job:
    """One tool on one package; `fault`: the name of the one that is planted in it."""

    folder: Path
    tool: str
    fault: str | None = None

    def describe(self) -> dict[str, Any]:
        return {"tool": self.tool, "package": self.folder.name, "fault": self.fault}


def jobs_of(
    folders: Sequence[Path], *, tools: Sequence[str] = TOOLS, plant: bool = False, faults: Sequence[Fault] = FAULTS
) -> list[Job]:
    """What `tools` have to do, as the figures list it: tool by tool, then the faults."""
    made = [Job(folder, tool) for tool in tools for folder in folders]
    return made + [Job(f.package(), f.tool, f.mutant.name) for f in faults if plant and f.tool in tools]


def by_duration(jobs: Sequence[Job]) -> list[Job]:
    """The slowest tool first, in it the packages of many columns; the faults, in a small package, fill the gaps."""

    def width(job: Job) -> int:
        asked = packages.plan(job.folder)["request"]
        return int(asked["d"]) + int(asked["dv"])

    return sorted(jobs, key=lambda job: (job.fault is not None, SLOWEST_FIRST.index(job.tool), -width(job)))


def run(
    folders: Sequence[Path],
    *,
    tools: Sequence[str] = TOOLS,
    plant: bool = False,
    faults: Sequence[Fault] = FAULTS,
    jobs: int = 4,
    timeout_s: float = TIMEOUT_S,
    seconds: float = float("inf"),
    keep: Callable[[dict[str, Any]], None] = lambda figures: None,
    step: Step = silent,
) -> dict[str, Any]:
    """Every tool on every package, and with `plant` each tool on those of `faults` that it must find; `jobs` at a time.

    Args:
        timeout_s: for one tool on one package.
        seconds: for all of it, builds included; a tool that has not ended by then is stopped, and none is started.
        keep: called with the figures so far after every report.
    Raises: RequestError without a GPU or without compute-sanitizer; what building raises.
    """
    import torch

    deadline = time.monotonic() + seconds
    if not torch.cuda.is_available():
        raise RequestError("sanitize: torch sees no CUDA device here", "run it on a machine with an NVIDIA GPU")
    everything = jobs_of(folders, plant=plant, faults=faults)
    work = [job for job in everything if job.tool in tools]
    sanitizer(work[0].folder)
    about = machine.describe("cuda")
    done: dict[Job, Report] = {}

    def one(job: Job) -> Report | None:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            return None
        return examine(job.folder, job.tool, fault=job.fault, timeout_s=min(timeout_s, left))

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(build, dict.fromkeys(job.folder for job in work)))
        running = {pool.submit(one, job): job for job in by_duration(work)}
        try:
            for future in as_completed(running):
                job, report = running[future], future.result()
                if report is not None:
                    done[job] = report
                    step(note=f"{job.tool} {job.fault or job.folder.name}")
                    keep(figures_of(everything, done, about))
        except BaseException:  # Ctrl-C, or a file that cannot be written: no further tool is started
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return figures_of(everything, done, about)


def figures_of(everything: Sequence[Job], done: dict[Job, Report], about: dict[str, Any]) -> dict[str, Any]:
    """What the reports so far say of all that has to be run."""
    rows = [done[job].describe() for job in everything if job in done]
    missing = [job.describe() for job in everything if job not in done]
    return {
        "kind": "sanitize",
        "device": "cuda",
        "machine": about,
        "environment": "PYTORCH_NO_CUDA_MEMORY_CACHING=1; outputs filled with NaN and between guard bytes",
        "clean": [row for row in rows if row["fault"] is None],
        "planted": [row for row in rows if row["fault"] is not None],
        "missing": missing,
        "holds": bool(rows) and not missing and all(row["holds"] for row in rows),
    }


def did_as_asked(figures: dict[str, Any], tools: Sequence[str]) -> bool:
    """Whether all holds of what `tools` had to do: what a run of some tools can say, where `holds` needs all four."""
    rows = [row for row in (*figures["clean"], *figures["planted"]) if row["tool"] in tools]
    return bool(rows) and all(row["holds"] for row in rows) and not any(m["tool"] in tools for m in figures["missing"])


def table(figures: dict[str, Any]) -> Table:
    """One row per tool and package, then one per planted fault."""
    made = Table(title=f"compute-sanitizer on {figures['machine']['gpu']['model']}", title_justify="left")
    for name in ("tool", "package", "calls", "errors", "seconds", ""):
        made.add_column(name)
    for row in (*figures["clean"], *figures["planted"]):
        good = "found" if row["fault"] else "clean"
        verdict = good if row["holds"] else "[red]does not hold[/]"
        cells = (row["tool"], f"planted: {row['fault']}" if row["fault"] else row["package"])
        made.add_row(*cells, *(str(row[x]) for x in ("calls", "errors", "seconds")), verdict)
    for row in figures["missing"]:
        made.add_row(row["tool"], f"planted: {row['fault']}" if row["fault"] else row["package"], "", "", "", "not run")
    return made
