"""The mma.sync backward kernels for the emulator: emitted alone, at tiles of our choosing.

The backward tile of a package follows from its memory, and the cheapest one has some branches of the template only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codegen import render
from codegen.plans import sm80_backward
from codegen.plans.sm80_backward import KeyTiles, QueryTiles, Sm80BackwardPlan
from codegen.problem import Problem
from verify.cases import GRADIENTS
from verify.emulator.device_backward import BackwardCall
from verify.emulator.emulator import Emulator, Run
from verify.mutate.judge_backward import Answer
from verify.mutate.probes_backward import BackwardProbe

ARCH, ARITHMETIC = "sm80", sm80_backward.ARITHMETIC
PATH = f"csrc/backward_{ARCH}.cu"


def plan(d: int, dv: int, *, keys: Mapping[str, int], query: Mapping[str, int]) -> Sm80BackwardPlan:
    """Tiles of both kernels. Raises: ValueError when the warps do not share them evenly."""
    made = Sm80BackwardPlan(keys=KeyTiles(d=d, dv=dv, **keys), query=QueryTiles(d=d, dv=dv, **query))
    if not made.keys.is_whole:
        raise ValueError(f"{keys}: the warps do not share the tile evenly")
    return made


def files(problem: Problem, dtype: str, made: Sm80BackwardPlan) -> dict[str, bytes]:
    """The unit of one dtype and all that it includes, by path in a package. `problem` decides d, dv and the form."""
    texts: dict[str, tuple[str, Mapping[str, Any]]] = {
        f"csrc/{name}": (f"package/csrc/{name}.j2", {}) for name in ("forward.h", "backward.h")
    }
    texts["csrc/ptx_sm80.cuh"] = ("sm80/ptx_sm80.cuh", {})
    texts |= sm80_backward.files(problem, {(ARCH, dtype): made})
    shared = {"problem": problem, "header": ["A unit of its own."], "exact": []}
    return {path: render.render(template, {**shared, **context}) for path, (template, context) in texts.items()}


def launch(emulator: Emulator, probe: BackwardProbe, *, debug: bool = False) -> tuple[Run, BackwardCall]:
    """One call, as `emulator` is configured."""
    call = BackwardCall.of(probe.case, (probe.o, probe.lse), deterministic=probe.in_order, debug=debug)
    return call.launch(emulator, ARCH), call


def answer(call: BackwardCall) -> Answer:
    """The gradients that the call asked for."""
    return {name: call.result(name) for name in GRADIENTS if name in call.arrays}
