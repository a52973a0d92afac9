"""Tile plans of the AMX kernels (bf16, and fp16 as two bf16 planes), and the files that they print.

A tile is `panels` panels of 32 query rows against `bc` keys; K and V of `l2_keys` keys are walked by every
panel before the next ones are touched. The fast memory of a CPU is its L2 cache, of which --sram is the
share that one worker may fill: `memory` names all that the kernel walks repeatedly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PANEL_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class CpuAmxPlan:
    br: int
    bc: int
    d: int
    dv: int
    planes: int
    l2_keys: int
    lag: int
    exp_degree: int

    @property
    def panels(self): return self.br // 32
    @property
    def d_tiles(self): return -(-self.d // 32)
    @property
    def v_tiles(self): return 2 * -(-self.dv // 32)
    @property
    def k_in_place(self): return self.planes == 1 and self.d % 32 == 0
