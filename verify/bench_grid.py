"""`verify bench --device cuda`: which packages, peers and shapes are timed together, and the result file.

The default grid keeps 16384 tokens and 2048 columns in all heads: batch = tokens / N, heads = columns / d.
Lists of dtypes, layouts and heads per K/V head make *forms* of one shape: they are timed in the same rounds, and the
first form of each list is the plain one that `vs_plain` compares with. A backward pass adds the deterministic form of
each, which `vs_plain` compares with the same form without; peers are timed beside the default form alone.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from codegen import planners
from codegen.errors import CheckFailed, RequestError
from verify import bench_backward, bench_cuda, bench_table, devices, machine, overhead, packages, peers
from verify.bench import Cell
from verify.bench_cuda import GpuTiming
from verify.progress import Step, silent

TOKENS, COLUMNS = 16384, 2048
WIDTHS = ((64, 64), (128, 128), (256, 256))  # d and dv
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = {"full": False, "causal": True}
LAYOUTS = ("bhnd", "bnhd")
ROUNDS = 7
# What the backward pass is timed on by default. A target without a backward kernel of its own takes that of sm80.
BACKWARD: dict[str, Any] = {
    "widths": ((64, 64), (128, 128)), "lengths": (4096, 8192, 16384), "archs": ("sm80",),
}  # fmt: skip

Width = tuple[int, int]  # d and dv


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is asked for. `widths` is None where packages are named: theirs are taken."""

    packages: tuple[str, ...] = ()
    sram: str = "192KB"
    tiling: str = "paper"
    archs: tuple[str, ...] = ()
    tiles: tuple[tuple[int, int], ...] = ()
    widths: tuple[Width, ...] | None = None
    lengths: tuple[int, ...] = LENGTHS
    dtypes: tuple[str, ...] = ("bf16",)
    masks: tuple[str, ...] = tuple(MASKS)
    layouts: tuple[str, ...] = ("bhnd",)
    groups: tuple[int, ...] = (1,)
    peers: tuple[str, ...] = tuple(peers.PEERS)
    tokens: int = TOKENS
    columns: int = COLUMNS
    rounds: int = ROUNDS
    seed: int = 0
    seconds: float | None = None  # no further shape is begun after so long
    overhead: bool = False  # also what a call costs the host
    backward: bool = False  # the backward pass, in its default and its deterministic form

    def __post_init__(self) -> None:
        for option, given, known in (
            ("--mask", self.masks, tuple(MASKS)),
            ("--layout", self.layouts, LAYOUTS),
            ("--dtype", self.dtypes, ("bf16", "fp16")),
        ):
            for word in given:
                if word not in known:
                    raise RequestError(f"{option} {word}: unknown", f"known: {', '.join(known)}")
        for n in self.lengths:
            if n < 1 or self.tokens % n:
                raise RequestError(f"--n {n}: does not divide {self.tokens} tokens", "try a power of two, or --tokens")
        self._check(self.widths or ())

    def _check(self, widths: Sequence[Width]) -> None:
        for (d, _), group in itertools.product(widths, self.groups):
            unit = d * max(group, 1)
            if group < 1 or self.columns % unit:
                what = f"--d {d} --gqa {group}: {self.columns} columns are not whole groups of heads"
                raise RequestError(what, f"try --hidden {max(1, self.columns // unit) * unit}")

    def shapes(self, widths: Sequence[Width]) -> list[list[Cell]]:
        """One list per shape: its forms, the plain one first.

        Raises: RequestError when the columns do not make whole heads.
        """
        self._check(widths)
        return [
            [
                Cell(
                    dtype=dtype, d=d, dv=dv, n=n, causal=MASKS[mask], batch=self.tokens // n,
                    heads=self.columns // d, gqa=group, layout=layout, backward=self.backward,
                    deterministic=deterministic,
                )
                for dtype, layout, group, deterministic in itertools.product(
                    self.dtypes, self.layouts, self.groups, (False, True)[: 1 + self.backward]
                )
            ]
            for (d, dv), mask, n in itertools.product(widths, self.masks, self.lengths)
        ]  # fmt: skip


Modules = dict[Width, dict[str, ModuleType]]  # by widths, then by label


def load(grid: Grid) -> Modules:
    """The packages to time: those named, or one per width, target and tile.

    Raises: RequestError for a named package without kernels for what is to be timed; otherwise as the generator.
    """
    found: Modules = {}
    for name in grid.packages:
        folder = packages.find(name)
        if grid.backward:
            bench_backward.require(folder, "cuda")
        plan = packages.plan(folder)
        devices.require_dtypes(plan, "cuda", grid.dtypes)
        asked = plan["request"]
        found.setdefault((asked["d"], asked["dv"]), {})[folder.name] = packages.load(folder)
    if grid.packages:
        return found
    for (d, dv), arch in itertools.product(grid.widths or WIDTHS, grid.archs or (default_arch(),)):
        for tile in grid.tiles or (None,):
            words: dict[str, Any] = {} if tile is None else {"br": tile[0], "bc": tile[1]}
            if grid.tiling != "paper":
                words["tiling"] = grid.tiling
            label = arch if tile is None else f"{arch} {tile[0]}x{tile[1]}"
            folder = packages.emit(sram=grid.sram, d=d, dv=dv, dtypes=grid.dtypes, archs=(arch,), **words)
            found.setdefault((d, dv), {})[label] = packages.load(folder)
    return found


def default_arch() -> str:
    """The target with the most specific kernels for the current GPU."""
    import torch

    hopper = "sm90a" in planners.TARGETS and torch.cuda.get_device_capability() == (9, 0)
    return "sm90a" if hopper else "sm80"


