"""Which tiles of the mma.sync kernel hold in registers: a rule fitted to ptxas, and the tiles that exceed it.

A thread keeps S (then P) and O in float32: `accumulators` registers of the 255 that exist. The rest holds fragments
on their way to the matrix unit, m and l, and addresses. ptxas uses whatever is free for early loads, so its "Used N
registers" says little; what counts is whether it spills. It does so a little erratically near the limit (a tile may
spill 8 bytes where a larger one spills none), hence a limit below the largest that was seen to hold, and a short list
of larger tiles that were compiled one by one because they are the fastest.

Fitted with ptxas 13.0.88 for sm_80 and sm_90: tests/sm80/sweep_registers.py compiles the border of the rule and a
sample of its inside; `registers_sm80.json` is what it found. No accepted tile spills there.
"""

from __future__ import annotations

from dataclasses import dataclass

PER_THREAD = 255  # what one thread can address; 8 warps fill the 65536 of an SM with it
MOST_WARPS = 8

# Largest number of accumulators per thread by m16 tiles per warp. With two, every B fragment is used twice.
MOST_ACCUMULATORS = {1: 160, 2: 144}


@dataclass(frozen=True)
class Fit:
    """How a tile holds in registers. `refill_before_softmax`: when the load of the next K tile is started.

    Before the softmax is the better overlap; after it, softmax and P V are separate for ptxas, which then needs fewer
    registers.
    """

    refill_before_softmax: bool


# Larger tiles of 32 rows per warp that were compiled one by one, for d = dv and these numbers of warps. Padded width ->
# Bc with the refill before the softmax, Bc with the refill after it.
COMPILED_WARPS = (2, 4, 8)
COMPILED: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    16: ((144, 160, 176), ()),
    32: ((128, 144), ()),
    48: ((112, 128, 144), ()),
    64: ((96, 112, 128), ()),
    80: ((80, 96, 112), ()),
    96: ((64, 80), ()),
    112: ((48,), (64,)),
    128: ((32, 48), (64,)),
    144: ((16,), (32,)),
    160: ((16, 32), ()),
    176: ((16, 32), ()),
}


def accumulators(row_tiles: int, dv_padded: int, bc: int) -> int:
    """Float32 registers per thread that hold S and O of `row_tiles` m16 tiles."""
    return row_tiles * (bc + dv_padded) // 2


def fit(row_tiles: int, warps: int, d_padded: int, dv_padded: int, bc: int) -> Fit | None:
    """How the tile holds in registers, None if it would spill."""
    if row_tiles == 2 and d_padded == dv_padded and warps in COMPILED_WARPS:
        for keys, before in zip(COMPILED.get(d_padded, ()), (True, False), strict=False):
            if bc in keys:
                return Fit(refill_before_softmax=before)
    if accumulators(row_tiles, dv_padded, bc) <= MOST_ACCUMULATORS[row_tiles]:
        return Fit(refill_before_softmax=True)
    return None
