"""Tile plan of the backward AMX kernel (bf16), and the files that it is printed to.

--sram is the share of the L2 cache that one worker may fill. A tile is `panels` panels of 32 query rows, a block `bc`
keys; `AmxBackwardPlan.memory` names all that a worker keeps, and the emitted code asserts the sum.

From the paper's tile to a legal one:
  1. Br to a multiple of 32, at most 128 rows: a block's tiles of dK and dV are loaded and stored, and K and V packed,
     once per query tile, so more rows are better, but Q and dO are kept in two layouts each.
  2. Bc to a multiple of 32, at most 64: S and dP of a panel share L1 with its operands.
  3. Into the budget: fewer rows, down to 64; then 32 keys; then 32 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from codegen.errors import PlanError
from codegen.plan import Change, MemoryPart, Rejection
from codegen.plans.cpu_amx import EXP2, KEY_GRANULE, PANEL_ROWS, UNIT_FLAGS
from codegen.plans.cpu_isa import Limits
from codegen.problem import Problem
from spec import tile_rule

MOST_ROWS = 128
MOST_KEYS = 64
TILE_BYTES = 1024  # an operand of a tile instruction, or its result
ITEMSIZE = 2


@dataclass(frozen=True, kw_only=True)
class AmxBackwardPlan:
    """All that the template may ask. `_bytes` are bytes; other sizes count elements."""

    br: int
    bc: int
    d: int
    dv: int
    exp_degree: int

    def __post_init__(self) -> None:
        if self.br % PANEL_ROWS or self.br <= 0:
            raise PlanError(f"Br={self.br}: an AMX tile is a multiple of {PANEL_ROWS} rows")
        if self.bc % KEY_GRANULE or self.bc <= 0:
            raise PlanError(f"Bc={self.bc}: an AMX tile is a multiple of {KEY_GRANULE} keys")

    @property
    def panels(self) -> int:
        return self.br // PANEL_ROWS

    @property
    def d_tiles(self) -> int:
        """Tiles of 32 dims."""
        return -(-self.d // 32)

    @property
    def dv_tiles(self) -> int:
        """Tiles of 32 columns."""
        return -(-self.dv // 32)

    @property
    def memory(self) -> tuple[MemoryPart, ...]:
        panels, chunks = self.panels, self.bc // 32
        tiles = {
            "Q panels": panels * 4 * self.d_tiles,  # two layouts
            "dO panels": panels * 4 * self.dv_tiles,
            "dQ panels": panels * 4 * self.d_tiles,
            "P panels": panels * 2 * chunks,
            "dS panels": panels * 2 * chunks,
            "S panel": 4 * chunks,
            "dP panel": 4 * chunks,
            "K block": chunks * 4 * self.d_tiles,  # two layouts
            "V block": chunks * 2 * self.dv_tiles,
            "rows to pack": 2 * max(self.d_tiles, self.dv_tiles),
        }
        parts = [MemoryPart(name=name, bytes=n * TILE_BYTES) for name, n in tiles.items()]
        return (*parts, MemoryPart(name="row statistics", bytes=2 * 4 * self.br))  # LSE and D

    @property
    def fast_memory_bytes(self) -> int:
        return sum(part.bytes for part in self.memory)

    def as_dict(self) -> dict[str, Any]:
        return {
            "br": self.br,
            "bc": self.bc,
            "d": self.d,
            "dv": self.dv,
            "computed_in": "float32",
            "panel_rows": PANEL_ROWS,
            "panels": self.panels,
            "exp_degree": self.exp_degree,
            "memory": {part.name: part.bytes for part in self.memory},
            "fast_memory_bytes": self.fast_memory_bytes,
        }


def make_plan(*, br: int, bc: int, d: int, dv: int) -> AmxBackwardPlan:
    """The plan of one tile.

    Raises: PlanError when the tile is not a multiple of the granules. Whether it fits is the caller's question.
    """
    return AmxBackwardPlan(br=br, bc=bc, d=d, dv=dv, exp_degree=EXP2["bf16"].degree)


def plan_backward(
    problem: Problem, limits: Limits
) -> tuple[AmxBackwardPlan, tuple[Change, ...], tuple[Rejection, ...]]:
    """The legal plan, the steps that led to it and the tiles turned down. --br and --bc are the forward kernel's.

    Raises: PlanError when nothing fits.
    """
    limit = limits.fast_memory_bytes
    paper = tile_rule.rule(tile_rule.elements(problem.sram_bytes, ITEMSIZE), problem.d, problem.dv)
    br = min(max(paper.br // PANEL_ROWS * PANEL_ROWS, PANEL_ROWS), MOST_ROWS)
    bc = min(max(paper.bc // KEY_GRANULE * KEY_GRANULE, KEY_GRANULE), MOST_KEYS)
    changes = []
    if br != paper.br:
        why = f"whole panels of {PANEL_ROWS} rows, at most {MOST_ROWS}: Q and dO are kept in two layouts"
        changes.append(Change(what=f"Br {paper.br} -> {br}", why=why))
    if bc != paper.bc:
        why = f"whole tiles of {KEY_GRANULE} keys, at most {MOST_KEYS}: S and dP share the L1 cache"
        changes.append(Change(what=f"Bc {paper.bc} -> {bc}", why=why))
    rows = [r for r in range(br, 0, -PANEL_ROWS) if r >= min(br, 2 * PANEL_ROWS)]
    rejected = []
    for r, c in dict.fromkeys([*((r, bc) for r in rows), (rows[-1], KEY_GRANULE), (PANEL_ROWS, KEY_GRANULE)]):
        tried = make_plan(br=r, bc=c, d=problem.d, dv=problem.dv)
        if tried.fast_memory_bytes <= limit:
            break
        rejected.append(Rejection(br=r, bc=c, why=f"needs {tried.fast_memory_bytes:,} bytes of {limit:,}"))
    else:
        raise PlanError(
            f"no backward tile fits {limit:,} bytes at d={problem.d}, dv={problem.dv}, bf16 on the CPU (amx)",
            f"smallest: Br={tried.br} Bc={tried.bc} needs {tried.fast_memory_bytes:,} bytes",
            f"try --sram {-(-tried.fast_memory_bytes // 1024)}KB",
        )
    if (tried.br, tried.bc) != (br, bc):
        why = f"{br} x {bc} {rejected[0].why}"
        changes += [Change(what=f"Br {br} -> {tried.br}", why=why)] if tried.br != br else []
        changes += [Change(what=f"Bc {bc} -> {tried.bc}", why=why)] if tried.bc != bc else []
    return tried, tuple(changes), tuple(rejected)


def files(plan: AmxBackwardPlan) -> dict[str, tuple[str, dict[str, Any]]]:
    """The files under csrc/: template and context. They include forward_amx.h, backward_tasks.h, forward.h and
    backward.h of the same problem."""
    context = {"plan": plan, "exp2": EXP2["bf16"].name}
    return {
        "csrc/backward_amx_bf16.h": ("cpu/backward_amx_bf16.h.j2", context),
        "csrc/backward_cpu_amx.cpp": ("cpu/backward_cpu_amx.cpp.j2", {"flags": UNIT_FLAGS}),
    }
