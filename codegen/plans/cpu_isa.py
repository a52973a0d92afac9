"""The instruction sets of the CPU target: register blocks, cache assumptions and compiler flags.

A vector lane is a query row. The accumulators of the kernel, `vectors` by `keys` in S^T and `vectors` by `columns` in
O^T, should fill the registers and leave room for `vectors` operands, one broadcast and, without FMA, one product:

    v4        32 registers of 64 bytes: 3 x 8 and the broadcast comes from memory
    v3        16 registers of 32 bytes: 3 x 4
    baseline  16 registers of 16 bytes and no FMA; on aarch64 32 registers, FMA by element

A panel is `vectors` vectors of rows. Fewer vectors per panel take more keys per group, as far as registers go; columns
divide 8, because dv is a multiple of 8. Measured for d = 64, GFLOP/s of one core (AVX-512, then AVX2): 3 x 8 184,
2 x 8 172, 1 x 16 150; 3 x 4 107, 2 x 4 95, 1 x 8 86.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Groups:
    """Keys per group of S^T and columns per group of O^T."""

    keys: int
    columns: int


@dataclass(frozen=True)
class Limits:
    """What a CPU plan may count on. Bytes per thread."""

    fast_memory_bytes: int  # --sram: the share of L2


@dataclass(frozen=True, kw_only=True)
class Isa:
    """One translation unit. `_bytes` are bytes."""

    name: str
    machines: str  # for people
    vector_bytes: int
    l1_bytes: int  # data cache per core, the smallest among the machines that will mostly run this unit
    groups: dict[int, Groups]  # by vectors per panel
    aarch64_groups: dict[int, Groups] | None  # what the same unit takes there
    flags: tuple[str, ...]
    arithmetic: dict[str, str]  # scalar -> row of the judge's table of arithmetic models


COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast")

BASELINE = Isa(
    name="baseline",
    machines="any x86-64 or aarch64 machine",
    vector_bytes=16,
    l1_bytes=32 * 1024,  # every x86-64 server core since 2008; Neoverse N1, V1: 64 KiB
    groups={3: Groups(4, 4), 2: Groups(4, 4), 1: Groups(8, 8)},
    aarch64_groups={3: Groups(6, 8), 2: Groups(8, 8), 1: Groups(8, 8)},
    flags=COMMON_FLAGS,
    arithmetic={"float": "muladd_f32", "double": "muladd_f64"},
)
V3 = Isa(
    name="v3",
    machines="x86-64-v3 machines (AVX2, FMA, F16C)",
    vector_bytes=32,
    l1_bytes=32 * 1024,  # Haswell to Skylake, Zen 1 to 4
    groups={3: Groups(4, 4), 2: Groups(6, 4), 1: Groups(8, 8)},
    aarch64_groups=None,
    flags=(*COMMON_FLAGS, "-march=x86-64-v3"),
    arithmetic={"float": "fma_f32", "double": "fma_f64"},
)
V4 = Isa(
    name="v4",
    machines="x86-64-v4 machines (AVX-512)",
    vector_bytes=64,
    l1_bytes=48 * 1024,  # Ice Lake server and later (Intel 64 Optimization Reference Manual, cache parameters)
    groups={3: Groups(8, 8), 2: Groups(8, 8), 1: Groups(16, 8)},
    aarch64_groups=None,
    # Without the tuning GCC 12 spills accumulators: 10 to 15 % slower.
    flags=(*COMMON_FLAGS, "-march=x86-64-v4", "-mtune=icelake-server"),
    arithmetic={"float": "fma_f32", "double": "fma_f64"},
)

# Best first.
VECTOR_ISAS = (V4, V3, BASELINE)
