"""Parts of a GPU session that are commands of their own: tuning, benchmarks, training, memory, and the first build.

Each runs `python -m verify ...` with a limit of its own, keeps the figures that the command wrote, and says of every
bar that they have to meet whether they do. What a command had written when its time ran out is kept.

Holds always: a figure that is not there meets no bar.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from codegen import tuned
from verify import machine, packages
from verify.bench import geometric_mean

if TYPE_CHECKING:
    from verify.gpu_run import Session

Figures = dict[str, Any]
Bar = dict[str, Any]
SRAM = "227KB"  # all that a block can have
WIDTHS, TUNED_WIDTHS = "64,128,256", "64,128,256,192/128"
RIVALS = ("fa3", "fa4")  # at least one of them must have been there


@dataclass(frozen=True)
class Command:
    """One `python -m verify` command: its words without --out, the seconds that it may take, the bars to meet."""

    words: tuple[str, ...]
    most: float
    bars: Callable[[Figures], list[Bar]] = lambda figures: []


def bar(what: str, value: float | None, *, least: float | None = None, most: float | None = None) -> Bar:
    """Whether a figure is at least or at most what it has to be."""
    holds = value is not None and (least is None or value >= least) and (most is None or value <= most)
    limit = {"least": least} if least is not None else {"most": most}
    return {"bar": what, "value": value, **limit, "holds": holds}


def _ratios(figures: Figures, key: str) -> list[float]:
    """The median ratios of every cell to a peer, or none at all unless each cell has one."""
    found = [row[key]["median"] for row in figures["cells"] if row.get(key)]
    return found if len(found) == len(figures["cells"]) else []


def _mean_and_worst(figures: Figures, key: str, what: str, mean: float, worst: float) -> list[Bar]:
    found = _ratios(figures, key)
    return [
        bar(f"over {what}, geometric mean", geometric_mean(found) if found else None, least=mean),
        bar(f"over {what}, worst cell", min(found, default=None), least=worst),
    ]


# Part of the tensor cores' peak that a prototype used at N = 8192 in bf16: (d, causal) -> part.
PROTOTYPE_USE = {(64, False): 0.63, (128, False): 0.88, (128, True): 0.85, (256, False): 0.94}
CELLS = 36  # d 64, 128, 256; full and causal; six lengths


def speed_bars(figures: Figures) -> list[Bar]:
    """The forward kernels beside cuDNN and the best peer of the run; what a call costs the host."""
    cells = figures["cells"]
    found = [
        bar("cells", len(cells), least=CELLS),
        bar(f"peers of {', '.join(RIVALS)}", sum(name in figures["peers"] for name in RIVALS), least=1),
        *_mean_and_worst(figures, "vs_best", "the best peer", 1.03, 0.94),
        *_mean_and_worst(figures, "vs_cudnn", "cudnn", 1.08, 0.98),
    ]
    for (d, causal), use in PROTOTYPE_USE.items():
        reached = [row["tensor_use"] for row in cells if (row["d"], row["causal"], row["n"]) == (d, causal, 8192)]
        what = f"tensor use at d={d} {'causal' if causal else 'full'} N=8192"
        found.append(bar(what, reached[0] if len(reached) == 1 else None, least=round(use - 0.02, 4)))
    above = [one["above_us"] for one in figures["host_overhead"].values()]
    return [*found, bar("host us of a call above an empty one", max(above, default=None), most=12.0)]


def form_bars(figures: Figures) -> list[Bar]:
    """fp16, 8 query heads per key head and (B, N, H, d) strides beside the plain form."""
    found = [row["vs_plain"]["median"] for row in figures["cells"] if row.get("vs_plain")]
    return [bar("worst form over the plain one", min(found, default=None), least=0.96)]


def backward_bars(figures: Figures) -> list[Bar]:
    """The gradients beside torch's FA2, and their deterministic form beside the default one."""
    usual = [row["vs_fa2"]["median"] for row in figures["cells"] if row.get("vs_fa2")]
    twice = [row["vs_plain"]["median"] for row in figures["cells"] if row.get("vs_plain")]
    return [
        bar("over fa2, worst cell", min(usual, default=None), least=0.9),
        bar("deterministic over default, worst cell", min(twice, default=None), least=0.75),
    ]


_TUNED = ("bench", "--device", "cuda", "--sram", SRAM, "--tiling", "tuned", "--arch", "sm90a")
COMMANDS: dict[str, Command] = {
    "bench": Command((*_TUNED, "--d", WIDTHS, "--peers", "cudnn,fa3,fa4", "--overhead"), 330.0, speed_bars),
    # The plan that the paper's tile leads to for the default budget, beside the same peers.
    "bench_paper": Command(
        ("bench", "--device", "cuda", "--sram", "192KB", "--arch", "sm90a", "--d", "128", "--peers", "cudnn,fa3"), 90.0
    ),
    "forms": Command(
        (*_TUNED, "--d", WIDTHS, "--n", "4096", "--dtype", "bf16,fp16", "--layout", "bhnd,bnhd", "--gqa", "1,8",
         "--peers", "none"), 100.0, form_bars,
    ),
    "bench_backward": Command(
        ("bench", "--device", "cuda", "--backward", "--peers", "fa2,cudnn"), 240.0, backward_bars
    ),
    "training": Command(("real", "--training", "--device", "cuda"), 300.0),
    "memory": Command(("memory", "--device", "cuda"), 240.0),
}  # fmt: skip


