"""What was decided and why: the data behind `--explain`, and its printing.

`explanation` computes everything (JSON types only, what `--explain --json` prints); `show` only lays it out. Costs
are per head at Nq = Nk = n without a mask, from the formulas that plan.json keeps; the paper's tile and the
lower bound of the forward pass are the specification's (`spec.tile_rule`, `spec.io_bounds`).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from . import formulas, planners
from .devices import DEVICES
from .package import PLAN_FILE, Plans, backward_dict, read_plan, variant_dict
from .plan import LENGTH_CLASSES, Change, Decision, Rejection, Variant, label_of
from .problem import ITEMSIZE, Problem
from .sizes import format_bytes

WIDTH = 100
UNCHANGED = "the paper's tile: all that this kernel keeps in fast memory fits"


def unchanged(br: int | None, bc: int | None) -> str:
    """Why nothing was changed of a tile of which --br and --bc, or one of them, or neither was given."""
    given = [word for word, value in (("--br", br), ("--bc", bc)) if value is not None]
    return UNCHANGED.replace("the paper's tile", f"as {' and '.join(given)} set it") if given else UNCHANGED


def explanation(plans: Plans, at_n: int) -> dict[str, Any]:
    """Everything that `--explain` says about a request, at sequence length `at_n`."""
    problem = plans.problem
    return {
        "name": plans.name,
        "request": problem.as_dict(),
        "at_n": at_n,
        "paper": {dtype: papers_tile(problem, dtype) for dtype in problem.dtypes},
        "targets": [_target(decision, problem, at_n) for decision in plans.decisions],
    }


def papers_tile(problem: Problem, dtype: str) -> dict[str, Any]:
    """Algorithm 1 line 1 for the whole budget, what its tiles need, and the verdict of the footprint test."""
    from spec import tile_rule

    paper = tile_rule.paper_tile(problem.sram_bytes, ITEMSIZE[dtype], problem.d, problem.dv)
    missing = paper.footprint_bytes - problem.sram_bytes
    return {
        "m_elements": paper.m,
        "br": paper.tile.br,
        "bc": paper.tile.bc,
        "five_tiles_bytes": paper.five_tiles_bytes,
        "footprint_bytes": paper.footprint_bytes,
        "fits": paper.fits,
        "verdict": "fits" if paper.fits else f"does not fit, {missing:,} bytes over",
    }


def _target(decision: Decision, problem: Problem, at_n: int) -> dict[str, Any]:
    variants = []
    for variant in decision.variants:
        row = variant_dict(variant, problem)
        row["costs"] = costs(row["formulas"], problem, variant.dtype, decision.limit_bytes, at_n)
        variants.append(row)
    backward = [backward_dict(variant, problem) for variant in decision.backward]
    for row in backward:
        row["costs"] = evaluated(row["formulas"], at_n)
    return {
        "arch": decision.arch,
        "cards": DEVICES[decision.arch].cards if decision.arch in DEVICES else "",
        "brought_by": planners.companions(problem.archs).get(decision.arch),
        "limit_bytes": decision.limit_bytes,
        "limit_reason": decision.limit_reason,
        "ridge_flop_per_byte": ridge(decision.arch),
        "variants": variants,
        **_story(decision.changes, decision.rejected),
        "backward": {"variants": backward, **_story(decision.backward_changes, decision.backward_rejected)},
    }


def _story(
    changes: Mapping[str, Sequence[Change]], rejected: Mapping[str, Sequence[Rejection]]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    return {
        "changes": {key: [{"what": c.what, "why": c.why} for c in steps] for key, steps in changes.items()},
        "rejected": {key: [{"br": r.br, "bc": r.bc, "why": r.why} for r in tiles] for key, tiles in rejected.items()},
    }


def costs(texts: Mapping[str, str], problem: Problem, dtype: str, limit_bytes: int, n: int) -> dict[str, Any]:
    """The formulas at Nq = Nk = n, the lower bound for the memory that the plan may use, and the intensity."""
    from spec import io_bounds, io_counts

    values = evaluated(texts, n)
    sizes = io_counts.Sizes(nq=n, nk=n, dk=problem.d, dv=problem.dv)
    values["lower_bound_elements"] = math.ceil(io_bounds.lower_bound(sizes, limit_bytes // ITEMSIZE[dtype]))
    return values


def evaluated(texts: Mapping[str, str], n: int) -> dict[str, Any]:
    """The formulas at Nq = Nk = n, and the intensity."""
    values: dict[str, Any] = {key: formulas.evaluate(text, {"Nq": n, "Nk": n}) for key, text in texts.items()}
    values["flop_per_byte"] = values["flops"] / values["slow_memory_bytes"]
    return values


def ridge(arch: str) -> float | None:
    """FLOP per slow-memory byte above which the multiplier is the limit; None where it is not a data-sheet figure."""
    device = DEVICES.get(arch)
    if device is None or device.peak_16bit_flops is None or device.peak_bytes_per_s is None:
        return None
    return device.peak_16bit_flops / device.peak_bytes_per_s


def show(told: Mapping[str, Any]) -> None:
    """Print an explanation."""
    click.echo(f"{told['name']}: {_request_line(told['request'])}")
    click.echo("\nThe paper's tile (FlashAttention, Algorithm 1 line 1: Bc = ceil(M/4d), Br = min(Bc, d))")
    for line in _paper_lines(told["paper"]):
        click.echo(_wrapped(line, "  "))
    for target in told["targets"]:
        own = target["brought_by"] is None
        kept = unchanged(told["request"].get("br"), told["request"].get("bc")) if own else UNCHANGED
        _show_target(target, told["at_n"], kept)


def show_summary(plans: Plans, folder: Path, files: Mapping[str, bytes]) -> None:
    """What the plain command prints: what was asked, the paper's tile, what it became, where it lies."""
    problem = plans.problem
    click.echo(_request_line(problem.as_dict()))
    for line in _paper_lines({dtype: papers_tile(problem, dtype) for dtype in problem.dtypes}):
        click.echo(_wrapped(f"paper's tile, {line}", "  "))
    for decision in plans.decisions:
        click.echo(f"  {decision.arch}: at most {decision.limit_bytes:,} bytes")
        brought_by = planners.companions(problem.archs).get(decision.arch)
        if brought_by is not None:
            click.echo(_wrapped(_companion(decision.arch, brought_by), "    "))
        kept = UNCHANGED if brought_by is not None else unchanged(problem.br, problem.bc)
        _show_tiles(decision.variants, decision.changes, "", kept)
        _show_tiles(decision.backward, decision.backward_changes, "backward ", kept)
    digest = read_plan(files[PLAN_FILE])["digest"]
    click.echo(f"{folder}: {len(files)} files, {sum(map(len, files.values())):,} bytes, digest {digest[:12]}")


