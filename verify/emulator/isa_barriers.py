"""What barriers and asynchronous copies wait for: mbarrier phases, named barriers, cp.async groups.

Source: PTX ISA 9.0, "Contents of the mbarrier object", "Phase Completion of the mbarrier object", "mbarrier.try_wait",
"bar, barrier", "cp.async", "cp.async.wait_group".

Holds always: written from the manual, never from a kernel, a wrapper or the emulator. These are sequential
statements: they say which state each operation leads to, not who waits how long.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Mbarrier:
    """An mbarrier object: `count` arrivals and all expected bytes complete a phase."""

    count: int
    phase: int = 0
    pending: int = field(init=False)
    transactions: int = 0  # bytes expected and not yet arrived; may be negative until the phase expects them

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self) -> None:
        """mbarrier.arrive with count 1."""
        if self.pending == 0:
            raise ValueError("more arrivals than the phase has pending")
        self.pending -= 1
        self._complete_phase()

    def arrive_expect_tx(self, bytes_expected: int) -> None:
        """mbarrier.arrive.expect_tx: the expectation comes first."""
        self.transactions += bytes_expected
        self.arrive()

    def complete_tx(self, bytes_arrived: int) -> None:
        """complete-tx, done by the copy that named this barrier."""
        self.transactions -= bytes_arrived
        self._complete_phase()

    def try_wait_parity(self, parity: int) -> bool:
        """Whether the phase of that parity is complete: the current phase has the other one."""
        return self.phase % 2 != parity

    def _complete_phase(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.count


@dataclass
class NamedBarrier:
    """One of the 16 barriers of a block: released when `threads` have arrived, by bar.sync or bar.arrive."""

    threads: int
    arrived: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        if self.threads % 32:
            raise ValueError("the thread count of a barrier is a multiple of the warp size")

    def arrive_warp(self) -> int:
        """32 threads arrive. Returns the generation that a bar.sync of this warp waits to see completed."""
        waits_for = self.generation
        self.arrived += 32
        if self.arrived == self.threads:
            self.arrived = 0
            self.generation += 1
        return waits_for


def cp_async_zfill(memory: np.ndarray, shared: int, source: np.ndarray, size: int, source_bytes: int) -> np.ndarray:
    """Shared memory (uint8) after cp.async of `size` bytes of which the first `source_bytes` are read, the rest 0."""
    after = memory.copy()
    after[shared : shared + size] = 0
    after[shared : shared + source_bytes] = source[:source_bytes]
    return after


def groups_complete(committed: int, newest: int) -> int:
    """How many of a thread's `committed` groups cp.async.wait_group `newest` has completed, oldest first."""
    return max(committed - newest, 0)
