"""The gate for what only ptxas knows: spills, serialised matrix instructions, and shared memory beside the plan's.

    python -m verify ptxas generated/attn_d128_sram192k
    python -m verify ptxas --plans --out verify/results/ptxas_sm80.json

Needs nvcc, not a GPU. Every CUDA unit of a package is compiled for its targets with the flags of the package's own
build and `-Xptxas -v`. `--plans` adds the border of the planner's register rule (`codegen/plans/registers_sm80.py`):
the tiles that were accepted with nothing to spare. A finding of any kind fails; registers used and allowed are
recorded, and with cuobjdump the counts of the instructions that matter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from codegen import problem, render
from codegen.errors import RequestError, ToolError
from codegen.plans import registers_sm80, sm80
from codegen.plans.sm80 import Sm80Plan
from codegen.plans.sm80_backward import Sm80BackwardPlan
from verify import machine, packages, ptxas_backward, ptxas_output
from verify.progress import Step, silent
from verify.ptxas_output import Kernel, Limits

# A unit's target -> the architectures that it is compiled for: the first that it is planned for, and sm_90 for the
# mma.sync kernel because that is the card it is timed on. A target that is not here is compiled for itself.
ARCHS: dict[str, tuple[str, ...]] = {"sm80": ("sm_80", "sm_90")}
FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fPIC,-Wall", "-Xptxas=-v")
TABLE = Path(registers_sm80.__file__).with_suffix(".json")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One .cu file of a package, or of a plan that no package has."""

    name: str  # how reports call it
    source: Path
    archs: tuple[str, ...]
    limits: Limits
    least_kernels: int  # entry functions per architecture: one per dtype at least
    launched: bool = True  # must fit the shared memory of its first architecture; False: a plan for ptxas alone


@dataclass
class Verdict:
    """What was found out about a unit."""

    unit: Unit
    kernels: list[Kernel] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)  # of the unit as a whole

    @property
    def all_findings(self) -> list[str]:
        """Every finding, each naming its kernel."""
        return self.findings + [f"{k.name} for {k.arch}: {text}" for k in self.kernels for text in k.findings]

    def describe(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "unit": self.unit.name,
            "plan": self.unit.limits.plan,
            "threads": self.unit.limits.threads,
            "shared_bytes": self.unit.limits.shared_bytes,
            "findings": self.findings,
            "kernels": [kernel.describe() for kernel in self.kernels],
        }


@dataclass(frozen=True)
class Tools:
    """The compiler, and the disassembler where there is one."""

    nvcc: str
    version: str
    cuobjdump: str | None


def tools() -> Tools:
    """nvcc as a package's own build finds it: under CUDA_HOME or CUDA_PATH, on PATH, in /usr/local/cuda.

    Raises: RequestError without one.
    """
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name, "").strip()]
    found = next(filter(None, (shutil.which("nvcc", path=str(home)) for home in homes)), None)
    found = found or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        raise RequestError(
            "ptxas: no nvcc here: it is not on PATH, and neither CUDA_HOME nor /usr/local/cuda has one",
            "install a CUDA toolkit; it needs no GPU",
        )
    said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"V([0-9.]+)", said)
    return Tools(found, release[1] if release else "unknown", _cuobjdump(Path(found).parent))


def _cuobjdump(beside: Path) -> str | None:
    """On PATH, beside nvcc, or in triton, which torch brings along."""
    folders = [str(beside), "/usr/local/cuda/bin"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=os.pathsep.join(folders))


def has_cuda(folder: Path) -> bool:
    """Whether the package has a CUDA unit."""
    return any(row["target"] != "cpu" for row in packages.plan(folder)["variants"])


def units_of(folder: Path) -> list[Unit]:
    """Every CUDA unit of a package.

    Raises: RequestError when it has none, or when a .cu file belongs to no target of the plan.
    """
    plan = packages.plan(folder)
    found = []
    for path in sorted(p for p in plan["files"] if p.endswith(".cu")):
        unit = Path(path).stem.split("_", 1)[-1]
        backward = ptxas_backward.is_backward(Path(path))
        kernels = plan.get("backward", ()) if backward else plan["variants"]
        rows = [variant for variant in kernels if variant.get("unit", variant["target"]) == unit]
        if not rows:
            raise RequestError(f"{folder.name}/{path}: plan.json has no variant for target {unit!r}")
        target, tile = rows[0]["target"], rows[0]["plan"]
        found.append(Unit(
            name=f"{folder.name}/{Path(path).name}",
            source=folder / path,
            archs=ARCHS.get(target, (target.replace("sm", "sm_"),)),
            limits=ptxas_backward.limits(tile, plan["request"]["d"], plan["request"]["dv"]) if backward else Limits(
                threads=tile["threads"],
                shared_bytes=max(row["fast_memory_bytes"] for row in rows),
                plan=f"{tile['br']} x {tile['bc']}, d={plan['request']['d']}, dv={plan['request']['dv']}",
            ),
            least_kernels=len({row["dtype"] for row in rows}) * (ptxas_backward.KERNELS if backward else 1),
        ))  # fmt: skip
    if not found:
        raise RequestError(f"{folder.name} has no CUDA unit", "name a package with --arch sm80")
    return found


