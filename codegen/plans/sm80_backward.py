"""Tile plans of the mma.sync backward kernels, and the files that they are printed to.

Two kernels carry the products. `key_tiles`: a block owns Bc keys, keeps their dK and dV in registers and runs over
tiles of Br rows; it also makes the dQ of each tile, which it adds to memory. `query_tiles`, for sums in a fixed order
and where dQ alone is wanted: a block owns rows, keeps their dQ in registers and runs over keys. One text serves every
relative of sm_80; they differ in shared memory per block.

What decides speed here is the traffic of shared memory. An m16n8k16 takes 2 clocks of an A100's matrix units and an
ldmatrix.x4 takes 4 of its shared memory, so that one fetched operand must serve two products and more: warps own 32
keys rather than 16, and P^T and dS^T stay in the registers of the warp that made them, for its own share of the rows.
Every tile shape that holds in registers (`registers_sm80_backward`) and fits in min(--sram, shared memory of a block)
is scored by `KeyTiles.clocks` and `QueryTiles.clocks`, clocks of one multiprocessor per pair of row and key, and the
cheapest is taken; of tiles of `query_tiles` that the score cannot tell apart, the largest. --br and --bc are the
forward kernel's.

In `query_tiles` a barrier per step keeps the warps of a block together: they wait for a tile, for the first operands
and between the products all at once, and the units rest. A second block on the multiprocessor works meanwhile, so that
two blocks of 4 warps beat one of 8 although they load K and V twice as often (`STEP_WAIT`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from codegen.devices import DEVICES
from codegen.errors import PlanError
from codegen.plan import Change, MemoryPart, Rejection
from codegen.plans import registers_sm80_backward as registers
from codegen.plans.sm80_tiles import DTYPES, GRANULE, ITEMSIZE, SECTION_BYTES, Region, Widths, panel
from codegen.problem import Problem
from spec import tile_rule

ARITHMETIC = "mma_sm80"
PARTS = ("params", "query", "tiles")  # headers of the unit
ROWS, KEYS = (16, 32, 64, 128), (16, 32, 48, 64, 96, 128)
WARPS = (8, 4, 2, 1)
FEW_WARPS = 4  # blocks of fewer read Q and dO too often: only where nothing else fits
ENOUGH_DQ = 32  # accumulators of dQ that need no second pass
STATISTICS_BYTES = 8  # LSE log2 e and D of a row
MOST_REJECTIONS = 4

# Clocks of a multiprocessor: an m16n8k16, an ldmatrix.x4, 128 bytes of shared memory, a barrier with what waits behind
# it. An A100's data sheet (1024 multiply-adds per clock, 128 bytes); the barrier is a guess.
PRODUCT, FETCH, LINE_BYTES, BARRIER = 2, 4, 128, 60
LOADED_BYTES = 28  # per clock, from L2: 5.5 TB/s over the 132 multiprocessors of an H200 at 1.5 GHz
# Per clock, of dQ added to L2: 30 GB/s at 1.5 GHz, an H200 in flash-attention's pull requests 2888 and 2889.
REDUCED_BYTES = 20
# Fewer do not fill a multiprocessor; more do not fit, at up to 255 of a thread's registers: 8 warps take all 65,536.
BUSY_WARPS = 8
# Clocks of a step of query_tiles in which a block alone leaves the units idle, whatever for; three times as many with
# one stage, whose loads nothing hides. Fitted to 16 tiles timed on an H200 (tests/sm80/query_tiles_h200.json), with the
# time of each shape's backward pass as a line in `QueryTiles.clocks`. The part that grows with the clocks is then met
# to 6.5% at d=64 and 3.9% at d=128 (root mean square; tests/sm80/test_backward_plan_sm80.py makes the fit): clocks that
# differ by less do not tell which tile is faster.
STEP_WAIT, FIT_ERROR = 1300, 0.05


def _blocks(columns: int) -> int:
    return columns // GRANULE


def _share(parts: int, among: int) -> int:
    return -(-parts // among)


def _regions(parts: tuple[tuple[str, str, int], ...]) -> tuple[Region, ...]:
    """(constant, name, bytes) one behind the other from offset 0 on. Tiles are whole 16-row blocks."""
    regions, at = [], 0
    for constant, name, size in parts:
        regions.append(Region(constant=constant, name=name, offset=at, bytes=size))
        at += size
    return tuple(regions)


@dataclass(frozen=True, kw_only=True)
class KeyTiles(Widths):
    """A tile of `key_tiles`. The warps form a grid: warps / row_warps groups of keys, row_warps groups of rows."""

    br: int
    bc: int
    warps: int
    row_warps: int
    stages: int  # tiles of Q and dO in flight

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def key_tiles(self) -> int:
        """m16 tiles of keys per warp."""
        return self.bc * self.row_warps // (GRANULE * self.warps)

    @property
    def rows(self) -> int:
        """Rows of a warp."""
        return self.br // self.row_warps

    @property
    def pairs(self) -> int:
        """Float32 registers of S^T and dP^T."""
        return self.key_tiles * self.rows

    @property
    def sums(self) -> int:
        """Float32 registers of dK and dV."""
        columns = _share(_blocks(self.d_padded), self.row_warps) + _share(_blocks(self.dv_padded), self.row_warps)
        return 8 * self.key_tiles * columns

    @property
    def panel_p(self) -> int:
        return panel(self.br)

    @cached_property
    def dq_grid(self) -> tuple[int, int]:
        """m16 tiles of rows per warp and warps across the columns, for dQ: the grid that fetches least."""
        found = []
        for tiles in (1, 2, 4):
            if self.br % (GRANULE * tiles) == 0 and self.warps % (self.br // (GRANULE * tiles)) == 0:
                across = self.warps * GRANULE * tiles // self.br
                columns = _share(_blocks(self.d_padded), across)
                found.append((columns * tiles, tiles + columns, tiles, across))
        return min(found)[2:]

    @property
    def dq_row_tiles(self) -> int:
        return self.dq_grid[0]

    @property
    def dq_passes(self) -> int:
        """In how many passes over the keys a warp makes its dQ: its columns then take the place of S^T and dP^T."""
        room = max(self.pairs, ENOUGH_DQ) // (8 * self.dq_row_tiles)
        columns = _share(_blocks(self.d_padded), self.dq_column_warps)
        return registers.dq_passes(self, columns, _share(columns, max(1, room)))

    @property
    def dq_columns(self) -> int:
        """16-column blocks of one pass."""
        return _share(_share(_blocks(self.d_padded), self.dq_column_warps), self.dq_passes)

    @property
    def dq_column_warps(self) -> int:
        return self.dq_grid[1]

    @property
    def tile_sums(self) -> int:
        """Float32 of one tile of dQ in memory."""
        return self.threads * self.dq_passes * self.dq_columns * self.dq_row_tiles * 8

    @property
    def steps_at_once(self) -> int:
        """Unrolled k16 steps of S^T and dP^T."""
        return registers.key_steps(self)

    @property
    def is_whole(self) -> bool:
        """Whether the warps share the tile evenly."""
        keys, rows = GRANULE * self.warps, GRANULE * self.row_warps
        whole = self.warps % self.row_warps == 0 and self.bc * self.row_warps % keys == 0 and self.br % rows == 0
        tiles = self.br // GRANULE
        return whole and any(tiles % n == 0 and self.warps % (tiles // n) == 0 for n in (1, 2, 4))

    @cached_property
    def accumulators(self) -> int:
        """Float32 registers per thread at the worst place: dK and dV beside S^T and dP^T, or beside dQ."""
        return self.sums + max(self.pairs, 8 * self.dq_row_tiles * self.dq_columns)

    @property
    def q_bytes(self) -> int:
        return ITEMSIZE * self.br * self.d_padded

    @property
    def do_bytes(self) -> int:
        return ITEMSIZE * self.br * self.dv_padded

    @property
    def rows_bytes(self) -> int:
        return STATISTICS_BYTES * self.br

    @cached_property
    def layout(self) -> tuple[Region, ...]:
        pairs = ITEMSIZE * self.br * self.bc
        stages = f", {self.stages} stages" if self.stages > 1 else ""
        return _regions((
            ("kKAt", "K tile", ITEMSIZE * self.bc * self.d_padded),
            ("kVAt", "V tile", ITEMSIZE * self.bc * self.dv_padded),
            ("kQAt", f"Q tiles{stages}", self.stages * self.q_bytes),
            ("kDoAt", f"dO tiles{stages}", self.stages * self.do_bytes),
            *((("kPAt", "P tile", pairs),) if self.row_warps > 1 else ()),
            ("kDsAt", "dS tile", pairs),
            ("kRowsAt", f"LSE and D{stages}", self.stages * self.rows_bytes),
        ))  # fmt: skip

    @property
    def bytes(self) -> int:
        return sum(region.bytes for region in self.layout)

    def clocks(self, smem_per_sm_bytes: int) -> float:
        """Of a multiprocessor, per row and key, by the traffic of one tile of rows."""
        d, dv, keys, rows = _blocks(self.d_padded), _blocks(self.dv_padded), self.key_tiles, self.rows // GRANULE
        columns_d, columns_v = _share(d, self.row_warps), _share(dv, self.row_warps)
        steps, of_others = _blocks(self.br), _blocks(self.br) - rows  # k16 steps of dK and dV
        tiles, across = self.dq_grid
        columns_q = _share(d, across)
        products = 2 * (keys * rows * (d + dv) + keys * steps * (columns_d + columns_v))
        products += 2 * tiles * columns_q * _blocks(self.bc)
        fetches = (keys + rows) * (d + dv) + steps * (columns_d + columns_v) + 2 * keys * of_others
        fetches += (self.dq_passes * tiles + columns_q) * _blocks(self.bc)
        loaded = self.q_bytes + self.do_bytes
        shared = loaded + ITEMSIZE * self.br * self.bc * (2 if self.row_warps > 1 else 1)
        times = (
            self.warps * PRODUCT * products,
            self.warps * FETCH * fetches + shared / LINE_BYTES,
            loaded / LOADED_BYTES + 4 * self.br * self.d_padded / REDUCED_BYTES,
        )
        waits = BARRIER * (2 if self.stages > 1 else 4)
        blocks = _resident(self.warps, self.bytes, smem_per_sm_bytes)
        return _per_pair(_busy(times) + waits / blocks, self.br * self.bc, self.warps, blocks)


@dataclass(frozen=True, kw_only=True)
class QueryTiles(Widths):
    """A tile of `query_tiles`: every warp owns 16 row_tiles rows."""

    br: int
    bc: int
    row_tiles: int
    stages: int  # tiles of K and V in flight

    @property
    def warps(self) -> int:
        return self.br // (GRANULE * self.row_tiles)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def accumulators(self) -> int:
        """Float32 registers per thread: dQ, S and dP."""
        return self.row_tiles * (self.d_padded // 2 + self.bc)

    @property
    def steps_at_once(self) -> int:
        """Unrolled k16 steps of S and dP."""
        return registers.query_steps(self)

    @property
    def k_bytes(self) -> int:
        return ITEMSIZE * self.bc * self.d_padded

    @property
    def v_bytes(self) -> int:
        return ITEMSIZE * self.bc * self.dv_padded

    @cached_property
    def layout(self) -> tuple[Region, ...]:
        stages = f", {self.stages} stages" if self.stages > 1 else ""
        return _regions((
            ("kQueryQAt", "Q tile", ITEMSIZE * self.br * self.d_padded),
            ("kQueryDoAt", "dO tile", ITEMSIZE * self.br * self.dv_padded),
            ("kQueryKAt", f"K tiles{stages}", self.stages * self.k_bytes),
            ("kQueryVAt", f"V tiles{stages}", self.stages * self.v_bytes),
        ))  # fmt: skip

    @property
    def bytes(self) -> int:
        return sum(region.bytes for region in self.layout)

    def clocks(self, smem_per_sm_bytes: int) -> float:
        """As KeyTiles.clocks, by the traffic of one tile of keys. What a block waits for, the others hide."""
        d, dv, keys = _blocks(self.d_padded), _blocks(self.dv_padded), _blocks(self.bc)
        products = 2 * self.row_tiles * keys * (2 * d + dv)
        fetches = (self.row_tiles + keys) * (d + dv) + keys * d
        loaded = self.k_bytes + self.v_bytes
        shared = self.warps * FETCH * fetches + loaded / LINE_BYTES
        times = self.warps * PRODUCT * products, shared, loaded / LOADED_BYTES
        busy, waits = _busy(times), STEP_WAIT * (1 if self.stages > 1 else 3)
        blocks = _resident(self.warps, self.bytes, smem_per_sm_bytes)
        idle = max(0.0, waits - (blocks - 1) * busy)  # while each of the blocks makes one step
        return _per_pair(busy + idle / blocks, self.br * self.bc, self.warps, blocks)


def _resident(warps: int, block_bytes: int, smem_per_sm_bytes: int) -> int:
    """Blocks that share a multiprocessor; the system keeps 1 KB of shared memory for each."""
    return max(1, min(BUSY_WARPS // warps, smem_per_sm_bytes // (block_bytes + 1024)))


def _busy(times: tuple[float, ...]) -> float:
    """The units work side by side, though never perfectly: the slowest, and a quarter of all."""
    return max(times) + sum(times) / 4


def _per_pair(clocks: float, pairs: int, warps: int, blocks: int) -> float:
    """Clocks of a block's step, per pair, and more where the resident warps are too few."""
    return clocks / pairs * max(1.0, BUSY_WARPS / (blocks * warps))


