"""What a call costs the host: a package beside the same operator path around a kernel that does nothing.

    empty = packages.load(empty_package(d=128, dtype="bf16"))
    figures = measure({"sm90a": attn}, empty, d=128, dtype="bf16")

The problem is so small that the GPU waits for the host: seconds per call of a loop of calls are the host's. Rounds are
interleaved in random order, and "above_us" is the median of the per-round differences: what choosing a kernel, making
tensor maps and launching it costs beyond an empty launch.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from codegen import emit, package
from verify import packages
from verify.bench import Cell
from verify.bench_cuda import Sample, inputs, interleave
from verify.mutate.mutant import seal
from verify.probe import PROBES

ROWS = 64  # of the one head that is called
CALLS, ROUNDS = 500, 9
EMPTY = ""  # stands for the empty package among the labels
KERNEL = "csrc/forward_sm80.cu"


def empty_package(*, d: int, dv: int | None = None, dtype: str) -> Path:
    """The sm80 package of these widths with probes/empty_sm80.cu in place of its kernel."""
    asked = packages.request(sram="96KB", d=d, dv=dv, dtypes=(dtype,), archs=("sm80",))
    files = package.render_package(asked)
    assert KERNEL in files
    changed = seal({**files, KERNEL: (PROBES / "empty_sm80.cu").read_bytes()})
    digest = package.read_plan(changed[package.PLAN_FILE])["digest"]
    return emit.write_files(changed, packages.cache() / "empty" / digest[: package.DIGEST_CHARS])


def host_seconds(call: Callable[[], Any]) -> Sample:
    """Seconds per call of the host, over CALLS calls; the device is waited for before and after, not between."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return Sample(took / CALLS)


def measure(
    named: Mapping[str, ModuleType],
    empty: ModuleType,
    *,
    d: int,
    dv: int | None = None,
    dtype: str,
    rounds: int = ROUNDS,
    seed: int = 0,
    device: str = "cuda",
    sample: Callable[[Callable[[], Any]], Sample] = host_seconds,
) -> dict[str, dict[str, float]]:
    """Label -> microseconds of a call, of the empty one in the same rounds, and of what is above it."""
    import torch

    cell = Cell(dtype=dtype, d=d, dv=dv, n=ROWS, causal=False, heads=1)
    q, k, v = inputs(cell, device)

    def of(attn: ModuleType) -> Callable[[], Any]:
        return lambda: attn.attention(q, k, v)

    calls = {EMPTY: of(empty), **{label: of(attn) for label, attn in named.items()}}
    with torch.no_grad():
        for call in calls.values():
            call()
        taken = interleave(calls, rounds=rounds, sample=sample, choose=random.Random(seed))
    micro = {label: [1e6 * s.seconds for s in samples] for label, samples in taken.items()}
    return {
        label: {
            "call_us": statistics.median(micro[label]),
            "empty_us": statistics.median(micro[EMPTY]),
            "above_us": statistics.median(a - b for a, b in zip(micro[label], micro[EMPTY], strict=True)),
        }
        for label in named
    }
