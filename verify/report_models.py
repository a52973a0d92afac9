"""The figures of real models as Markdown: a sentence encoder, the training of a GPT, the memory of a step."""

from __future__ import annotations

import statistics
from typing import Any

from verify.markdown import source, table


def real(item: dict[str, Any]) -> str:
    rows = [
        [str(row["layer"]), f"{row['max_ratio']['o/float64']:.3f}", f"{row['max_ratio']['lse/float64']:.3f}",
         f"{row['worst_error']['o']:.1e}", f"{row['eager_worst_error']['o']:.1e}"]
        for row in item["layers"]
    ]  # fmt: skip
    e = item["embeddings"]
    head = ("layer", "O: max err/bound", "LSE: max err/bound", "O error: ours", "O error: eager")
    note = (
        f"{item['sentences']} sentences, {min(item['tokens'])} to {max(item['tokens'])} tokens, "
        f"{item['calls_of_the_op']} calls; embeddings: ours - float64 {e['ours_minus_float64']:.1e}, "
        f"eager - float64 {e['eager_minus_float64']:.1e}."
    )
    return f"{table(head, rows)}\n\n{note} {source(item)}"


def training(item: dict[str, Any]) -> str:
    """One row per dtype: how far the losses part early on, and where training ends."""
    setting, size, rows = item["setting"], item["setting"]["size"], []
    for one in item["conditions"]:
        close, final = one["close"], one["final"]
        early = (statistics.median(close[name]) for name in ("ours_against_default", "default_against_math"))
        ratio = "void" if close["void"] else f"{close['ratio']:.2f} (at most {close['allowed']:g})"
        path, peer = one["path"]["isa"], one["torch_default_backend"].lower().replace("_", " ")
        late = (f"{final['difference']:.1e}", f"{final['spread_of_seeds']:.1e}")
        rows.append([f"{path}/{one['dtype']}", peer, *(f"{x:.1e}" for x in early), ratio, *late])
    head = (
        "path", "torch's default", f"largest loss difference, steps 1 to {setting['compared']}: ours - default",
        "default - math", "ratio", "after the last step: difference", "spread of seeds",
    )  # fmt: skip
    note = (
        f"{size['layers']} layers, {size['heads']} heads of {size['head_dim']}, {size['context']} tokens, "
        f"{setting['steps']} steps; medians over {setting['seeds']} seeds."
    )
    return f"{table(head, rows)}\n\n{note} {source(item)}"


def memory(item: dict[str, Any]) -> str:
    """One row per algorithm and dtype: the peak at each length, and what a least-squares fit makes of it."""
    rows = []
    for line in item["lines"]:
        peaks = [f"{point['peak_bytes'] / 1e6:.1f}" for point in line["points"]]
        fit = line["fit"]
        rows.append(
            [line["dtype"], line["what"], *peaks, f"{fit['bytes_per_row']:.0f}", f"{fit['bytes_per_score']:.3f}"]
        )
    head = ("dtype", "what", *(f"N={n}, MB" for n in item["lengths"]), "bytes per row", "bytes per score")
    shape = item["shape"]
    note = f"Batch {shape['batch']}, {shape['heads']} heads, d={shape['d']}; {item['counted']}."
    return f"{table(head, rows)}\n\n{note} {source(item)}"
