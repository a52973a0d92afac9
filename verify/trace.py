"""The debug form of a package: O as it is computed, and the state (m, l, O) after every key tile, judged tile by tile.

A package's debug form has the same kernels with float32 (float64) output and a trace. Its O has no final rounding to
hide behind, and the first tile whose state leaves its bound says where a mistake is. The state after tile j is judged
as attention over the keys of the tiles before and itself (for a kernel that takes the last tile first, of those after
it and itself): m between its limits, O / l and m + ln l within the bound of that part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as Folder
from types import ModuleType
from typing import Any

import numpy as np

from codegen import problem as problems
from verify import bounds, devices, judge, judge_backward, packages, suite
from verify.cases import Array, Case
from verify.compare import ratio
from verify.devices import Device, Path
from verify.oracle import float64
from verify.progress import Step, silent


@dataclass(frozen=True)
class Finding:
    """The worst state of one case on one path."""

    case: str
    path: Path
    states: int  # rows x tiles that were looked at
    worst: float  # the largest err/bound
    where: str

    @property
    def holds(self) -> bool:
        return self.worst <= 1

    def describe(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "path": str(self.path),
            "states": self.states,
            "max_ratio": self.worst,
            "where": self.where,
        }


def debug_form(folder: Folder, device: str) -> Folder:
    """The debug form of the package in `folder`, for one device, in the cache."""
    request = problems.from_dict(packages.plan(folder)["request"])
    archs = tuple(a for a in request.archs if (a == "cpu") == (device == "cpu"))
    dtypes = tuple(
        t for t in request.dtypes if any(t in dataclasses.replace(request, archs=(a,)).dtypes_of(a) for a in archs)
    )
    return packages.emit(dataclasses.replace(request, archs=archs, dtypes=dtypes, debug=True))


def hear(case: Case, path: Path, trace: Array) -> Finding:
    """Judge every state of a finite case against attention over the keys of its tiles."""
    worst, where, states = 0.0, "", 0
    for text, value, count in _states(case, path, trace):
        states += count
        if value > worst:
            worst, where = value, text
    return Finding(case.name, path, states, worst, where)


def _states(case: Case, path: Path, trace: Array) -> Iterator[tuple[str, float, int]]:
    """(where, err/bound, rows) per head, tile and quantity."""
    model = judge.model_of(path)
    for b, h, q, k, v in case.heads():
        seen = case.visible(b)
        for tile in range(trace.shape[3]):
            keys = bounds.seen_by(tile, path.bc, last_tile_first=model.last_tile_first)
            prefix = seen[:, keys]
            touched = seen[:, tile * path.bc : (tile + 1) * path.bc].any(axis=1)
            if not touched.any():
                continue
            rows = np.flatnonzero(touched)
            m, l, o = trace[b, h, rows, tile, 0], trace[b, h, rows, tile, 1], trace[b, h, rows, tile, 2:]
            room = bounds.prefix(
                q[rows], k, v, scale=case.scale, visible=seen[rows], model=model, bc=path.bc, tile=tile
            )
            t0 = float64.attention(q[rows], k[keys], v[keys], scale=case.scale, visible=prefix[rows])
            with np.errstate(invalid="ignore", divide="ignore"):
                average, log_sum = o / l[:, None], m + np.log(l)
                inside = (room.m_low <= m) & (m <= room.m_high)
            for name, value in (
                ("O / l", ratio(average, t0.o, room.o, want_error=t0.o_err)),
                ("m + ln l", ratio(log_sum, t0.lse, room.lse, want_error=t0.lse_err)),
                ("m", np.where(inside, 0.0, np.inf)),
            ):
                at = np.unravel_index(int(value.argmax()), value.shape)
                yield (
                    f"{name} after key tile {tile}, batch {b}, head {h}, row {int(rows[at[0]])}",
                    float(value[at]),
                    len(rows) if name == "m" else 0,
                )


PER_DTYPE = 40  # cases of the suite that are traced


def stated(folder: Folder, device: Device, *, seed: int, most: int = PER_DTYPE, step: Step = silent) -> dict[str, Any]:
    """What the certificate says of the debug form: per path the states looked at and the worst of them.

    most: cases per dtype, if fewer than PER_DTYPE.
    """
    per_dtype = min(most, PER_DTYPE)
    form = debug_form(folder, device.name)
    attn, request = packages.load(form), packages.plan(form)["request"]
    found: list[Finding] = []
    violations: list[str] = []
    for dtype in devices.dtypes_of(packages.plan(form), device.name):
        small = suite.smallest(dtype, d=request["d"], dv=request["dv"])
        tiles = [(p.br, p.bc) for p in device.paths(attn, dtype, small)]
        cases = suite.cases(dtype, d=request["d"], dv=request["dv"], tiles=tiles, count=per_dtype, seed=seed)
        for case in (c for c in cases if c.family != "special"):
            mine, bad = states(attn, case, device)
            found, violations = found + mine, violations + bad
            step(note=case.name)
    worst = [
        max((f for f in found if str(f.path) == p), key=lambda f: f.worst) for p in {str(f.path): 0 for f in found}
    ]
    return {
        "states": sum(f.states for f in found),
        "violations": violations,
        "paths": [{**f.describe(), "states": sum(g.states for g in found if g.path == f.path)} for f in worst],
    }


def states(attn: ModuleType, case: Case, device: Device) -> tuple[list[Finding], list[str]]:
    """Run a finite case on every path of the debug form: its states judged, and a text for each thing out of bounds.

    The gradients, which it stores as they are summed, are judged stage-wise at the O and LSE of the first path.
    """
    found, bad = [], []
    given = None
    for path in device.paths(attn, case.dtype, case):
        try:
            o, lse, trace = device.trace(attn, case, path)
        except AssertionError as fault:
            bad.append(f"{case.name} on {path}, debug form: {fault}")
            continue
        (verdict,) = judge.hear(case, [(path, o, lse)], spec=False, device=device.name)
        given = given or judge_backward.read_by_kernel(case, o, lse)
        finding = hear(case, path, trace)
        found.append(finding)
        if not verdict.holds:
            bad.append(verdict.message())
        if not finding.holds:
            bad.append(f"{case.name} on {path}, debug form: {finding.where}: err/bound {finding.worst:.3g}")
    if case.do is not None and given is not None:
        bad += _gradients(attn, case, device, given)
    return found, bad


def _gradients(attn: ModuleType, case: Case, device: Device, given: tuple[Array, Array]) -> list[str]:
    """What is wrong with the gradients of a debug form."""
    runs, bad = [], []
    for path in device.backward_paths(attn, case.dtype, case):
        try:
            runs.append((path, device.run_backward(attn, case, path, given)))
        except AssertionError as fault:
            bad.append(f"{case.name} on {path}, debug form: {fault}")
    if not runs:
        return bad
    verdicts = judge_backward.hear(case, given, runs, spec=False, rows=0, device=device.name, compare_plain=False)
    return bad + [verdict.message() for verdict in verdicts if not verdict.holds]
