"""The part of a GPU session that times the mma.sync forward kernels beside torch's own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from verify import bench_cuda, bench_report, machine, packages, peers
from verify.bench import Cell, Timing, summary
from verify.gpu_packages import DTYPES, SPEED_BUDGET, SPEED_TILES, request, tile_request
from verify.gpu_run import Session, identity

# 16384 tokens of hidden size 2048.
TOKENS, HIDDEN = 16384, 2048
SPEED_LENGTHS = (4096, 8192, 16384)
SPEED_PEERS = ("fa2", "cudnn", "efficient")
ROUNDS = 9


def speed(session: Session) -> None:
    """Time the best tile within 163 KB against torch's own backends, alternately, alone on the machine."""
    figures: dict[str, Any] = {
        "kind": "bench",
        "device": "cuda",
        "machine": machine.describe("cuda"),
        "package": f"--sram {SPEED_BUDGET} per d, sm80",
        "shapes": f"{TOKENS} tokens, {HIDDEN} columns in all heads; no GQA",
        "rounds": ROUNDS,
        "threads": 1,
        "tiles": {},
        "cells": [],
        "holds": False,
    }
    found, figures["absent"] = peers.available(SPEED_PEERS)
    some = packages.load(request(tile_request(64, SPEED_TILES[64][0])))
    gpu = bench_cuda.Gpu(bench_cuda.nvcc_of(some))

    def timer(attn: ModuleType, cell: Cell, *, rounds: int) -> Timing:
        return bench_cuda.time_group([cell], {"sm80": attn}, found, gpu=gpu, rounds=rounds)[0]

    timings = []
    for dtype in DTYPES:
        for d, tiles in SPEED_TILES.items():
            wanted = [
                Cell(dtype=dtype, d=d, n=n, causal=causal, batch=TOKENS // n, heads=HIDDEN // d)
                for n in SPEED_LENGTHS
                for causal in (False, True)
            ]

            def make(tile: bench_report.Tile | None, d: int = d) -> ModuleType:
                assert tile is not None
                return packages.load(request(tile_request(d, tile)))

            tile, means = bench_report.best_tile(make, tiles, wanted, timer=timer)
            attn = make(tile)
            figures["tiles"][f"{dtype} d={d}"] = {
                "tile": list(tile or ()),
                "tried": {f"{br}x{bc}": mean for (br, bc), mean in means.items()},
                **identity(request(tile_request(d, tile or (0, 0)))),
            }
            for cell in wanted:
                timings.append(timer(attn, cell, rounds=ROUNDS))
                row = timings[-1].describe()
                figures["cells"].append(row)
                session.say(f"{cell}, tile {tile}: {row['ours_gflops'] / 1e3:.0f} TFLOP/s, "
                            + ", ".join(f"{p} {row[f'vs_{p}']['median']:.3f}" for p in timings[-1].peers))  # fmt: skip
            names = list(dict.fromkeys(name for t in timings for name in t.peers))
            figures["summary"] = {name: summary(timings, name) for name in names}
            figures["load_at_the_end"] = machine.load()
            figures["holds"] = len(timings) == len(DTYPES) * len(SPEED_TILES) * len(wanted)
            session.keep("speed", figures)
