"""Compiles the border of the register rule of the wgmma kernel: the largest key tile that it accepts for each width.

    python -m tests.sm90a.sweep_registers [OUT.json]

Needs nvcc, not a GPU. Prints every plan that spills or whose wgmma ptxas serialises; exit 1 if there is one.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from codegen import problem
from codegen.plans import sm90a
from codegen.plans.registers_sm90a import REGISTERS
from codegen.plans.sm90a import Sm90aPlan
from tests.sm90a import kernels

WIDTHS = [(d, d) for d in (8, 24, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256)] + [(192, 128), (72, 40), (8, 256)]

STAGES = ((2, 2), (1, 1))  # the usual rings, and for key tiles that fit in no other way
FIELDS = ("br", "bc", "d", "dv", "stages_k", "stages_v", "p_in_shared", "blocks_per_sm")


def border() -> list[Sm90aPlan]:
    """The two longest key tiles that the rule accepts, for each width, number of consumers, blocks per SM and rings."""
    found: dict[Sm90aPlan, None] = {}
    for d, dv in WIDTHS:
        asked = problem.make(sram_bytes=2**20, d=d, dv=dv, archs=["sm80"])
        for (consumers, blocks), stages in itertools.product(REGISTERS, STAGES):
            plans = (
                sm90a.make_plan(asked, 64 * consumers, keys, stages, blocks_per_sm=blocks)
                for keys in range(sm90a.MOST_KEYS, 0, -sm90a.GRANULE)
            )
            fitting = (plan for plan in plans if plan and plan.fast_memory_bytes * blocks <= 227 * 1024)
            found.update(dict.fromkeys(itertools.islice(fitting, 2)))
    return list(found)


def judge(plan: Sm90aPlan) -> tuple[Sm90aPlan, int, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            _, reports = kernels.build(kernels.write(Path(folder), plan))
        except RuntimeError as e:  # ptxas gives up on a wgmma that its registers do not hold
            return plan, 0, re.findall(r"\(C7\d+\)[^\n]*", str(e)) or [str(e)]
    return plan, sum(r.spilled_bytes for r in reports), sorted({w for r in reports for w in r.warnings})


def main() -> int:
    rows = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for plan, spilled, warnings in pool.map(judge, border()):
            rows.append({**{f: getattr(plan, f) for f in FIELDS}, "spilled_bytes": spilled, "warnings": warnings})
            if spilled or warnings:
                codes = sorted({code for text in warnings for code in re.findall(r"C7\d+", text)})
                print(f"{plan}: {spilled} bytes spilled, {codes}", flush=True)
    print(f"{len(rows)} plans, {sum(bool(r['spilled_bytes'] or r['warnings']) for r in rows)} not clean")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return int(any(r["spilled_bytes"] or r["warnings"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
