"""What the plans of both mma.sync passes share: types, padded columns, panels and pieces of shared memory.

sm_90a, whose swizzles are as wide, pads and lays out its tiles likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

ITEMSIZE = 2  # bytes of a bf16 or fp16
GRANULE = 16  # rows of an m16 tile, keys of a k16 step
# K and V that the heads running side by side may touch: half of the smallest L2 among data-center cards (A100, 40 MB),
# rounded down to a power of two.
SECTION_BYTES = 16 * 1024 * 1024
DTYPES = {
    "bf16": {"type": "BFloat16", "code": "kBFloat16", "mma": "mma_m16n8k16_bf16", "pack": "cvt_rn_bf16x2"},
    "fp16": {"type": "Float16", "code": "kFloat16", "mma": "mma_m16n8k16_f16", "pack": "cvt_rn_f16x2"},
}


def padded(width: int) -> int:
    """Columns in shared memory: whole k16 steps."""
    return -(-width // GRANULE) * GRANULE


def panel(width: int) -> int:
    """Columns of one panel: the widest swizzle, 128, 64 or 32 bytes, that the padded width is made of."""
    return next(columns for columns in (64, 32, 16) if width % columns == 0)


@dataclass(frozen=True, kw_only=True)
class Region:
    """One piece of shared memory: the constant that the kernel prints for its offset, in bytes."""

    constant: str
    name: str
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Columns of a problem, padded to whole k16 steps, and the panels that they make in shared memory."""

    d: int
    dv: int

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
