"""Tile plans of the backward vector kernels of the CPU, and the files that they are printed to.

--sram is the share of the L2 cache that one worker may fill, as in the forward pass. A worker keeps what
`BackwardPlan.memory` names, and the emitted code asserts the sum at compile time: Q, dO and dQ of a tile with a row in
each lane, Q and dO once more with a column in each lane (dK and dV sum over rows), P and dS of a whole tile, and one
block of keys.

From the paper's tile (the rule of the forward pass, with the same M) to a legal one:
  1. Br to whole panels of 3 vectors of rows, down if it can, and no more than MOST_PANELS: P and dS of all panels are
     summed together, so more panels make longer sums, but P and dS then leave L1 for L2.
  2. Bc to a multiple of 8, and to what the L1 cache has room for: a panel's dS and dQ share it.
  3. Into the budget: fewer keys, but not below 48; then fewer rows, down to one panel; then panels of 3, 2 or 1 vectors
     with 24 keys or more; then with fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from codegen.errors import PlanError
from codegen.plan import Change, Rejection
from codegen.plans.cpu_isa import VECTOR_ISAS, Groups, Isa, Limits
from codegen.plans.cpu_vector import CACHE_LINE, CODE, ELEMENT, KEY_GRANULE, SCALAR, SCALAR_BYTES, VectorPlan
from codegen.problem import ITEMSIZE, Problem
from codegen.sizes import format_bytes
from spec import tile_rule

MOST_PANELS = 2
ENOUGH_KEYS = 48
SOME_KEYS = 24
MOST_REJECTIONS = 3  # of one kernel; the rest go without saying
PANEL_VECTORS = 3
NARROW_LANES = 8  # d and dv are multiples of it

# In `csrc/`: what the unit of an instruction set includes beside the forward pass's simd.h, storage_simd.h, forward.h,
# and the package's backward.h.
HEADERS = {
    "backward_simd.h": "cpu/backward_simd.h.j2",
    "backward_simd_block.h": "cpu/backward_simd_block.h.j2",
    "backward_simd_sums.h": "cpu/backward_simd_sums.h.j2",
    "backward_tasks.h": "cpu/backward_tasks.h.j2",
}
UNIT = "cpu/backward_cpu_unit.cpp.j2"


@dataclass(frozen=True)
class ColumnGroup:
    """A sum over rows that the registers hold: `vectors` of `lanes` columns from `first` on, times `keys` keys."""

    first: int
    lanes: int
    vectors: int
    keys: int


@dataclass(frozen=True, kw_only=True)
class BackwardPlan(VectorPlan):
    """The plan of a backward kernel."""

    def __post_init__(self) -> None:
        if self.br <= 0 or self.br % self.lanes:
            raise PlanError(f"Br={self.br}: a backward tile is a multiple of {self.lanes} rows here")
        if self.bc <= 0 or self.bc % KEY_GRANULE:
            raise PlanError(f"Bc={self.bc}: a CPU tile is a multiple of {KEY_GRANULE} keys")
        assert self.br % self.panel_rows == 0 and self.d % self.columns_per_group == 0

    @property
    def elements(self) -> dict[str, int]:
        return {
            "Q panels": self.br * self.d,
            "dO panels": self.br * self.dv,
            "dQ panels": self.br * self.d,
            "row statistics": 3 * self.br,  # LSE, D and the number of visible keys
            "P panels": self.br * self.bc,
            "dS panels": self.br * self.bc,
            "Q rows": self.br * self.d,
            "dO rows": self.br * self.dv,
            "K block": self.bc * self.k_pitch,
            "V block": self.bc * self.v_pitch,
        }

    @property
    def fast_memory_bytes(self) -> int:
        """What a worker allocates: the parts, in whole cache lines."""
        return -(-super().fast_memory_bytes // CACHE_LINE) * CACHE_LINE


def column_groups(isa: Isa, plan: BackwardPlan, width: int) -> tuple[ColumnGroup, ...]:
    """How the registers share `width` columns of a sum over rows: near-equal groups of whole vectors, then a rest of 8.

    With vectors x keys accumulators, vectors of a row and one broadcast weight, a row costs vectors + keys loads.
    """
    accumulators = PANEL_VECTORS * isa.groups[PANEL_VECTORS].keys
    most = 4 if accumulators > 12 else 3
    whole = width // plan.lanes
    count = -(-whole // most)
    groups, first = [], 0
    for i in range(count):
        vectors = whole * (i + 1) // count - whole * i // count
        groups.append(ColumnGroup(first, plan.lanes, vectors, min(accumulators // vectors, 12)))
        first += vectors * plan.lanes
    if first < width:
        groups.append(ColumnGroup(first, NARROW_LANES, 1, min(accumulators, 12)))
    return tuple(groups)


make_plan = BackwardPlan.of


def plan_backward(
    problem: Problem, dtype: str, isa: Isa, limits: Limits
) -> tuple[BackwardPlan, tuple[Change, ...], tuple[Rejection, ...]]:
    """The legal plan of one backward kernel, the steps that led to it and the tiles turned down.

    --br and --bc are the forward kernel's: a backward kernel with its own memory takes its own tile.
    Raises: PlanError when nothing fits.
    """
    limit = limits.fast_memory_bytes

    def plan(br: int, bc: int) -> BackwardPlan:
        return make_plan(isa, dtype, br=br, bc=bc, d=problem.d, dv=problem.dv)

    lanes = isa.vector_bytes // SCALAR_BYTES[SCALAR[dtype]]
    panel = PANEL_VECTORS * lanes
    paper = tile_rule.rule(tile_rule.elements(problem.sram_bytes, ITEMSIZE[dtype]), problem.d, problem.dv)
    br = panel * min(max(paper.br // panel, 1), MOST_PANELS)
    most = _most_keys(plan(panel, KEY_GRANULE), isa)
    bc = min(max(KEY_GRANULE, paper.bc // KEY_GRANULE * KEY_GRANULE), most)
    changes = []
    if br != paper.br:
        changes.append(
            Change(what=f"Br {paper.br} -> {br}", why=f"whole panels of {panel} rows, at most {MOST_PANELS}")
        )
    if bc != paper.bc:
        why = f"Bc is a multiple of {KEY_GRANULE}"
        if paper.bc > most:
            why = f"dS and dQ of a panel share the L1 cache, {format_bytes(isa.l1_bytes)}"
        changes.append(Change(what=f"Bc {paper.bc} -> {bc}", why=why))

    rejected: list[Rejection] = []
    for r, c in _candidates(br, bc, panel, lanes):
        tried = plan(r, c)
        if tried.fast_memory_bytes <= limit:
            break
        if len(rejected) < MOST_REJECTIONS:
            rejected.append(Rejection(br=r, bc=c, why=f"needs {tried.fast_memory_bytes:,} bytes of {limit:,}"))
    else:
        raise _nothing_fits(problem, dtype, isa, limit, plan(lanes, KEY_GRANULE))
    why = f"{br} x {bc} needs {plan(br, bc).fast_memory_bytes:,} bytes of {limit:,}"
    if tried.br != br:
        changes.append(
            Change(what=f"Br {br} -> {tried.br}", why=f"{why}; fewer rows before fewer than {ENOUGH_KEYS} keys")
        )
    if tried.bc != bc:
        changes.append(Change(what=f"Bc {bc} -> {tried.bc}", why=why))
    return tried, tuple(changes), tuple(rejected)


def files(problem: Problem, plans: Mapping[tuple[str, str], BackwardPlan]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The files under csrc/ of the backward kernels `plans`, keyed (instruction set, dtype): template and context.

    They include the package's forward.h and backward.h, and the forward pass's simd.h and storage_simd.h.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {f"csrc/{n}": (template, {}) for n, template in HEADERS.items()}
    for isa in VECTOR_ISAS:
        kernels = [_kernel(plan, dtype, isa) for (name, dtype), plan in plans.items() if name == isa.name]
        if kernels:
            found[f"csrc/backward_cpu_{isa.name}.cpp"] = (UNIT, {"isa": isa, "kernels": kernels})
    return found


def _candidates(br: int, bc: int, panel: int, lanes: int) -> Iterator[tuple[int, int]]:
    """Tiles in the order in which they are tried: less and less of what makes a kernel fast."""
    for rows, fewest in (
        (range(br, 0, -panel), ENOUGH_KEYS),
        ((panel, 2 * lanes, lanes), SOME_KEYS),
        ((panel, 2 * lanes, lanes), KEY_GRANULE),
    ):
        yield from ((r, c) for r in rows for c in range(bc, min(bc, fewest) - 1, -KEY_GRANULE))


def _most_keys(plan: BackwardPlan, isa: Isa) -> int:
    """The most keys for which a panel's dS and dQ share the L1 cache; at least ENOUGH_KEYS."""
    room = isa.l1_bytes // (plan.panel_rows * plan.itemsize) - max(plan.d, plan.dv)
    return max(ENOUGH_KEYS, room // KEY_GRANULE * KEY_GRANULE)


def _nothing_fits(problem: Problem, dtype: str, isa: Isa, limit: int, smallest: BackwardPlan) -> PlanError:
    need = smallest.fast_memory_bytes
    parts = ", ".join(f"{part.name} {part.bytes:,}" for part in smallest.memory)
    size = f"d={problem.d}" + (f", dv={problem.dv}" if problem.dv != problem.d else "")
    return PlanError(
        f"no backward tile fits {limit:,} bytes at {size}, {dtype} on the CPU ({isa.name})",
        f"smallest: Br={smallest.br} Bc={smallest.bc} needs {need:,} bytes ({parts})",
        f"try --sram {-(-need // 1024)}KB",
    )


def _kernel(plan: BackwardPlan, dtype: str, isa: Isa) -> dict[str, Any]:
    """What the unit prints of one kernel."""

    def block(groups: Groups) -> str:
        return f"BackwardBlock<{plan.scalar}, {plan.lanes}, {plan.vectors}, {groups.keys}, {groups.columns}>"

    return {
        "dtype": dtype,
        "code": CODE[dtype],
        "element": ELEMENT[dtype],
        "plan": plan,
        "block": block(isa.groups[plan.vectors]),
        "aarch64_block": block(isa.aarch64_groups[plan.vectors]) if isa.aarch64_groups else None,
        "k_columns": column_groups(isa, plan, plan.d),
        "v_columns": column_groups(isa, plan, plan.dv),
    }
