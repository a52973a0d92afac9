"""Compiles many tiles and writes down which of them spill: the evidence behind `codegen/plans/registers_sm80.py`.

    python tests/sm80/sweep_registers.py border sample:900 beyond --out codegen/plans/registers_sm80.json

`border`: per padded d and dv the largest Bc that the rule accepts, with one and with two m16 tiles per warp, and each
tile that is listed beyond the rule. `sample:N`: N more accepted tiles, drawn with a fixed seed. `beyond`: for d = dv,
tiles of 32 rows per warp past the rule, with either place for the refill of K: where the list comes from. Takes about
1.5 s per tile and core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from codegen.plans import registers_sm80
from codegen.plans.sm80 import GRANULE, Sm80Plan, padded
from verify import ptxas

WIDTHS = range(GRANULE, 257, GRANULE)
ARCHS = ptxas.ARCHS["sm80"]
FIELDS = ("d", "dv", "br", "bc", "row_tiles", "refill_before_softmax", *(f"spilled_{a}" for a in ARCHS),
          *(f"registers_{a}" for a in ARCHS))  # fmt: skip


def tile(row_tiles: int, d: int, dv: int, bc: int, *, warps: int = 4, early: bool | None = None) -> Sm80Plan:
    fit = registers_sm80.fit(row_tiles, warps, padded(d), padded(dv), bc)
    if early is None:
        assert fit is not None
        early = fit.refill_before_softmax
    rows = GRANULE * row_tiles * warps
    return Sm80Plan(br=rows, bc=bc, d=d, dv=dv, row_tiles=row_tiles, refill_before_softmax=early)


def largest_bc(row_tiles: int, dv: int) -> int:
    """The largest Bc that the rule accepts, 0 if none; tiles listed beyond it do not count."""
    most = 2 * registers_sm80.MOST_ACCUMULATORS[row_tiles] // row_tiles - dv
    return max(0, most - most % GRANULE)


def border() -> Iterator[Sm80Plan]:
    for row_tiles in registers_sm80.MOST_ACCUMULATORS:
        for d in WIDTHS:
            for dv in WIDTHS:
                if largest_bc(row_tiles, dv):
                    yield tile(row_tiles, d, dv, largest_bc(row_tiles, dv))
    for d, lists in registers_sm80.COMPILED.items():
        for bc, warps in itertools.product(itertools.chain(*lists), registers_sm80.COMPILED_WARPS):
            yield tile(2, d, d, bc, warps=warps)


def beyond() -> Iterator[Sm80Plan]:
    for d in WIDTHS:
        for bc in range(largest_bc(2, d) + GRANULE, max(0, 208 - d) + 1, GRANULE):
            for early in (True, False):
                for warps in registers_sm80.COMPILED_WARPS:
                    yield tile(2, d, d, bc, warps=warps, early=early)


def sample(count: int) -> Iterator[Sm80Plan]:
    draw = random.Random(20250731)
    for _ in range(count):
        while True:
            row_tiles, d, dv = draw.choice((1, 2)), 8 * draw.randint(1, 32), 8 * draw.randint(1, 32)
            most = largest_bc(row_tiles, padded(dv))
            if most:
                break
        yield tile(row_tiles, d, dv, GRANULE * draw.randint(1, most // GRANULE), warps=draw.randint(1, 8))


def compiled(plan: Sm80Plan) -> list[int]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        of_arch = {k.arch: k for k in ptxas.check(ptxas.write_plan(Path(folder), plan), ptxas.tools()).kernels}
    reports = [of_arch[arch] for arch in ARCHS]
    return [
        plan.d, plan.dv, plan.br, plan.bc, plan.row_tiles, int(plan.refill_before_softmax),
        *(r.stack_bytes + r.spill_store_bytes + r.spill_load_bytes for r in reports), *(r.registers for r in reports),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    makers = {"border": border, "beyond": beyond}
    plans: dict[Sm80Plan, None] = {}
    for what in asked.what:
        name, _, count = what.partition(":")
        plans.update(dict.fromkeys(sample(int(count)) if name == "sample" else makers[name]()))
    with ThreadPoolExecutor(asked.jobs) as pool:
        rows = sorted(pool.map(compiled, plans))
    head = {"swept": asked.what, "ptxas": ptxas.tools().version, "machine": platform.machine(), "fields": list(FIELDS)}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    asked.out.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")
    spilling = [row for row in rows if row[6] or row[7]]
    print(f"{len(rows)} tiles, {len(spilling)} spill", *spilling[:40], sep="\n")


if __name__ == "__main__":
    main()
