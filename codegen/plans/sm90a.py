"""Tile plans of the warp-specialised wgmma kernel (sm_90a), and the files of that target.

A block is one warpgroup that gives work and 1 to 4 consumers of 64 query rows each. Q has one buffer, K and V have
rings of their own. S, O and mostly P live in the consumers' registers; P goes through shared memory where that fits
more rows or keys (`registers_sm90a`).

From the paper's tile to a legal one, each step a Change with its reason:
  1. Br to a multiple of 64, the rows of a wgmma; Bc to a multiple of 16, the keys of one step of P V, at most 256.
  2. Bc, and below 32 keys Br, to what S and P leave room for beside O, with P in registers if that holds.
  3. Into min(--sram, shared memory of a block) with two stages of K and of V: fewer keys, but not below 32; then fewer
     rows; then one stage of V, of K, and 16 keys.
With `--tiling tuned` the plan is the fastest one measured, by mask form and length class; a case that was not measured
takes the plan of the paper's tile, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from codegen import tuned
from codegen.devices import DEVICES, FEATURE_TARGETS
from codegen.errors import PlanError, ToolError
from codegen.plan import Change, Decision, MemoryPart, Rejection, Variant
from codegen.plans import registers_sm90a
from codegen.plans.registers_sm90a import REGISTERS
from codegen.plans.sm80_tiles import ITEMSIZE, Region, Widths, padded
from codegen.problem import Problem
from codegen.sizes import format_bytes
from spec import tile_rule

WARPGROUP_ROWS = 64  # rows of one wgmma: one consumer
MOST_CONSUMERS = 4
GRANULE = 16  # keys of a k16 step of P V
MOST_KEYS = 256  # rows of one box of a tensor map
FEW_KEYS = 32  # rows go before keys below this
P_PANEL = 64  # P in shared memory is whole 128-byte panels
ALIGNMENT = 1024  # bytes: period of the widest swizzle
BARRIER_BYTES = 256
TILE_BYTES = 32  # two query tiles, named ahead
LAZY_FROM = 224  # padded dv from which the multiplications of O that a lazy rescale saves pay for its test
COUNTER_BYTES = 4
COUNTER_FROM = 11  # query tiles per head from which causal tiles are handed out by a counter
# K and V that the heads running side by side may touch: well below the L2 of an H100 or H200 (50 MB).
SECTION_BYTES = 32 * 1024 * 1024
STAGES = ((2, 2), (2, 1), (1, 1))
MOST_REJECTIONS = 6
# What plans of one tile may differ in: field -> how it is called, and how its value is said.
FREE: dict[str, tuple[str, Callable[[Any], str]]] = {
    "blocks_per_sm": ("blocks per SM", str),
    "stages_k": ("K tiles", str),
    "stages_v": ("V tiles", str),
    "p_in_shared": ("P in", lambda x: "shared memory" if x else "registers"),
    "ping_pong": ("products of the consumers", lambda x: "in turn" if x else "at will"),
    "lazy_rescale": ("O rescaled", lambda x: "when a maximum grew much" if x else "always"),
    "skips_masked": ("masked key tiles", lambda x: "left out" if x else "computed"),
}

Case = tuple[str, str]  # mask form, length class
ANY: Case = ("any", "any")

ARITHMETIC = "wgmma_sm90a"
# What every kernel includes: file under csrc/ -> template.
HEADERS = {
    "heads_sm90a.h": "sm90a/heads_sm90a.h",
    "map_sm90a.h": "sm90a/map_sm90a.h",
    "output_sm90a.cuh": "sm90a/output_sm90a.cuh.j2",
    "ptx_sm80.cuh": "sm80/ptx_sm80.cuh",
    "ptx_sm90a.cuh": "sm90a/ptx_sm90a.cuh.j2",
    "rings_sm90a.cuh": "sm90a/rings_sm90a.cuh",
    "softmax_sm90a.cuh": "sm90a/softmax_sm90a.cuh",
    "tiles_sm90a.cuh": "sm90a/tiles_sm90a.cuh",
}
DTYPES = {
    "bf16": {"type": "BFloat16", "code": "kBFloat16", "mma": "bf16", "pack": "cvt_rn_bf16x2",
             "map_type": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"},
    "fp16": {"type": "Float16", "code": "kFloat16", "mma": "f16", "pack": "cvt_rn_f16x2",
             "map_type": "CU_TENSOR_MAP_DATA_TYPE_FLOAT16"},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sm90aPlan(Widths):
    """All that the template may ask. `_bytes` are bytes; other sizes count elements."""

    br: int
    bc: int
    stages_k: int
    stages_v: int
    p_in_shared: bool  # P through shared memory, not through registers: fewer registers, more shared-memory traffic
    ping_pong: bool  # consumers issue their products in turn
    lazy_rescale: bool  # O is multiplied only when a maximum moved by more than 8 in base-2 units
    skips_masked: bool = False  # causal: a consumer leaves out key tiles that only later rows of its tile see
    blocks_per_sm: int = 1
    causal: str = "any"  # the mask forms that are compiled: "any", "full" or "causal"

    def __post_init__(self) -> None:
        rows_fit = self.br > 0 and self.br % WARPGROUP_ROWS == 0
        if not rows_fit or (self.br // WARPGROUP_ROWS, self.blocks_per_sm) not in REGISTERS:
            raise PlanError(f"Br={self.br}, {self.blocks_per_sm} blocks per SM: no such split into warpgroups")
        if min(self.stages_k, self.stages_v) < 1:
            raise PlanError(f"rings of {self.stages_k} K and {self.stages_v} V tiles: each needs one")
        if self.bc % (P_PANEL if self.p_in_shared else GRANULE) or not 0 < self.bc <= MOST_KEYS:
            raise PlanError(f"Bc={self.bc}: not whole granules of keys")
        if self.skips_masked and most_skipped(self.br, self.bc) >= min(self.stages_k, self.stages_v):
            raise PlanError("a consumer that skips so many key tiles waits for one that others still hold")

    @property
    def consumers(self) -> int:
        return self.br // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def producer_registers(self) -> int:
        return REGISTERS[self.consumers, self.blocks_per_sm][0]

    @property
    def consumer_registers(self) -> int:
        return REGISTERS[self.consumers, self.blocks_per_sm][1]

    @property
    def layout(self) -> tuple[Region, ...]:
        parts = [
            ("kQAt", "Q tile", self.br * self.d_padded),
            ("kKAt", f"{self.stages_k} K tiles", self.stages_k * self.bc * self.d_padded),
            ("kVAt", f"{self.stages_v} V tiles", self.stages_v * self.bc * self.dv_padded),
        ]
        if self.p_in_shared:
            parts.append(("kPAt", "P tile", self.br * self.bc))
        regions: list[Region] = []
        at = 0
        for constant, name, elements in parts:
            at = -(-at // ALIGNMENT) * ALIGNMENT
            regions.append(Region(constant=constant, name=name, offset=at, bytes=ITEMSIZE * elements))
            at += ITEMSIZE * elements
        regions.append(Region(constant="kBarriersAt", name="barriers", offset=at, bytes=BARRIER_BYTES))
        regions.append(Region(constant="kTilesAt", name="named tiles", offset=at + BARRIER_BYTES, bytes=TILE_BYTES))
        return tuple(regions)

    @property
    def memory(self) -> tuple[MemoryPart, ...]:
        return tuple(MemoryPart(name=r.name, bytes=r.bytes) for r in self.layout)

    @property
    def fast_memory_bytes(self) -> int:
        return self.layout[-1].offset + self.layout[-1].bytes

    @property
    def scratch_bytes(self) -> int:
        """Device memory that a call brings: the counter that hands out tiles under a causal mask."""
        return 0 if self.causal == "full" else COUNTER_BYTES

    def as_dict(self) -> dict[str, Any]:
        return {
            "br": self.br,
            "bc": self.bc,
            "consumers": self.consumers,
            "threads": self.threads,
            "blocks_per_sm": self.blocks_per_sm,
            "stages_k": self.stages_k,
            "stages_v": self.stages_v,
            "d_padded": self.d_padded,
            "dv_padded": self.dv_padded,
            "p_in_shared": self.p_in_shared,
            "ping_pong": self.ping_pong,
            "lazy_rescale": self.lazy_rescale,
            "skips_masked": self.skips_masked,
            "registers": self.consumer_registers,
            "producer_registers": self.producer_registers,
            "consumer_registers": self.consumer_registers,
            "fast_memory_bytes": self.fast_memory_bytes,
            "scratch_bytes": self.scratch_bytes,
        }


def most_skipped(br: int, bc: int) -> int:
    """The most key tiles that the first consumer of a causal tile may leave to the last one."""
    return -(-(br - WARPGROUP_ROWS) // bc)


def make_plan(
    problem: Problem, br: int, bc: int, stages: tuple[int, int], *, blocks_per_sm: int = 1, causal: str = "any"
) -> Sm90aPlan | None:
    """The plan of a tile of whole granules, P in registers if that holds; None if neither way does."""
    consumers, dv_padded, one_buffer = br // WARPGROUP_ROWS, padded(problem.dv), 1 in stages
    for p_in_shared in (False, True):
        whole = not p_in_shared or bc % P_PANEL == 0
        if whole and registers_sm90a.holds(consumers, blocks_per_sm, bc, dv_padded, p_in_shared, one_buffer):
            return Sm90aPlan(
                br=br, bc=bc, d=problem.d, dv=problem.dv, stages_k=stages[0], stages_v=stages[1],
                p_in_shared=p_in_shared, ping_pong=consumers > 1, lazy_rescale=dv_padded >= LAZY_FROM,
                skips_masked=consumers > 2 and causal != "full" and most_skipped(br, bc) < min(stages),
                blocks_per_sm=blocks_per_sm, causal=causal,
            )  # fmt: skip
    return None


def plan_tile(problem: Problem, limit: int) -> tuple[Sm90aPlan, tuple[Change, ...], tuple[Rejection, ...]]:
    """The legal plan within `limit` bytes that is nearest to the paper's tile, and the steps that led to it.

    Raises: PlanError when an override is illegal or nothing fits.
    """
    _check_overrides(problem)
    paper = tile_rule.rule(tile_rule.elements(problem.sram_bytes, ITEMSIZE), problem.d, problem.dv)
    changes: list[Change] = []
    rejected: list[Rejection] = []
    most_rows = WARPGROUP_ROWS * MOST_CONSUMERS
    br = problem.br or min(most_rows, max(WARPGROUP_ROWS, paper.br - paper.br % WARPGROUP_ROWS))
    bc = problem.bc or min(MOST_KEYS, max(GRANULE, paper.bc - paper.bc % GRANULE))
    whole = f"wgmma takes {WARPGROUP_ROWS} rows and {GRANULE} keys, a block {most_rows} rows and a box {MOST_KEYS} keys"
    _note(changes, "Br", paper.br, br, whole, problem.br)
    _note(changes, "Bc", paper.bc, bc, whole, problem.bc)

    held = next(_holding(problem, br, bc), None)
    if held is None:
        hint = () if problem.br is None and problem.bc is None else ("try --br or --bc with fewer rows or keys",)
        raise PlanError(_why_registers(problem, br, bc), *hint)
    spill = _why_registers(problem, br, bc)
    if (held.br, held.bc) != (br, bc):
        rejected.append(Rejection(br=br, bc=bc, why=spill))
    _note(changes, "Br", br, held.br, spill, problem.br)
    _note(changes, "Bc", bc, held.bc, spill, problem.bc)

    fitting = next(_fitting(problem, held.br, held.bc, limit, rejected), None)
    if fitting is None:
        raise _nothing_fits(problem, limit)
    over = f"{held.br} x {held.bc} with two stages exceeds {limit:,} bytes"
    _note(changes, "Br", held.br, fitting.br, f"{over}; rows go before fewer than {FEW_KEYS} keys", problem.br)
    _note(changes, "Bc", held.bc, fitting.bc, over, problem.bc)
    return fitting, tuple(changes), tuple(rejected[:MOST_REJECTIONS])


def _keys(problem: Problem, most: int, least: int) -> list[int]:
    return [problem.bc] if problem.bc else list(range(most, least - 1, -GRANULE))


def _rows(problem: Problem, most: int) -> list[int]:
    return [problem.br] if problem.br else list(range(most, 0, -WARPGROUP_ROWS))


def _holding(problem: Problem, br: int, bc: int) -> Iterator[Sm90aPlan]:
    """Plans of at most br x bc that hold in registers, the nearest first; rows go before fewer than FEW_KEYS keys."""
    for least in dict.fromkeys((min(bc, FEW_KEYS), GRANULE)):
        for rows in _rows(problem, br):
            for keys in _keys(problem, bc, least):
                plan = make_plan(problem, rows, keys, STAGES[0])
                if plan is not None:
                    yield plan


def _fitting(problem: Problem, br: int, bc: int, limit: int, rejected: list[Rejection]) -> Iterator[Sm90aPlan]:
    """Plans within `limit` bytes, the nearest to br x bc first; what is overridden stays."""
    for stages in STAGES:
        for least in dict.fromkeys((min(bc, FEW_KEYS), GRANULE)) if stages != STAGES[0] else (min(bc, FEW_KEYS),):
            for rows in _rows(problem, br):
                for keys in _keys(problem, bc, least):
                    plan = make_plan(problem, rows, keys, stages)
                    if plan is not None and plan.fast_memory_bytes <= limit:
                        yield plan
                    elif plan is not None and keys == bc:
                        why = f"needs {plan.fast_memory_bytes:,} bytes of {limit:,}"
                        rejected.append(Rejection(br=rows, bc=keys, why=why))


def _note(changes: list[Change], side: str, before: int, after: int, why: str, overridden: int | None) -> None:
    if before != after and overridden is None:
        changes.append(Change(what=f"{side} {before} -> {after}", why=why))


def _check_overrides(problem: Problem) -> None:
    """Raise PlanError for a Br or Bc that no shared memory and no other side would make legal."""
    most = WARPGROUP_ROWS * MOST_CONSUMERS
    if problem.br is not None and (problem.br % WARPGROUP_ROWS or problem.br > most):
        raise PlanError(f"Br={problem.br}: wgmma needs a multiple of {WARPGROUP_ROWS}, at most {most}")
    if problem.bc is not None and (problem.bc % GRANULE or problem.bc > MOST_KEYS):
        raise PlanError(f"Bc={problem.bc}: wgmma needs a multiple of {GRANULE}, at most {MOST_KEYS}")


def _why_registers(problem: Problem, br: int, bc: int) -> str:
    """Why the tile does not hold in registers, with P in them and in shared memory."""
    given = REGISTERS[br // WARPGROUP_ROWS, 1][1]
    inside, outside = (registers_sm90a.needed(bc, padded(problem.dv), way) for way in (False, True))
    wants = f"and P in shared memory wants a multiple of {P_PANEL} keys"
    ways = f"{inside} with P in registers, {wants if bc % P_PANEL else f'{outside} with P in shared memory'}"
    return f"{br} x {bc} spills: of a consumer's {given} registers it takes {ways}"


def _nothing_fits(problem: Problem, limit: int) -> PlanError:
    """What was asked, the smallest tile, and what to try."""
    br, bc = problem.br or WARPGROUP_ROWS, problem.bc or GRANULE
    smallest = make_plan(problem, br, bc, STAGES[-1])
    widths = f"d={problem.d}" + (f", dv={problem.dv}" if problem.dv != problem.d else "")
    hints = []
    if smallest is not None:
        parts = ", ".join(f"{part.name} {part.bytes:,}" for part in smallest.memory)
        hints.append(f"smallest: Br={br} Bc={bc} needs {smallest.fast_memory_bytes:,} bytes ({parts})")
        if limit == problem.sram_bytes:
            hints.append(f"try --sram {-(-smallest.fast_memory_bytes // 1024)}KB")
    else:
        hints.append(f"with rings of one buffer Br={br} Bc={bc} spills: try fewer rows or keys (--br, --bc)")
    dtypes = ", ".join(t for t in problem.dtypes if t in DTYPES)
    return PlanError(f"no tile fits {limit:,} bytes of shared memory at {widths}, {dtypes}", *hints)


def shared_memory(problem: Problem, arch: str) -> tuple[int, str]:
    """Bytes that a plan may take, and what limits them."""
    device = DEVICES[FEATURE_TARGETS.get(arch, arch)]
    limit = min(problem.sram_bytes, device.smem_per_block_bytes)
    of_device = f"shared memory of a block on {device.name}, {format_bytes(limit)}"
    return limit, "--sram" if limit == problem.sram_bytes else of_device


def decide(problem: Problem, arch: str) -> Decision:
    """The kernels of the wgmma target: one plan for all, or with tuned tiling one per mask form and length class.

    Raises: PlanError when no tile is legal, or an override is not; ToolError for a tuning table that is not right.
    """
    limit, reason = shared_memory(problem, arch)
    paper, steps, rejected = plan_tile(problem, limit)
    changes = steps + _few_rows(problem, paper)
    if problem.tiling != "tuned":
        return _decision(problem, arch, {ANY: paper}, limit, reason, {ANY: changes}, rejected)
    plans: dict[Case, Sm90aPlan] = {}
    notes: dict[Case, tuple[Change, ...]] = {}
    for causal in tuned.CAUSAL_FORMS:
        for length_class, most in tuned.LENGTH_CLASSES.items():
            case = (causal, length_class if most else "any")  # tried in this order: the last takes what is left
            choice = tuned.fastest(problem, arch, causal=causal, length_class=length_class)
            if choice is None or choice.fast_memory_bytes > limit:
                plans[case], notes[case] = replace(paper, causal=causal), changes
                continue
            plan = plans[case] = _measured(problem, choice, causal)
            what = _difference(problem, paper, plan)
            told = Change(what=what or f"{plan.br} x {plan.bc} as with --tiling paper", why=choice.why)
            notes[case] = (told,) if what else (*steps, told)
    missing = [case for case in plans if notes[case] is changes]
    if len(missing) == len(plans):  # the package of --tiling paper, which says that it is
        plans, notes, missing = {ANY: paper}, {ANY: changes}, [ANY]
    for case in missing:
        what = f"{paper.br} x {paper.bc} as with --tiling paper"
        notes[case] += (Change(what=what, why=tuned.why_none(problem, arch, causal=case[0])),)
    return _decision(problem, arch, plans, limit, reason, notes)


def _difference(problem: Problem, paper: Sm90aPlan, plan: Sm90aPlan) -> str:
    """What a measured plan has other than the paper's tile for the same masks; "" where nothing."""
    own = make_plan(problem, paper.br, paper.bc, (paper.stages_k, paper.stages_v), causal=plan.causal)
    assert own is not None  # as the plan of the paper's tile was made
    is_tile = (own.br, own.bc) != (plan.br, plan.bc)
    found = [f"{own.br} x {own.bc} -> {plan.br} x {plan.bc}"] if is_tile else []
    for name in ("blocks_per_sm",) if is_tile else FREE:  # the others mostly follow from the tile
        before, after = (FREE[name][1](getattr(one, name)) for one in (own, plan))
        if before != after:
            found.append(f"{FREE[name][0]} {before} -> {after}")
    return ", ".join(found)