def border(most: int | None = None) -> list[Sm80Plan]:
    """Tiles of the recorded sweep that the rule accepts and whose next Bc it does not; `most` of them, evenly spaced.

    Only tiles that the rule itself accepts today: a row of the sweep beyond it says what would spill.
    """
    table = json.loads(TABLE.read_text())
    fields, found = table["fields"], []
    for values in table["rows"]:
        row = dict(zip(fields, values, strict=True))
        plan = Sm80Plan(
            br=row["br"], bc=row["bc"], d=row["d"], dv=row["dv"], row_tiles=row["row_tiles"],
            refill_before_softmax=bool(row["refill_before_softmax"]),
        )  # fmt: skip
        words = (plan.row_tiles, plan.warps, plan.d_padded, plan.dv_padded)
        here = registers_sm80.fit(*words, plan.bc)
        if here is None or here.refill_before_softmax != plan.refill_before_softmax:
            continue
        if registers_sm80.fit(*words, plan.bc + sm80.GRANULE) is None:
            found.append(plan)
    if most is None or most >= len(found):
        return found
    return [found[i * len(found) // most] for i in range(most)]


def write_plan(folder: Path, plan: Sm80Plan, dtypes: Sequence[str] = ("bf16",), *, debug: bool = False) -> Unit:
    """Write the unit of one mma.sync plan to `folder`; also of a plan that no request leads to."""
    asked = problem.make(sram_bytes=2**20, d=plan.d, dv=plan.dv, dtypes=dtypes, archs=["sm80"], debug=debug)
    described = {"problem": asked, "header": ["One plan."], "exact": []}
    context = {**sm80.context(asked, plan, "sm80", tuple(dtypes)), **described}
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "forward_sm80.cu"
    source.write_bytes(render.render("sm80/forward_sm80.cu.j2", context))
    (folder / "forward.h").write_bytes(render.render("package/csrc/forward.h.j2", context))
    (folder / "ptx_sm80.cuh").write_bytes(render.render("sm80/ptx_sm80.cuh", {}))
    what = f"{plan.br} x {plan.bc}, d={plan.d}, dv={plan.dv}, {sm80.GRANULE * plan.row_tiles} rows per warp"
    return Unit(
        name=what,
        source=source,
        archs=ARCHS["sm80"],
        limits=Limits(threads=plan.threads, shared_bytes=plan.fast_memory_bytes, plan=what),
        least_kernels=len(dtypes),
        launched=False,
    )


def write_backward_plan(
    folder: Path, plan: Sm80BackwardPlan, dtypes: Sequence[str] = ("bf16",), *, debug: bool = False
) -> Unit:
    """The same for the backward unit."""
    tile = ptxas_backward.limits(plan.as_dict(), plan.keys.d, plan.keys.dv)
    return Unit(
        name=f"backward {tile.plan}",
        source=ptxas_backward.write(folder, plan, dtypes, debug=debug),
        archs=ARCHS["sm80"],
        limits=tile,
        least_kernels=ptxas_backward.KERNELS * len(dtypes),
        launched=False,
    )


def check(unit: Unit, use: Tools) -> Verdict:
    """Compile one unit for its architectures and judge what is said of it.

    Raises: ToolError when it does not compile.
    """
    return judge(unit, *compiled(unit, use))


def compiled(unit: Unit, use: Tools) -> tuple[str, str]:
    """What nvcc with ptxas says of the unit, and its machine code as text; that is empty where there is no cuobjdump.

    Raises: ToolError when it does not compile.
    """
    code = [f"--generate-code=arch={arch.replace('sm', 'compute')},code={arch}" for arch in unit.archs]
    with tempfile.TemporaryDirectory() as work:
        product = str(Path(work) / "unit.o")
        command = [use.nvcc, *FLAGS, *code, "-c", str(unit.source), "-o", product]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        said = done.stdout + done.stderr
        if done.returncode:
            raise ToolError(f"{unit.name} does not compile", *said.splitlines()[-12:])
        if use.cuobjdump is None:
            return said, ""
        dump = subprocess.run([use.cuobjdump, "-sass", product], capture_output=True, text=True, errors="replace")
        return said, dump.stdout if dump.returncode == 0 else ""


def judge(unit: Unit, said: str, sass: str) -> Verdict:
    """What `compiled` returned, and the unit's own text, against the plan."""
    made = Verdict(unit, ptxas_output.kernels(said, unit.limits))
    made.findings += ptxas_output.messages(said)
    must_fit = unit.archs[:1] if unit.launched else ()
    if ptxas_backward.is_backward(unit.source):
        made.findings += ptxas_backward.shared_memory(ptxas_backward.text_of(unit.source), unit.limits, must_fit)
    else:
        made.findings += ptxas_output.shared_memory(unit.source.read_text(), unit.limits, must_fit)
    counts = ptxas_output.instructions(sass)
    names = ptxas_output.readable([kernel.name for kernel in made.kernels])
    for kernel in made.kernels:
        kernel.instructions = counts.get((kernel.arch, kernel.name), {})
        local = {name: n for name, n in kernel.instructions.items() if name in ptxas_output.LOCAL_MNEMONICS}
        if local and not kernel.findings:
            kernel.findings.append(f"local memory: {local} in the machine code")
        kernel.name = names[kernel.name]
    for arch in unit.archs:
        count = sum(kernel.arch == arch for kernel in made.kernels)
        if count < unit.least_kernels:
            made.findings.append(f"missing: {count} kernels for {arch}, the plan has {unit.least_kernels}")
    return made


def run(
    folders: Sequence[Path], *, plans: bool = False, most: int | None = None, jobs: int = 1, step: Step = silent
) -> dict[str, Any]:
    """Check every unit of the packages, and with `plans` the border of the register rule; the result file.

    Raises: RequestError without nvcc; ToolError when a unit does not compile.
    """
    use = tools()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max(1, jobs)) as pool:
        packaged = [unit for folder in folders for unit in units_of(folder)]
        chosen = border(most) if plans else []
        bordering = [write_plan(Path(scratch) / str(i), plan) for i, plan in enumerate(chosen)]
        waiting = [pool.submit(check, unit, use) for unit in (*packaged, *bordering)]
        verdicts = []
        for job in waiting:
            verdicts.append(job.result())
            step(note=verdicts[-1].unit.name)
    units, tiles = verdicts[: len(packaged)], verdicts[len(packaged) :]
    return {
        "kind": "ptxas",
        "device": "sm80",
        "machine": machine.describe("cpu"),
        "nvcc": use.version,
        "cuobjdump": use.cuobjdump is not None,
        "units": [verdict.describe() for verdict in units],
        "border": _border(tiles, len(border()) if plans else 0),
        "findings": [f"{v.unit.name}: {text}" for v in verdicts for text in v.all_findings],
        "holds": bool(verdicts) and not any(v.all_findings for v in verdicts),
    }


def _border(verdicts: Sequence[Verdict], exist: int) -> dict[str, Any]:
    """The border plans in short: one row each."""
    return {
        "exist": exist,
        "compiled": len(verdicts),
        "spilling": sum(any(k.spill_store_bytes + k.spill_load_bytes for k in v.kernels) for v in verdicts),
        "rows": [
            {"plan": v.unit.limits.plan, "allowed": min(k.allowed for k in v.kernels),
             "registers": {k.arch: k.registers for k in v.kernels}}
            for v in verdicts
        ],
    }  # fmt: skip


def rows(figures: dict[str, Any]) -> list[list[str]]:
    """One row per kernel of a package, and one for the border: what the table and the README show."""
    made = []
    for unit in figures["units"]:
        for k in unit["kernels"]:
            counted = ", ".join(f"{name} {n}" for name, n in k["instructions"].items()) or "-"
            spills = k["spill_store_bytes"] + k["spill_load_bytes"] + k["stack_bytes"]
            made.append([
                k["name"], k["arch"], f"{k['registers']} of {k['allowed']}", str(spills),
                f"{unit['shared_bytes']} + {k['static_shared_bytes']}", counted,
            ])  # fmt: skip
    side = figures["border"]
    if side["compiled"]:
        most: dict[str, int] = {}
        for row in side["rows"]:
            for arch, n in row["registers"].items():
                most[arch] = max(most.get(arch, 0), n)
        what = f"{side['compiled']} of {side['exist']} tiles on the border of the register rule"
        made += [
            [what, arch, f"at most {n} of {registers_sm80.PER_THREAD}", f"{side['spilling']} spill", "-", "-"]
            for arch, n in most.items()
        ]
    return made


HEAD = ("kernel", "for", "registers", "spilled and stack bytes", "shared bytes: dynamic + static", "instructions")


def table(figures: dict[str, Any]) -> Table:
    """The rows for a terminal."""
    made = Table(title=f"nvcc {figures['nvcc']}: {'holds' if figures['holds'] else 'DOES NOT HOLD'}")
    for name in HEAD:
        made.add_column(name, overflow="fold")
    for row in rows(figures):
        made.add_row(*row)
    return made
