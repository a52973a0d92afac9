"""draft"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from codegen.plan import MemoryPart
from codegen.plans.sm80 import DTYPES, GRANULE, ITEMSIZE, Region, padded, panel


@dataclass(frozen=True, kw_only=True)
class Sm80BackwardPlan:
    br: int
    bc: int
    d: int
    dv: int
    warps: int
    row_warps: int
    stages: int

    @property
    def threads(self): return 32 * self.warps
    @property
    def d_padded(self): return padded(self.d)
    @property
    def dv_padded(self): return padded(self.dv)
    @property
    def panel_d(self): return panel(self.d_padded)
    @property
    def panel_dv(self): return panel(self.dv_padded)
    @property
    def panel_p(self): return panel(self.br)
    @property
    def key_tiles(self): return self.bc // GRANULE * self.row_warps // self.warps
    @property
    def dq_row_tiles(self):
        return self.dq[0]
    @property
    def dq_column_warps(self):
        return self.dq[1]
    @property
    def dq(self):
        # (m16 tiles, column warps)
        tiles = self.br // GRANULE
        best = None
        for m in (1, 2, 4):
            if tiles % m: continue
            rw = tiles // m
            if self.warps % rw: continue
            cw = self.warps // rw
            blocks = self.d_padded // GRANULE
            n = -(-blocks // cw)
            cost = (m + n) / (m * n) * n * cw / blocks, m * n
            if best is None or cost < best[0]: best = (cost, m, cw)
        return best[1:]
    @property
    def q_bytes(self): return ITEMSIZE * self.br * self.d_padded
    @property
    def do_bytes(self): return ITEMSIZE * self.br * self.dv_padded
    @property
    def rows_bytes(self): return 8 * self.br
    @property
    def layout(self):
        parts = [("kKAt", "K", ITEMSIZE * self.bc * self.d_padded), ("kVAt", "V", ITEMSIZE * self.bc * self.dv_padded),
          ("kQAt", "Q", self.stages * self.q_bytes), ("kDoAt", "dO", self.stages * self.do_bytes)]
        if self.row_warps > 1: parts.append(("kPAt", "P", 2 * self.br * self.bc))
        parts.append(("kDsAt", "dS", 2 * self.br * self.bc))
        parts.append(("kRowsAt", "rows", self.stages * self.rows_bytes))
        out, at = [], 0
        for c, n, b in parts:
            out.append(Region(constant=c, name=n, offset=at, bytes=b)); at += b
        return out
    @property
    def fast_memory_bytes(self): return sum(r.bytes for r in self.layout)

    query_row_tiles: int = 1
    query_warps: int = 8
    query_bc: int = 32
    query_stages: int = 2
    @property
    def query_threads(self): return 32 * self.query_warps
    @property
    def query_br(self): return 16 * self.query_warps * self.query_row_tiles
    @property
    def query_k_bytes(self): return 2 * self.query_bc * self.d_padded
    @property
    def query_v_bytes(self): return 2 * self.query_bc * self.dv_padded
    @property
    def query_layout(self):
        parts = [("kQueryQAt", "Q", 2*self.query_br * self.d_padded), ("kQueryDoAt", "dO", ITEMSIZE * self.query_br * self.dv_padded),
          ("kQueryKAt", "K", self.query_stages * self.query_k_bytes), ("kQueryVAt", "V", self.query_stages * self.query_v_bytes)]
        out, at = [], 0
        for c, n, b in parts:
            out.append(Region(constant=c, name=n, offset=at, bytes=b)); at += b
        return out
    @property
    def query_bytes(self): return sum(r.bytes for r in self.query_layout)
ARITHMETIC = "mma_sm80"
def plan_backward(problem, dtype, arch):
    return Sm80BackwardPlan(br=64, bc=128, d=problem.d, dv=problem.dv, warps=8, row_warps=2, stages=2), (), ()
def files(problem, plans):
    plan = next(iter(plans.values()))
    dtypes = [t for (_, t) in plans]
    c = dict(plan=plan, arch="sm80", dtypes=[DTYPES[t] for t in dtypes])
    return {"csrc/backward_sm80.cu": ("sm80/backward_sm80.cu.j2", c), "csrc/backward_tiles_sm80.cuh": ("sm80/backward_tiles_sm80.cuh.j2", c)}
