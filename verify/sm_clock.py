"""The clock at which a GPU ran a stretch of work, from its own counters: no driver query, no change of a setting.

    clock = SmClock(nvcc)
    before = clock.read()
    ...                                   # work on the current stream
    after = clock.read()
    torch.cuda.synchronize()
    hertz = frequency(before.tolist(), after.tolist())

A GPU lowers its clock under power: FLOP/s alone cannot tell a slow kernel from a hot card. Cycles can:
tensor use = FLOPs / (FLOPs per cycle of a multiprocessor x multiprocessors x seconds x clock).
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Sequence
from typing import Any

from codegen.errors import ToolError
from verify.probe import compile_probe

PLACES = 1024  # as in probes/sm_clock.cu
BLOCKS_PER_SM = 4  # so that a reading misses few multiprocessors, whatever the scheduler does

# Dense 16-bit products with float32 sums: FLOPs per cycle of one multiprocessor, by compute capability. From the
# vendor's architecture papers: peak rate / (multiprocessors x boost clock).
TENSOR_FLOPS_PER_CYCLE = {(8, 0): 2048, (8, 6): 1024, (8, 7): 1024, (8, 9): 1024, (9, 0): 4096}


class SmClock:
    """Readings on the current device; the probe is compiled with `nvcc` for it, once per machine.

    Raises: ToolError when the probe does not compile.
    """

    def __init__(self, nvcc: Sequence[str]) -> None:
        import torch

        major, minor = torch.cuda.get_device_capability()
        flags = ("-O3", "-std=c++17", f"-arch=sm_{major}{minor}", "-Xcompiler", "-fPIC", "-shared")
        self._entry = compile_probe([*nvcc, *flags], "sm_clock.cu", f"sm_clock_sm_{major}{minor}").sm_clocks
        self._entry.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        self._blocks = (
            BLOCKS_PER_SM * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        )

    def read(self) -> Any:
        """Enqueue a reading; a tensor (PLACES, 2) of cycles and nanoseconds, ready when the stream has come by.

        Raises: ToolError when the launch fails.
        """
        import torch

        readings = torch.zeros(PLACES, 2, dtype=torch.int64, device="cuda")
        error = self._entry(readings.data_ptr(), self._blocks, torch.cuda.current_stream().cuda_stream)
        if error:
            raise ToolError(f"the probe sm_clocks failed on the device: CUDA error {error}")
        return readings


def frequency(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> float | None:
    """Hz between two readings: the median over the multiprocessors that are in both; None without one."""
    rates = [
        (cycles - cycles_before) / (ns - ns_before)
        for (cycles_before, ns_before), (cycles, ns) in zip(before, after, strict=True)
        if ns_before and ns > ns_before and cycles > cycles_before
    ]
    return 1e9 * statistics.median(rates) if rates else None


def tensor_use(
    flops: float, seconds: float, hertz: float | None, multiprocessors: int, capability: tuple[int, int]
) -> float | None:
    """Fraction of the matrix units' cycles that `flops` take at least; None where the clock or the peak is unknown."""
    peak = TENSOR_FLOPS_PER_CYCLE.get(capability)
    return None if hertz is None or peak is None else flops / (peak * multiprocessors * seconds * hertz)
