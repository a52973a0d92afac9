"""Tile plans of the vector (FMA) CPU kernels, and the files of the CPU target.

--sram is the share of the L2 cache that one worker may fill; nothing else of the machine enters a plan, so a plan is
the same wherever it is made. The kernel keeps the Q and O panels of a tile, the statistics of its rows, S or P of one
panel, and one block of keys: `CpuPlan.memory` names them, and the emitted code asserts that sum at compile time.

From the paper's tile to a legal one:
  1. Br to a multiple of 32, down if it can. A panel is 3, 2 or 1 vectors of rows, the largest that divides Br, so
     every multiple of 32 suits every instruction set and type.
  2. Bc to a multiple of 8, and to what L1 has room for: S and O of a panel share it (and S and Q before),
     (Bc + max(d, dv)) rows bytes <= L1. More than 64 keys gain little, so 64 is never cut by this rule.
  3. Into the budget: fewer keys, but not below 64; then fewer rows; then fewer keys down to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from codegen.errors import PlanError
from codegen.plan import Change, Decision, MemoryPart, Rejection, Variant
from codegen.plans import cpu_amx, exp2_coefficients
from codegen.plans.cpu_isa import VECTOR_ISAS, Groups, Isa, Limits
from codegen.problem import HEAD_DIMS, ITEMSIZE, Problem
from codegen.sizes import format_bytes
from spec import tile_rule

ROW_GRANULE = 32
KEY_GRANULE = 8
ENOUGH_KEYS = 64  # more keys per block change the speed by less than 3 %
COLLIDING_BYTES = 2048  # rows this far apart, or a multiple, share too few sets of L1
CACHE_LINE = 64
MOST_REJECTIONS = 6  # of one kernel; the rest go without saying

SCALAR = {"float32": "float", "float64": "double", "bf16": "float", "fp16": "float"}  # what a type is computed in
SCALAR_BYTES = {"float": 4, "double": 8}
ELEMENT = {"float32": "float", "float64": "double", "bf16": "BFloat16", "fp16": "Float16"}  # C++ type in memory
CODE = {"float32": "kFloat32", "float64": "kFloat64", "bf16": "kBFloat16", "fp16": "kFloat16"}  # enum DType
AMX_ARITHMETIC = {"bf16": "amx_bf16", "fp16": "amx_fp16_planes"}


@dataclass(frozen=True, kw_only=True)
class CpuPlan:
    """All that the vector templates may ask. `_bytes` are bytes; other sizes count elements."""

    br: int
    bc: int
    d: int
    dv: int
    scalar: str  # C++ type that everything is computed in
    lanes: int  # scalars per vector
    vectors: int  # per panel
    keys_per_group: int
    columns_per_group: int

    def __post_init__(self) -> None:
        if self.br % ROW_GRANULE or self.br <= 0:
            raise PlanError(f"Br={self.br}: a CPU tile is a multiple of {ROW_GRANULE} rows", f"try --br {_near(self.br, ROW_GRANULE)}")
        if self.bc % KEY_GRANULE or self.bc <= 0:
            raise PlanError(f"Bc={self.bc}: a CPU tile is a multiple of {KEY_GRANULE} keys", f"try --bc {_near(self.bc, KEY_GRANULE)}")
        assert self.br % self.panel_rows == 0 and self.dv % self.columns_per_group == 0

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
        """Elements from one key to the next in the copy of a key block."""
        return _pitch(self.d, self.itemsize)

    @property
    def v_pitch(self) -> int:
        return _pitch(self.dv, self.itemsize)

    @property
    def memory(self) -> tuple[MemoryPart, ...]:
        elements = {
            "Q panels": self.br * self.d,
            "O panels": self.br * self.dv,
            "row statistics": 3 * self.br,  # m, l and the number of visible keys
            "S panel": self.bc * self.panel_rows,
            "K block": self.bc * self.k_pitch,
            "V block": self.bc * self.v_pitch,
        }
        return tuple(MemoryPart(name=name, bytes=n * self.itemsize) for name, n in elements.items())

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


def _near(value: int, granule: int) -> int:
    return max(granule, value // granule * granule)


def _pitch(width: int, itemsize: int) -> int:
    """A row of the copied key block: padded by a cache line where whole rows would collide in L1."""
    return width if width * itemsize % COLLIDING_BYTES else width + CACHE_LINE // itemsize


def make_plan(isa: Isa, dtype: str, *, br: int, bc: int, d: int, dv: int) -> CpuPlan:
    """The plan of one tile: how `isa` cuts it into panels.

    Raises: PlanError when the tile is not a multiple of the granules.
    """
    scalar = SCALAR[dtype]
    lanes = isa.vector_bytes // SCALAR_BYTES[scalar]
    vectors = next((n for n in (3, 2, 1) if br % (n * lanes) == 0), 1)
    groups = isa.groups[vectors]
    return CpuPlan(
        br=br, bc=bc, d=d, dv=dv, scalar=scalar, lanes=lanes, vectors=vectors,
        keys_per_group=groups.keys, columns_per_group=groups.columns,
    )  # fmt: skip


def plan_vector(problem: Problem, dtype: str, isa: Isa) -> tuple[CpuPlan, tuple[Change, ...], tuple[Rejection, ...]]:
    """The legal plan of one kernel, the steps that led to it and the tiles turned down.

    Raises: PlanError when an override is illegal or nothing fits.
    """

    def plan(br: int, bc: int) -> CpuPlan:
        return make_plan(isa, dtype, br=br, bc=bc, d=problem.d, dv=problem.dv)

    paper = tile_rule.rule(tile_rule.elements(problem.sram_bytes, ITEMSIZE[dtype]), problem.d, problem.dv)
    changes: list[Change] = []

    br = problem.br or _near(paper.br, ROW_GRANULE)
    if problem.br is None and br != paper.br:
        changes.append(Change(what=f"Br {paper.br} -> {br}", why=f"Br is a multiple of {ROW_GRANULE}: whole panels"))
    bc = problem.bc or paper.bc
    if problem.bc is None:
        most = _most_keys(plan(br, KEY_GRANULE), isa)
        if bc > most:
            why = f"S and O of a panel share the L1 cache, {format_bytes(isa.l1_bytes)}"
            changes.append(Change(what=f"Bc {bc} -> {most}", why=why))
            bc = most
        elif bc % KEY_GRANULE:
            legal = _near(bc, KEY_GRANULE)
            changes.append(Change(what=f"Bc {bc} -> {legal}", why=f"Bc is a multiple of {KEY_GRANULE}"))
            bc = legal

    fitting, rejected = _fit(plan, br, bc, problem)
    if fitting is None:
        raise _nothing_fits(problem, dtype, isa, plan)
    if rejected:
        why = f"{br} x {bc} needs {plan(br, bc).fast_memory_bytes:,} bytes of {problem.sram_bytes:,}"
        if fitting.br != br:
            changes.append(Change(what=f"Br {br} -> {fitting.br}", why=f"{why}; fewer rows before fewer than {ENOUGH_KEYS} keys"))
        if fitting.bc != bc:
            changes.append(Change(what=f"Bc {bc} -> {fitting.bc}", why=why))
    return fitting, tuple(changes), rejected


def _most_keys(panel: CpuPlan, isa: Isa) -> int:
    """Bc from which S and O of a panel no longer fit L1 together; never below ENOUGH_KEYS."""
    room = isa.l1_bytes // (panel.panel_rows * panel.itemsize) - max(panel.d, panel.dv)
    return max(ENOUGH_KEYS, room - room % KEY_GRANULE)


def _fit(
    plan: Callable[[int, int], CpuPlan], br: int, bc: int, problem: Problem
) -> tuple[CpuPlan | None, tuple[Rejection, ...]]:
    """The tile nearest to br x bc within the budget, and those before it; what is overridden stays."""
    rows = [br] if problem.br else range(br, 0, -ROW_GRANULE)
    rejected = []
    for least in dict.fromkeys((min(bc, ENOUGH_KEYS), KEY_GRANULE)):
        keys = [bc] if problem.bc else range(bc, least - 1, -KEY_GRANULE)
        for r in rows:
            for c in keys:
                tried = plan(r, c)
                if tried.fast_memory_bytes <= problem.sram_bytes:
                    return tried, tuple(rejected)
                if c == keys[0] and len(rejected) < MOST_REJECTIONS:
                    why = f"needs {tried.fast_memory_bytes:,} bytes of {problem.sram_bytes:,}"
                    rejected.append(Rejection(br=r, bc=c, why=why))
    return None, tuple(rejected)


def _nothing_fits(problem: Problem, dtype: str, isa: Isa, plan: Callable[[int, int], CpuPlan]) -> PlanError:
    """What was asked, the smallest tile, and what to try."""
    br, bc = problem.br or ROW_GRANULE, problem.bc or KEY_GRANULE
    need = plan(br, bc).fast_memory_bytes
    hints = [f"smallest: Br={br} Bc={bc} needs {need:,} bytes ({_parts(plan(br, bc))})", f"try --sram {-(-need // 1024)}KB"]
    for d in reversed(HEAD_DIMS):
        if d < problem.d and make_plan(isa, dtype, br=br, bc=bc, d=d, dv=d).fast_memory_bytes <= problem.sram_bytes:
            hints[-1] += f", or --d {d}"
            break
    asked = "".join(f" {side}={size}" for side, size in (("Br", problem.br), ("Bc", problem.bc)) if size)
    size = f"d={problem.d}" + (f", dv={problem.dv}" if problem.dv != problem.d else "")
    return PlanError(
        f"no tile{' with' + asked if asked else ''} fits {problem.sram_bytes:,} bytes at {size}, {dtype} on the CPU ({isa.name})",
        *hints,
    )


def _parts(plan: CpuPlan) -> str:
    return ", ".join(f"{part.name} {part.bytes:,}" for part in plan.memory)


def decide(problem: Problem, arch: str) -> Decision:
    """Every kernel of the CPU target: per dtype, best instruction set first.

    Raises: PlanError when a vector kernel has no legal plan, or an override is illegal for any kernel. AMX alone not
        fitting is a rejection: the vector kernels serve its types.
    """
    limits = Limits(fast_memory_bytes=problem.sram_bytes, l1_bytes=VECTOR_ISAS[0].l1_bytes)
    variants: list[Variant] = []
    changes: dict[str, tuple[Change, ...]] = {}
    rejected: dict[str, tuple[Rejection, ...]] = {}
    for dtype in problem.dtypes:
        if dtype in AMX_ARITHMETIC and hasattr(cpu_amx, "plan_amx"):
            key = f"amx/{dtype}"
            try:
                amx, changes[key], rejected[key] = cpu_amx.plan_amx(problem, dtype, limits)
            except PlanError as error:
                if problem.br or problem.bc:
                    raise
                rejected[key] = (Rejection(br=ROW_GRANULE, bc=KEY_GRANULE, why=str(error).splitlines()[0]),)
            else:
                variants.append(Variant(target=arch, isa="amx", dtype=dtype, arithmetic=AMX_ARITHMETIC[dtype], plan=amx))
        for isa in VECTOR_ISAS:
            plan, steps, turned_down = plan_vector(problem, dtype, isa)
            arithmetic = isa.arithmetic[plan.scalar]
            variants.append(Variant(target=arch, isa=isa.name, dtype=dtype, arithmetic=arithmetic, plan=plan))
            changes[f"{isa.name}/{dtype}"] = steps
            rejected[f"{isa.name}/{dtype}"] = turned_down
    return Decision(
        arch=arch,
        limit_bytes=problem.sram_bytes,
        limit_reason="--sram, read as the share of the L2 cache that one thread may fill",
        variants=tuple(variants),
        changes={key: steps for key, steps in changes.items() if steps},
        rejected={key: tiles for key, tiles in rejected.items() if tiles},
    )


def files(problem: Problem, decision: Decision) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Every file of the CPU target under csrc/: its template and the context that this adds to the package's."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {
        "csrc/simd.h": (
            "cpu/simd.h.j2",
            {
                "has_double": "float64" in problem.dtypes,
                "float_exp2": exp2_coefficients.FLOAT32,
                "double_exp2": exp2_coefficients.FLOAT64,
            },
        ),
        "csrc/storage_simd.h": (
            "cpu/storage_simd.h.j2",
            {"has_bf16": "bf16" in problem.dtypes, "has_fp16": "fp16" in problem.dtypes},
        ),
        "csrc/block_simd.h": ("cpu/block_simd.h.j2", {}),
        "csrc/forward_simd.h": ("cpu/forward_simd.h.j2", {}),
    }
    for isa in VECTOR_ISAS:
        kernels = [_kernel(v, isa) for v in decision.variants if v.isa == isa.name]
        found[f"csrc/forward_cpu_{isa.name}.cpp"] = ("cpu/forward_cpu_unit.cpp.j2", {"isa": isa, "kernels": kernels})
    amx = tuple(v for v in decision.variants if v.isa == "amx")
    if amx and hasattr(cpu_amx, "files_amx"):
        found.update(cpu_amx.files_amx(problem, amx))
    return found


def _kernel(variant: Variant, isa: Isa) -> dict[str, Any]:
    """What the unit prints of one kernel."""
    plan = variant.plan
    assert isinstance(plan, CpuPlan)
    return {
        "dtype": variant.dtype,
        "code": CODE[variant.dtype],
        "element": ELEMENT[variant.dtype],
        "plan": plan,
        "blocks": [_block(plan, n, isa.groups[n]) for n in (plan.vectors, 1)],
        "aarch64_blocks": [_block(plan, n, isa.aarch64_groups[n]) for n in (plan.vectors, 1)] if isa.aarch64_groups else [],
    }


def _block(plan: CpuPlan, vectors: int, groups: Groups) -> str:
    """The C++ type of the block kernel with `vectors` vectors per panel."""
    return f"BlockKernel<{plan.scalar}, {plan.lanes}, {vectors}, {groups.keys}, {groups.columns}>"
