"""A plot of a training file: the losses of every seed, and under them how far apart the arms are, step by step."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from verify import plots

PANEL_INCHES = (5.5, 3.2)
PAIRS = (("ours", "default"), ("default", "math"), ("repeat", "default"))


def steps_of(stated: dict[str, Any], arm: str) -> list[list[float]]:
    """Per seed the losses of an arm, step by step."""
    return [[x for row in rows for x in row] for rows in stated["losses"][arm]]


def differences(stated: dict[str, Any], one: str, other: str) -> list[float]:
    """Per step the median over the seeds of the distance of two arms; as long as the shorter of them."""
    seeds = zip(steps_of(stated, one), steps_of(stated, other), strict=True)
    apart = [[abs(a - b) for a, b in zip(x, y, strict=False)] for x, y in seeds]
    return [statistics.median(step) for step in zip(*apart, strict=True)]


def draw(figures: dict[str, Any], file: Path) -> None:
    """Write the plot; the ending of `file` chooses its kind.

    Raises: ImportError without matplotlib.
    """
    pyplot = plots.pyplot()
    conditions = figures["conditions"]
    size = (PANEL_INCHES[0] * len(conditions), PANEL_INCHES[1] * 2)
    page, panels = pyplot.subplots(2, len(conditions), figsize=size, squeeze=False, sharex=True)
    for column, stated in enumerate(conditions):
        losses, apart = panels[0][column], panels[1][column]
        for arm, style in (("math", ":"), ("default", "-"), ("ours", "--")):
            for seed, steps in enumerate(steps_of(stated, arm)):
                name = arm if seed == 0 else None
                losses.plot(range(1, len(steps) + 1), steps, style, color=f"C{seed}", linewidth=0.9, label=name)
        losses.set_title(f"{stated['dtype']} ({stated['path']['isa']}); a colour is a seed", fontsize="medium")
        losses.set_ylabel("loss, nats per byte")
        for one, other in PAIRS:
            steps = differences(stated, one, other)
            apart.plot(range(1, len(steps) + 1), steps, linewidth=1.1, label=f"{one} - {other}")
        apart.axvline(stated["close"]["steps"], color="grey", linewidth=0.8)
        apart.set_yscale("log")
        apart.set_xlabel("step; compared up to the line")
        apart.set_ylabel("loss difference, median over seeds")
        for panel in (losses, apart):
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")
    machine = figures["machine"]
    page.suptitle(f"{plots.chip(machine)}, torch {machine['versions']['torch']}", fontsize="medium")
    plots.save(page, file)
