"""Tile plans of the warp-specialised wgmma kernel (sm_90a), and the files of that target. (first form)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from codegen.errors import PlanError
from codegen.plan import MemoryPart
from codegen.plans.sm80 import padded, panel
from codegen.problem import Problem

ITEMSIZE = 2  # bytes of a bf16 or fp16
WARPGROUP_ROWS = 64  # rows of one wgmma: one consumer
GRANULE = 16  # keys of a k16 step of P V
ALIGNMENT = 1024  # bytes: period of the widest swizzle
BARRIER_BYTES = 256
TILE_BYTES = 32  # two query tiles, named ahead
COUNTER_FROM = 20  # query tiles per head
SECTION_BYTES = 32 * 1024 * 1024

# Registers per thread of the producer and of a consumer after setmaxnreg, by consumers and blocks per SM.
REGISTERS = {
    (1, 1): (24, 256),
    (2, 1): (24, 240),
    (3, 1): (32, 160),
    (4, 1): (24, 112),
    (1, 2): (24, 208),
    (2, 2): (24, 104),
    (1, 3): (24, 136),
}

DTYPES = {
    "bf16": {"type": "BFloat16", "code": "kBFloat16", "mma": "bf16", "pack": "cvt_rn_bf16x2",
             "map_type": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"},
    "fp16": {"type": "Float16", "code": "kFloat16", "mma": "f16", "pack": "cvt_rn_f16x2",
             "map_type": "CU_TENSOR_MAP_DATA_TYPE_FLOAT16"},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Region:
    """One piece of shared memory: the constant that the kernel prints for its offset, in bytes."""

    constant: str
    name: str
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Sm90aPlan:
    """All that the template may ask. `_bytes` are bytes; other sizes count elements."""

    br: int
    bc: int
    d: int
    dv: int
    stages_k: int
    stages_v: int
    p_in_shared: bool  # P through shared memory, not through registers: fewer registers, more shared-memory traffic
    ping_pong: bool  # consumers issue their products in turn
    lazy_rescale: bool  # O is multiplied only when a maximum moved by more than 8 in base-2 units
    skips_masked: bool = False  # causal: a consumer leaves out key tiles that only later rows of its tile see
    blocks_per_sm: int = 1
    causal: str = "any"  # the mask forms that are compiled: "any", "full" or "causal"

    def __post_init__(self) -> None:
        if self.br % WARPGROUP_ROWS or self.bc % GRANULE or not 0 < self.bc <= 256:
            raise PlanError(f"Br={self.br}, Bc={self.bc}: wgmma takes {WARPGROUP_ROWS} rows and {GRANULE} keys")
        skipped = -(-(self.br - WARPGROUP_ROWS) // self.bc)
        if self.skips_masked and skipped >= min(self.stages_k, self.stages_v):
            raise PlanError(f"a consumer that skips {skipped} key tiles waits for one that others still hold")

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
    def d_padded(self) -> int:
        return padded(self.d)

    @property
    def dv_padded(self) -> int:
        return padded(self.dv)

    @property
    def panel_d(self) -> int:
        return panel(self.d_padded)

    @property
    def panel_dv(self) -> int:
        return panel(self.dv_padded)

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


def context(problem: Problem, plan: Sm90aPlan, dtypes: tuple[str, ...], tag: str = "") -> dict[str, Any]:
    """What the kernel's template asks beyond the package's own context."""
    return {
        "plan": plan,
        "dtypes": [DTYPES[t] for t in dtypes],
        "wgmma": products(plan, dtypes),
        "section_bytes": SECTION_BYTES,
        "counter_from": COUNTER_FROM,
        "entry": f"attention_forward_sm90a{tag}",
        "kernel_name": f"attention_forward_d{problem.d}_dv{problem.dv}_{plan.br}x{plan.bc}",
    }


def products(plan: Sm90aPlan, dtypes: tuple[str, ...]) -> list[dict[str, Any]]:
    """The wgmma wrappers that a kernel of this plan calls."""
    found = []
    for t in dtypes:
        mma = DTYPES[t]["mma"]
        forms = {(plan.bc, "ss"), (plan.dv_padded, "ss" if plan.p_in_shared else "rs")}
        found += [{"n": n, "form": form, "dtype": mma} for n, form in sorted(forms)]
    return found
