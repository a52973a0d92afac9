"""The fastest measured plan within a budget: what `--tiling tuned` reads.

`tuning/<card>.json` holds what `python -m verify tune` measured on that card: for each target, width, mask form and
length class, the legal plans it tried, the fastest first, each with the fast memory that it allocates. Nothing is
measured here: a case that no table has, nor one of longer calls, gives None, and the planner's own rule stands.

    choice = fastest(problem, "sm90a", causal="causal", length_class="long")
    plan = Sm90aPlan(d=problem.d, dv=problem.dv, **choice.fields)

Holds always: the choice depends on the request and on the checked-in tables alone, so equal requests give equal bytes;
a smaller budget never gives a plan that needs more than it. Tables are read in the order of their names; the first
that has a case, in its own length class or else in the next longer one that it measured, decides it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from .errors import ToolError
from .plan import LENGTH_CLASSES
from .problem import Problem

__all__ = ["CAUSAL_FORMS", "LENGTH_CLASSES", "Choice", "fastest", "length_class_of", "read", "why_none"]

TABLES = Path(__file__).parent / "tuning"
FORMAT = "tileproof tuning 1"

CAUSAL_FORMS = ("full", "causal")
_CASE = {"arch", "d", "dv", "causal", "length_class", "date", "plans"}
_ROW, _TILE = {"plan", "fast_memory_bytes", "relative"}, {"br", "bc"}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One measured plan. `fields` are those of the target's plan class, without d and dv."""

    fields: Mapping[str, Any]
    fast_memory_bytes: int
    relative: float  # speed over that of the fastest plan of its case, whatever the budget
    longer_class: str = ""  # the length class that it was measured in, where the table lacks the one asked for
    card: str
    date: str

    @property
    def why(self) -> str:
        """Where the plan comes from, for `--explain`."""
        part = "the fastest plan" if self.relative == 1 else f"{100 * self.relative:.0f} % of the fastest plan's speed"
        calls = f", in {self.longer_class} calls" if self.longer_class else ""
        return f"measured on {self.card}, {self.date}{calls}: {part}"


def fastest(problem: Problem, arch: str, *, causal: str, length_class: str, tables: Path = TABLES) -> Choice | None:
    """The fastest measured plan for a case of `problem` that fits --sram (and --br, --bc where given); None if none.

    Raises: ToolError for a table that cannot be read.
    """
    wanted = (arch, problem.d, problem.dv, causal)
    classes = list(LENGTH_CLASSES)
    for table in _tables(tables):
        found = {
            case["length_class"]: case
            for case in table["cases"]
            if (case["arch"], case["d"], case["dv"], case["causal"]) == wanted and case["plans"]
        }
        for name in classes[classes.index(length_class) :]:
            if name in found:
                choice = next(_fitting(problem, found[name], table), None)
                return choice and replace(choice, longer_class="" if name == length_class else name)
    return None


def why_none(problem: Problem, arch: str, *, causal: str, tables: Path = TABLES) -> str:
    """Why `fastest` has no plan for a case, and what to do about it. causal: "any" for every mask form."""
    names = ", ".join(file.stem for file in sorted(tables.glob("*.json")))
    if any(
        (case["arch"], case["d"], case["dv"]) == (arch, problem.d, problem.dv) and causal in ("any", case["causal"])
        for table in _tables(tables)
        for case in table["cases"]
    ):
        return f"of the plans that the tuning tables ({names}) have for it none fits --sram, --br and --bc"
    widths = f"{problem.d}" + (f"/{problem.dv}" if problem.dv != problem.d else "")
    has = f"none of the tuning tables ({names}) has a plan for it" if names else "there is no tuning table"
    return f"{has}: python -m verify tune --arch {arch} --d {widths} measures one on a card"


def _fitting(problem: Problem, case: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[Choice]:
    for row in case["plans"]:
        plan = row["plan"]
        as_asked = problem.br in (None, plan["br"]) and problem.bc in (None, plan["bc"])
        if as_asked and row["fast_memory_bytes"] <= problem.sram_bytes:
            yield Choice(
                fields=plan, fast_memory_bytes=row["fast_memory_bytes"], relative=row["relative"],
                card=table["card"], date=case["date"],
            )  # fmt: skip


def length_class_of(rows: int) -> str:
    """The class of a call with so many query rows."""
    return next(name for name, most in LENGTH_CLASSES.items() if most is None or rows <= most)


def read(file: Path) -> dict[str, Any]:
    """A table.

    Raises: ToolError when it is not one of ours.
    """
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # the last: too deep to be ours
        raise ToolError(f"{file}: not a tuning table: {error}") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT or not _is_whole(table):
        raise ToolError(f"{file}: not a tuning table ({FORMAT})", "make it again with python -m verify tune")
    return table


def _is_whole(table: Mapping[str, Any]) -> bool:
    """Whether every case and every plan has what this module reads of it."""
    cases = table.get("cases")
    return (
        isinstance(table.get("card"), str)
        and isinstance(cases, list)
        and all(_is_case(case) for case in cases)
        and all(_is_row(row) for case in cases for row in case["plans"])
    )


def _is_case(case: Any) -> bool:
    return (
        isinstance(case, dict)
        and case.keys() >= _CASE
        and isinstance(case["plans"], list)
        and all(isinstance(case[name], str) for name in ("arch", "causal", "length_class", "date"))
    )


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and row.keys() >= _ROW
        and isinstance(row["plan"], dict)
        and row["plan"].keys() >= _TILE
        and isinstance(row["fast_memory_bytes"], int)
        and isinstance(row["relative"], int | float)
        and 0 < row["relative"] <= 1
    )


@cache
def _tables(folder: Path) -> tuple[dict[str, Any], ...]:
    return tuple(read(file) for file in sorted(folder.glob("*.json")))
