"""The ptxas gate for plans of the wgmma kernel: what `codegen` chooses by itself, and what `verify tune` would measure.

    python -m verify ptxas --wgmma --out verify/results/ptxas_sm90a.json

Needs nvcc and cuobjdump (triton has one), not a GPU. Beside what verify/ptxas.py asks of every unit, the machine code
must have the products of the algorithm and no others. A step, S = Q Kj^T and O += P Vj, has d/16 + Bc/16 of them; it
stands once in the text for every loop over key tiles (one, and one more with a mask), once before and once after them.
Of every loop the record keeps how many instructions a step takes, and how many R2UR.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from codegen import problem, render
from codegen.errors import RequestError
from codegen.plan import LENGTH_CLASSES, Decision
from codegen.plans import sm90a
from codegen.plans.sm90a import Sm90aPlan
from codegen.problem import HEAD_DIMS
from codegen.tuned import CAUSAL_FORMS
from verify import machine, packages, ptxas, ptxas_loops
from verify.progress import Step, silent
from verify.ptxas_output import Limits

ARCH = "sm90a"
BUDGETS = ("192KB", "227KB")  # the default command's, and all that a block can have
Width = tuple[int, int]  # d, dv
WIDTHS: tuple[Width, ...] = (*((d, d) for d in HEAD_DIMS), (192, 128))  # of the default plans
TUNED: tuple[Width, ...] = ((64, 64), (128, 128), (256, 256), (192, 128))  # of the candidates


@dataclass(frozen=True)
class Asked:
    """A plan, and where it comes from: "codegen 192KB, 227KB", "tune"."""

    plan: Sm90aPlan
    source: str

    @property
    def name(self) -> str:
        """In a few words, enough to find it again."""
        p = self.plan
        more = [
            *(["P in shared memory"] if p.p_in_shared else []),
            *(["skips"] if p.skips_masked else []),
            *([f"{p.blocks_per_sm} blocks per SM"] if p.blocks_per_sm > 1 else []),
            *([f"stages {p.stages_k}, {p.stages_v}"] if (p.stages_k, p.stages_v) != (2, 2) else []),
        ]
        return ", ".join([f"{p.br} x {p.bc}", f"d={p.d}", f"dv={p.dv}", p.causal, *more])


def chosen(widths: Sequence[Width], tuned: Sequence[Width]) -> list[Asked]:
    """Every plan once: the default ones of `widths` within BUDGETS, the candidates of `tuned` within the last of them.

    Raises: RequestError for a width that no kernel has.
    """
    sources: dict[Sm90aPlan, list[str]] = {}

    def note(decision: Decision, source: str) -> None:
        for variant in decision.variants:
            assert isinstance(variant.plan, Sm90aPlan)
            sources.setdefault(variant.plan, []).append(source)

    for width in widths:
        for budget in BUDGETS:
            note(sm90a.decide(_request(width, budget), ARCH), f"codegen {budget}")
    for width in tuned:
        for causal in CAUSAL_FORMS:
            for length in LENGTH_CLASSES:
                for decision in sm90a.candidates(
                    _request(width, BUDGETS[-1]), ARCH, causal=causal, length_class=length
                ):
                    note(decision, "tune")
    return [Asked(plan, ", ".join(dict.fromkeys(names))) for plan, names in sources.items()]


def _request(width: Width, sram: str) -> problem.Problem:
    return packages.request(sram=sram, d=width[0], dv=width[1], dtypes=("bf16",), archs=(ARCH,))


def write(folder: Path, asked: Asked, dtypes: Sequence[str] = ("bf16",)) -> ptxas.Unit:
    """The kernel of one plan with all that it includes, written to `folder`."""
    plan = asked.plan
    request = problem.make(sram_bytes=2**20, d=plan.d, dv=plan.dv, dtypes=dtypes, archs=(ARCH,))
    context = {
        **sm90a.context(request, plan, tuple(dtypes), "attention_forward_sm90a"),
        "wgmma": sm90a.products((plan,), tuple(dtypes)), "problem": request, "header": ["One plan."], "exact": True,
    }  # fmt: skip
    names = {"forward_sm90a.cu": "sm90a/forward_sm90a.cu.j2", "forward.h": "package/csrc/forward.h.j2", **sm90a.HEADERS}
    folder.mkdir(parents=True, exist_ok=True)
    for path, template in names.items():
        (folder / path).write_bytes(render.render(template, context))
    return ptxas.Unit(
        name=asked.name,
        source=folder / "forward_sm90a.cu",
        archs=("sm_90a",),
        limits=Limits(threads=plan.threads, shared_bytes=plan.fast_memory_bytes, plan=asked.name),
        least_kernels=len(dtypes) * len(loops_of(plan)),
    )


def loops_of(plan: Sm90aPlan) -> dict[str, int]:
    """Mask form -> loops over key tiles, of each kernel that is compiled for a plan."""
    both = {"full": 1, "causal": 2}
    return both if plan.causal == "any" else {plan.causal: both[plan.causal]}


def products_of_a_step(plan: Sm90aPlan) -> int:
    """The wgmma of S = Q Kj^T and of O += P Vj."""
    return plan.d_padded // 16 + plan.bc // 16


def check(asked: Asked, use: ptxas.Tools) -> dict[str, Any]:
    """Compile one plan; its row of the result file.

    Raises: ToolError when it does not compile.
    """
    with tempfile.TemporaryDirectory() as work:
        unit = write(Path(work), asked)
        said, sass = ptxas.compiled(unit, use)
        verdict = ptxas.judge(unit, said, sass)
    kernels, findings = judge(asked.plan, sass)
    registers = [k.registers for k in verdict.kernels]
    spilled = [k.spill_store_bytes + k.spill_load_bytes + k.stack_bytes for k in verdict.kernels]
    return {
        "plan": asked.name,
        "from": asked.source,
        "consumer_registers": asked.plan.consumer_registers,
        "launch_registers": max(registers, default=0),
        "spilled_bytes": sum(spilled),
        "kernels": kernels,
        "findings": [*verdict.all_findings, *findings],
    }


def judge(plan: Sm90aPlan, sass: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Products and loops of every kernel in the machine code, and what is not as the algorithm has it."""
    made: list[dict[str, Any]] = []
    findings: list[str] = []
    step, wanted = products_of_a_step(plan), loops_of(plan)
    for name, code in ptxas_loops.functions(sass).items():
        form = "causal" if "ELb1E" in name else "full"  # the template argument kCausal
        loops, products = ptxas_loops.over_key_tiles(code, step), ptxas_loops.products(code)
        expected = (wanted.get(form, 0) + 2) * step
        made.append({
            "mask": form, "products": products, "expected": expected, "loops": [loop.describe() for loop in loops],
        })  # fmt: skip
        if products != expected:
            findings.append(f"{form}: {products} products, the algorithm has {expected}")
        if len(loops) != wanted.get(form, 0):
            findings.append(f"{form}: {len(loops)} loops of {step} products, the plan has {wanted.get(form, 0)}")
    if sorted(kernel["mask"] for kernel in made) != sorted(wanted):
        findings.append(f"kernels: {', '.join(kernel['mask'] for kernel in made)}, the plan has {', '.join(wanted)}")
    return made, findings


