"""The PTX ISA in NumPy: one statement per primitive that the emitted kernels use, and where it comes from.

Source: PTX ISA 9.0. The statements are in four files by topic, each with the sections that it was written from; which
wrapper of the PTX headers a statement answers for is said by the cases of verify/conformance.

Holds always: written from the manual, never from the kernels, the wrappers or the emulator's C++. Three things are
compared with each other (tests/emulator/test_conformance_*.py): these statements, the emulator's twins, and vectors
recorded on a GPU (tests/data/ptx_*.npz).
"""

from __future__ import annotations

from verify.emulator.isa_arithmetic import (
    CANONICAL_NAN,
    EX2_RELATIVE_ERROR,
    LG2_ERROR,
    RCP_RELATIVE_ERROR,
    Sum,
    cvt_rn,
    cvt_rn_x2,
    decode,
    ex2_agrees,
    lg2_agrees,
    mma_m16n8k16,
    rcp_agrees,
    redux_max_s32,
    shfl_xor,
    wgmma_m64nk16,
)
from verify.emulator.isa_barriers import Mbarrier, NamedBarrier, cp_async_zfill, groups_complete
from verify.emulator.isa_fragments import (
    gather,
    ldmatrix_x4,
    mma_a,
    mma_b,
    mma_d,
    pack,
    scatter,
    stmatrix_x4,
    unpack,
    wgmma_a,
    wgmma_d,
)
from verify.emulator.isa_tensor import (
    TENSOR_MAP_SWIZZLE,
    TensorMap,
    canonical_layout,
    matrix_descriptor,
    operand_addresses,
    read_operand,
    swizzle,
    tma_load,
    tma_reduce_add_f32,
    tma_store,
    write_operand,
)

__all__ = [
    "CANONICAL_NAN", "EX2_RELATIVE_ERROR", "LG2_ERROR", "RCP_RELATIVE_ERROR", "TENSOR_MAP_SWIZZLE", "Mbarrier",
    "NamedBarrier", "Sum", "TensorMap", "canonical_layout", "cp_async_zfill", "cvt_rn", "cvt_rn_x2", "decode",
    "ex2_agrees", "gather", "groups_complete", "ldmatrix_x4", "lg2_agrees", "matrix_descriptor", "mma_a", "mma_b",
    "mma_d", "mma_m16n8k16", "operand_addresses", "pack", "rcp_agrees", "read_operand", "redux_max_s32", "scatter",
    "shfl_xor", "stmatrix_x4", "swizzle", "tma_load", "tma_reduce_add_f32", "tma_store", "unpack", "wgmma_a", "wgmma_d",
    "wgmma_m64nk16", "write_operand",
]  # fmt: skip
