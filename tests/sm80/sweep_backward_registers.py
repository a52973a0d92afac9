"""Compiles what the backward planner takes over widths and budgets: the evidence behind `registers_sm80_backward.py`.

    python tests/sm80/sweep_backward_registers.py --out codegen/plans/registers_sm80_backward.json

For each budget of BUDGETS_KB on a card that has it: widths d = dv in its steps, then widths that differ. Takes about
8 s per plan and core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from codegen import problem
from codegen.errors import PlanError
from codegen.plans import sm80_backward
from codegen.plans.sm80_backward import Sm80BackwardPlan
from verify import ptxas

BUDGETS_KB = (("sm80", 163, 16), ("sm90", 227, 32), ("sm86", 99, 32), ("sm80", 64, 32))  # target, KB, steps of d
MIXED = ((128, 64), (192, 128), (64, 256), (256, 16), (96, 80))
ARCHS = ptxas.ARCHS["sm80"]
FIELDS = ("d", "dv", "keys", "query", "accumulators", "query_accumulators", *(f"spilled_{a}" for a in ARCHS),
          *(f"registers_{a}" for a in ARCHS))  # fmt: skip


def plans() -> Iterator[Sm80BackwardPlan]:
    for arch, kb, step in BUDGETS_KB:
        for d, dv in (*((d, d) for d in range(256, 0, -step)), *MIXED):
            try:
                asked = problem.make(sram_bytes=kb * 1024, d=d, dv=dv, archs=(arch,))
                yield sm80_backward.plan_backward(asked, "bf16", arch)[0]
            except PlanError:
                continue


def described(plan: Sm80BackwardPlan) -> tuple[int | str, ...]:
    """The first six fields of a plan's row."""
    keys, query = plan.keys, plan.query
    return (
        keys.d, keys.dv, f"{keys.br}x{keys.bc} warps={keys.warps}/{keys.row_warps} stages={keys.stages}",
        f"{query.br}x{query.bc} warps={query.warps} stages={query.stages}", keys.accumulators, query.accumulators,
    )  # fmt: skip


def compiled(plan: Sm80BackwardPlan) -> list[int | str]:
    """One row of the table: the worst of the unit's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        verdict = ptxas.check(ptxas.write_backward_plan(Path(folder), plan), ptxas.tools())
    of_arch = {arch: [k for k in verdict.kernels if k.arch == arch] for arch in ARCHS}
    spilled = [max(k.stack_bytes + k.spill_store_bytes + k.spill_load_bytes for k in of_arch[a]) for a in ARCHS]
    row = [*described(plan), *spilled, *(max(k.registers for k in of_arch[a]) for a in ARCHS)]
    print(*row, *verdict.all_findings, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    with ThreadPoolExecutor(asked.jobs) as pool:
        rows = list(pool.map(compiled, dict.fromkeys(plans())))
    head = {"ptxas": ptxas.tools().version, "machine": platform.machine(), "fields": list(FIELDS)}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    asked.out.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")
    print(f"{len(rows)} plans, {sum(bool(row[6] or row[7]) for row in rows)} spill")


if __name__ == "__main__":
    main()
