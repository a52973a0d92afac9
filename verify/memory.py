"""How the peak memory of forward plus backward grows with the length: ours beside the standard algorithm.

Every point is a process of its own (`memory_point.py` says what it counts, and why). Through the points of each
algorithm goes the least-squares fit

    bytes(N) = fixed + row * N + score * (batch * heads) * N^2

and its last coefficient, bytes per score, is what is decided:

  ours        less than BIT = 1/8 byte: not even a mask of one bit per score is ever held.
  standard    at least one element: a whole matrix, S or P, is held. This shows that the measurement would notice.

Linear growth is the first; the ratio of each two peaks is stated beside it. torch's own attention is measured too,
to compare with, and not judged.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from codegen.errors import RequestError, ToolError
from codegen.problem import ITEMSIZE
from verify import bench_backward, devices, machine, memory_point, packages
from verify.progress import Step, silent

LENGTHS = (512, 1024, 2048, 4096)
DTYPES = {"cpu": ("float32", "bf16"), "cuda": ("bf16", "fp16")}
ALGORITHMS = ("ours", "standard", "sdpa")
BIT = 0.125
SECONDS = 300  # that one point may take


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What does not change along a line of points."""

    batch: int = 1
    heads: int = 8
    d: int = 64

    def results_bytes(self, n: int, dtype: str) -> int:
        """O, dQ, dK and dV, and LSE in float32 (float64 for float64): what any algorithm has to hold at the end."""
        lse = 8 if dtype == "float64" else 4
        return self.batch * self.heads * n * (4 * self.d * ITEMSIZE[dtype] + lse)


@dataclass(frozen=True)
class Line:
    """The peaks of one algorithm in one dtype, over ascending lengths."""

    what: str
    dtype: str
    shape: Shape
    lengths: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]  # bytes, per length

    @property
    def peaks(self) -> list[int]:
        """The largest round of each length."""
        return [max(one) for one in self.rounds]

    @property
    def fit(self) -> tuple[float, float, float]:
        """Bytes that are fixed, per row of the length, and per score."""
        n = np.array(self.lengths, dtype=float) / max(self.lengths)  # so that the three columns are alike in size
        terms = np.stack([np.ones_like(n), n, n * n], axis=1)
        found = np.linalg.lstsq(terms, np.array(self.peaks, dtype=float), rcond=None)[0]
        longest = max(self.lengths)
        scores = self.shape.batch * self.shape.heads * longest**2
        return float(found[0]), float(found[1]) / longest, float(found[2]) / scores

    @property
    def holds(self) -> bool | None:
        """Whether it grows as it should; None where nothing is decided."""
        if self.what == "ours":
            return self.fit[2] < BIT
        return self.fit[2] >= ITEMSIZE[self.dtype] if self.what == "standard" else None

    def describe(self) -> dict[str, Any]:
        fixed, row, score = self.fit
        results = [self.shape.results_bytes(n, self.dtype) for n in self.lengths]
        return {
            "what": self.what,
            "dtype": self.dtype,
            "holds": self.holds,
            "fit": {"fixed_bytes": fixed, "bytes_per_row": row, "bytes_per_score": score},
            "growth": [b / a for a, b in zip(self.peaks, self.peaks[1:], strict=False)],
            "points": [
                {"n": n, "peak_bytes": max(seen), "per_row": max(seen) / n, "of_results": max(seen) / least,
                 "rounds": list(seen)}
                for n, seen, least in zip(self.lengths, self.rounds, results, strict=True)
            ],
        }  # fmt: skip