def _show_tiles(
    variants: Sequence[Variant], changes: Mapping[str, Sequence[Change]], of_pass: str, kept: str
) -> None:  # fmt: skip
    """One line per tile. kept: what is said of one that was not changed."""
    plans_and_reasons = []
    for v in variants:
        steps = changes.get(v.key, ())
        why = steps[-1].why if steps else kept
        plans_and_reasons.append(((v.plan.br, v.plan.bc, why), v.key))
    every = [v.key for v in variants]
    for (br, bc, why), keys in _grouped(plans_and_reasons):
        click.echo(_wrapped(f"{of_pass}{br} x {bc} [{_kernels(keys, every)}]: {why}", "    "))


def _request_line(request: Mapping[str, Any]) -> str:
    sram = request["sram_bytes"]
    return f"{format_bytes(sram)} = {sram:,} bytes of fast memory, d={request['d']}, dv={request['dv']}"


def _paper_lines(paper: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for tile, dtypes in _grouped((dict(tile), dtype) for dtype, tile in paper.items()):
        yield (
            f"{', '.join(dtypes)}: {tile['br']} x {tile['bc']}, from M = {tile['m_elements']:,} elements; its five "
            f"tiles need {tile['five_tiles_bytes']:,} bytes, {tile['footprint_bytes']:,} with the two statistics: "
            f"{tile['verdict']}"
        )


def _show_target(target: Mapping[str, Any], at_n: int, kept: str) -> None:
    cards = f" ({target['cards']})" if target["cards"] else ""
    click.echo(f"\n{target['arch']}{cards}: at most {target['limit_bytes']:,} bytes, {target['limit_reason']}")
    if target["brought_by"] is not None:
        click.echo(_wrapped(_companion(target["arch"], target["brought_by"]), "  "))
    _show_pass(target, target["ridge_flop_per_byte"], at_n, kept)
    if target["backward"]["variants"]:
        click.echo(f"\n{target['arch']}, backward: at most {target['limit_bytes']:,} bytes")
        _show_pass(target["backward"], target["ridge_flop_per_byte"], at_n, kept)


def _show_pass(told: Mapping[str, Any], ridge_flop_per_byte: float | None, at_n: int, kept: str) -> None:
    """The plans of one pass on one target, how they came about, and what they cost."""
    every = [_key(v) for v in told["variants"]]
    _show_variants(told["variants"], every)
    _show_lengths(told["variants"])
    same = [key for key in every if not told["changes"].get(key)]
    if same:
        click.echo(_wrapped(f"{kept} [{_kernels(same, every)}]", "  "))
    for title, story in (("Changes", told["changes"]), ("Turned down", told["rejected"])):
        lines = [
            ((step.get("what") or f"{step['br']} x {step['bc']}", step["why"]), key)
            for key, steps in story.items()
            for step in steps
        ]
        if lines:
            click.echo(f"  {title}")
        for (what, why), keys in _grouped(lines):
            click.echo(_wrapped(f"{what}: {why} [{_kernels(keys, every)}]", "    "))
    _show_costs(told["variants"], every, ridge_flop_per_byte, at_n)


def _show_variants(variants: Sequence[Mapping[str, Any]], every: Sequence[str]) -> None:
    """One row per distinct plan: tile, bytes, registers, and the named parts of its memory."""
    from rich.console import Console
    from rich.table import Table

    rows = (
        (
            (f"{v['plan']['br']} x {v['plan']['bc']}", f"{v['fast_memory_bytes']:,}", _registers(v["plan"]),
             ", ".join(f"{part['name']} {part['bytes']:,}" for part in v["memory"])),
            _key(v),
        )
        for v in variants
    )  # fmt: skip
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("Br x Bc", "bytes", "registers", "made of", "kernels"):
        table.add_column(column)
    for (tile, size, registers, parts), keys in _grouped(rows):
        table.add_row(tile, size, registers, parts, _kernels(keys, every))
    console = Console(width=WIDTH, highlight=False)
    with console.capture() as text:
        console.print(table)
    for line in text.get().splitlines():
        click.echo(f"  {line}".rstrip())


def _show_lengths(variants: Sequence[Mapping[str, Any]]) -> None:
    """The length classes that the kernels are for, if any."""
    named = {v.get("length_class") for v in variants}
    limits = [f"{name}: at most {most:,} query rows" for name, most in LENGTH_CLASSES.items() if most and name in named]
    if limits:
        click.echo(_wrapped(f"{'; '.join(limits)}; a call runs the first kernel that takes it", "  "))


def _show_costs(
    variants: Sequence[Mapping[str, Any]], every: Sequence[str], ridge_flop_per_byte: float | None, at_n: int
) -> None:
    click.echo(f"  Per head at N = {at_n:,} without a mask")
    moved = ("slow_memory_bytes", "slow_memory_reads_elements", "slow_memory_writes_elements")
    names = ("flops", *moved, "lower_bound_elements")
    rows = ((tuple(v["costs"].get(name) for name in names), _key(v)) for v in variants)
    for (flops, size, reads, writes, bound), keys in _grouped(rows):
        text = f"{flops:,} FLOPs; reads {reads:,} and writes {writes:,} elements of slow memory, {size:,} bytes"
        if bound is not None:
            text += f"; no algorithm moves fewer than {bound:,} elements"
        text += f"; {flops / size:.0f} FLOP per byte"
        if ridge_flop_per_byte is not None:
            side = "above" if flops / size > ridge_flop_per_byte else "below"
            text += f", {side} the ridge at {ridge_flop_per_byte:.0f}"
        click.echo(_wrapped(f"{text} [{_kernels(keys, every)}]", "    "))


def _key(row: Mapping[str, Any]) -> str:
    """Variant.key of a row of plan.json."""
    label = label_of(row["isa"], row.get("causal", "any"), row.get("length_class", "any"))
    return f"{label}/{row['dtype']}"


def _companion(arch: str, brought_by: str) -> str:
    return (
        f"comes with {brought_by}, whatever --arch says: for the calls that {brought_by} cannot take (a stride that no "
        f"tensor map expresses) and for other GPUs; planned by itself, --br and --bc are for {brought_by}"
    )


def _registers(plan: Mapping[str, Any]) -> str:
    """Registers per thread: one figure, or one per role where warps differ ("24 producer, 240 consumer")."""
    roles = [f"{plan[f'{role}_registers']} {role}" for role in ("producer", "consumer") if f"{role}_registers" in plan]
    return ", ".join(roles) or str(plan.get("registers", "-"))


def _kernels(keys: Sequence[str], every: Sequence[str]) -> str:
    """Keys in few words: "all", "bf16, fp16" of a target with one instruction set, "amx: bf16; v4, v3: all"."""
    if set(keys) == set(every):
        return "all"

    def dtypes_of(isa: str, among: Sequence[str]) -> tuple[str, ...]:
        return tuple(key.split("/")[1] for key in among if key.split("/")[0] == isa)

    isas = list(dict.fromkeys(key.split("/")[0] for key in keys))
    groups = []
    for dtypes, members in _grouped((dtypes_of(isa, keys), isa) for isa in isas):
        whole = all(set(dtypes) == set(dtypes_of(isa, every)) for isa in members)
        groups.append((", ".join(members), "all" if whole and len(dtypes) > 1 else ", ".join(dtypes)))
    if len({key.split("/")[0] for key in every}) == 1:
        return "; ".join(dtypes for _, dtypes in groups)
    return "; ".join(f"{isas}: {dtypes}" for isas, dtypes in groups)


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def _grouped(pairs: Iterable[tuple[Any, str]]) -> list[tuple[Any, list[str]]]:
    """Keys with equal values together, each once, both in the order of first appearance."""
    groups: list[tuple[Any, list[str]]] = []
    for value, key in pairs:
        for known, keys in groups:
            if known == value:
                keys += [key] if key not in keys else []
                break
        else:
            groups.append((value, [key]))
    return groups
