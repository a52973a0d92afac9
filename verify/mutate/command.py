"""What `python -m verify mutate` prints: what killed the mutants of each target, then what needs a reader."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def tables(figures: dict[str, Any]) -> list[Table]:
    """A row per target; then the mutants that did not end as they should, and the equivalents with their reasons."""
    made = [_totals(figures)]
    rows = [(one["target"], row) for one in figures["targets"] for row in one["results"]]
    wrong = [(target, row) for target, row in rows if not row["holds"]]
    if wrong:
        made.append(_list("mutants that did not end as they should", "outcome", wrong))
    alike = [(target, row) for target, row in rows if row["equivalent"] and row["holds"]]
    if alike:
        made.append(_list("survivors, as expected", "reason", alike))
    return made


def _totals(figures: dict[str, Any]) -> Table:
    checks = list(dict.fromkeys(check for one in figures["targets"] for check in one["by_check"]))
    made = Table(
        title=f"seeded bugs, {figures['seconds']:.0f} s", title_justify="left", caption_justify="left",
        caption="columns on the right: which check noticed first",
    )  # fmt: skip
    for name in ("target", "mutants", "killed", "expected to survive", *checks, "outcome"):
        made.add_column(name)
    for one in figures["targets"]:
        counts = (one["mutants"], one["killed"], one["equivalent"], *(one["by_check"].get(c, 0) for c in checks))
        made.add_row(one["target"], *map(str, counts), "holds" if one["holds"] else "[red]does not hold[/]")
    return made


def _list(title: str, last: str, rows: list[tuple[str, dict[str, Any]]]) -> Table:
    made = Table(title=title, title_justify="left")
    for name in ("target", "number", "mutant", "what", last):
        made.add_column(name)
    for target, row in rows:
        says = row["equivalent"]
        if last == "outcome":
            survived = f"survived {row['probes']} probes"
            says = f"killed by {row['probe']}: {row['message']}" if row["killed_by"] else survived
        made.add_row(target, row["number"], row["name"], row["what"], says)
    return made