def _measured(problem: Problem, choice: tuned.Choice, causal: str) -> Sm90aPlan:
    """The plan of a row of a tuning table.

    Raises: ToolError where it is none of this planner's, is for another mask form, or takes other memory than when it
    was measured.
    """
    again = f"python -m verify tune --arch sm90a --d {problem.d}" + f"/{problem.dv}" * (problem.dv != problem.d)
    kinds = {field.name: field.type for field in fields(Sm90aPlan)}  # as annotated: "int"
    try:
        for name, value in choice.fields.items():
            if type(value).__name__ != kinds.get(name):
                raise PlanError(f"{name}: {value!r} is no {kinds.get(name, 'field of a plan')}")
        plan = Sm90aPlan(d=problem.d, dv=problem.dv, **choice.fields)
        if plan.causal not in ("any", causal):
            raise PlanError(f"{plan.br} x {plan.bc} for {causal} calls has a kernel of {plan.causal} ones")
        size = plan.fast_memory_bytes
        if size != choice.fast_memory_bytes:
            raise PlanError(f"{plan.br} x {plan.bc} takes {size:,} bytes, not {choice.fast_memory_bytes:,}")
    except (TypeError, PlanError) as error:  # TypeError: a field is missing
        row = f"the tuning table of {choice.card} has a plan that is not this planner's"
        raise ToolError(f"{row}: {error}", f"measure it again: {again}") from None
    return plan


