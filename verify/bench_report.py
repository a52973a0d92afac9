"""The bench command on a CPU: which packages to time, the best tile among several, the result as file and table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rich.table import Table

from codegen.errors import PlanError, RequestError
from verify import bench_backward, devices, machine, packages
from verify.bench import Cell, Timing, cells, geometric_mean, summary, time_all, time_cell
from verify.progress import Step, silent

Tile = tuple[int, int]


class Timer(Protocol):
    """How one cell is timed: `bench.time_cell` on a CPU."""

    def __call__(self, attn: ModuleType, cell: Cell, *, rounds: int) -> Timing: ...


# What `--tiles grid` tries. Multiples of 96 and 128 suit the panels of every CPU path and the warps of mma.sync.
GRID: tuple[Tile, ...] = tuple((br, bc) for br in (96, 128, 192, 256, 384) for bc in (64, 96, 128))


def run(
    *,
    package: str | None,
    sram: str = "192KB",
    widths: Sequence[int] = (64, 128),
    lengths: Sequence[int] = (512, 2048, 4096),
    dtypes: Sequence[str] = (),
    tiles: Sequence[Tile] = (),
    batch: int = 1,
    heads: int = 8,
    rounds: int = 7,
    threads: int | None = None,
    backward: bool = False,
    step: Step = silent,
) -> dict[str, Any]:
    """Time what the command asks for: a package, or one per width and dtype, with the best of `tiles` if there are any.

    backward: the backward pass alone, which takes its own tile whatever that of the forward pass is.

    Raises: RequestError when no tile of `tiles` is legal, or the package has no kernels for what is to be timed.
    """
    import torch

    for n in lengths:
        if n < 1:
            raise RequestError(f"--n {n}: there is nothing to time", "try --n 512,2048")
    if threads is not None:
        torch.set_num_threads(threads)
    before = machine.describe("cpu")
    chosen: dict[str, Any] = {}
    timings: list[Timing] = []
    if package is not None:
        folder = packages.find(package)
        plan = packages.plan(folder)
        devices.require_dtypes(plan, "cpu", dtypes)
        if backward:
            bench_backward.require(folder, "cpu")
        attn = packages.load(folder)
        names = list(dtypes) or devices.dtypes_of(plan, "cpu")
        wanted = cells(names, [plan["request"]["d"]], lengths, batch=batch, heads=heads, backward=backward)
        timings = time_all(lambda cell: attn, wanted, rounds=rounds, step=step)
    else:
        for dtype in list(dtypes) or ["float32", "bf16", "fp16"]:
            for d in widths:
                wanted = cells([dtype], [d], lengths, batch=batch, heads=heads, backward=backward)
                make = _maker(sram, d, dtype)
                tile, means = best_tile(make, tiles, wanted, step=step)
                attn = make(tile)
                chosen[f"{dtype} d={d}"] = {
                    "tile": list(tile) if tile else "the planner's",
                    "tried": {f"{br}x{bc}": mean for (br, bc), mean in means.items()},
                }
                timings += time_all(lambda cell, attn=attn: attn, wanted, rounds=rounds, step=step)  # type: ignore[misc]
    peers = list(dict.fromkeys(name for t in timings for name in t.peers))
    return {
        "kind": "bench_backward" if backward else "bench",
        "device": "cpu",
        "machine": before,
        "load_at_the_end": machine.load(),
        "threads": torch.get_num_threads(),
        "package": package or f"--sram {sram} per d and dtype, cpu",
        "rounds": rounds,
        "tiles": chosen,
        "cells": [t.describe() for t in timings],
        "summary": {peer: summary(timings, peer) for peer in peers},
    }


def best_tile(
    make: Callable[[Tile | None], ModuleType],
    tiles: Sequence[Tile],
    wanted: Sequence[Cell],
    *,
    timer: Timer | None = None,
    rounds: int = 3,
    step: Step = silent,
) -> tuple[Tile | None, dict[Tile, float]]:
    """The tile with the best geometric mean over `wanted` against the first peer, and every legal tile's mean.

    With no tiles to try: (None, {}), the planner's own.
    Raises: RequestError when every tile is illegal.
    """
    means: dict[Tile, float] = {}
    for tile in tiles:
        try:
            attn = make(tile)
        except PlanError:
            continue
        timings = [(timer or time_cell)(attn, cell, rounds=rounds) for cell in wanted]
        means[tile] = geometric_mean(statistics.median(t.ratio(next(iter(t.peers)))) for t in timings)
        step(note=f"Br={tile[0]} Bc={tile[1]}: {means[tile]:.2f}")
    if tiles and not means:
        raise RequestError(f"--tiles: none of {', '.join(f'{a}x{b}' for a, b in tiles)} is legal here")
    return (max(means, key=lambda tile: means[tile]) if means else None), means


def table(figures: dict[str, Any]) -> Table:
    """One row per cell, one column per peer."""
    peers = list(figures["summary"])
    chip = (figures["machine"].get("gpu") or figures["machine"]["cpu"])["model"]
    what = "speed of the backward pass" if figures["kind"] == "bench_backward" else "speed"
    made = Table(
        title=f"{what} against {', '.join(peers)} on {chip}, {figures['threads']} threads",
        caption="; ".join(
            f"{peer} {dtype}: geometric mean {s['geometric_mean']:.2f}, worst cell {s['worst_cell']:.2f}"
            for peer, by in figures["summary"].items()
            for dtype, s in by.items()
        ),
        title_justify="left",
        caption_justify="left",
    )
    for name in ("dtype", "d", "N", "mask", "ours GFLOP/s", *(f"vs {peer} (quartiles)" for peer in peers)):
        made.add_column(name, justify="right")
    for cell in figures["cells"]:
        row = [cell["dtype"], str(cell["d"]), str(cell["n"]), "causal" if cell["causal"] else "full"]
        row.append(f"{cell['ours_gflops']:.0f}")
        for peer in peers:
            s = cell.get(f"vs_{peer}")
            row.append(f"{s['median']:.2f} ({s['low']:.2f}..{s['high']:.2f})" if s else "-")
        made.add_row(*row)
    return made


def _maker(sram: str, d: int, dtype: str) -> Callable[[Tile | None], ModuleType]:
    def make(tile: Tile | None) -> ModuleType:
        words: dict[str, Any] = {} if tile is None else {"br": tile[0], "bc": tile[1]}
        folder: Path = packages.emit(sram=sram, d=d, dtypes=(dtype,), archs=("cpu",), **words)
        return packages.load(folder)

    return make
