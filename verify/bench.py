"""Time an emitted package and torch's own attention on the CPU alternately, and compare round by round.

A shared machine drifts, so a figure here is never a time alone: in each round ours and every peer run back to back
on the same tensors with the same thread count, the round gives one ratio per peer, and the cell's figure is the
median ratio with its spread. Order within a round alternates, so that neither side always runs on the other's heat.

FLOPs = 2 B H Nq Nk (d + dv), of a backward pass 2 B H Nq Nk (3 d + 2 dv), which is 2.5 times that for d = dv; halved
for causal. A GPU has its own way to time (bench_cuda.py) and the same words for what was timed: Cell, Timing, spread,
summary.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from codegen.errors import CheckFailed
from verify import bench_backward
from verify.bench_check import Expected
from verify.cases import torch_dtype
from verify.progress import Step, silent

SAMPLE_S = 0.02  # one sample repeats its call until it lasts about this long


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape to time."""

    dtype: str
    d: int
    n: int
    causal: bool
    batch: int = 1
    heads: int = 8
    gqa: int = 1  # query heads per key/value head
    layout: str = "bhnd"  # how memory is ordered: "bhnd", or "bnhd", a row of all heads after the other
    dv: int | None = None  # width of a value row; None: d
    backward: bool = False  # the backward pass alone is timed
    deterministic: bool = False  # and ours must give equal bits every time

    @property
    def width_of_values(self) -> int:
        return self.d if self.dv is None else self.dv

    @property
    def flops(self) -> float:
        forward = 2.0 * (self.d + self.width_of_values)
        per_pair = 2.0 * forward + 2.0 * self.d if self.backward else forward
        return self.batch * self.heads * self.n * self.n * per_pair * (0.5 if self.causal else 1.0)

    def __str__(self) -> str:
        widths = f"d={self.d}" + (f" dv={self.dv}" if self.width_of_values != self.d else "")
        form = ([self.layout] if self.layout != "bhnd" else []) + ([f"gqa={self.gqa}"] if self.gqa != 1 else [])
        form += ["backward"] * self.backward + ["deterministic"] * self.deterministic
        return " ".join([f"{self.dtype} {widths} N={self.n} {'causal' if self.causal else 'full'}", *form])


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one entry per round, of ours and of each peer."""

    cell: Cell
    ours: list[float]
    peers: dict[str, list[float]]

    def ratio(self, peer: str) -> list[float]:
        """Peer's time over ours, round by round: above 1, ours is faster."""
        return [theirs / mine for mine, theirs in zip(self.ours, self.peers[peer], strict=True)]

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {**vars(self.cell), "ours_gflops": self.cell.flops / statistics.median(self.ours) / 1e9}
        for peer, times in self.peers.items():
            found[f"{peer}_gflops"] = self.cell.flops / statistics.median(times) / 1e9
            found[f"vs_{peer}"] = spread(self.ratio(peer))
        return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median with quartiles and extremes."""
    ordered = sorted(values)
    quarter = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    return {
        "median": statistics.median(ordered),
        "low": quarter[0],
        "high": quarter[2],
        "min": ordered[0],
        "max": ordered[-1],
    }


def geometric_mean(values: Iterable[float]) -> float:
    """exp(mean(log)); NaN for nothing."""
    logs = [math.log(x) for x in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summary(timings: Sequence[Timing], peer: str) -> dict[str, dict[str, float]]:
    """Per dtype: geometric mean of the cells' median ratios to `peer`, and the worst cell."""
    found = {}
    for dtype in dict.fromkeys(t.cell.dtype for t in timings):
        medians = [statistics.median(t.ratio(peer)) for t in timings if t.cell.dtype == dtype and peer in t.peers]
        if medians:
            found[dtype] = {
                "geometric_mean": geometric_mean(medians),
                "worst_cell": min(medians),
                "cells": len(medians),
            }
    return found


def cells(
    dtypes: Sequence[str], dims: Sequence[int], lengths: Sequence[int], *, batch: int = 1, heads: int = 8,
    backward: bool = False,
) -> list[Cell]:  # fmt: skip
    """Every combination, full and causal."""
    return [
        Cell(dtype=dtype, d=d, n=n, causal=causal, batch=batch, heads=heads, backward=backward)
        for dtype in dtypes
        for d in dims
        for n in lengths
        for causal in (False, True)
    ]


Clock = Callable[[Callable[[], Any], int], float]


def cpu_clock(call: Callable[[], Any], repeats: int) -> float:
    """Seconds per call on the CPU."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def alternate(
    ours: Callable[[], Any], peers: dict[str, Callable[[], Any]], *, rounds: int, clock: Clock = cpu_clock
) -> tuple[list[float], dict[str, list[float]]]:
    """Time `ours` and each peer once per round, in an order that turns round every time, after one warm-up each."""
    calls = {"": ours, **peers}
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, round(SAMPLE_S / max(clock(call, 1), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        order = list(calls) if turn % 2 == 0 else list(reversed(calls))
        for name in order:
            times[name].append(clock(calls[name], repeats[name]))
    mine = times.pop("")
    return mine, times


def time_cell(attn: ModuleType, cell: Cell, *, rounds: int = 7) -> Timing:
    """Time one cell on the CPU; the peer is torch's default.

    Raises: CheckFailed when O, or in a backward pass a gradient, is beyond its bound, of ours or of the peer.
    """
    import torch
    from torch.nn import functional

    shape = (cell.batch, cell.heads, cell.n, cell.d)
    made = torch.Generator().manual_seed(cell.n)
    q, k, v, do = (torch.randn(shape, generator=made).to(torch_dtype(cell.dtype)) for _ in range(4))

    def ours() -> Any:
        return attn.attention(q, k, v, causal=cell.causal)

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)

    def require(found: dict[str, str | None]) -> None:
        for name, wrong in found.items():
            if wrong is not None:
                raise CheckFailed(f"{name} on {cell}: {wrong}", "nothing is timed that is not attention")

    if cell.backward:
        work = bench_backward.BackwardPass(q, k, v, do, causal=cell.causal, dtype=cell.dtype)
        prepared = {"ours": work.of_package(attn), "torch": work.of_torch(sdpa)}
        require({name: wrong for name, (_, wrong) in prepared.items()})
        mine, theirs = alternate(prepared["ours"][0], {"torch": prepared["torch"][0]}, rounds=rounds)
    else:
        expected = Expected(q, k, v, causal=cell.causal, dtype=cell.dtype)
        of_torch = Expected(q, k, v, causal=cell.causal, dtype=cell.dtype, torch_on_cpu=True)
        with torch.no_grad():
            require({"ours": expected.difference(ours()), "torch": of_torch.difference(sdpa(q, k, v))})
            mine, theirs = alternate(ours, {"torch": lambda: sdpa(q, k, v)}, rounds=rounds)
    return Timing(cell, mine, theirs)


def time_all(
    attn_of: Callable[[Cell], ModuleType], wanted: Sequence[Cell], *, rounds: int, step: Step = silent
) -> list[Timing]:
    """Time each cell with the package that `attn_of` gives for it."""
    timings = []
    for cell in wanted:
        timings.append(time_cell(attn_of(cell), cell, rounds=rounds))
        step(note=str(cell))
    return timings