def _few_rows(problem: Problem, plan: Sm90aPlan) -> tuple[Change, ...]:
    """A word on the single consumer to which the paper's rule leads where d < 128: nobody multiplies beside it."""
    if plan.consumers > 1 or problem.br is not None or problem.d >= 2 * WARPGROUP_ROWS:
        return ()
    why = (
        f"the paper's Br = min(Bc, d) is at most {problem.d} rows: no other consumer's products run beside the softmax "
        "of this one, and few rows share a key tile; --tiling tuned, or --br 128 or 192, is faster"
    )
    return (Change(what="one consumer", why=why),)


def _decision(
    problem: Problem,
    arch: str,
    plans: Mapping[Case, Sm90aPlan],
    limit: int,
    reason: str,
    changes: Mapping[Case, tuple[Change, ...]] | None = None,
    rejected: tuple[Rejection, ...] = (),
) -> Decision:
    variants = tuple(
        Variant(target=arch, isa=arch, dtype=t, causal=case[0], length_class=case[1], arithmetic=ARITHMETIC, plan=plan)
        for t in problem.dtypes
        if t in DTYPES
        for case, plan in plans.items()
    )
    steps = {v.key: (changes or {}).get((v.causal, v.length_class), ()) for v in variants}
    return Decision(
        arch=arch,
        limit_bytes=limit,
        limit_reason=reason,
        variants=variants,
        changes={key: found for key, found in steps.items() if found},
        rejected={v.key: rejected for v in variants if rejected},
    )