@dataclass(frozen=True, kw_only=True)
class Sm80BackwardPlan:
    """All that the backward template may ask. `_bytes` are bytes; other sizes count elements."""

    keys: KeyTiles
    query: QueryTiles

    @property
    def br(self) -> int:
        return self.keys.br

    @property
    def bc(self) -> int:
        return self.keys.bc

    @property
    def memory(self) -> tuple[MemoryPart, ...]:
        """Of the kernel that takes more."""
        regions = self.keys.layout if self.keys.bytes >= self.query.bytes else self.query.layout
        return tuple(MemoryPart(name=region.name, bytes=region.bytes) for region in regions)

    @property
    def fast_memory_bytes(self) -> int:
        return max(self.keys.bytes, self.query.bytes)

    def as_dict(self) -> dict[str, Any]:
        keys, query = self.keys, self.query
        return {
            "br": self.br,
            "bc": self.bc,
            "warps": keys.warps,
            "threads": keys.threads,
            "row_warps": keys.row_warps,
            "keys_per_warp": GRANULE * keys.key_tiles,
            "stages": keys.stages,
            "d_padded": keys.d_padded,
            "dv_padded": keys.dv_padded,
            "dq_rows_per_warp": GRANULE * keys.dq_row_tiles,
            "dq_column_warps": keys.dq_column_warps,
            "dq_passes": keys.dq_passes,
            "tile_sums": keys.tile_sums,
            "accumulator_registers": keys.accumulators,
            "registers": registers.PER_THREAD,
            "query_br": query.br,
            "query_bc": query.bc,
            "query_warps": query.warps,
            "query_stages": query.stages,
            "query_accumulator_registers": query.accumulators,
            "memory": {part.name: part.bytes for part in self.memory},
            "query_fast_memory_bytes": query.bytes,
            "fast_memory_bytes": self.fast_memory_bytes,
        }