def build(modules: Modules) -> dict[str, float]:
    """Compile what is not in the cache, side by side; seconds of each."""

    def one(attn: ModuleType) -> float:
        start = time.monotonic()
        packages.part(attn, "build").library("cuda")
        return round(time.monotonic() - start, 2)

    named = {f"{label}, d={d} dv={dv}": attn for (d, dv), by in modules.items() for label, attn in by.items()}
    with ThreadPoolExecutor(machine.cpu()["cores"] or 1) as pool:
        return dict(zip(named, pool.map(one, named.values()), strict=True))


def run(
    grid: Grid, *, out: Path | None = None, step: Step = silent, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Time the grid on the current GPU; `out` holds what is known after every shape, if the run is cut short.

    Raises: RequestError without a GPU. A package that does not compute attention is in "failures", and the run goes on.
    """
    devices.device("cuda")
    header = machine.describe("cuda")
    modules = load(grid)
    built = build(modules)
    step(note="built")
    found, absent = peers.available(grid.peers, backward=grid.backward)
    header["versions"] = machine.versions()  # again: those of $TILEPROOF_PEERS are in reach now
    for name, why in absent.items():
        say(f"no {name}: {why}")
    gpu = bench_cuda.Gpu(bench_cuda.nvcc_of(next(iter(next(iter(modules.values())).values()))))
    if gpu.no_clock:
        say(f"no tensor use: {gpu.no_clock}")
    until = None if grid.seconds is None else time.monotonic() + grid.seconds
    host = host_overhead(grid, modules, say) if grid.overhead else {}
    timings: list[GpuTiming] = []
    failures: list[str] = []
    left_out: list[str] = []

    def stated() -> dict[str, Any]:
        return figures(
            grid, timings, modules, absent=absent, header=header, built=built, host=host, left_out=left_out,
            failures=failures,
        )  # fmt: skip

    for shape in grid.shapes(list(modules)):
        if until is not None and time.monotonic() > until:
            left_out += map(str, shape)
            continue
        serving = modules[shape[0].d, shape[0].width_of_values]
        try:
            fresh = bench_cuda.time_group(shape, serving, found, gpu=gpu, rounds=grid.rounds, seed=grid.seed)
        except CheckFailed as error:
            failures.append(str(error))
            say(str(error))
            continue
        timings += fresh
        for t in fresh:
            say(line(t))
        if out is not None:
            packages.write_json(out, stated())
        step(note=str(shape[0]))
    return stated()


def host_overhead(grid: Grid, modules: Modules, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """What a call costs the host (overhead.py), per package; {} where the empty package does not build."""
    found: dict[str, dict[str, float]] = {}
    for (d, dv), named in modules.items():
        dtype = grid.dtypes[0]
        try:
            empty = packages.load(overhead.empty_package(d=d, dv=dv, dtype=dtype))
            seen = overhead.measure(named, empty, d=d, dv=dv, dtype=dtype)
        except RuntimeError as error:  # each package has a BuildError of its own
            say(f"no host overhead at d={d}: {peers.refusal(error)}")
            continue
        for label, figures in seen.items():
            found[f"{label}, d={d} dv={dv}"] = figures
            say(f"{label}, d={d}: a call takes the host {figures['call_us']:.1f} us, an empty one "
                f"{figures['empty_us']:.1f} us, {figures['above_us']:.1f} us above")  # fmt: skip
    return found


def line(t: GpuTiming) -> str:
    """One finished cell in a line, for a log."""
    against = ", ".join(f"{peer} {statistics.median(t.ratio(peer)):.3f}" for peer in t.peers)
    return f"{t.cell}, {t.package}: {t.cell.flops / statistics.median(t.ours) / 1e12:.0f} TFLOP/s; {against}"


def figures(
    grid: Grid,
    timings: Sequence[GpuTiming],
    modules: Modules,
    *,
    absent: Mapping[str, str],
    header: Mapping[str, Any],
    built: Mapping[str, float],
    host: Mapping[str, Any] | None = None,
    left_out: Sequence[str] = (),
    failures: Sequence[str] = (),
) -> dict[str, Any]:
    """The result file."""
    rows = [t.describe() for t in timings]
    rates = [t.matmul_flops / 1e9 for t in timings if t.matmul_flops is not None]
    matmul = statistics.median(rates) if rates else None
    for row in rows:
        row["percent_of_matmul"] = None if matmul is None else 100 * row["ours_gflops"] / matmul
    return {
        "kind": "speed_backward" if grid.backward else "speed",
        "device": "cuda",
        "machine": dict(header),
        "load_at_the_end": machine.load(),
        "shapes": f"{grid.tokens} tokens, {grid.columns} columns in all heads",
        "rounds": grid.rounds,
        "packages": {
            f"{label}, d={d} dv={dv}": {"name": packages.part(attn, "contents").NAME, "digest": _digest(attn)}
            for (d, dv), by in modules.items()
            for label, attn in by.items()
        },
        "build_seconds": dict(built),
        "host_overhead": dict(host or {}),
        "peers": {name: peers.PEERS[name].title for name in dict.fromkeys(p for t in timings for p in t.peers)},
        "absent": dict(absent),
        "matmul_gflops": None if not rates else {"median": matmul, "min": min(rates), "max": max(rates)},
        "summary": bench_table.summary(timings),
        "holds": not failures,
        "failures": list(failures),
        "left_out": list(left_out),
        "cells": rows,
    }


def _digest(attn: ModuleType) -> str:
    assert attn.__file__ is not None
    return str(packages.plan(Path(attn.__file__).parent)["digest"])