def candidates(problem: Problem, arch: str, *, causal: str, length_class: str) -> list[Decision]:
    """The legal plans that are worth measuring for a mask form and a length class, one Decision each.

    For each number of consumers and of blocks per SM the two longest key tiles that hold, and 128 and 64 keys. Every
    tile from 64 keys on where two or more consumers have an SM to themselves: the fastest plans are among them, and a
    budget between two of them would take a much slower one.
    """
    limit, reason = shared_memory(problem, arch)
    _check_overrides(problem)
    found: dict[Sm90aPlan, None] = {}
    for consumers, blocks in REGISTERS:
        br = WARPGROUP_ROWS * consumers
        if problem.br not in (None, br) or (blocks > 1 and length_class != "short"):
            continue
        room = min(limit, DEVICES[FEATURE_TARGETS.get(arch, arch)].smem_per_sm_bytes // blocks - 1024)
        plans = [
            plan
            for keys in _keys(problem, 208, GRANULE)
            if (plan := make_plan(problem, br, keys, STAGES[0], blocks_per_sm=blocks, causal=causal))
            and plan.fast_memory_bytes <= room
        ]
        every = blocks == 1 and consumers > 1
        worth = [p for i, p in enumerate(plans) if i < 2 or p.bc in (64, 128) or (every and p.bc > 64)]
        found.update(dict.fromkeys(worth))
    return [_decision(problem, arch, {(causal, length_class): plan}, limit, reason) for plan in found]


def context(problem: Problem, plan: Sm90aPlan, dtypes: tuple[str, ...], entry: str) -> dict[str, Any]:
    """What a kernel's template asks beyond the package's own context. `entry`: the name of its C function."""
    return {
        "plan": plan,
        "dtypes": [DTYPES[t] for t in dtypes],
        "section_bytes": SECTION_BYTES,
        "counter_from": COUNTER_FROM,
        "entry": entry,
        "kernel_name": f"attention_forward_d{problem.d}_dv{problem.dv}_{plan.br}x{plan.bc}",
    }


def products(plans: tuple[Sm90aPlan, ...], dtypes: tuple[str, ...]) -> list[dict[str, Any]]:
    """The wgmma wrappers that the kernels of these plans call."""
    forms = {(plan.bc, "ss") for plan in plans}
    forms |= {(plan.dv_padded, "ss" if plan.p_in_shared else "rs") for plan in plans}
    return [{"n": n, "form": form, "dtype": DTYPES[t]["mma"]} for t in dtypes for n, form in sorted(forms)]


def files(problem: Problem, decision: Decision) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """A kernel per distinct plan, named in the order of the variants, and what the kernels include, under csrc/."""
    dtypes = tuple(dict.fromkeys(v.dtype for v in decision.variants))
    plans = tuple(dict.fromkeys(v.plan for v in decision.variants if isinstance(v.plan, Sm90aPlan)))
    assert plans and dtypes, decision
    made: dict[str, tuple[str, Mapping[str, Any]]] = {
        f"csrc/{path}": (template, {"wgmma": products(plans, dtypes)} if template.endswith(".j2") else {})
        for path, template in HEADERS.items()
    }
    for number, plan in enumerate(plans):
        own = context(problem, plan, dtypes, f"attention_forward_sm90a_{number}")
        made[f"csrc/forward_sm90a_{number}.cu"] = ("sm90a/forward_sm90a.cu.j2", own)
    return made
