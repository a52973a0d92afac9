"""The target of the synchronisation mutants of the mma.sync backward kernels; what counts is as in `synchronisation`.

The kernels are emitted alone, at tiles that between them have every branch of the template: one and two stages, a key
tile whose warps share rows (P and dS through shared memory) and one whose warps do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

from verify import arithmetic, packages
from verify.bounds.backward_model import of_path
from verify.emulator.emulator import Emulator
from verify.inputs import FAMILIES
from verify.mutate import emulated_backward, probes_backward, sync, texts
from verify.mutate.judge_backward import BackwardJudge
from verify.mutate.probes_backward import BackwardProbe
from verify.mutate.synchronisation import SUFFIX, Host, Ran, Synchronisation
from verify.suite import Shape, case

# Widths, the tile of key_tiles and that of query_tiles.
HOSTS: tuple[dict[str, Any], ...] = (
    {
        "d": 64, "dv": 64,
        "keys": {"br": 32, "bc": 64, "warps": 4, "row_warps": 2, "stages": 2},
        "query": {"br": 32, "bc": 32, "row_tiles": 1, "stages": 2},
    },
    {
        "d": 40, "dv": 72,
        "keys": {"br": 32, "bc": 32, "warps": 2, "row_warps": 1, "stages": 1},
        "query": {"br": 64, "bc": 16, "row_tiles": 2, "stages": 1},
    },
)  # fmt: skip

# Package, statement and edit -> why nothing reports it. Checked: such a mutant must not be reported.
EXPLAINED: dict[str, str] = {
    f"sm80 d=64 32x64 {statement} {edit}": "the plan has two stages, and the statement is of one: a "
    "branch never taken. At d=40 dv=72, with one stage, it is reported"
    for statement in ("kernel: __syncthreads 3", "backward_query_sm80: __syncthreads 2")
    for edit in (sync.REMOVED.how, sync.DIVERGENT.how)
}


class BackwardSynchronisation(Synchronisation):
    """All synchronisation mutants of the backward kernels."""

    explained: Mapping[str, str] = EXPLAINED

    def __init__(self) -> None:
        super().__init__(emulated_backward.ARCH)
        self.name = f"{self.arch}-backward{SUFFIX}"

    @cached_property
    def hosts(self) -> list[Host]:
        found = []
        for words in HOSTS:
            made = emulated_backward.plan(**words)
            d, dv = words["d"], words["dv"]
            problem = packages.request(sram="163KB", d=d, dv=dv, dtypes=("bf16",), archs=(self.arch,))
            files = emulated_backward.files(problem, "bf16", made)
            model = of_path(arithmetic.model(emulated_backward.ARITHMETIC, "bf16"), {"dq_restarts": False})
            cases = _probes(d=d, dv=dv, br=made.br, bc=made.bc, rows=made.query.br)
            judge = BackwardJudge({"": model}, made.br, made.bc, cases, sums_anywhere=True)
            label = f"d={d}{f' dv={dv}' if dv != d else ''} {made.br}x{made.bc}"
            call = partial(_backward, judge)
            found.append(Host(label, emulated_backward.PATH, files, texts.written(files), judge, call))
        return found


def _backward(judge: BackwardJudge, emulator: Emulator, probe: BackwardProbe) -> Ran:
    run, call = emulated_backward.launch(emulator, probe)
    return run, lambda: judge.hear(probe, "", emulated_backward.answer(call))


def _probes(*, d: int, dv: int, br: int, bc: int, rows: int) -> list[BackwardProbe]:
    """More than one tile each way of both kernels, with edges; whole tiles; key lengths, one of them 0; one key."""
    shapes = {
        "causal": Shape(nq=2 * max(br, rows) + 9, nk=2 * bc + 5, hq=2, hkv=1, causal="bottom_right"),
        "whole tiles": Shape(nq=2 * max(br, rows), nk=2 * bc),
        "key lengths": Shape(nq=9, nk=2 * bc + 3, b=3, lengths=(0.0, 1.0, 0.4)),
        "one key": Shape(nq=1, nk=1),
    }
    family = FAMILIES["gaussian"]
    made = [case(family, shape, name, dtype="bf16", d=d, dv=dv, seed=1) for name, shape in shapes.items()]
    return probes_backward.both_ways([probes_backward.of_case(one, dlse=True) for one in made])
