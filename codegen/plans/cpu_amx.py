"""Tile plans of the AMX kernels (bf16, and fp16 as two bf16 planes), and the files that they are printed to.

--sram is the share of the L2 cache that one worker may fill. A tile is `panels` panels of 32 query rows against `bc`
keys. K and V of `l2_keys` keys are walked by every panel of the tile before the next keys are touched, so they come
from L2 for all panels but the first; `CpuAmxPlan.memory` names them and all else that a worker keeps.

From the paper's tile to a legal one:
  1. Br to a multiple of 32, down if it can: whole panels.
  2. Bc to a multiple of 32, and to at most 64, or 96 where dv > 64: S and P of a panel share L1 with Q and O, and a
     matrix unit that was idle for 2500 cycles needs 1300 more to wake up (measured; the exponentials of one panel take
     7 cycles per 16 scores). Wide outputs want more keys per load and store of O. From 64 to 128 keys it is 3 %.
  3. Into the budget: fewer keys, but not below 64; then fewer rows; then 32 keys.
  4. l2_keys: as many whole tiles of keys as the rest of the budget holds, up to 512 KiB; more gained nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from codegen.errors import PlanError
from codegen.plan import Change, MemoryPart, Rejection, Variant
from codegen.plans import exp2_floor_coefficients
from codegen.plans.cpu_isa import COMMON_FLAGS, Limits
from codegen.problem import HEAD_DIMS, Problem
from spec import tile_rule

PANEL_ROWS = 32
KEY_GRANULE = 32  # keys per tile instruction
ENOUGH_KEYS = 64
WIDE_OUTPUT_KEYS = 96  # for dv > WIDE_OUTPUT
WIDE_OUTPUT = 64
MOST_L2_BYTES = 512 * 1024  # of K and V
MOST_REJECTIONS = 6  # the rest go without saying

ITEMSIZE = 2
PLANES = {"bf16": 1, "fp16": 2}
EXP2 = {"bf16": exp2_floor_coefficients.DEGREE4, "fp16": exp2_floor_coefficients.DEGREE5}

# VEX- and tile-encoded instructions are written as assembly, so the unit needs the tile flags for compilers that check
# assembly against the target (clang), and AVX512-BF16 for its conversions.
UNIT_FLAGS = (
    *COMMON_FLAGS, "-march=x86-64-v4", "-mtune=icelake-server", "-mavx512bf16", "-mamx-tile", "-mamx-bf16",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CpuAmxPlan:
    """All that the AMX templates may ask. `_bytes` are bytes; other sizes count elements."""

    br: int
    bc: int
    d: int
    dv: int
    planes: int  # bf16 planes per operand
    l2_keys: int  # keys whose K and V stay in L2 for all panels of the tile
    exp_degree: int

    def __post_init__(self) -> None:
        if self.br % PANEL_ROWS or self.br <= 0:
            hint = f"try --br {_near(self.br, PANEL_ROWS)}"
            raise PlanError(f"Br={self.br}: an AMX tile is a multiple of {PANEL_ROWS} rows", hint)
        if self.bc % KEY_GRANULE or self.bc <= 0:
            hint = f"try --bc {_near(self.bc, KEY_GRANULE)}"
            raise PlanError(f"Bc={self.bc}: an AMX tile is a multiple of {KEY_GRANULE} keys", hint)
        assert self.l2_keys % self.bc == 0 and self.l2_keys > 0

    @property
    def panels(self) -> int:
        return self.br // PANEL_ROWS

    @property
    def d_tiles(self) -> int:
        """Tiles of 32 dims."""
        return -(-self.d // 32)

    @property
    def v_tiles(self) -> int:
        """Tiles of 16 columns; the kernel takes them in pairs."""
        return 2 * -(-self.dv // 32)

    @property
    def most_weight(self) -> int:
        """The sum of a row's weights over one tile of keys that the kernel tolerates before it moves the reference.
        At a fresh reference each is below 2."""
        return 4 * self.bc

    @property
    def lag(self) -> float:
        """By how much the reference may trail the row maximum, in log2 units."""
        return math.log2(self.most_weight)

    @property
    def key_bytes(self) -> int:
        """K and V^T of one key, padded and in planes."""
        return (32 * self.d_tiles + 16 * self.v_tiles) * self.planes * ITEMSIZE

    @property
    def memory(self) -> tuple[MemoryPart, ...]:
        sums = 4 if self.planes == 1 else 3  # m in two parts, l and, of rounded weights, l_rounded
        parts = {
            "Q panels": self.br * 32 * self.d_tiles * self.planes * ITEMSIZE,
            "O panels": self.br * 16 * self.v_tiles * 4,
            "row statistics": self.br * sums * 4,
            "S panel": self.bc * PANEL_ROWS * 4,
            "P panel": self.bc * PANEL_ROWS * ITEMSIZE * self.planes if self.planes > 1 else 0,  # else in place of S
            "K block": self.l2_keys * 32 * self.d_tiles * self.planes * ITEMSIZE,
            "V block": self.l2_keys * 16 * self.v_tiles * self.planes * ITEMSIZE,
        }
        return tuple(MemoryPart(name=name, bytes=n) for name, n in parts.items() if n)

    @property
    def worker_bytes(self) -> int:
        """What one worker allocates: all but the K and V blocks, which are the caller's K and the packed K and V^T."""
        return self.fast_memory_bytes - self.l2_keys * self.key_bytes

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
            "planes": self.planes,
            "panel_rows": PANEL_ROWS,
            "panels": self.panels,
            "l2_keys": self.l2_keys,
            "exp_degree": self.exp_degree,
            "lag": self.lag,
            "memory": {part.name: part.bytes for part in self.memory},
            "fast_memory_bytes": self.fast_memory_bytes,
        }


