"""Measure how long the emulator takes: one head of the default packages, checker on and off, best of five.

    python -m verify.emulator.speed --out verify/results/emulator_cpu.json

The seconds are those of the launch alone: the library is compiled and loaded before. One core is used.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from codegen.errors import TileproofError
from verify import machine, packages, suite
from verify.emulator import build
from verify.emulator.device import Call
from verify.emulator.emulator import SCHEDULES, Emulator
from verify.inputs import FAMILIES
from verify.report import markdown

N = 512  # rows and keys
RUNS = 5
TARGET, DTYPE = "sm80", "bf16"
# Head width -> seconds that a launch may take with the checker on; a missed bar is printed, never hidden.
BARS = {64: 0.2, 128: 0.5}


def measure(d: int, *, check: bool, n: int = N, runs: int = RUNS) -> dict[str, Any]:
    """The best of `runs` launches of the default package of width d.

    Raises: FindingError when the kernel has a finding.
    """
    folder = packages.emit(d=d)
    variants = packages.plan(folder)["variants"]
    variant = next(v for v in variants if (v["target"], v["dtype"]) == (TARGET, DTYPE))
    emulator = Emulator(build.package(folder, TARGET))
    case = suite.case(FAMILIES["gaussian"], suite.Shape(nq=n, nk=n), "speed", dtype=DTYPE, d=d, dv=d, seed=0)
    emulator.configure(SCHEDULES[0], check=check)
    done = [Call.of(case).launch(emulator, TARGET).check() for _ in range(runs)]
    best = min(done, key=lambda run: run.seconds)
    return {
        "package": folder.name,
        "dtype": DTYPE,
        "tile": [variant["plan"]["br"], variant["plan"]["bc"]],
        "n": n,
        "checker": check,
        "seconds": [round(run.seconds, 4) for run in done],
        "best_s": round(best.seconds, 4),
        "gflops": round(4e-9 * n * n * d / best.seconds, 2),
        "switches": best.counters["switches"],
        "mma": best.counters["mma"],
        "bytes": {name: best.bytes(name) for name in ("q", "k", "v", "o", "lse")},
    }


def run() -> dict[str, Any]:
    """The figures of all packages, and whether each keeps its bar."""
    stated = {
        "kind": "emulator",
        "device": "cpu",
        "machine": {**machine.describe("cpu"), "command": "python -m verify.emulator.speed"},
        "compiler": build.compiler().version,
        "threads": 1,
    }
    rows = [{**measure(d, check=check), "bar_s": bar if check else None}
            for d, bar in BARS.items() for check in (True, False)]  # fmt: skip
    return {**stated, "runs": rows, "holds": all(r["bar_s"] is None or r["best_s"] <= r["bar_s"] for r in rows)}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Write the figures to this file.")
def main(out: Path | None) -> None:
    """Measure the emulator's speed."""
    try:
        if out is not None:
            packages.check_writable(out)
        figures = run()
        if out is not None:
            packages.write_json(out, figures)
    except TileproofError as error:
        click.echo(f"speed: error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(markdown("emulator", [{"file": str(out or "nowhere: --out FILE keeps the figures"), **figures}]))


if __name__ == "__main__":
    main()
