"""A plot of a speed file: TFLOP/s against N, one row of panels per head width, full beside causal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verify import plots

PANEL_INCHES = (5.0, 3.2)


def series(stated: dict[str, Any], d: int, dv: int, causal: bool) -> dict[str, list[tuple[int, float]]]:
    """Line -> points (N, TFLOP/s), ascending: our packages first, then the peers, in the plain form of each shape."""
    cells = [c for c in stated["cells"] if (*_widths(c), c["causal"]) == (d, dv, causal)]
    plain = [c for c in cells if _form(c) == _form(stated["cells"][0])]
    lines: dict[str, list[tuple[int, float]]] = {}
    for cell in plain:
        lines.setdefault(cell["package"], []).append((cell["n"], cell["ours_gflops"] / 1e3))
    for name in stated["peers"]:
        points = {c["n"]: c[f"{name}_gflops"] / 1e3 for c in plain if f"{name}_gflops" in c}
        if points:
            lines[name] = list(points.items())
    return {name: sorted(points) for name, points in lines.items()}


def _widths(cell: dict[str, Any]) -> tuple[int, int]:
    return cell["d"], cell["dv"] or cell["d"]


def _form(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["dtype"], cell["layout"], cell["gqa"], cell.get("deterministic", False)


def draw(stated: dict[str, Any], file: Path) -> None:
    """Write the plot; the ending of `file` chooses its kind.

    Raises: ImportError without matplotlib.
    """
    pyplot = plots.pyplot()
    widths = sorted({_widths(c) for c in stated["cells"]})
    masks = [causal for causal in (False, True) if any(c["causal"] is causal for c in stated["cells"])]
    lengths = sorted({c["n"] for c in stated["cells"]})
    size = (PANEL_INCHES[0] * len(masks), PANEL_INCHES[1] * len(widths))
    page, panels = pyplot.subplots(len(widths), len(masks), figsize=size, squeeze=False, sharey="row")
    for (d, dv), row in zip(widths, panels, strict=True):
        for causal, panel in zip(masks, row, strict=True):
            for name, points in series(stated, d, dv, causal).items():
                mine = name not in stated["peers"]
                panel.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if mine else 1.2)
            if stated["matmul_gflops"]:
                panel.axhline(stated["matmul_gflops"]["median"] / 1e3, color="grey", linestyle=":", linewidth=1)
            panel.set_xscale("log", base=2)
            panel.set_xticks(lengths, [str(n) for n in lengths])
            panel.set_title(f"d={d}{f', dv={dv}' if dv != d else ''}, {'causal' if causal else 'full'}")
            panel.set_xlabel("N")
            panel.set_ylabel("TFLOP/s")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize="small")
    page.suptitle(f"{stated['machine']['gpu']['model']}, {stated['shapes']}; dotted: matrix product", fontsize="medium")
    plots.save(page, file)
