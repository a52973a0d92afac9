"""Markdown of result files: a table, and the line that says where its figures come from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def source(item: dict[str, Any]) -> str:
    """The line under a table: machine, versions, load, command, file."""
    machine = item["machine"]
    chip = machine.get("gpu") or machine["cpu"]
    parts = [chip["model"]]
    if machine.get("gpu"):
        parts.append(f"driver {chip['driver']}, CUDA {chip['cuda']}")
    else:
        parts.append(f"{chip['cores']} cores")
    parts.append(f"torch {machine['versions'].get('torch', '-')}")
    if "threads" in item and not machine.get("gpu"):
        parts.append(f"{item['threads']} thread{'' if item['threads'] == 1 else 's'}")
    parts.append(f"load {machine['load'][0]} at the start")
    return f"{', '.join(parts)}; {machine['date']}; `{machine['command']}`; `{item['file']}`."
