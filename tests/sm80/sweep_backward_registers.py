"""Compiles what the backward planner takes over widths and budgets: the evidence behind `registers_sm80_backward.py`.

    python tests/sm80/sweep_backward_registers.py --out codegen/plans/registers_sm80_backward.json
    python tests/sm80/sweep_backward_registers.py --tiles --out codegen/plans/registers_sm80_backward_tiles.json

The first compiles whole units. For each budget of BUDGETS_KB on a card that has it: widths d = dv in its steps, then
widths that differ. Takes about 8 s per plan and core.

The second compiles single kernels: of all tiles that any budget and any two widths lead to, equal or not, those with
many accumulators (`is_tight`). Widths of one padding differ by the last 8 columns, cut or not: one text of up to four
is compiled, and all where that one takes NEAR registers. The table has a row for each tile, over its widths. Takes 1 s
per kernel and core, hours in all; `--done FILE` keeps what was compiled, and a second call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from codegen import problem
from codegen.errors import PlanError
from codegen.plans import sm80_backward
from codegen.plans.sm80_backward import KeyTiles, QueryTiles, Sm80BackwardPlan
from tests.sm80 import backward_tiles_alone as alone
from verify import ptxas

BUDGETS_KB = (("sm80", 163, 16), ("sm90", 227, 32), ("sm86", 99, 32), ("sm80", 64, 32))  # target, KB, steps of d
MIXED = ((128, 64), (192, 128), (64, 256), (256, 16), (96, 80))
ARCHS = ptxas.ARCHS["sm80"]
FIELDS = ("d", "dv", "keys", "query", "accumulators", "query_accumulators", *(f"spilled_{a}" for a in ARCHS),
          *(f"registers_{a}" for a in ARCHS))  # fmt: skip

NEAR = 248  # of 255 registers
TOGETHER = 10  # kernels of one compilation
TILE_FIELDS = ("kernel", "tile", "paddings", "compiled", "accumulators", *(f"spilled_{a}" for a in ARCHS),
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
    return keys.d, keys.dv, shape(keys), shape(query), keys.accumulators, query.accumulators


def shape(tile: KeyTiles | QueryTiles) -> str:
    """A tile but for its widths."""
    warps = f"{tile.warps}/{tile.row_warps}" if isinstance(tile, KeyTiles) else f"{tile.warps}"
    return f"{tile.br}x{tile.bc} warps={warps} stages={tile.stages}"


def compiled(plan: Sm80BackwardPlan) -> list[int | str]:
    """One row of the table: the worst of the unit's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        verdict = ptxas.check(ptxas.write_backward_plan(Path(folder), plan), ptxas.tools())
    of_arch = {arch: [k for k in verdict.kernels if k.arch == arch] for arch in ARCHS}
    spilled = [max(k.stack_bytes + k.spill_store_bytes + k.spill_load_bytes for k in of_arch[a]) for a in ARCHS]
    row = [*described(plan), *spilled, *(max(k.registers for k in of_arch[a]) for a in ARCHS)]
    print(*row, *verdict.all_findings, flush=True)
    return row


def kernel(tile: KeyTiles | QueryTiles) -> str:
    return "key_tiles" if isinstance(tile, KeyTiles) else "query_tiles"


def is_tight(tile: KeyTiles | QueryTiles) -> bool:
    """Whether a tile is worth compiling: its accumulators, and fewer where dQ follows dK without a loop between."""
    if isinstance(tile, QueryTiles):
        return tile.accumulators >= (160 if tile.row_tiles == 1 else 144)
    if tile.row_warps == 1 and tile.bc <= 64:
        return tile.sums + tile.pairs >= (112 if tile.pairs < 32 else 80)
    if tile.row_warps == 2 and tile.bc <= 96 and tile.pairs >= 48:
        return tile.sums + tile.pairs >= 128
    return tile.accumulators >= 152


def padding(tile: KeyTiles | QueryTiles) -> tuple[str, str, int, int]:
    """What widths that differ by cut columns alone have in common."""
    return kernel(tile), shape(tile), tile.d_padded, tile.dv_padded


def text_of(tile: KeyTiles | QueryTiles) -> str:
    """What decides the text of a tile's kernel: widths, shape, and what the register rule adds."""
    passes = f" passes={tile.dq_passes}" if isinstance(tile, KeyTiles) else ""
    return f"d={tile.d} dv={tile.dv} {shape(tile)} steps={tile.steps_at_once}{passes}"


class Done:
    """What was compiled, kept in a file."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.lock = path, threading.Lock()
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.found = {name: alone.Compiled(tuple(a), tuple(b)) for name, a, b in map(json.loads, lines)}

    def add(self, tiles: list[KeyTiles | QueryTiles]) -> None:
        made = dict(zip(map(text_of, tiles), alone.compile_together(tiles), strict=True))
        lines = [json.dumps([name, one.spilled, one.registers]) + "\n" for name, one in made.items()]
        with self.lock:
            self.found |= made
            if self.path:
                with self.path.open("a") as file:
                    file.writelines(lines)
        print(len(self.found), "compiled", *(f"{n} spills {c}" for n, c in made.items() if any(c.spilled)), flush=True)

    def registers(self, tile: KeyTiles | QueryTiles) -> int:
        """0 where it was not compiled."""
        return max(self.found[text_of(tile)].registers) if text_of(tile) in self.found else 0

    def all(self, tiles: Iterable[KeyTiles | QueryTiles], jobs: int) -> None:
        left = [tile for tile in tiles if text_of(tile) not in self.found]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(self.add, (left[at : at + TOGETHER] for at in range(0, len(left), TOGETHER))))


def tile_rows(done: Done, jobs: int) -> list[list[int | str]]:
    """Compile the tight tiles; one row per tile over its widths."""
    every = dict.fromkeys(tile for d, dv in alone.widths() for tile in alone.of_every_budget(d, dv) if is_tight(tile))
    of_padding = defaultdict(list)
    for tile in every:
        of_padding[padding(tile)].append(tile)
    of_each = list(of_padding.values())
    done.all((tiles[0] for tiles in of_each if not any(map(done.registers, tiles))), jobs)
    done.all((tile for tiles in of_each if max(map(done.registers, tiles)) >= NEAR for tile in tiles), jobs)
    rows = defaultdict(list)
    for tile in every:
        if text_of(tile) in done.found:
            rows[kernel(tile), shape(tile)].append(tile)
    return [_tile_row(*name, tiles, done) for name, tiles in sorted(rows.items())]


def _tile_row(of: str, name: str, tiles: list[KeyTiles | QueryTiles], done: Done) -> list[int | str]:
    said = [done.found[text_of(tile)] for tile in tiles]
    worst = [max(s.spilled[i] for s in said) for i in range(len(ARCHS))]
    worst += [max(s.registers[i] for s in said) for i in range(len(ARCHS))]
    return [of, name, len({padding(t) for t in tiles}), len(tiles), max(t.accumulators for t in tiles), *worst]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--done", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    if asked.tiles:
        fields, rows = TILE_FIELDS, tile_rows(Done(asked.done), asked.jobs)
    else:
        with ThreadPoolExecutor(asked.jobs) as pool:
            fields, rows = FIELDS, list(pool.map(compiled, dict.fromkeys(plans())))
    head = {"ptxas": ptxas.tools().version, "machine": platform.machine(), "fields": list(fields)}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    asked.out.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")
    at = fields.index(f"spilled_{ARCHS[0]}")
    print(f"{len(rows)} rows, {sum(any(row[at : at + len(ARCHS)]) for row in rows)} spill")


if __name__ == "__main__":
    main()
