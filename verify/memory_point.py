"""The peak memory of one forward and backward pass, in a process of its own.

    python -m verify.memory_point '{"folder": ..., "what": "ours", "device": "cpu", "dtype": "float32",
                                    "batch": 1, "heads": 8, "d": 64, "n": 1024, "rounds": 3}'

prints {"bytes": [one per round], "counted": how}. `bytes` is what the pass adds to what was there before it: q, k, v
and dO are there, O, LSE, the gradients and all scratch memory come on top.

On a CPU it is the growth of the resident set up to its high-water mark, because that is all memory: torch's profiler
sees what torch's allocator hands out, and a kernel's own buffers are none of that. Four things make it repeat to a few
hundred KB: a process per point; a pass of 64 rows before, which loads libraries and starts threads; malloc told to give
each block back to the system at once (MALLOC_* in ENVIRONMENT: by default its threshold grows with what was freed);
and no huge pages, which round every block up to 2 MB.

On a GPU it is torch's own maximum, which is exact: the kernels take scratch memory from torch's allocator only.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from codegen.errors import ToolError

# For the process that measures.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
COUNTED = {"cpu": "growth of the resident set to its high-water mark", "cuda": "torch.cuda.max_memory_allocated"}
WARM_ROWS = 64

_PR_SET_THP_DISABLE = 41  # <linux/prctl.h>


def attend(what: str, folder: str | None) -> Any:
    """The attention to measure, q, k, v (B, H, N, d) -> (B, H, N, d): "ours", "standard" or torch's "sdpa"."""
    import torch
    from torch.nn import functional

    from verify import packages

    if what == "ours":
        if folder is None:
            raise ValueError("ours: name the folder of the package")
        return packages.load(folder).attention
    if what == "standard":  # Algorithm 0: S, P and their gradients as N x N matrices in slow memory
        return lambda q, k, v: torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v
    if what == "sdpa":
        return functional.scaled_dot_product_attention
    raise ValueError(f"{what!r}: ours, standard or sdpa")


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Run what the command line describes. Raises: ToolError where the system does not tell."""
    import torch

    from verify.cases import torch_dtype

    device = asked["device"]
    function = attend(asked["what"], asked["folder"])
    draw = torch.Generator().manual_seed(0)

    def tensors(n: int) -> list[torch.Tensor]:
        shape = (asked["batch"], asked["heads"], n, asked["d"])
        made = [torch.randn(shape, generator=draw).to(device, torch_dtype(asked["dtype"])) for _ in range(4)]
        return [x.requires_grad_(place < 3) for place, x in enumerate(made)]

    def both_passes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> None:
        torch.autograd.grad(function(q, k, v), (q, k, v), do)

    both_passes(*tensors(WARM_ROWS))
    given = tensors(asked["n"])
    meter = _Resident() if device == "cpu" else _Cuda()
    found = []
    for _ in range(asked["rounds"]):
        meter.begin()
        both_passes(*given)
        found.append(meter.end())
    return {"bytes": found, "counted": COUNTED[device]}


class _Resident:
    """Growth of this process's resident set to its high-water mark."""

    def begin(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # "5" resets the high-water mark, see proc(5)
        except OSError as error:
            raise ToolError(f"/proc/self/clear_refs cannot be written: {error.strerror}") from None
        self.before = self._kilobytes("VmRSS")

    def end(self) -> int:
        return (self._kilobytes("VmHWM") - self.before) * 1024

    @staticmethod
    def _kilobytes(name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found is None:
            raise ToolError(f"/proc/self/status does not state {name}", "this needs a Linux kernel")
        return int(found[1])


class _Cuda:
    """Growth of torch's allocations on the current device to their maximum."""

    def begin(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    def end(self) -> int:
        import torch

        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - self.before


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # the answer is out; torch's threads have been seen to abort a process that ends the usual way


if __name__ == "__main__":
    main()