def run(
    widths: Sequence[Width] = WIDTHS, tuned: Sequence[Width] = TUNED, *, jobs: int = 1, step: Step = silent
) -> dict[str, Any]:
    """Check the plans that `chosen` gives; the result file.

    Raises: RequestError without nvcc or cuobjdump; ToolError when a plan does not compile.
    """
    use = ptxas.tools()
    if use.cuobjdump is None:
        raise RequestError("ptxas --wgmma: no cuobjdump here", "pip install triton, which brings one")
    asked = chosen(widths, tuned)
    rows = []
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for row in pool.map(lambda one: check(one, use), asked):
            rows.append(row)
            step(note=row["plan"])
    return {
        "kind": "wgmma",
        "device": ARCH,
        "machine": machine.describe("cpu"),
        "nvcc": use.version,
        "widths": [list(width) for width in widths],
        "tuned_widths": [list(width) for width in tuned],
        "plans": len(rows),
        "spilling": sum(bool(row["spilled_bytes"]) for row in rows),
        "findings": [f"{row['plan']}: {text}" for row in rows for text in row["findings"]],
        "rows": rows,
        "holds": bool(rows) and not any(row["findings"] for row in rows),
    }


def table(figures: dict[str, Any]) -> Table:
    """One row per loop, for a terminal."""
    title = f"nvcc {figures['nvcc']}, {figures['plans']} plans: {'holds' if figures['holds'] else 'DOES NOT HOLD'}"
    made = Table(title=title, title_justify="left")
    for name in ("plan", "mask", "products", "instructions per step", "R2UR per step", "spilled"):
        made.add_column(name, justify="left" if name in ("plan", "mask") else "right")
    for row in figures["rows"]:
        for kernel in row["kernels"]:
            for loop in kernel["loops"]:
                made.add_row(
                    row["plan"], kernel["mask"], str(kernel["products"]), str(loop["instructions"]),
                    str(loop["R2UR"]), str(row["spilled_bytes"]),
                )  # fmt: skip
    return made
