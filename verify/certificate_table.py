"""A certificate as tables: one row per path, the outputs of the forward pass and then the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from verify.judge_backward import END_TO_END
from verify.verdict import GRADIENTS, OUTPUTS

TITLES = {"o": "O", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}
JUDGES = {"spec": ("spec",), "oracle": ("float64", "balls"), "mpmath": ("mpmath",)}


def tables(stated: dict[str, Any], title: str) -> list[Table]:
    """The certificate of one device."""
    made = [_forward(stated, title)]
    if any("backward" in row for row in stated["paths"]):
        made.append(_backward(stated, f"{title}, gradients"))
    return made


def _forward(stated: dict[str, Any], title: str) -> Table:
    made = _table(title, _caption(stated, stated["cases"], stated["runs"]))
    for output in OUTPUTS:
        for judge in JUDGES:
            made.add_column(f"{TITLES[output]}\n{judge}", justify="right")
    _error_columns(made, OUTPUTS)
    for row in (row for row in stated["paths"] if "o" in row["outputs"]):
        cells = [row["path"], f"{row['br']} x {row['bc']}", str(row["cases"])]
        for output in OUTPUTS:
            judges = row["outputs"][output]["judges"]
            cells += [_cell(judges, names) for names in JUDGES.values()]
        made.add_row(*cells, *_errors(row["outputs"], OUTPUTS))
    return made


def _backward(stated: dict[str, Any], title: str) -> Table:
    made = _table(title, _caption(stated, stated["backward_cases"], stated["backward_runs"]))
    for output in GRADIENTS:
        for what in ("stage-wise", "end to end"):
            made.add_column(f"{TITLES[output]}\n{what}", justify="right")
    for row in (row for row in stated["paths"] if "backward" in row):
        mine = row["backward"]
        cells = [row["path"], f"{mine['br']} x {mine['bc']}", str(mine["cases"])]
        for output in GRADIENTS:
            judges = row["outputs"].get(output, {"judges": {}})["judges"]
            cells += [_cell(judges, [name for name in judges if name != END_TO_END]), _cell(judges, [END_TO_END])]
        made.add_row(*cells)
    return made


def _table(title: str, caption: str) -> Table:
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    made.add_column("path")
    made.add_column("Br x Bc", justify="right")
    made.add_column("cases", justify="right")
    return made


def _error_columns(made: Table, outputs: Sequence[str]) -> None:
    for output in outputs:
        made.add_column(f"{TITLES[output]} error, N(0,1)\nours / plain", justify="right")


def _errors(outputs: dict[str, Any], names: Sequence[str]) -> list[str]:
    """The worst errors on N(0, 1), ours and the plain formula's, against exact attention."""
    found = [outputs.get(name, {"families": {}})["families"].get("gaussian") for name in names]
    return [f"{one['error']:.1e} / {one['plain_error']:.1e}" if one else "-" for one in found]


def _cell(judges: dict[str, Any], names: Sequence[str]) -> str:
    """The worst err/bound in the eyes of some judges."""
    heard = [judges[name]["max_ratio"] for name in names if name in judges]
    if not heard:
        return "-"
    return f"[{'default' if all(x <= 1 for x in heard) else 'red'}]{max(heard, default=math.nan):.3f}[/]"


def _caption(stated: dict[str, Any], cases: int, runs: int) -> str:
    machine = stated["machine"]
    chip = (machine.get("gpu") or machine["cpu"])["model"]
    return (
        f"max err/bound per judge, at most 1 is within the proven bound; {cases} cases, {runs} "
        f"runs, seed {stated['seed']}, {stated['violations']} violations; {chip}, "
        f"torch {machine['versions'].get('torch', '-')}"
    )