def _key_candidates(d: int, dv: int) -> Iterator[KeyTiles]:
    """Every tile whose warps share it evenly."""
    for warps in WARPS:
        for row_warps in (n for n in WARPS if warps % n == 0):
            for br in ROWS:
                for bc in KEYS:
                    for stages in (2, 1):
                        tile = KeyTiles(d=d, dv=dv, br=br, bc=bc, warps=warps, row_warps=row_warps, stages=stages)
                        if tile.is_whole:
                            yield tile


def _query_candidates(d: int, dv: int) -> Iterator[QueryTiles]:
    for warps in WARPS:
        for row_tiles in (2, 1):
            for bc in KEYS:
                for stages in (2, 1):
                    yield QueryTiles(
                        d=d, dv=dv, br=GRANULE * row_tiles * warps, bc=bc, row_tiles=row_tiles, stages=stages
                    )


def _cost(tile: KeyTiles | QueryTiles, smem_per_sm_bytes: int) -> tuple[bool, float]:
    """What the planner orders tiles by: those of FEW_WARPS or more, then by their clocks."""
    return tile.warps < FEW_WARPS, tile.clocks(smem_per_sm_bytes)


@lru_cache(maxsize=64)
def _ranked(d: int, dv: int, smem_per_sm_bytes: int) -> tuple[tuple[KeyTiles, ...], tuple[QueryTiles, ...]]:
    """Every tile of both kernels, the cheapest first, those of few warps behind all others."""
    cost = partial(_cost, smem_per_sm_bytes=smem_per_sm_bytes)
    keys, query = sorted(_key_candidates(d, dv), key=cost), sorted(_query_candidates(d, dv), key=cost)
    return tuple(keys), tuple(query)


