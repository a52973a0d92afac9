"""The tune command: cases one after the other, and what was found as the table that `codegen` reads (codegen/tuned.py
has its format) and as one for people.

Holds always: the plans of a case are in the order in which the reader tries them, the fastest first.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from codegen import tuned
from codegen.plan import Decision
from verify import bench_cuda, devices, machine, packages
from verify.progress import Step, silent
from verify.tune import COLUMNS, ROUNDS, TOKENS, Case, Measured, build, candidates, fields_of, measure, relative


def row_of(
    case: Case, found: Sequence[Decision], measured: Measured, header: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """The case as the table keeps it: the finalists, fastest first, then what the first stage left behind."""
    speed = relative(measured.final)
    slowest, behind = min(speed.values()), relative(measured.screened)
    speed |= {i: min(slowest, x) for i, x in behind.items() if i not in speed}
    cells = {cell.n: cell for cell in case.cells(dtype)}
    plans = []
    for i in sorted(speed, key=lambda i: (i not in measured.final, -speed[i])):
        times = (measured.final if i in measured.final else measured.screened)[i]
        rates = {str(n): round(cells[n].flops / statistics.median(s) / 1e12, 1) for n, s in times.items()}
        plans.append({
            "plan": fields_of(found[i]),
            "fast_memory_bytes": found[i].variants[0].plan.fast_memory_bytes,
            "relative": round(speed[i], 4),
            "rounds": min(map(len, times.values())),
            "spread": round(max(map(_spread, times.values())), 4),
            "tflops": rates,
        })  # fmt: skip
    return {
        "arch": case.arch,
        "d": case.problem.d,
        "dv": case.problem.dv,
        "causal": case.causal,
        "length_class": case.length_class,
        "date": header["date"],
        "command": header["command"],
        "torch": header["versions"].get("torch"),
        "sram_bytes": case.problem.sram_bytes,
        "dtype": dtype,
        "shapes": f"{TOKENS} tokens, {COLUMNS} columns in all heads",
        "plans": plans,
        "refused": [{"plan": fields_of(found[i]), "why": why} for i, why in sorted(measured.refused.items())],
    }


def _spread(times: Sequence[float]) -> float:
    """(slowest - fastest) / median."""
    return (max(times) - min(times)) / statistics.median(times)


def slug(card: str) -> str:
    """File name of a card's table: "NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "_", card.lower().removeprefix("nvidia ")).strip("_")


def merged(
    before: Mapping[str, Any] | None, card: Mapping[str, Any], fresh: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """A table with the fresh cases in place of those of the same key, in the order of their keys."""

    def key(case: Mapping[str, Any]) -> tuple[Any, ...]:
        order = (*tuned.CAUSAL_FORMS, *tuned.LENGTH_CLASSES)
        return (case["arch"], case["d"], case["dv"], order.index(case["causal"]), order.index(case["length_class"]))

    known = {key(case): case for case in (before or {"cases": []})["cases"]}
    known |= {key(case): case for case in fresh}
    facts = {name: card.get(name) for name in ("capability", "multiprocessors", "driver", "cuda")}
    return {"format": tuned.FORMAT, "card": card["model"], **facts, "cases": [known[one] for one in sorted(known)]}


def run(
    wanted: Sequence[Case],
    *,
    dtype: str,
    out: Path | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
    seconds: float | None = None,
    step: Step = silent,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure the cases on the current GPU; the table, which is also written to `out` (default: the checked-in one).

    Raises: RequestError without a GPU, CheckFailed when no candidate of a case computes attention.
    """
    devices.device("cuda")
    header = machine.describe("cuda")
    card = header["gpu"]
    own = tuned.TABLES / f"{slug(card['model'])}.json"
    file = out or own
    before = next((tuned.read(one) for one in (file, own) if one.exists()), None)
    until = None if seconds is None else time.monotonic() + seconds
    tried = {case: candidates(case) for case in wanted}
    built = build(tried, step=step)
    gpu = bench_cuda.Gpu(None)
    table = merged(before, card, [])
    for case, found in tried.items():
        if until is not None and time.monotonic() > until:
            say(f"{case}: out of time, left as it was")
            continue
        measured = measure(case, built[case], sample=gpu.sample, dtype=dtype, rounds=rounds, seed=seed, step=step)
        row = row_of(case, found, measured, header, dtype)
        table = merged(table, card, [row])
        packages.write_json(file, table)
        best = row["plans"][0]
        say(f"{case}: {describe(best['plan'])} of {len(found)} plans, {best['tflops']} TFLOP/s")
    return table


def describe(plan: Mapping[str, Any]) -> str:
    """A plan of the table in a few words."""
    more = [k if v is True else f"{k}={v}" for k, v in plan.items() if k not in ("br", "bc") and v is not False]
    return " ".join([f"{plan['br']}x{plan['bc']}", *more])


def table(figures: Mapping[str, Any], most: int = 4) -> Table:
    """The fastest plans of every case."""
    made = Table(title=f"tuned plans on {figures['card']}", title_justify="left")
    for name in ("target", "d", "dv", "mask", "length", "plan", "KB", "relative", "TFLOP/s"):
        made.add_column(name, justify="left" if name == "plan" else "right")
    for case in figures["cases"]:
        for row in case["plans"][:most]:
            rates = ", ".join(f"{n}: {rate:.0f}" for n, rate in row["tflops"].items())
            made.add_row(
                case["arch"], str(case["d"]), str(case["dv"]), case["causal"], case["length_class"],
                describe(row["plan"]), f"{row['fast_memory_bytes'] / 1024:.0f}", f"{row['relative']:.3f}", rates,
            )  # fmt: skip
    return made
