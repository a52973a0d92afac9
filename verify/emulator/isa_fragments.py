"""Which element each lane holds: matrix fragments of ldmatrix, stmatrix, mma.m16n8k16 and wgmma.m64nNk16.

Source: PTX ISA 9.0, "Warp-level Matrix Load Instruction: ldmatrix", "Warp-level Matrix Store Instruction: stmatrix",
"Matrix Fragments for mma.m16n8k16 with floating point type", "Matrix Fragments for wgmma.mma_async.m64nNk16". Names
are the manual's: groupID = lane / 4, threadID_in_group = lane % 4.

Holds always: written from the manual, never from a kernel, a wrapper or the emulator. A register is a uint32 whose
low half holds the element of lower index; memory is an array of bytes; an index array ends in (row, column).
"""

from __future__ import annotations

import numpy as np

LANES = 32
WARPGROUP = 128
_LANE = np.arange(LANES)
GROUP_ID = _LANE // 4
THREAD_ID_IN_GROUP = _LANE % 4


def _index(row: np.ndarray, column: np.ndarray) -> np.ndarray:
    return np.stack(np.broadcast_arrays(row, column), axis=-1)


def mma_a() -> np.ndarray:
    """(32, 8, 2): row and column in A (16 x 16) of elements a0..a7; register r holds elements 2r and 2r + 1."""
    i = np.arange(8)
    row = GROUP_ID[:, None] + 8 * ((i // 2) % 2)
    column = 2 * THREAD_ID_IN_GROUP[:, None] + i % 2 + 8 * (i // 4)
    return _index(row, column)


def mma_b() -> np.ndarray:
    """(32, 4, 2): row and column in B (16 x 8) of elements b0..b3."""
    i = np.arange(4)
    row = 2 * THREAD_ID_IN_GROUP[:, None] + i % 2 + 8 * (i // 2)
    return _index(row, GROUP_ID[:, None])


def mma_d() -> np.ndarray:
    """(32, 4, 2): row and column in C or D (16 x 8) of elements c0..c3."""
    i = np.arange(4)
    return _index(GROUP_ID[:, None] + 8 * (i // 2), 2 * THREAD_ID_IN_GROUP[:, None] + i % 2)


def wgmma_a() -> np.ndarray:
    """(128, 8, 2): row and column in A (64 x 16) of a0..a7: warp w holds rows 16 w .. 16 w + 15 as in mma_a."""
    return _per_warp(mma_a())


def wgmma_d(n: int) -> np.ndarray:
    """(128, n / 2, 2): row and column in D (64 x n) of d0, d1, ...: eight columns at a time as in mma_d."""
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma.m64nNk16 has no n = {n}")
    eight = np.arange(n // 8)[:, None, None] * np.array([0, 8])
    per_lane = mma_d()[:, None] + eight  # (32, n / 8, 4, 2)
    return _per_warp(per_lane.reshape(LANES, n // 2, 2))


def _per_warp(fragment: np.ndarray) -> np.ndarray:
    warps = np.arange(4)[:, None, None, None] * np.array([16, 0])
    return (fragment + warps).reshape(WARPGROUP, *fragment.shape[1:])


def gather(matrix: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The fragment that `index` takes from a matrix (rows, columns)."""
    return matrix[index[..., 0], index[..., 1]]


def scatter(fragment: np.ndarray, index: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The matrix whose fragment this is: the inverse of `gather`."""
    matrix = np.zeros(shape, fragment.dtype)
    matrix[index[..., 0], index[..., 1]] = fragment
    return matrix


def pack(halves: np.ndarray) -> np.ndarray:
    """Registers (..., r) uint32 from 16-bit elements (..., 2 r)."""
    two = halves.astype(np.uint32).reshape(*halves.shape[:-1], -1, 2)
    return two[..., 0] | two[..., 1] << np.uint32(16)


def unpack(registers: np.ndarray) -> np.ndarray:
    """16-bit elements (..., 2 r) of registers (..., r)."""
    two = np.stack([registers & 0xFFFF, registers >> 16], axis=-1)
    return two.reshape(*registers.shape[:-1], -1).astype(np.uint16)


def _matrix_rows(rows: np.ndarray) -> np.ndarray:
    """(4, 8, 8) byte addresses of the elements of matrix q, whose row i starts at the address in lane 8 q + i."""
    if np.any(np.asarray(rows) % 16):
        raise ValueError("each row address must be a multiple of 16 bytes")
    return np.asarray(rows).reshape(4, 8, 1) + 2 * np.arange(8)


def _fragments_8x8(trans: bool) -> np.ndarray:
    """(32, 2, 2): row and column of the two elements of an 8 x 8 matrix that a lane holds."""
    low_high = np.arange(2)
    index = _index(GROUP_ID[:, None], 2 * THREAD_ID_IN_GROUP[:, None] + low_high)
    return index[..., ::-1] if trans else index


def ldmatrix_x4(memory: np.ndarray, rows: np.ndarray, *, trans: bool = False) -> np.ndarray:
    """Registers (32, 4) of ldmatrix.m8n8.x4{.trans}.b16. memory: uint8; rows (32,): byte addresses."""
    address = _matrix_rows(rows)
    matrices = memory[address].astype(np.uint32) | memory[address + 1].astype(np.uint32) << np.uint32(8)
    return np.stack([pack(gather(m, _fragments_8x8(trans)))[:, 0] for m in matrices], axis=1)


def stmatrix_x4(memory: np.ndarray, rows: np.ndarray, registers: np.ndarray, *, trans: bool = False) -> np.ndarray:
    """Memory after stmatrix.m8n8.x4{.trans}.b16 of registers (32, 4)."""
    after = memory.copy()
    for q, address in enumerate(_matrix_rows(rows)):
        matrix = scatter(unpack(registers[:, q : q + 1]), _fragments_8x8(trans), (8, 8))
        after[address] = matrix & 0xFF
        after[address + 1] = matrix >> 8
    return after
