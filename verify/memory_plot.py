"""A plot of a memory file: peak bytes against N on two logarithmic axes, a panel per dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verify import plots

PANEL_INCHES = (5.0, 4.0)


def guide(stated: dict[str, Any], power: int) -> list[tuple[int, float]]:
    """Growth by a power of N, through the last point of a line."""
    last = stated["points"][-1]
    return [(p["n"], last["peak_bytes"] * (p["n"] / last["n"]) ** power) for p in stated["points"]]


def draw(figures: dict[str, Any], file: Path) -> None:
    """Write the plot; the ending of `file` chooses its kind.

    Raises: ImportError without matplotlib.
    """
    pyplot = plots.pyplot()
    dtypes = list(dict.fromkeys(one["dtype"] for one in figures["lines"]))
    size = (PANEL_INCHES[0] * len(dtypes), PANEL_INCHES[1])
    page, panels = pyplot.subplots(1, len(dtypes), figsize=size, squeeze=False, sharey=True)
    for dtype, panel in zip(dtypes, panels[0], strict=True):
        for one in (line for line in figures["lines"] if line["dtype"] == dtype):
            points = [(p["n"], p["peak_bytes"]) for p in one["points"]]
            width = 2.5 if one["what"] == "ours" else 1.2
            (drawn,) = panel.plot(*zip(*points, strict=True), marker="o", label=one["what"], linewidth=width)
            power = {"ours": 1, "standard": 2}.get(one["what"])
            if power is not None:
                name = "~ N" if power == 1 else "~ N²"
                along = zip(*guide(one, power), strict=True)
                panel.plot(*along, linestyle=":", color=drawn.get_color(), linewidth=1, label=name)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(figures["lengths"], [str(n) for n in figures["lengths"]])
        panel.set_title(dtype)
        panel.set_xlabel("N")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    panels[0][0].set_ylabel("peak bytes, forward + backward")
    machine, shape = figures["machine"], figures["shape"]
    title = f"{plots.chip(machine)}, torch {machine['versions']['torch']}; {shape['heads']} heads, d={shape['d']}"
    page.suptitle(title, fontsize="medium")
    plots.save(page, file)
