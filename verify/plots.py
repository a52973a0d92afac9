"""A plot beside a result file, by matplotlib, which nothing else here needs: without it a command goes on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def beside(draw: Callable[[dict[str, Any], Path], None], figures: dict[str, Any], out: Path) -> str:
    """Have `draw` write the plot of the result file `out` next to it; what became of it, in a sentence."""
    file = out.with_suffix(".png")
    if file == out:
        return f"no plot: {out} holds the figures, which are JSON"
    try:
        draw(figures, file)
    except ImportError as error:
        return f"no plot: {error}"
    return f"plot: {file}"


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files only. Raises: ImportError without matplotlib."""
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def save(page: Any, file: Path) -> None:
    """Write a figure of `pyplot` to a file, whose ending chooses its kind, and close it."""
    page.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    page.savefig(file, dpi=120)
    pyplot().close(page)


def chip(machine: dict[str, Any]) -> str:
    """The GPU, or else the CPU, of a result file's "machine"."""
    return str((machine.get("gpu") or machine["cpu"])["model"])