def _choose_query(all_query: Sequence[QueryTiles], limit: int, smem_per_sm_bytes: int) -> QueryTiles | None:
    """Of the legal tiles as cheap as the cheapest but for FIT_ERROR, the largest: it takes the fewest steps."""
    legal = [tile for tile in all_query if _why_not_query(tile, limit) is None]
    if not legal:
        return None
    few, least = _cost(legal[0], smem_per_sm_bytes)
    enough = (few, least * (1 + FIT_ERROR))
    return max((t for t in legal if _cost(t, smem_per_sm_bytes) <= enough), key=lambda tile: tile.br * tile.bc)


def plan_backward(
    problem: Problem, dtype: str, arch: str
) -> tuple[Sm80BackwardPlan, tuple[Change, ...], tuple[Rejection, ...]]:
    """The legal plan of the backward kernels, the step that led to it and the cheaper tiles turned down.

    Raises: PlanError when nothing fits.
    """
    device = DEVICES[arch]
    limit = min(problem.sram_bytes, device.smem_per_block_bytes)
    all_keys, all_query = _ranked(problem.d, problem.dv, device.smem_per_sm_bytes)
    rejected: dict[tuple[int, int], Rejection] = {}
    for tile in all_keys:
        why = _why_not(tile, limit)
        if why is None:
            break
        if len(rejected) < MOST_REJECTIONS:
            rejected.setdefault((tile.br, tile.bc), Rejection(br=tile.br, bc=tile.bc, why=why))
    else:
        raise _nothing_fits(problem, limit, all_keys, all_query)
    query = _choose_query(all_query, limit, device.smem_per_sm_bytes)
    if query is None:
        raise _nothing_fits(problem, limit, all_keys, all_query)
    paper = tile_rule.rule(tile_rule.elements(problem.sram_bytes, ITEMSIZE), problem.d, problem.dv)
    changes: tuple[Change, ...] = ()
    if (paper.br, paper.bc) != (tile.br, tile.bc):
        why = "the cheapest tile by matrix and shared-memory clocks whose dK and dV stay in registers"
        changes = (Change(what=f"Br x Bc {paper.br} x {paper.bc} -> {tile.br} x {tile.bc}", why=why),)
    rejected.pop((tile.br, tile.bc), None)  # the same tile, spread over the warps in another way
    return Sm80BackwardPlan(keys=tile, query=query), changes, tuple(rejected.values())


