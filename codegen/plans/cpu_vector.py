"""Tile plans of the vector (FMA) CPU kernels.

--sram is the share of the L2 cache that one worker may fill; nothing else of the machine enters a plan, so a plan is
the same wherever it is made. A worker keeps the Q and O panels of a tile, the statistics of its rows, S or P of one
panel and one block of keys: `CpuPlan.memory` names them, and the emitted code asserts their sum at compile time.

From the paper's tile to a legal one:
  1. Br to a multiple of 32, down if it can. A panel is 3, 2 or 1 vectors of rows, the largest that divides Br, so
     every multiple of 32 suits every instruction set and type.
  2. Bc to a multiple of 8, and to what the L1 cache has room for: a panel's S and O share it (before that S and Q), so
     (Bc + max(d, dv)) rows bytes <= L1. More than 64 keys gain little, so this rule never goes below 64.
  3. Into the budget: fewer keys, but not below 64; then fewer rows; then fewer keys, down to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from codegen.errors import PlanError
from codegen.plan import Change, MemoryPart, Rejection
from codegen.plans.cpu_isa import Isa, Limits
from codegen.problem import HEAD_DIMS, ITEMSIZE, Problem
from codegen.sizes import format_bytes
from spec import tile_rule

ROW_GRANULE = 32
KEY_GRANULE = 8
ENOUGH_KEYS = 64  # more keys per block change the speed by less than 3 %
COLLIDING_BYTES = 2048  # rows this far apart, or a multiple, share too few sets of L1
CACHE_LINE = 64
MOST_REJECTIONS = 6  # of one kernel; the rest go without saying

CODE = {"float32": "kFloat32", "float64": "kFloat64", "bf16": "kBFloat16", "fp16": "kFloat16"}  # enum DType
ELEMENT = {"float32": "float", "float64": "double", "bf16": "BFloat16", "fp16": "Float16"}  # C++ type in memory
SCALAR = {"float32": "float", "float64": "double", "bf16": "float", "fp16": "float"}  # what a type is computed in
SCALAR_BYTES = {"float": 4, "double": 8}
SomePlan = TypeVar("SomePlan", bound="VectorPlan")


@dataclass(frozen=True, kw_only=True)
class VectorPlan:
    """What the vector templates of both passes may ask. `_bytes` are bytes; other sizes count elements."""

    br: int
    bc: int
    d: int
    dv: int
    scalar: str  # C++ type that everything is computed in
    lanes: int  # scalars per vector
    vectors: int  # per panel
    keys_per_group: int
    columns_per_group: int

    @classmethod
    def of(cls: type[SomePlan], isa: Isa, dtype: str, *, br: int, bc: int, d: int, dv: int) -> SomePlan:
        """The plan of one tile: how `isa` cuts it into panels.

        Raises: PlanError when the tile is not a multiple of the granules. Whether it fits is the caller's question.
        """
        scalar = SCALAR[dtype]
        lanes = isa.vector_bytes // SCALAR_BYTES[scalar]
        vectors = next((n for n in (3, 2) if br % (n * lanes) == 0), 1)
        groups = isa.groups[vectors]
        return cls(
            br=br, bc=bc, d=d, dv=dv, scalar=scalar, lanes=lanes, vectors=vectors,
            keys_per_group=groups.keys, columns_per_group=groups.columns,
        )  # fmt: skip

    @property
    def elements(self) -> dict[str, int]:
        """What a worker keeps: the name of each part and how many scalars it is."""
        raise NotImplementedError

    @property
    def itemsize(self) -> int:
        return SCALAR_BYTES[self.scalar]

    @property
    def panel_rows(self) -> int:
        return self.vectors * self.lanes

    @property
    def panels(self) -> int:
        return self.br // self.panel_rows

    @property
    def k_pitch(self) -> int:
        """Elements from one key to the next where a key block is copied."""
        return _pitch(self.d, self.itemsize)

    @property
    def v_pitch(self) -> int:
        return _pitch(self.dv, self.itemsize)

    @property
    def memory(self) -> tuple[MemoryPart, ...]:
        return tuple(MemoryPart(name=name, bytes=n * self.itemsize) for name, n in self.elements.items())

    @property
    def fast_memory_bytes(self) -> int:
        return sum(part.bytes for part in self.memory)

    def as_dict(self) -> dict[str, Any]:
        return {
            "br": self.br,
            "bc": self.bc,
            "d": self.d,
            "dv": self.dv,
            "computed_in": {"float": "float32", "double": "float64"}[self.scalar],
            "lanes": self.lanes,
            "vectors": self.vectors,
            "panel_rows": self.panel_rows,
            "panels": self.panels,
            "keys_per_group": self.keys_per_group,
            "columns_per_group": self.columns_per_group,
            "memory": {part.name: part.bytes for part in self.memory},
            "fast_memory_bytes": self.fast_memory_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class CpuPlan(VectorPlan):
    """The plan of a forward kernel."""

    def __post_init__(self) -> None:
        for side, size, granule, what in (
            ("Br", self.br, ROW_GRANULE, "rows"),
            ("Bc", self.bc, KEY_GRANULE, "keys"),
        ):
            if size % granule or size <= 0:
                hint = f"try --{side.lower()} {_near(size, granule)}"
                raise PlanError(f"{side}={size}: a CPU tile is a multiple of {granule} {what}", hint)
        assert self.br % self.panel_rows == 0 and self.dv % self.columns_per_group == 0

    @property
    def elements(self) -> dict[str, int]:
        return {
            "Q panels": self.br * self.d,
            "O panels": self.br * self.dv,
            "row statistics": 3 * self.br,  # m, l and the number of visible keys
            "S panel": self.bc * self.panel_rows,
            "K block": self.bc * self.k_pitch,
            "V block": self.bc * self.v_pitch,
        }


def _near(value: int, granule: int) -> int:
    return max(granule, value // granule * granule)


def _pitch(width: int, itemsize: int) -> int:
    """A row of the copied key block: padded by a cache line where whole rows would collide in L1."""
    return width if width * itemsize % COLLIDING_BYTES else width + CACHE_LINE // itemsize


make_plan = CpuPlan.of


def plan_vector(
    problem: Problem, dtype: str, isa: Isa, limits: Limits
) -> tuple[CpuPlan, tuple[Change, ...], tuple[Rejection, ...]]:
    """The legal plan of one kernel, the steps that led to it and the tiles turned down.

    Raises: PlanError when an override is illegal or nothing fits.
    """
    limit = limits.fast_memory_bytes

    def plan(br: int, bc: int) -> CpuPlan:
        return make_plan(isa, dtype, br=br, bc=bc, d=problem.d, dv=problem.dv)

    paper = tile_rule.rule(tile_rule.elements(problem.sram_bytes, ITEMSIZE[dtype]), problem.d, problem.dv)
    changes: list[Change] = []
    br = problem.br or _near(paper.br, ROW_GRANULE)
    if br != paper.br and problem.br is None:
        changes.append(Change(what=f"Br {paper.br} -> {br}", why=f"Br is a multiple of {ROW_GRANULE}: whole panels"))
    most = _most_keys(plan(br, KEY_GRANULE), isa)
    bc = problem.bc or min(_near(paper.bc, KEY_GRANULE), most)
    if bc != paper.bc and problem.bc is None:
        why = f"Bc is a multiple of {KEY_GRANULE}"
        if paper.bc > most:
            why = f"S and O of a panel share the L1 cache, {format_bytes(isa.l1_bytes)}"
        changes.append(Change(what=f"Bc {paper.bc} -> {bc}", why=why))

    rejected: list[Rejection] = []
    for r, c in _candidates(br, bc, problem):
        tried = plan(r, c)
        if tried.fast_memory_bytes <= limit:
            break
        if len(rejected) < MOST_REJECTIONS:
            rejected.append(Rejection(br=r, bc=c, why=f"needs {tried.fast_memory_bytes:,} bytes of {limit:,}"))
    else:
        raise _nothing_fits(problem, dtype, isa, limit, plan)
    why = f"{br} x {bc} needs {plan(br, bc).fast_memory_bytes:,} bytes of {limit:,}"
    if tried.br != br:
        less = f"{why}; fewer rows before fewer than {ENOUGH_KEYS} keys"
        changes.append(Change(what=f"Br {br} -> {tried.br}", why=less))
    if tried.bc != bc:
        changes.append(Change(what=f"Bc {bc} -> {tried.bc}", why=why))
    return tried, tuple(changes), tuple(rejected)


def _most_keys(panel: CpuPlan, isa: Isa) -> int:
    """The largest Bc at which S and O of a panel fit L1 together, but at least ENOUGH_KEYS."""
    room = isa.l1_bytes // (panel.panel_rows * panel.itemsize) - max(panel.d, panel.dv)
    return max(ENOUGH_KEYS, room // KEY_GRANULE * KEY_GRANULE)


def _candidates(br: int, bc: int, problem: Problem) -> Iterator[tuple[int, int]]:
    """Tiles in the order of preference, from br x bc down; what is overridden stays."""
    rows = [br] if problem.br else list(range(br, 0, -ROW_GRANULE))
    keys = [bc] if problem.bc else list(range(bc, 0, -KEY_GRANULE))
    enough = [c for c in keys if c >= min(bc, ENOUGH_KEYS)]
    yield from ((r, c) for r in rows for c in enough)
    yield from ((r, c) for r in rows for c in keys if c not in enough)


def _nothing_fits(problem: Problem, dtype: str, isa: Isa, limit: int, plan: Callable[[int, int], CpuPlan]) -> PlanError:
    """What was asked, the smallest tile, and what to try."""
    br, bc = problem.br or ROW_GRANULE, problem.bc or KEY_GRANULE
    smallest = plan(br, bc)
    need = smallest.fast_memory_bytes
    parts = ", ".join(f"{part.name} {part.bytes:,}" for part in smallest.memory)
    hints = [f"smallest: Br={br} Bc={bc} needs {need:,} bytes ({parts})", f"try --sram {-(-need // 1024)}KB"]
    for d in reversed(HEAD_DIMS):
        if d < problem.d and make_plan(isa, dtype, br=br, bc=bc, d=d, dv=d).fast_memory_bytes <= limit:
            hints[-1] += f", or --d {d}"
            break
    asked = "".join(f" {side}={size}" for side, size in (("Br", problem.br), ("Bc", problem.bc)) if size)
    size = f"d={problem.d}" + (f", dv={problem.dv}" if problem.dv != problem.d else "")
    what = f"no tile{' with' + asked if asked else ''} fits {limit:,} bytes at {size}, {dtype} on the CPU ({isa.name})"
    return PlanError(what, *hints)