def point(asked: dict[str, Any]) -> dict[str, Any]:
    """Run `memory_point` in a process of its own.

    Raises: ToolError with the end of its error output.
    """
    command = [sys.executable, "-m", "verify.memory_point", json.dumps(asked)]
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=root,
            env=os.environ | memory_point.ENVIRONMENT,
        )
    except subprocess.TimeoutExpired:
        raise ToolError(f"{asked['what']} at N={asked['n']} took over {SECONDS} s", "try shorter lengths") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-3:]
        raise ToolError(f"{asked['what']} at N={asked['n']} ended with {done.returncode}", *last)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def run(
    folder: Path,
    *,
    device: str,
    dtypes: Sequence[str],
    lengths: Sequence[int] = LENGTHS,
    shape: Shape | None = None,
    rounds: int = 3,
    algorithms: Sequence[str] = ALGORITHMS,
    step: Step = silent,
) -> dict[str, Any]:
    """Measure the package in `folder` and the others: what the result file states, but for its kind.

    Raises: RequestError for lengths that no fit goes through, or a package that lacks the kernels, or whose values are
        not as wide as its keys.
    """
    shape = Shape() if shape is None else shape
    ascending = tuple(sorted(set(lengths)))
    if len(ascending) < 3 or ascending[0] <= memory_point.WARM_ROWS:
        raise RequestError(
            f"--n {','.join(map(str, lengths))}: growth needs three lengths beyond {memory_point.WARM_ROWS}",
            f"try --n {','.join(map(str, LENGTHS))}",
        )
    bench_backward.require(folder, device)
    plan = packages.plan(folder)
    devices.require_dtypes(plan, device, dtypes)
    asked_for = plan["request"]
    if (asked_for["d"], asked_for["dv"]) != (shape.d, shape.d):
        raise RequestError(
            f"{folder.name}: d={asked_for['d']}, dv={asked_for['dv']}; measured is d = dv = {shape.d}",
            "name a package with d = dv",
        )
    header = machine.describe(device)
    step(0, note="build")
    packages.load(folder).build()  # once, and not by the process that measures
    about = {"folder": str(folder.resolve()), "device": device, **vars(shape), "rounds": rounds}

    def seen(place: tuple[str, str, int]) -> tuple[int, ...]:
        dtype, what, n = place
        found = point({**about, "what": what, "dtype": dtype, "n": n})["bytes"]
        step(note=f"{dtype}, {what}, N={n}")
        return tuple(found)

    # On a GPU a process counts its own allocations, whatever runs beside it; resident sets are counted one at a time.
    jobs = max(1, (os.cpu_count() or 1) // 2) if device == "cuda" else 1
    places = list(itertools.product(dtypes, algorithms, ascending))
    with ThreadPoolExecutor(jobs) as pool:
        peaks = dict(zip(places, pool.map(seen, places), strict=True))
    lines = [
        Line(what, dtype, shape, ascending, tuple(peaks[dtype, what, n] for n in ascending))
        for dtype, what in itertools.product(dtypes, algorithms)
    ]
    return {
        "holds": all(one.holds is not False for one in lines),
        "counted": memory_point.COUNTED[device],
        "shape": vars(shape),
        "lengths": list(ascending),
        "lines": [one.describe() for one in lines],
        "machine": header,
    }


def table(figures: dict[str, Any]) -> Table:
    """One row per algorithm and dtype: the peak at each length, and the fit."""
    shape = figures["shape"]
    found = Table(
        title=f"peak of forward + backward in MB, batch {shape['batch']}, {shape['heads']} heads, d={shape['d']}",
        title_justify="left",
    )
    for name in ("dtype", "what", *(f"N={n}" for n in figures["lengths"]), "bytes per row", "per score", "holds"):
        found.add_column(name, justify="right")
    for one in figures["lines"]:
        fit = one["fit"]
        found.add_row(
            one["dtype"],
            one["what"],
            *(f"{p['peak_bytes'] / 1e6:.1f}" for p in one["points"]),
            f"{fit['bytes_per_row']:.0f}",
            f"{fit['bytes_per_score']:.4f}",
            {True: "yes", False: "NO", None: "-"}[one["holds"]],
        )
    found.caption = f"{figures['counted']}; ours holds below {BIT} bytes per score, the standard above one element"
    found.caption_justify = "left"
    return found
