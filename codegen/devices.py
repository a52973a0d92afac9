"""Limits of the machines that we plan for: one row per compute capability, and one for the CPU.

Source: CUDA C++ Programming Guide 13, "Technical Specifications per Compute Capability" (shared memory per
multiprocessor and per block, resident threads, 32-bit registers). KB = 1024 bytes. More than 48 KB of
shared memory needs dynamic allocation with an opt-in; the system keeps 1 KB per block from compute
capability 8.0 on, which is why 164 KB per multiprocessor give 163 KB to one block.

Holds always: a target is a row here plus a planner in `codegen/plans/` (see `planners.py`). A row without
a planner is a known machine whose kernels come later, never a silent fallback. A row whose name ends in "a" has the
limits of its capability and uses instructions of that capability alone: its code runs on no other device, later ones
included.
"""

from __future__ import annotations

from dataclasses import dataclass

KB = 1024


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one multiprocessor of an NVIDIA GPU allows. `_bytes` are bytes."""

    arch: str  # the name that --arch takes
    capability: tuple[int, int]
    smem_per_sm_bytes: int
    smem_per_block_bytes: int  # dynamic, after the opt-in; what a kernel may really ask for
    smem_reserved_bytes: int  # kept by the system, per block
    threads_per_sm: int
    cards: str  # examples, for people
    threads_per_block: int = 1024
    registers_per_sm: int = 65536
    registers_per_block: int = 65536
    registers_per_thread: int = 255
    blocks_per_sm: int = 32
    # Dense 16-bit tensor-core FLOP and slow-memory bytes per second of `cards`' first card, for the ridge
    # that --explain prints; from the vendor's data sheet. None: not looked up.
    peak_16bit_flops: float | None = None
    peak_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        assert self.smem_per_block_bytes + self.smem_reserved_bytes <= self.smem_per_sm_bytes, self.arch

    @property
    def name(self) -> str:
        return "sm_" + self.arch.removeprefix("sm")

    @property
    def is_exact(self) -> bool:
        """Whether code for this row runs on its own capability alone."""
        return self.arch.endswith("a")

    @property
    def built_for(self) -> str:
        """The GPU that a package is compiled for to serve this row: "sm_90" for sm_90a."""
        return "sm_{}{}".format(*self.capability)


def _row(arch: str, capability: tuple[int, int], sm_kb: int, block_kb: int, threads: int, cards: str, **more) -> Device:
    return Device(
        arch=arch, capability=capability, smem_per_sm_bytes=sm_kb * KB, smem_per_block_bytes=block_kb * KB,
        smem_reserved_bytes=KB if capability >= (8, 0) else 0, threads_per_sm=threads, cards=cards, **more,
    )  # fmt: skip


DEVICES: dict[str, Device] = {
    device.arch: device
    for device in (
        _row("sm75", (7, 5), 64, 64, 1024, "T4, RTX 20", blocks_per_sm=16,
             peak_16bit_flops=65e12, peak_bytes_per_s=320e9),
        _row("sm80", (8, 0), 164, 163, 2048, "A100", peak_16bit_flops=312e12, peak_bytes_per_s=2039e9),
        _row("sm86", (8, 6), 100, 99, 1536, "A10, RTX 30", blocks_per_sm=16,
             peak_16bit_flops=125e12, peak_bytes_per_s=600e9),
        _row("sm87", (8, 7), 164, 163, 1536, "Jetson Orin", blocks_per_sm=16),
        _row("sm89", (8, 9), 100, 99, 1536, "L4, RTX 40", blocks_per_sm=24,
             peak_16bit_flops=121e12, peak_bytes_per_s=300e9),
        _row("sm90", (9, 0), 228, 227, 2048, "H100, H200", peak_16bit_flops=989e12, peak_bytes_per_s=3350e9),
        _row("sm90a", (9, 0), 228, 227, 2048, "H100, H200", peak_16bit_flops=989e12, peak_bytes_per_s=3350e9),
        _row("sm100", (10, 0), 228, 227, 2048, "B200"),
        _row("sm103", (10, 3), 228, 227, 2048, "B300"),
        _row("sm110", (11, 0), 228, 227, 1536, "Jetson Thor", blocks_per_sm=24),
        _row("sm120", (12, 0), 100, 99, 1536, "RTX 50, RTX PRO Blackwell", blocks_per_sm=24),
        _row("sm121", (12, 1), 100, 99, 1536, "GB10", blocks_per_sm=24),
    )
}  # fmt: skip

# Targets that have a name of their own but neither a row nor kernels: the instructions differ, not the limits.
FEATURE_TARGETS = {"sm100a": "sm100", "sm120a": "sm120"}


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """A CPU has no shared memory to allocate: --sram is its share of the L2 cache, planned as if it were."""

    arch: str = "cpu"
    cards: str = "x86-64 and aarch64"
    # Smallest L1 data cache per core among the machines that each instruction set runs on. Bytes.
    l1_bytes: int = 32 * KB


CPU = Cpu()

# Every name that --arch takes, in the order in which packages list their targets.
ARCHS: tuple[str, ...] = ("cpu", *DEVICES)
