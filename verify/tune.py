"""`verify tune`: measure the legal plans of a target on this GPU, and write the table that `--tiling tuned` reads.

A *case* is a target, d, dv, mask form and length class (codegen/tuned.py). Its candidates are the planner's own: its
module's `candidates(problem, arch, causal=, length_class=)` gives one Decision per legal plan. Each becomes a package
like any other, is built, and is compared with float64 before it is timed (bench_check.py).

Measuring a case: every candidate in every round, in an order drawn anew, on every length of the class. A first stage of
SCREEN_ROUNDS leaves those within KEEP_WITHIN of the fastest; ROUNDS more decide among them. A round's figure is the
candidate's time over the geometric mean of all times of that round and length, which a slow clock moves alike; a
candidate's is the geometric mean over the lengths of its median rounds. The best of k equals is some percent lucky: a
table says how its plans compare, a benchmark of its own (`verify bench`) says how fast they are.

The table is written after every case, and cases that are measured again replace what was there.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from codegen import package, planners, tuned
from codegen.errors import CheckFailed, RequestError
from codegen.plan import Decision
from codegen.problem import Problem
from verify import bench_cuda, machine, packages
from verify.bench import Cell, geometric_mean
from verify.bench_check import Expected
from verify.bench_cuda import Sampler
from verify.progress import Step, silent

SCREEN_ROUNDS, ROUNDS = 2, 7
KEEP_WITHIN, KEEP_MOST = 0.9, 12  # of the fastest in the first stage; so many at most go on
# Lengths that stand for a class: the powers of two that the peers are timed at.
LENGTHS = {"short": (512, 1024), "medium": (2048, 4096), "long": (8192, 16384)}
TOKENS, COLUMNS = 16384, 2048  # in all, as in the peers' figures


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table, and the request that its candidates answer."""

    arch: str
    causal: str
    length_class: str
    problem: Problem
    tiles: tuple[tuple[int, int], ...] = ()  # only candidates with these (Br, Bc); (): all

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.arch, self.problem.d, self.problem.dv, self.causal, self.length_class)

    def __str__(self) -> str:
        d, dv = self.problem.d, self.problem.dv
        return f"{self.arch} d={d}{f' dv={dv}' if dv != d else ''} {self.causal} {self.length_class}"

    def cells(self, dtype: str) -> list[Cell]:
        """The shapes to time."""
        heads = max(1, COLUMNS // self.problem.d)
        return [
            Cell(
                dtype=dtype, d=self.problem.d, dv=self.problem.dv, n=n, causal=self.causal == "causal",
                batch=TOKENS // n, heads=heads,
            )
            for n in LENGTHS[self.length_class]
        ]  # fmt: skip


def cases(
    *,
    arch: str,
    sram: str,
    widths: Sequence[tuple[int, int]],
    masks: Sequence[str],
    classes: Sequence[str],
    dtype: str,
    tiles: Sequence[tuple[int, int]] = (),
) -> list[Case]:
    """Every combination. `widths` are pairs (d, dv).

    Raises: RequestError for a target without candidates, or an unknown word.
    """
    planners.require(arch)
    if not hasattr(planners.planner(arch), "candidates"):
        raise RequestError(f"--arch {arch}: its planner names no candidates to measure")
    for option, given, known in (
        ("--mask", masks, tuned.CAUSAL_FORMS), ("--class", classes, tuple(tuned.LENGTH_CLASSES)),
    ):  # fmt: skip
        for word in given:
            if word not in known:
                raise RequestError(f"{option} {word}: unknown", f"known: {', '.join(known)}")
    return [
        Case(
            arch=arch, causal=causal, length_class=name, tiles=tuple(tiles),
            problem=packages.request(sram=sram, d=d, dv=dv, dtypes=(dtype,), archs=(arch,), backward=False),
        )
        for d, dv in widths
        for causal in masks
        for name in classes
    ]  # fmt: skip


def steps(wanted: Sequence[Case], rounds: int) -> int:
    """At most so many steps of a progress bar: a build per candidate, a sample per candidate, length and round."""
    total = 0
    for case in wanted:
        tried, lengths = len(candidates(case)), len(LENGTHS[case.length_class])
        total += tried + lengths * (SCREEN_ROUNDS * tried + rounds * min(tried, KEEP_MOST))
    return total


def candidates(case: Case) -> list[Decision]:
    """The decisions to measure, each plan once.

    Raises: RequestError when there is none.
    """
    planner: Any = planners.planner(case.arch)
    found: dict[str, Decision] = {}
    for decision in planner.candidates(case.problem, case.arch, causal=case.causal, length_class=case.length_class):
        fields = fields_of(decision)
        if not case.tiles or (fields["br"], fields["bc"]) in case.tiles:
            found.setdefault(json.dumps(fields, sort_keys=True), decision)
    if not found:
        named = f"of {', '.join(f'{br}x{bc}' for br, bc in case.tiles)} " if case.tiles else ""
        raise RequestError(f"{case}: no plan {named}is legal within {case.problem.sram_bytes} bytes")
    return list(found.values())


def fields_of(decision: Decision) -> dict[str, Any]:
    """The fields of a decision's plan without d and dv: what the plan class is made of again."""
    plan: Any = decision.variants[0].plan
    return {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.init and f.name not in ("d", "dv")}


def build(wanted: Mapping[Case, Sequence[Decision]], *, step: Step = silent) -> dict[Case, dict[int, ModuleType | str]]:
    """Every candidate of every case as a built package, or why it does not build; all cores at once.

    A package here serves every length, so that the length classes of a case share what they have in common.
    """

    def emitted(case: Case, decision: Decision) -> ModuleType:
        variants = tuple(dataclasses.replace(v, length_class="any") for v in decision.variants)
        serving = dataclasses.replace(decision, variants=variants)
        plans = package.around(serving, case.problem, "tuned_candidate")  # with the companion that sm90a needs
        return packages.load(packages.emit_plans(plans))

    def built(attn: ModuleType) -> ModuleType | str:
        try:
            packages.part(attn, "build").library("cuda")
        except RuntimeError as error:  # each package has a BuildError of its own
            return first_line(error)
        finally:
            step(note=attn.__name__)
        return attn

    modules = {case: [emitted(case, decision) for decision in found] for case, found in wanted.items()}
    each = {attn.__name__: attn for found in modules.values() for attn in found}
    with ThreadPoolExecutor(machine.cpu()["cores"] or 1) as pool:
        done = dict(zip(each, pool.map(built, each.values()), strict=True))
    return {case: {i: done[attn.__name__] for i, attn in enumerate(found)} for case, found in modules.items()}


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


Seconds = dict[int, dict[int, list[float]]]  # candidate -> length -> one figure per round


@dataclass(frozen=True)
class Measured:
    """Both stages, and why other candidates were not timed."""

    screened: Seconds
    final: Seconds
    refused: dict[int, str]


def measure(
    case: Case,
    built: Mapping[int, ModuleType | str],
    *,
    sample: Sampler,
    dtype: str,
    rounds: int = ROUNDS,
    seed: int = 0,
    device: str = "cuda",
    step: Step = silent,
) -> Measured:
    """Check and time the candidates of a case.

    Raises: CheckFailed when none of them computes attention.
    """
    import torch

    refused = {i: attn for i, attn in built.items() if isinstance(attn, str)}
    calls: dict[tuple[int, int], Callable[[], Any]] = {}
    with torch.no_grad():
        for cell in case.cells(dtype):
            q, k, v = bench_cuda.inputs(cell, device)
            expected = Expected(q, k, v, causal=cell.causal, dtype=dtype)
            for i, attn in built.items():
                if isinstance(attn, str) or i in refused:
                    continue
                call = bench_cuda.ours(attn, q, k, v, cell.causal)
                try:
                    served = attn.path(q, k, v, causal=cell.causal)["target"]
                    wrong = f"served by {served}" if served != case.arch else expected.difference(call.run())
                except RuntimeError as error:
                    wrong = first_line(error)
                if wrong is None:
                    calls[i, cell.n] = call.run
                else:
                    refused[i] = f"{cell}: {wrong}"
        calls = {key: call for key, call in calls.items() if key[0] not in refused}
        if not calls:
            raise CheckFailed(f"{case}: no candidate computes attention", *map(str, refused.values()))
        choose = random.Random(seed)
        screened = _rounds(calls, SCREEN_ROUNDS, sample, choose, step)
        speed = relative(screened)
        ahead = [i for i in sorted(speed, key=lambda i: -speed[i]) if speed[i] >= KEEP_WITHIN][:KEEP_MOST]
        calls = {key: call for key, call in calls.items() if key[0] in ahead}
        return Measured(screened, _rounds(calls, rounds, sample, choose, step), refused)


def _rounds(
    calls: Mapping[tuple[int, int], Callable[[], Any]], rounds: int, sample: Sampler, choose: random.Random, step: Step
) -> Seconds:
    def shown(call: Callable[[], Any]) -> bench_cuda.Sample:
        taken = sample(call)
        step()
        return taken

    found: Seconds = {}
    for (i, n), samples in bench_cuda.interleave(calls, rounds=rounds, sample=shown, choose=choose).items():
        found.setdefault(i, {})[n] = [s.seconds for s in samples]
    return found


def relative(seconds: Seconds) -> dict[int, float]:
    """Speed of each candidate over that of the fastest, from rounds that all of them took part in."""
    lengths = next(iter(seconds.values())).keys()
    typical = {n: [geometric_mean(s) for s in zip(*(by[n] for by in seconds.values()), strict=True)] for n in lengths}
    slow = {
        i: geometric_mean(statistics.median(a / b for a, b in zip(by[n], typical[n], strict=True)) for n in lengths)
        for i, by in seconds.items()
    }
    best = min(slow.values())
    return {i: best / x for i, x in slow.items()}
