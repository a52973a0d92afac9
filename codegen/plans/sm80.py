"""Tile plans of the mma.sync kernel (sm_80 and its relatives), and the files of such a target.

One kernel text serves sm80, sm86, sm89 and sm120: they differ in shared memory per block, not in instructions that we
use. A block is `warps` warps, each with one or two m16 tiles of query rows. Shared memory holds Q, K and V, one buffer
each: the copy of V overlaps Q K^T, the copy of the next K the rest of the step. S, P and O live in registers.

From the paper's tile to a legal one, each step a Change with its reason:
  1. Br and Bc to multiples of 16, the granule of mma.m16n8k16; more than 128 rows to a multiple of 32, because a block
     has at most 8 warps.
  2. Bc to what S leaves room for beside O in 255 registers (`registers_sm80`). Above 128 rows a warp has 32 rows and
     room for fewer keys than with 16, so 128 rows are tried too and the larger Br x Bc is taken.
  3. Into min(--sram, shared memory of a block): fewer keys, but not below 32; then fewer rows; then 16 keys.
Of the ways to spread the rows over warps, 32 rows per warp come first: each K and V fragment is then used twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from codegen.devices import DEVICES
from codegen.errors import PlanError
from codegen.plan import Change, Decision, MemoryPart, Rejection, Variant
from codegen.plans import registers_sm80, sm80_backward
from codegen.plans.registers_sm80 import MOST_ACCUMULATORS, MOST_WARPS, PER_THREAD, accumulators
from codegen.plans.sm80_tiles import DTYPES, GRANULE, ITEMSIZE, SECTION_BYTES, Region, Widths, padded, panel
from codegen.problem import Problem
from codegen.sizes import format_bytes
from spec import tile_rule

FEW_KEYS = 32  # rows go before keys below this
LOOP_STEPS = 7  # longest straight run of k16 steps in Q K^T: longer ones spill
MOST_REJECTIONS = 6
CANDIDATE_ROWS, CANDIDATE_KEYS = (64, 128, 256), (32, 64, 96, 128, 192, 256)

ARITHMETIC = "mma_sm80"


@dataclass(frozen=True, kw_only=True)
class Sm80Plan(Widths):
    """All that the template may ask. `_bytes` are bytes; other sizes count elements."""

    br: int
    bc: int
    row_tiles: int  # m16 tiles per warp
    refill_before_softmax: bool  # when the copy of the next K tile starts

    def __post_init__(self) -> None:
        if self.br <= 0 or self.bc <= 0 or self.bc % GRANULE or self.row_tiles not in spreads(self.br):
            raise PlanError(f"Br={self.br}, Bc={self.bc}, {self.row_tiles} m16 tiles per warp: not whole granules")

    @property
    def warps(self) -> int:
        return self.br // (GRANULE * self.row_tiles)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def steps_at_once(self) -> int:
        return steps_at_once(self.d_padded)

    @property
    def layout(self) -> tuple[Region, ...]:
        """Shared memory from offset 0 on. Tiles are whole 16-row blocks, so each starts on a period of its swizzle."""
        regions: list[Region] = []
        for constant, name, rows, columns in (
            ("kQAt", "Q tile", self.br, self.d_padded),
            ("kKAt", "K tile", self.bc, self.d_padded),
            ("kVAt", "V tile", self.bc, self.dv_padded),
        ):
            at = regions[-1].offset + regions[-1].bytes if regions else 0
            regions.append(Region(constant=constant, name=name, offset=at, bytes=ITEMSIZE * rows * columns))
        return tuple(regions)

    @property
    def memory(self) -> tuple[MemoryPart, ...]:
        parts = [MemoryPart(name=region.name, bytes=region.bytes) for region in self.layout]
        rest = ITEMSIZE * self.br * self.dv_padded - sum(part.bytes for part in parts)
        if rest > 0:  # O is written out through the same bytes
            parts.append(MemoryPart(name="O tile beyond Q, K and V", bytes=rest))
        return tuple(parts)

    @property
    def fast_memory_bytes(self) -> int:
        return sum(part.bytes for part in self.memory)

    @property
    def accumulators(self) -> int:
        return accumulators(self.row_tiles, self.dv_padded, self.bc)

    def as_dict(self) -> dict[str, Any]:
        return {
            "br": self.br,
            "bc": self.bc,
            "warps": self.warps,
            "threads": self.threads,
            "rows_per_warp": GRANULE * self.row_tiles,
            "stages": 1,
            "d_padded": self.d_padded,
            "dv_padded": self.dv_padded,
            "accumulator_registers": self.accumulators,
            "registers": PER_THREAD,  # ptxas takes all that it can have
            "refill_before_softmax": self.refill_before_softmax,
            "fast_memory_bytes": self.fast_memory_bytes,
        }


def steps_at_once(width: int) -> int:
    """k16 steps of Q K^T in one pass of its loop: whole panels and a divisor of all steps; else all steps."""
    steps, in_panel = width // GRANULE, panel(width) // GRANULE
    runs = [n for n in range(in_panel, LOOP_STEPS + 1, in_panel) if steps % n == 0]
    return max(runs) if runs and (runs[-1] > 1 or steps <= LOOP_STEPS) else steps


def swizzled(row: int, chunk: int, columns: int) -> int:
    """Byte offset of 16-byte chunk `chunk` of row `row` in a panel: what the template's `swizzled` computes."""
    chunks = columns // 8
    return row * 2 * columns + ((chunk ^ (row // (8 // chunks) % chunks)) << 4)


def spreads(br: int) -> tuple[int, ...]:
    """m16 tiles per warp with which at most MOST_WARPS warps make `br` rows, the better first."""
    return tuple(n for n in (2, 1) if br % (GRANULE * n) == 0 and br // (GRANULE * n) <= MOST_WARPS)


def make_plan(problem: Problem, br: int, bc: int) -> Sm80Plan | None:
    """The plan of a tile of whole granules: the first spread that holds in registers, None if none does."""
    for row_tiles in spreads(br):
        warps = br // (GRANULE * row_tiles)
        fit = registers_sm80.fit(row_tiles, warps, padded(problem.d), padded(problem.dv), bc)
        if fit is not None:
            return Sm80Plan(
                br=br, bc=bc, d=problem.d, dv=problem.dv, row_tiles=row_tiles,
                refill_before_softmax=fit.refill_before_softmax,
            )  # fmt: skip
    return None


def plan_tile(problem: Problem, limit: int) -> tuple[Sm80Plan, tuple[Change, ...], tuple[Rejection, ...]]:
    """The legal plan within `limit` bytes, the steps that led to it and the tiles turned down.

    Raises: PlanError when an override is illegal or nothing fits.
    """
    paper = tile_rule.rule(tile_rule.elements(problem.sram_bytes, ITEMSIZE), problem.d, problem.dv)
    _check_overrides(problem)
    changes: list[Change] = []
    rejected: list[Rejection] = []

    br = problem.br or max(GRANULE, _whole(paper.br))
    bc = problem.bc or max(GRANULE, paper.bc - paper.bc % GRANULE)
    whole = f"mma.m16n8k16 takes {GRANULE} rows and {GRANULE} keys, and a block has at most {MOST_WARPS} warps"
    _note(changes, "Br", paper.br, br, whole, overridden=problem.br)
    _note(changes, "Bc", paper.bc, bc, whole, overridden=problem.bc)

    held = _hold_in_registers(problem, br, bc, rejected)
    if held is None:
        raise PlanError(_why_registers(problem, br, bc), *_try_keys(problem, br, bc))
    spill = _why_registers(problem, br, bc)
    _note(changes, "Br", br, held.br, spill, overridden=problem.br)
    _note(changes, "Bc", bc, held.bc, spill, overridden=problem.bc)

    fitting = _fit_memory(problem, held, limit, rejected)
    if fitting is None:
        raise _nothing_fits(problem, limit)
    over = f"{held.br} x {held.bc} needs {held.fast_memory_bytes:,} bytes of {limit:,}"
    fewer_rows = f"{over}; rows go before fewer than {FEW_KEYS} keys"
    _note(changes, "Br", held.br, fitting.br, fewer_rows, overridden=problem.br)
    _note(changes, "Bc", held.bc, fitting.bc, over, overridden=problem.bc)
    return fitting, tuple(changes), tuple(rejected[:MOST_REJECTIONS])


def _whole(br: int) -> int:
    """The most rows up to `br` that some spread makes; 0 below one granule."""
    return next((rows for rows in range(br - br % GRANULE, 0, -GRANULE) if spreads(rows)), 0)


def _note(changes: list[Change], side: str, before: int, after: int, why: str, *, overridden: int | None) -> None:
    if before != after and overridden is None:
        changes.append(Change(what=f"{side} {before} -> {after}", why=why))


def _check_overrides(problem: Problem) -> None:
    """Raise PlanError for a Br or Bc that no shared memory and no other side would make legal."""
    for side, size in (("br", problem.br), ("bc", problem.bc)):
        if size is not None and size % GRANULE:
            near = max(GRANULE, size - size % GRANULE)
            raise PlanError(
                f"{side.capitalize()}={size}: mma.m16n8k16 needs a multiple of {GRANULE}", f"try --{side} {near}"
            )
    if problem.br is not None and not spreads(problem.br):
        rows = GRANULE * MOST_WARPS
        raise PlanError(
            f"Br={problem.br}: a block has at most {MOST_WARPS} warps of {GRANULE} or {2 * GRANULE} rows",
            f"multiples of {GRANULE} up to {rows}, of {2 * GRANULE} up to {2 * rows}",
            f"try --br {_whole(problem.br)}",
        )


def _hold_in_registers(problem: Problem, br: int, bc: int, rejected: list[Rejection]) -> Sm80Plan | None:
    """The largest tile of at most br x bc that does not spill; what is overridden stays."""
    most = GRANULE * MOST_WARPS
    found = []
    for rows in [br] if problem.br or br <= most else [br, most]:
        for keys in [bc] if problem.bc else range(bc, 0, -GRANULE):
            plan = make_plan(problem, rows, keys)
            if plan is not None:
                found.append(plan)
                break
            if keys == bc:
                rejected.append(Rejection(br=rows, bc=keys, why=_why_registers(problem, rows, keys)))
    return max(found, key=lambda plan: plan.br * plan.bc, default=None)


def _fit_memory(problem: Problem, held: Sm80Plan, limit: int, rejected: list[Rejection]) -> Sm80Plan | None:
    """The tile nearest to `held` within `limit` bytes; what is overridden stays."""
    for least in dict.fromkeys((min(held.bc, FEW_KEYS), GRANULE)):
        for rows in [held.br] if problem.br else range(held.br, 0, -GRANULE):
            for keys in [held.bc] if problem.bc else range(held.bc, least - 1, -GRANULE):
                plan = make_plan(problem, rows, keys)
                if plan is None:
                    continue
                if plan.fast_memory_bytes <= limit:
                    return plan
                if keys == held.bc:
                    why = f"needs {plan.fast_memory_bytes:,} bytes of {limit:,}"
                    rejected.append(Rejection(br=rows, bc=keys, why=why))
    return None


def _why_registers(problem: Problem, br: int, bc: int) -> str:
    """Why the tile does not hold in registers, for each way to spread its rows."""
    needs = {n: accumulators(n, padded(problem.dv), bc) for n in spreads(br)}
    ways = " or ".join(
        f"{need} with {GRANULE * n} rows per warp (limit {MOST_ACCUMULATORS[n]})" for n, need in needs.items()
    )
    return f"{br} x {bc} spills: of a thread's {PER_THREAD} registers, S and O take {ways}"


def _try_keys(problem: Problem, br: int, bc: int) -> list[str]:
    """What to try instead of an override that spills."""
    keys = next((k for k in range(bc, 0, -GRANULE) if make_plan(problem, br, k)), None)
    rows = next((r for r in range(br, 0, -GRANULE) if make_plan(problem, r, bc)), None)
    hints = [f"--br {br} --bc {keys}"] if keys else []
    hints += [f"--br {rows} --bc {bc}"] if rows else []
    return [f"try {' or '.join(hints)}"] if hints else []


def _nothing_fits(problem: Problem, limit: int) -> PlanError:
    """What was asked, the smallest tile, and what to try."""
    br, bc = problem.br or GRANULE, problem.bc or GRANULE
    smallest = make_plan(problem, br, bc)
    assert smallest is not None  # fewer keys and rows only lower the register count
    need = smallest.fast_memory_bytes
    parts = ", ".join(f"{part.name} {part.bytes:,}" for part in smallest.memory)
    hints = [f"smallest: Br={br} Bc={bc} needs {need:,} bytes ({parts})"]
    if limit == problem.sram_bytes:
        hints.append(f"try --sram {-(-need // 1024)}KB")
    asked = "".join(f" {side}={size}" for side, size in (("Br", problem.br), ("Bc", problem.bc)) if size)
    widths = f"d={problem.d}" + (f", dv={problem.dv}" if problem.dv != problem.d else "")
    dtypes = ", ".join(t for t in problem.dtypes if t in DTYPES)
    tile = f"no tile with{asked}" if asked else "no tile"
    return PlanError(f"{tile} fits {limit:,} bytes of shared memory at {widths}, {dtypes}", *hints)


def decide(problem: Problem, arch: str) -> Decision:
    """The kernels of one mma.sync target: per pass, one plan serves both 16-bit types.

    Raises: PlanError when no tile is legal, or an override is not.
    """
    device = DEVICES[arch]
    limit = min(problem.sram_bytes, device.smem_per_block_bytes)
    of_device = f"shared memory of a block on {device.name}, {format_bytes(limit)}"
    plan, changes, rejected = plan_tile(problem, limit)
    dtypes = problem.dtypes_of(arch)
    of_gradients = {t: sm80_backward.plan_backward(problem, t, arch) for t in dtypes if problem.backward}
    return Decision(
        arch=arch,
        limit_bytes=limit,
        limit_reason="--sram" if limit == problem.sram_bytes else of_device,
        variants=tuple(Variant(target=arch, isa=arch, dtype=t, arithmetic=ARITHMETIC, plan=plan) for t in dtypes),
        changes={f"{arch}/{t}": changes for t in dtypes if changes},
        rejected={f"{arch}/{t}": rejected for t in dtypes if rejected},
        backward=tuple(
            Variant(target=arch, isa=arch, dtype=t, arithmetic=sm80_backward.ARITHMETIC, plan=found[0])
            for t, found in of_gradients.items()
        ),
        backward_changes={f"{arch}/{t}": found[1] for t, found in of_gradients.items() if found[1]},
        backward_rejected={f"{arch}/{t}": found[2] for t, found in of_gradients.items() if found[2]},
    )


def candidates(problem: Problem, arch: str, *, causal: str, length_class: str) -> Iterator[Decision]:
    """What `verify tune` measures: the decisions that would be made for every tile of CANDIDATE_ROWS x CANDIDATE_KEYS
    that is legal within --sram. One kernel text serves every mask form and length."""
    for br in CANDIDATE_ROWS:
        for bc in CANDIDATE_KEYS:
            try:
                yield decide(replace(problem, br=br, bc=bc), arch)
            except PlanError:
                continue


def context(problem: Problem, plan: Sm80Plan, arch: str, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """What the kernel's template asks beyond the package's own context."""
    return {
        "arch": arch,
        "plan": plan,
        "dtypes": [DTYPES[t] for t in dtypes],
        "section_bytes": SECTION_BYTES,
        "kernel_name": f"attention_forward_d{problem.d}_dv{problem.dv}_{plan.br}x{plan.bc}",
    }


def files(problem: Problem, decision: Decision) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """The kernels and their PTX header under csrc/: template and the context that this adds to the package's."""
    plan = decision.variants[0].plan
    assert isinstance(plan, Sm80Plan)
    dtypes = tuple(v.dtype for v in decision.variants)
    backward = {
        (v.target, v.dtype): v.plan for v in decision.backward if isinstance(v.plan, sm80_backward.Sm80BackwardPlan)
    }
    return {
        f"csrc/forward_{decision.arch}.cu": ("sm80/forward_sm80.cu.j2", context(problem, plan, decision.arch, dtypes)),
        "csrc/ptx_sm80.cuh": ("sm80/ptx_sm80.cuh", {}),
        **sm80_backward.files(problem, backward),
    }