def _why_not(tile: KeyTiles, limit: int) -> str | None:
    if not registers.holds_keys(tile):
        most = registers.most_keys(tile)
        return f"spills: dK, dV, S and dP take {tile.accumulators} of a thread's registers (limit {most})"
    return None if tile.bytes <= limit else f"needs {tile.bytes:,} bytes of {limit:,}"


def _why_not_query(tile: QueryTiles, limit: int) -> str | None:
    if not registers.holds_query(tile):
        most = registers.most_query(tile)
        return f"spills: dQ, S and dP take {tile.accumulators} of a thread's registers (limit {most})"
    return None if tile.bytes <= limit else f"needs {tile.bytes:,} bytes of {limit:,}"


def _nothing_fits(
    problem: Problem, limit: int, all_keys: Sequence[KeyTiles], all_query: Sequence[QueryTiles]
) -> PlanError:
    """What was asked, the smallest tile of the kernel that needs more, and what to try."""
    keys = min((tile for tile in all_keys if registers.holds_keys(tile)), key=lambda tile: tile.bytes)
    query = min((tile for tile in all_query if registers.holds_query(tile)), key=lambda tile: tile.bytes)
    smallest: KeyTiles | QueryTiles = keys if keys.bytes >= query.bytes else query
    parts = ", ".join(f"{region.name} {region.bytes:,}" for region in smallest.layout)
    widths = f"d={problem.d}" + (f", dv={problem.dv}" if problem.dv != problem.d else "")
    return PlanError(
        f"no backward tile fits {limit:,} bytes of shared memory at {widths}, bf16 or fp16",
        f"smallest: Br={smallest.br} Bc={smallest.bc} needs {smallest.bytes:,} bytes ({parts})",
        f"try --sram {-(-smallest.bytes // 1024)}KB, or --no-backward",
    )


def files(problem: Problem, plans: Mapping[tuple[str, str], Sm80BackwardPlan]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The files under csrc/ of the backward kernels `plans`, keyed (target, dtype): template and context.

    They include ptx_sm80.cuh, forward.h and backward.h. One plan serves both types of a target.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for arch in dict.fromkeys(target for target, _ in plans):
        of_arch = {dtype: plan for (target, dtype), plan in plans.items() if target == arch}
        plan = next(iter(of_arch.values()))
        dtypes = [DTYPES[dtype] for dtype in of_arch]
        context = {"arch": arch, "plan": plan, "dtypes": dtypes, "section_bytes": SECTION_BYTES}
        found[f"csrc/backward_{arch}.cu"] = ("sm80/backward_sm80.cu.j2", context)
        for part in PARTS:
            found[f"csrc/backward_{part}_{arch}.cuh"] = (f"sm80/backward_{part}_sm80.cuh.j2", context)
    return found