def _near(value: int, granule: int) -> int:
    return max(granule, value // granule * granule)


def make_plan(dtype: str, *, br: int, bc: int, d: int, dv: int, limit_bytes: int) -> CpuAmxPlan:
    """The plan of one tile, with the largest K and V block that the limit has room for (one tile of keys at least).

    Raises: PlanError when the tile is not a multiple of the granules. Whether it fits is the caller's question.
    """

    def plan(l2_keys: int) -> CpuAmxPlan:
        return CpuAmxPlan(
            br=br, bc=bc, d=d, dv=dv, planes=PLANES[dtype], l2_keys=l2_keys, exp_degree=EXP2[dtype].degree
        )

    least = plan(bc)
    room = min(limit_bytes - least.worker_bytes, MOST_L2_BYTES) // least.key_bytes
    return plan(max(bc, room // bc * bc))


def plan_amx(
    problem: Problem, dtype: str, limits: Limits
) -> tuple[CpuAmxPlan, tuple[Change, ...], tuple[Rejection, ...]]:
    """The legal plan of one kernel, the steps that led to it and the tiles turned down.

    Raises: PlanError when an override is illegal or nothing fits.
    """
    limit = limits.fast_memory_bytes

    def plan(br: int, bc: int) -> CpuAmxPlan:
        return make_plan(dtype, br=br, bc=bc, d=problem.d, dv=problem.dv, limit_bytes=limit)

    paper = tile_rule.rule(tile_rule.elements(problem.sram_bytes, ITEMSIZE), problem.d, problem.dv)
    changes: list[Change] = []
    br = problem.br or _near(paper.br, PANEL_ROWS)
    if br != paper.br and problem.br is None:
        changes.append(Change(what=f"Br {paper.br} -> {br}", why=f"Br is a multiple of {PANEL_ROWS}: whole panels"))
    most = WIDE_OUTPUT_KEYS if problem.dv > WIDE_OUTPUT else ENOUGH_KEYS
    bc = problem.bc or _near(min(paper.bc, most), KEY_GRANULE)
    if bc != paper.bc and problem.bc is None:
        why = f"Bc is a multiple of {KEY_GRANULE}: whole tiles"
        if paper.bc > most:
            why = "S and P share the L1 cache with Q and O, and long pauses put the matrix unit to sleep"
        changes.append(Change(what=f"Bc {paper.bc} -> {bc}", why=why))

    rejected: list[Rejection] = []
    for r, c in _candidates(br, bc, problem):
        tried = plan(r, c)
        if tried.fast_memory_bytes <= limit:
            break
        if len(rejected) < MOST_REJECTIONS:
            rejected.append(Rejection(br=r, bc=c, why=f"needs {tried.fast_memory_bytes:,} bytes of {limit:,}"))
    else:
        raise _nothing_fits(problem, dtype, limit)
    if (tried.br, tried.bc) != (br, bc):
        why = f"{br} x {bc} needs {plan(br, bc).fast_memory_bytes:,} bytes of {limit:,}"
        if tried.br != br:
            less = f"{why}; fewer rows before fewer than {ENOUGH_KEYS} keys"
            changes.append(Change(what=f"Br {br} -> {tried.br}", why=less))
        if tried.bc != bc:
            changes.append(Change(what=f"Bc {bc} -> {tried.bc}", why=why))
    return tried, tuple(changes), tuple(rejected)


def _candidates(br: int, bc: int, problem: Problem) -> list[tuple[int, int]]:
    """Tiles in the order of preference, from br x bc down; what is overridden stays."""
    rows = [br] if problem.br else list(range(br, 0, -PANEL_ROWS))
    keys = [bc] if problem.bc else list(range(bc, 0, -KEY_GRANULE))
    enough = [c for c in keys if c >= min(bc, ENOUGH_KEYS)]
    few = [c for c in keys if c not in enough]
    return [(r, c) for some in (enough, few) for r in rows for c in some]


def _nothing_fits(problem: Problem, dtype: str, limit: int) -> PlanError:
    """What was asked, the smallest tile, and what to try."""
    br, bc = problem.br or PANEL_ROWS, problem.bc or KEY_GRANULE
    smallest = make_plan(dtype, br=br, bc=bc, d=problem.d, dv=problem.dv, limit_bytes=0)
    need = smallest.fast_memory_bytes
    parts = ", ".join(f"{part.name} {part.bytes:,}" for part in smallest.memory)
    hints = [f"smallest: Br={br} Bc={bc} needs {need:,} bytes ({parts})", f"try --sram {-(-need // 1024)}KB"]
    for d in reversed(HEAD_DIMS):
        if d < problem.d and make_plan(dtype, br=br, bc=bc, d=d, dv=d, limit_bytes=0).fast_memory_bytes <= limit:
            hints[-1] += f", or --d {d}"
            break
    asked = "".join(f" {side}={size}" for side, size in (("Br", problem.br), ("Bc", problem.bc)) if size)
    size = f"d={problem.d}" + (f", dv={problem.dv}" if problem.dv != problem.d else "")
    what = f"no tile{' with' + asked if asked else ''} fits {limit:,} bytes at {size}, {dtype} on the CPU (amx)"
    return PlanError(what, *hints)


def files_amx(problem: Problem, variants: tuple[Variant, ...]) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """The files of the AMX unit under csrc/: template and context of each."""
    plans = {v.dtype: v.plan for v in variants}
    one = next(iter(plans.values()))
    assert isinstance(one, CpuAmxPlan)
    shared = {
        "d": problem.d,
        "dv": problem.dv,
        "d_tiles": one.d_tiles,
        "v_tiles": one.v_tiles,
        "d_mask": f"{(1 << problem.d % 32) - 1:#x}",  # dims of the last tile, where d % 32 != 0
    }
    exps = [EXP2[dtype] for dtype in plans]
    found: dict[str, tuple[str, Mapping[str, Any]]] = {
        "csrc/forward_amx.h": ("cpu/forward_amx.h.j2", {**shared, "exps": exps}),
        "csrc/forward_cpu_amx.cpp": ("cpu/forward_cpu_amx.cpp.j2", {"amx_dtypes": tuple(plans), "flags": UNIT_FLAGS}),
    }
    for dtype, plan in plans.items():
        context = {**shared, "plan": plan, "exp2": EXP2[dtype].name}
        found[f"csrc/forward_amx_{dtype}.h"] = (f"cpu/forward_amx_{dtype}.h.j2", context)
    return found