def run(session: Session, part: str) -> None:
    """Run the command of a part; its result file is <part>.json."""
    command, file = COMMANDS[part], session.out / f"{part}.json"
    words = [*command.words]
    if command.words[0] == "bench":  # it begins no shape that it might not end, and writes after every one
        words += ["--seconds", f"{max(1.0, min(command.most, session.left) - 25.0):.0f}"]
    done = session.command(["-m", "verify", *words, "--out", str(file)], most=command.most)
    nothing = {"kind": part, "device": "cuda", "cells": [], "peers": {}, "host_overhead": {}, "holds": False}
    found = json.loads(file.read_text()) if file.exists() else nothing
    session.keep(part, judged(found, command.bars, done))


def judged(figures: Figures, bars: Callable[[Figures], list[Bar]], done: subprocess.CompletedProcess[str]) -> Figures:
    """The figures of a command with its bars, its exit code and, unless that is 0, the end of what it said."""
    met = bars(figures)
    holds = done.returncode == 0 and bool(figures.get("holds", True)) and all(one["holds"] for one in met)
    said = {} if done.returncode == 0 else {"exit": done.returncode, "said": done.stderr[-3000:]}
    return {**figures, **({"bars": met} if met else {}), **said, "holds": holds}


def tune(session: Session) -> None:
    """`verify tune`: writes the table that `--tiling tuned` reads; a benchmark after it has it. `out` gets a copy."""
    limit = min(520.0, session.left)
    words = ["tune", "--arch", "sm90a", "--d", TUNED_WIDTHS, "--sram", SRAM, "--seconds", f"{limit - 60:.0f}"]
    done = session.command(["-m", "verify", *words], most=limit)
    card = machine.describe("cuda")["gpu"]["model"]
    tables = [file for file in sorted(tuned.TABLES.glob("*.json")) if tuned.read(file)["card"] == card]
    for file in tables:
        shutil.copy(file, session.out / f"tuning_{file.name}")
    cases = sum(len(tuned.read(file)["cases"]) for file in tables)
    wanted = len(TUNED_WIDTHS.split(",")) * len(tuned.CAUSAL_FORMS) * len(tuned.LENGTH_CLASSES)
    figures = {
        "kind": "tuning",
        "device": "cuda",
        "machine": machine.describe("cuda"),
        "command": f"python -m verify {' '.join(words)}",
        "tables": [file.name for file in tables],
    }
    session.keep("tune", judged(figures, lambda _: [bar("cases measured", cases, least=wanted)], done))


# ---- The first call: what building one dtype takes

FIRST_CALLS: dict[str, dict[str, Any]] = {
    "paper tile": {"sram": SRAM, "d": 128},
    "tuned": {"sram": SRAM, "d": 128, "tiling": "tuned"},
}
FIRST_CALL_CORES, FIRST_CALL_S = 2, 45.0


def first_call(session: Session) -> None:
    """Build packages of one dtype from nothing on two cores: kernels for sm_90a, their companion, the binding."""
    rows = {name: build_seconds(words) for name, words in FIRST_CALLS.items()}
    bars = [bar(f"seconds, {name}", row["seconds"], most=FIRST_CALL_S) for name, row in rows.items()]
    session.keep("first_call", {
        "kind": "first_call",
        "device": "sm90a",
        "machine": machine.describe("cpu"),
        "cores": FIRST_CALL_CORES,
        "packages": rows,
        "bars": bars,
        "holds": all(one["holds"] for one in bars),
    })  # fmt: skip


def build_seconds(words: Mapping[str, Any], *, cores: int = FIRST_CALL_CORES) -> dict[str, Any]:
    """What `python -m PACKAGE build` takes with an empty cache on so many cores; None for a build that failed."""
    folder = packages.emit(dtypes=("bf16",), archs=("sm90a",), backward=False, **words)
    own = sorted(os.sched_getaffinity(0))[:cores]
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "TILEPROOF_CACHE": scratch, "PYTHONPATH": str(folder.parent)}
        line = [sys.executable, "-m", folder.name, "build", "--cuda-arch", "90a"]
        before, start = os.times(), time.monotonic()
        with subprocess.Popen(
            line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder.parent
        ) as process:
            os.sched_setaffinity(process.pid, own)
            said, _ = process.communicate()
        took, after = time.monotonic() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    plan = packages.plan(folder)
    failed = {} if process.returncode == 0 else {"said": said[-2000:]}
    return {
        "package": folder.name,
        "digest": plan["digest"],
        "kernels": sum(path.endswith(".cu") for path in plan["files"]),
        "seconds": round(took, 1) if process.returncode == 0 else None,
        "cpu_seconds": round(cpu, 1),
        **failed,
    }
