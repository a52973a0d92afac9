"""The figures of a GPU benchmark for people: geometric means, and a table with one row per cell and package."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from verify.bench import Cell, geometric_mean
from verify.bench_cuda import BEST, MATMUL, GpuTiming


def summary(timings: Sequence[GpuTiming]) -> dict[str, dict[str, dict[str, Any]]]:
    """Package -> form -> peer ("best", "plain" too) -> geometric mean of the cells' median ratios, and the worst."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for t in timings:
        per_form = found.setdefault(t.package, {}).setdefault(form(t.cell), {})
        rounds = {peer: t.ratio(peer) for peer in t.peers}
        if t.best is not None:
            rounds[BEST] = t.ratio(t.best)
        if t.plain is not None:
            rounds["plain"] = [a / b for a, b in zip(t.plain, t.ours, strict=True)]
        for peer, ratios in rounds.items():
            per_form.setdefault(peer, []).append((statistics.median(ratios), str(t.cell)))
    return {
        package: {
            name: {
                peer: {
                    "geometric_mean": geometric_mean(ratio for ratio, _ in cells),
                    "worst": min(cells)[0],
                    "worst_cell": min(cells)[1],
                    "cells": len(cells),
                }
                for peer, cells in by_peer.items()
            }
            for name, by_peer in forms.items()
        }
        for package, forms in found.items()
    }


def form(cell: Cell) -> str:
    """What makes a cell other than the plain one of its shape."""
    return f"{cell.dtype} {cell.layout} gqa={cell.gqa}" + " deterministic" * cell.deterministic


def rows(stated: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table: TFLOP/s, how much of the card that is, and the ratio to each peer."""
    names = list(stated["peers"])
    plain = ["vs plain"] if any("vs_plain" in row for row in stated["cells"]) else []
    figures = ["TFLOP/s", "% of product", "tensor %", "GHz", *(f"vs {name}" for name in names), *plain, "best peer"]
    body = []
    for row in stated["cells"]:
        use, clock, part = row["tensor_use"], row["clock_ghz"], row["percent_of_matmul"]
        body.append([
            widths(row), str(row["n"]), "causal" if row["causal"] else "full",
            form_of(row), served(row), f"{row['ours_gflops'] / 1e3:.0f}",
            "-" if part is None else f"{part:.0f}", "-" if use is None else f"{100 * use:.1f}",
            "-" if clock is None else f"{clock:.2f}", *(ratio(row.get(f"vs_{name}")) for name in names),
            *(ratio(row.get("vs_plain")) for _ in plain),
            f"{row['best_peer']} {ratio(row[f'vs_{BEST}'])}" if row.get("best_peer") else "-",
        ])  # fmt: skip
    return ["d", "N", "mask", "form", "package", *figures], body


def table(stated: dict[str, Any]) -> Table:
    """One row per cell and package."""
    rate = stated["matmul_gflops"]
    ceiling = f"; {MATMUL}^3 product {rate['median'] / 1e3:.0f} TFLOP/s" if rate else ""
    what = "speed of the backward pass" if stated.get("kind") == "speed_backward" else "speed"
    made = Table(
        title=f"{what} on {stated['machine']['gpu']['model']}, {stated['shapes']}, {stated['rounds']} rounds{ceiling}",
        caption="\n".join([*summary_lines(stated), *remarks(stated)]),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    head, body = rows(stated)
    for name in head:
        made.add_column(name, justify="right")
    for row in body:
        made.add_row(*row)
    return made


def served(row: dict[str, Any]) -> str:
    """The package, and the target whose kernel took the call where the name does not say it."""
    target = row["path"].get("target", "")
    return row["package"] if target in row["package"] else f"{row['package']} by {target}"


def form_of(row: dict[str, Any]) -> str:
    """dtype, layout, query heads per K/V head, and whether equal bits were asked for."""
    return f"{row['dtype']} {row['layout']} {row['gqa']}" + " deterministic" * row.get("deterministic", False)


def widths(row: dict[str, Any]) -> str:
    """d, or d/dv where they differ."""
    return str(row["d"]) if row["dv"] in (None, row["d"]) else f"{row['d']}/{row['dv']}"


def ratio(spread: dict[str, float] | None) -> str:
    """Median and half the distance of the quartiles."""
    return "-" if spread is None else f"{spread['median']:.2f}±{(spread['high'] - spread['low']) / 2:.2f}"


def remarks(stated: dict[str, Any]) -> list[str]:
    """What else a reader of the table must know, a line each."""
    host = [
        f"host: {label}: a call {x['call_us']:.1f} us, an empty one {x['empty_us']:.1f}, above it {x['above_us']:.1f}"
        for label, x in stated["host_overhead"].items()
    ]
    built = [f"built: {label}: {seconds:.0f} s" for label, seconds in stated["build_seconds"].items() if seconds >= 1]
    return [*host, *built, *shortfalls(stated)]


def shortfalls(stated: dict[str, Any]) -> list[str]:
    """What the figures lack of what was asked of them, a line each: peers, checks, cells, bars."""
    absent = [f"no {name}: {why}" for name, why in stated["absent"].items()]
    failed = [f"FAILED: {text}" for text in stated["failures"]]
    left_out = [f"out of time: {', '.join(stated['left_out'])}"] if stated["left_out"] else []
    missed = [f"DOES NOT HOLD: {_missed(bar)}" for bar in stated.get("bars", []) if not bar["holds"]]
    return [*absent, *failed, *left_out, *missed]


def _missed(bar: dict[str, Any]) -> str:
    value = "no figure" if bar["value"] is None else f"{bar['value']:.4g}"
    limit = f"at least {bar['least']:.4g}" if "least" in bar else f"at most {bar['most']:.4g}"
    return f"{bar['bar']}: {value}, wanted {limit}"


def summary_lines(stated: dict[str, Any]) -> list[str]:
    """The geometric means, one line per package and form that was compared with another."""
    return [
        f"{package}, {name}: "
        + "; ".join(
            f"/ {peer} {s['geometric_mean']:.3f} (worst {s['worst']:.3f}: {s['worst_cell']})"
            for peer, s in by_peer.items()
        )
        for package, forms in stated["summary"].items()
        for name, by_peer in forms.items()
        if by_peer
    ]
