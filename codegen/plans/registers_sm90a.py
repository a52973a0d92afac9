"""Registers of the wgmma kernel: what producer and consumers get by setmaxnreg, and which tiles hold in that.

`setmaxnreg` hands registers from the warpgroup that gives work to the consumers. A consumer thread keeps S (Bc / 2),
O (dv / 2) and, where P goes through registers, P (Bc / 4, while S of the next key tile is already there). ptxas takes
the consumers' number as its limit: a tile that exceeds it spills, and its wgmma are serialised, which halves the speed.

Fitted with ptxas 13.0.88 for sm_90a: tests/sm90a/sweep_registers.py compiles the border of the rule, and
`registers_sm90a.json` is what it found, and below that what spilled when the rule was wider.
"""

from __future__ import annotations

# (consumer warpgroups, blocks per SM) -> registers per thread of the producer and of a consumer. All warpgroups of the
# blocks together fill at most the 65536 registers of an SM, and each block at most what it is launched with.
REGISTERS = {
    (1, 1): (24, 256),
    (2, 1): (24, 240),
    (3, 1): (32, 160),
    (4, 1): (24, 112),
    (1, 2): (24, 208),
    (2, 2): (24, 104),
    (1, 3): (24, 136),
}
PER_SM = 65536
ONE_PRODUCT = 26  # beside its accumulators, one wgmma needs so many of the registers that the block is launched with
FIXED = 32  # m, l, addresses, masks and what ptxas loads early
SPARE = 8  # tiles nearer to the limit than this hold only sometimes;
SPARE_OF_ONE_BUFFER = 40  # with P in shared memory and a ring of one buffer: 128 x 256 at d=96 spilled with 32

# (consumers, blocks per SM, Bc, padded dv, P in shared memory): nearer, and compiled without a spill.
COMPILED = {
    (1, 3, 96, 64, False),
    (2, 1, 176, 128, False),
    (3, 1, 96, 96, False),
    (3, 1, 112, 80, False),
    (3, 1, 128, 64, False),
    (3, 1, 128, 128, True),
    (4, 1, 64, 64, False),
}
# Farther, and spilled some bytes: ptxas is a little erratic.
SPILLED = {(2, 1, 80, 224, False), (3, 1, 192, 48, True)}


def launched(consumers: int, blocks_per_sm: int) -> int:
    """Registers per thread before setmaxnreg."""
    return min(255, PER_SM // (128 * (1 + consumers) * blocks_per_sm) // 8 * 8)


def needed(bc: int, dv_padded: int, p_in_shared: bool) -> int:
    """Registers per consumer thread."""
    return (2 * bc if p_in_shared else 3 * bc) // 4 + dv_padded // 2 + FIXED


def holds(consumers: int, blocks_per_sm: int, bc: int, dv_padded: int, p_in_shared: bool, one_buffer: bool) -> bool:
    """Whether a tile compiles without spills. one_buffer: K or V has a ring of a single one."""
    tile = (consumers, blocks_per_sm, bc, dv_padded, p_in_shared)
    if tile in COMPILED or tile in SPILLED:
        return tile in COMPILED
    given = REGISTERS.get((consumers, blocks_per_sm))
    if given is None or max(bc, dv_padded) // 2 + ONE_PRODUCT > launched(consumers, blocks_per_sm):
        return False
    spare = SPARE_OF_ONE_BUFFER if p_in_shared and one_buffer else SPARE
    return needed(bc, dv_padded, p_in_shared) + spare <= given[1]
