"""The bench command: which packages to time, the best tile among several, and the result as a file and a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.table import Table

from codegen.errors import PlanError, RequestError
from verify import devices, machine, packages
from verify.bench import Cell, Timing, cells, geometric_mean, summary, time_all, time_cell
from verify.progress import Step, silent

Tile = tuple[int, int]

# What `--tiles grid` tries. Multiples of 96 and 128 suit the panels of every CPU path and the warps of mma.sync.
GRID: tuple[Tile, ...] = tuple((br, bc) for br in (96, 128, 192, 256, 384) for bc in (64, 96, 128))


def run(
    *,
    package: str | None,
    device: str,
    sram: str,
    dims: str,
    lengths: str,
    dtypes: str | None,
    arch: str | None,
    tiles: str | None,
    batch: int,
    heads: int,
    rounds: int,
    threads: int | None,
    step: Step = silent,
) -> dict[str, Any]:
    """Time what the command asks for; the words are its options, as typed.

    Raises: RequestError for a list that cannot be read, or when no tile of `tiles` is legal.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    devices.device(device)
    before = machine.describe(device)
    target = arch or ("cpu" if device == "cpu" else "sm80")
    sizes = _numbers(lengths, "--n")
    chosen: dict[str, Any] = {}
    timings: list[Timing] = []
    if package is not None:
        folder = packages.find(package)
        plan = packages.plan(folder)
        attn = packages.load(folder)
        names = _words(dtypes) or devices.dtypes_of(plan, device)
        wanted = cells(names, [plan["request"]["d"]], sizes, batch=batch, heads=heads)
        timings = time_all(lambda cell: attn, wanted, device=device, rounds=rounds, step=step)
    else:
        names = _words(dtypes) or (["float32", "bf16", "fp16"] if target == "cpu" else ["bf16", "fp16"])
        for dtype in names:
            for d in _numbers(dims, "--d"):
                wanted = cells([dtype], [d], sizes, batch=batch, heads=heads)
                make = _maker(sram, d, dtype, target)
                tile, means = best_tile(make, _tiles(tiles), wanted, device=device, step=step)
                attn = make(tile)
                chosen[f"{dtype} d={d}"] = {
                    "tile": list(tile) if tile else "the planner's",
                    "tried": {f"{br}x{bc}": mean for (br, bc), mean in means.items()},
                }
                timings += time_all(lambda cell, attn=attn: attn, wanted, device=device, rounds=rounds, step=step)  # type: ignore[misc]
    peers = list(dict.fromkeys(name for t in timings for name in t.peers))
    return {
        "kind": "bench",
        "device": device,
        "machine": before,
        "load_at_the_end": machine.load(),
        "threads": torch.get_num_threads(),
        "package": package or f"--sram {sram} per d and dtype, {target}",
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
    device: str,
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
        timings = [time_cell(attn, cell, device=device, rounds=rounds) for cell in wanted]
        means[tile] = geometric_mean(statistics.median(t.ratio(next(iter(t.peers)))) for t in timings)
        step(note=f"Br={tile[0]} Bc={tile[1]}: {means[tile]:.2f}")
    if tiles and not means:
        raise RequestError(f"--tiles: none of {', '.join(f'{a}x{b}' for a, b in tiles)} is legal here")
    return (max(means, key=lambda tile: means[tile]) if means else None), means


def table(figures: dict[str, Any]) -> Table:
    """One row per cell, one column per peer."""
    peers = list(figures["summary"])
    chip = (figures["machine"].get("gpu") or figures["machine"]["cpu"])["model"]
    made = Table(
        title=f"speed against {', '.join(peers)} on {chip}, {figures['threads']} threads",
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


def _maker(sram: str, d: int, dtype: str, target: str) -> Callable[[Tile | None], ModuleType]:
    def make(tile: Tile | None) -> ModuleType:
        words: dict[str, Any] = {} if tile is None else {"br": tile[0], "bc": tile[1]}
        folder: Path = packages.emit(sram=sram, d=d, dtypes=(dtype,), archs=(target,), **words)
        return packages.load(folder)

    return make


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise RequestError(f"{option} {text}: not a list of whole numbers", f"try {option} 64,128") from None


def _tiles(text: str | None) -> list[Tile]:
    if text == "grid":
        return list(GRID)
    try:
        return [(int(br), int(bc)) for br, bc in (word.lower().split("x") for word in _words(text))]
    except ValueError:
        raise RequestError(
            f"--tiles {text}: not a list of BRxBC", "try --tiles grid, or --tiles 96x64,192x128"
        ) from None
