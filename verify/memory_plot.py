"""A plot of a memory file: peak bytes against N on two logarithmic axes, a panel per dtype."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

PANEL_INCHES = (5.0, 4.0)


def guide(stated: dict[str, Any], power: int) -> list[tuple[int, float]]:
    """Growth by a power of N, through the last point of a line."""
    last = stated["points"][-1]
    return [(p["n"], last["peak_bytes"] * (p["n"] / last["n"]) ** power) for p in stated["points"]]


def beside(figures: dict[str, Any], out: Path) -> str:
    """Draw next to a result file; what became of it, in a sentence."""
    file = out.with_suffix(".png")
    try:
        draw(figures, file)
    except ImportError as error:
        return f"no plot: {error}"
    return f"plot: {file}"


def draw(figures: dict[str, Any], file: Path) -> None:
    """Write the plot; the ending of `file` chooses its kind.

    Raises: ImportError without matplotlib.
    """
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
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
    chip = (machine.get("gpu") or machine["cpu"])["model"]
    title = f"{chip}, torch {machine['versions']['torch']}; {shape['heads']} heads, d={shape['d']}"
    page.suptitle(title, fontsize="medium")
    page.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    page.savefig(file, dpi=120)
    pyplot.close(page)
