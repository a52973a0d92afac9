"""The figures of the result files as Markdown, and their way into the README: no number there is typed by hand.

A README holds a block per kind of figure:

    <!-- figures: bench cpu -->
    ... replaced by `python -m verify report` ...
    <!-- end of figures -->

Result files are `results/*.json`, each with a "kind", a "machine" and the command that made it; certificates are the
`certificate.json` of the packages under `generated/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from codegen.errors import CheckFailed
from verify import report_models
from verify.certificate_table import TITLES
from verify.markdown import source, table

GENERATED = Path("generated")
CERTIFICATES = "<!-- figures: certificate -->"  # the block that every `certify` of a checked-in package changes
MOST_NAMED = 20  # failed tests that are named under their counts
_BLOCK = re.compile(r"(<!-- figures: (?P<name>[a-z_ 0-9]+) -->\n)(?P<body>.*?)(<!-- end of figures -->)", re.DOTALL)

Figures = dict[str, Any]


def collect(results: Path, generated: Path = GENERATED) -> dict[str, list[Figures]]:
    """Every result by its block's name: "certificate", "fuzz cpu", ... Files in the order of their names."""
    found: dict[str, list[Figures]] = {}
    for file in sorted(results.glob("*.json")):
        figures = json.loads(file.read_text())
        device = figures.get("device") or "cpu"
        where = f"{results.parent.name}/{results.name}/{file.name}"
        found.setdefault(f"{figures['kind']} {device}", []).append({"file": where, **figures})
    for file in sorted(generated.glob("*/certificate.json")):
        found.setdefault("certificate", []).append(
            {"file": f"{generated.name}/{file.parent.name}/{file.name}"} | json.loads(file.read_text())
        )
    return found


def refresh(readme: Path, results: Path, *, write: bool, generated: Path = GENERATED) -> bool:
    """Put the figures into the blocks of `readme`; True if that changed it (or would, without `write`).

    Raises: CheckFailed for a block that no result file fills.
    """
    if not readme.exists():
        return False
    found, before = collect(results, generated), readme.read_text()

    def fill(place: re.Match[str]) -> str:
        name = place["name"].strip()
        if name not in found:
            raise CheckFailed(
                f"{readme}: no result file for the block {name!r}", f"there are: {', '.join(sorted(found))}"
            )
        return place.group(1) + markdown(name, found[name]) + "\n" + place.group(4)

    after = _BLOCK.sub(fill, before)
    if write and after != before:
        readme.write_text(after)
    return after != before


def text(results: Path, generated: Path = GENERATED) -> str:
    """All blocks, one after the other."""
    return "\n\n".join(f"## {name}\n\n{markdown(name, items)}" for name, items in collect(results, generated).items())


def markdown(name: str, items: Iterable[Figures]) -> str:
    """One block: a table per result file, and under it where the figures come from."""
    return "\n\n".join(_WRITERS.get(name.split()[0], _plain)(item) for item in items)


def _ran_on_emulator(machine: Figures) -> str:
    """What the emulator ran, for figures that were made on it: a part of a sentence."""
    ran = machine.get("emulator")
    if ran is None:
        return ""
    schedules = f"{', '.join(ran['schedules'])}; {ran['accumulation']} sums"
    return f"; {ran['launches']} launches on the emulator ({schedules}), {ran['findings']} findings"


def _certificate(item: Figures) -> str:
    found = []
    for device, stated in item["devices"].items():
        outputs, rows = _outputs(stated["paths"]), []
        for p in stated["paths"]:
            tile = [p["path"], f"{p['br']} x {p['bc']}", str(p["cases"])]
            errors = [_errors(p, x) for x in outputs if x != "lse"]
            rows.append([*tile, *(_most(p, x) for x in outputs), *errors])
        head = (
            "path",
            "Br x Bc",
            "cases",
            *(f"{TITLES[x]}: max err/bound" for x in outputs),
            *(f"{TITLES[x]} error on N(0,1): ours / plain formula" for x in outputs if x != "lse"),
        )
        counts = f"{stated['cases']} cases, {stated['runs']} runs"
        if stated.get("backward_runs"):
            counts += f", {stated['backward_cases']} of them backward too with {stated['backward_runs']} runs"
        note = f"`{item['name']}` on {device}: {counts}, {stated['violations']} violations"
        note += f"{_ran_on_emulator(stated['machine'])}. "
        found.append(table(head, rows) + "\n\n" + note + source({**stated, "file": item["file"]}))
    return "\n\n".join(found)


def _outputs(paths: Iterable[Figures]) -> list[str]:
    """The outputs that some path of a certificate, or some row of a fuzz result, has figures of."""
    heard = {name for p in paths for name in p.get("outputs", p)}
    return [name for name in TITLES if name in heard]


def _most(path: Figures, output: str) -> str:
    """The worst err/bound; of a gradient stage-wise."""
    return f"{path['outputs'][output]['max_ratio']:.3f}" if output in path["outputs"] else "-"


def _errors(path: Figures, output: str) -> str:
    """The worst error on N(0, 1), ours and the plain formula's."""
    normal = path["outputs"].get(output, {"families": {}})["families"].get("gaussian")
    return f"{normal['error']:.1e} / {normal['plain_error']:.1e}" if normal else "-"


def _bench(item: Figures) -> str:
    """One row per dtype and width, one column per length and mask; the cells are ratios to the first peer."""
    first, *others = item["summary"]
    columns = list(dict.fromkeys((c["n"], c["causal"]) for c in item["cells"]))
    rows: dict[tuple[str, int], dict[tuple[int, bool], str]] = {}
    for c in item["cells"]:
        rows.setdefault((c["dtype"], c["d"]), {})[c["n"], c["causal"]] = f"{c[f'vs_{first}']['median']:.2f}"
    head = ("dtype", "d", *(f"{n} {'causal' if causal else 'full'}" for n, causal in columns))
    body = [(dtype, str(d), *(cells.get(column, "-") for column in columns)) for (dtype, d), cells in rows.items()]
    means = [
        f"{dtype}: geometric mean {s['geometric_mean']:.2f}, worst cell {s['worst_cell']:.2f}"
        for dtype, s in item["summary"][first].items()
    ]
    beside = [
        f"{peer}: " + ", ".join(f"{dtype} {s['geometric_mean']:.2f}" for dtype, s in item["summary"][peer].items())
        for peer in others
    ]
    what = "Speed of the backward pass" if item["kind"] == "bench_backward" else "Speed"
    text = f"{what} / {first}, {item['package']}{_tiles(item)}. {'; '.join(means)}."
    if beside:
        text += f" Geometric means against {'; '.join(beside)}."
    return f"{text}\n\n{table(head, body)}\n\n{source(item)}"


def _tiles(item: Figures) -> str:
    """The tile that was chosen per dtype and width, and what each tried one reached against the first peer."""
    named = []
    for what, choice in (item.get("tiles") or {}).items():
        tried = choice.get("tried") or {}
        if tried:
            br, bc = choice["tile"]
            figures = ", ".join(f"{tile} {mean:.2f}" for tile, mean in tried.items())
            named.append(f"{what}: {br}x{bc} (tried: {figures})")
    return f"; best tiles: {'; '.join(named)}" if named else ""


def _fuzz(item: Figures) -> str:
    outputs = _outputs(item["paths"])
    columns = [(output, q) for output in outputs for q in ("q0.5", "q0.99", "max")]
    rows = [
        [row["path"], str(row["packages"]), str(row["cases"]),
         *(f"{row[output][q]:.2g}" if output in row else "-" for output, q in columns)]
        for row in item["paths"]
    ]  # fmt: skip
    titles = [TITLES[x] for x in outputs]
    head = ("path", "packages", "examples", *(f"{o} {q}" for o in titles for q in ("median", "99 %", "max")))
    backward = f", {item['backward_examples']} of them backward too," if item.get("backward_examples") else ""
    lines = [
        f"{item['examples']} examples{backward} over {item['packages']} packages "
        f"({item['packages_with_br_other_than_bc']} with Br != Bc), {item['violations']} violations"
        f"{_ran_on_emulator(item['machine'])}; err/bound:",
        table(head, rows),
    ]
    if item.get("spec"):
        spec = item["spec"]
        lines.append(
            f"Reference over {len(spec['masks'])} kinds of mask, {spec['examples']} examples: max err/bound "
            f"{max(spec['o']['max'], spec['lse']['max']):.2f}; error of the float64 oracle over its own bound: "
            f"{spec['float64_error_over_its_bound']:.2f}."
        )
    if item.get("mutants"):
        found = [m for m in item["mutants"] if m["found"]]
        most = max((m["first_failure"] for m in found), default=0)
        lines.append(f"Seeded mutants found: {len(found)} of {len(item['mutants'])}, after {most} examples at most.")
    return "\n\n".join([*lines, source(item)])


def _calibrate(item: Figures) -> str:
    rows = [
        [
            p["arithmetic"],
            p["device"],
            p["what"],
            f"{p['measured']:.4g}",
            f"{p['assumed']:.4g}",
            "yes" if p["holds"] else "NO",
        ]
        for p in item["probes"]
    ]
    return f"{table(('model', 'on', 'what', 'measured', 'assumed', 'holds'), rows)}\n\n{source(item)}"


def _certificates(item: Figures) -> str:
    outputs = _outputs(p for entry in item["packages"].values() for p in entry["paths"])
    rows = []
    for why, entry in item["packages"].items():
        for p in entry["paths"]:
            tile = (p["path"], f"{p['br']} x {p['bc']}", str(p["cases"]))
            rows.append([f"`{entry['package']}`: {why}", *tile, *(_most(p, x) for x in outputs)])
    head = ("package", "path", "Br x Bc", "cases", *(f"{TITLES[x]}: max err/bound" for x in outputs))
    counts = f"{len(item['packages'])} packages, {item['cases']} cases, {item['violations']} violations"
    return f"{table(head, rows)}\n\n{counts}. {source(item)}"


def _tests(item: Figures) -> str:
    ratios = [float(row["err_over_bound"]) for row in item["tests"] if "err_over_bound" in row]
    probes = f"; {len(ratios)} probes, max err/bound {max(ratios):.3f}" if ratios else ""
    failed = [row["test"] for row in item["tests"] if row["state"] == "failed"]
    left = _named("Failed", failed) + _named("Never came to an end", item.get("missing", []))
    return f"{item['passed']} passed, {item['failed']} failed, {item['skipped']} skipped{probes}.{left} {source(item)}"


def _named(what: str, names: list[str]) -> str:
    """A sentence that names the first of them; "" for none."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f" {what}: {', '.join(f'`{name}`' for name in names[:MOST_NAMED])}{more}." if names else ""


def _sanitize(item: Figures) -> str:
    tools = list(dict.fromkeys(row["tool"] for row in item["clean"]))
    rows = []
    for tool in tools:
        clean = [row for row in item["clean"] if row["tool"] == tool]
        planted = [f"{row['fault']} ({'found' if row['holds'] else 'NOT FOUND'})" for row in item["planted"]
                   if row["tool"] == tool]  # fmt: skip
        counts = (str(sum(row[x] or 0 for row in clean)) for x in ("calls", "errors"))
        rows.append([tool, str(sum(row["holds"] for row in clean)), *counts, ", ".join(planted)])
    head = ("tool", "packages that are clean", "calls", "errors", "planted faults")
    left = [*(row for row in item["clean"] if not row["holds"]), *item.get("missing", [])]
    named = ", ".join(f"{row['tool']} on `{row['fault'] or row['package']}`" for row in left)
    rest = f" Errors, or no end: {named}." if left else ""
    return f"{table(head, rows)}\n\n{item['environment']}.{rest} {source(item)}"


def _emulator(item: Figures) -> str:
    rows = []
    for row in item["runs"]:
        tile, bar = " x ".join(map(str, row["tile"])), f"{row['bar_s']:g}" if row["bar_s"] else "-"
        figures = (f"{row['best_s']:.3f}", bar, f"{row['gflops']:.2f}", f"{row['switches']:,}")
        rows.append(
            [f"`{row['package']}`", row["dtype"], tile, str(row["n"]), "on" if row["checker"] else "off", *figures]
        )
    head = ("package", "dtype", "Br x Bc", "N", "checker", "seconds", "bar", "GFLOP/s", "switches")
    note = f"One head, one core, best of {len(item['runs'][0]['seconds'])}; {item['compiler']}."
    return f"{table(head, rows)}\n\n{note} {source(item)}"


def _io(item: Figures) -> str:
    """One row per package: what was counted on its grid, and one head at the length of its last rows by formula."""
    rows = []
    for package in item["packages"]:
        counted, (full, causal) = package["rows"], package["far"]
        moved, beside = full["formula"]["total"], full["beside"]
        rows.append([
            f"`{package['package']}`",
            "{} x {}".format(*package["tile"]),
            f"{sum(row['equal'] for row in counted)} of {len(counted)} x {len(package['dtypes'])} dtypes",
            f"{sum(row['formula']['total'] for row in counted):,}",
            f"{moved / 1e6:.2f} MB",
            f"{full['ratio']:.2f}",
            f"{causal['ratio']:.2f}",
            *(f"{beside[name] / moved:.2f}" for name in ("F2f", "A1", "A0")),
        ])  # fmt: skip
    n = item["packages"][0]["far"][0]["shape"]["nq"]
    head = (
        "package", "Br x Bc", "calls whose bytes equal the formula", "bytes counted per dtype", f"one head at N={n}",
        "/ lower bound", "/ lower bound, causal", "F2f, tile for M / ours", "A1 / ours", "A0 / ours",
    )  # fmt: skip
    from verify import io_backward, io_ncu

    text = table(head, rows)
    gradients = io_backward.summary(item["packages"])
    if gradients:
        text += f"\n\nBackward:\n\n{table(io_backward.SUMMARY, gradients)}"
    text += f"\n\n{source(item)}"
    counters = item.get("counters")
    if counters is None:
        return text
    if not counters["available"]:
        return f"{text}\n\nNo hardware counters: {counters['why']}."
    seen = [[f"`{r['package']}`", r["shape"], f"{r['formula_read']:,}", *io_ncu.ratios(r)] for r in counters["rows"]]
    return f"{text}\n\n{table(('package', 'shape', 'formula read', *io_ncu.COLUMNS), seen)}"


def _ptxas(item: Figures) -> str:
    from verify import ptxas

    rows = [[f"`{what}`" if "<" in what else what, *figures] for what, *figures in ptxas.rows(item)]
    found = f"{len(item['findings'])} findings"
    return f"{table(ptxas.HEAD, rows)}\n\nnvcc {item['nvcc']}; {found}. {source(item)}"


def _mutate(item: Figures) -> str:
    """One row per target; under it the survivors with their reasons."""
    checks = list(dict.fromkeys(check for one in item["targets"] for check in one["by_check"]))
    rows, kept = [], []
    for one in item["targets"]:
        counts = (one["mutants"], one["killed"], one["equivalent"], *(one["by_check"].get(c, 0) for c in checks))
        rows.append([one["target"], one["what"], *map(str, counts)])
        kept += [f"* {one['target']}, {r['name']}: {r['equivalent']}" for r in one["results"] if r["equivalent"]]
        kept += [f"* {one['target']}, {name}: DID NOT END AS IT SHOULD" for name in one["wrong"]]
    head = ("target", "what is broken", "mutants", "noticed", "may survive", *(f"by {check}" for check in checks))
    survivors = "\n\nMutants that have to survive, and why:\n\n" + "\n".join(kept) if kept else ""
    return f"{table(head, rows)}{survivors}\n\n{item['seconds']:.0f} s. {source(item)}"


def _speed(item: Figures) -> str:
    from verify import bench_table

    rate = item["matmul_gflops"]
    ceiling = f" The matrix product reaches {rate['median'] / 1e3:.0f} TFLOP/s." if rate else ""
    means = "; ".join(bench_table.summary_lines(item))
    compared = f" Geometric means: {means}." if means else ""
    short = "".join(f" {text[0].upper()}{text[1:]}." for text in bench_table.shortfalls(item))
    note = f"{item['shapes']}, median of {item['rounds']} rounds.{ceiling}{compared}{short}"
    return f"{table(*bench_table.rows(item))}\n\n{note} {source(item)}"


def _plain(item: Figures) -> str:
    return f"`{item['file']}`: {source(item)}"


_WRITERS: dict[str, Callable[[Figures], str]] = {
    "certificate": _certificate,
    "bench": _bench,
    "bench_backward": _bench,
    "speed": _speed,
    "speed_backward": _speed,
    "fuzz": _fuzz,
    "real": report_models.real,
    "training": report_models.training,
    "memory": report_models.memory,
    "calibrate": _calibrate,
    "certificates": _certificates,
    "tests": _tests,
    "sanitize": _sanitize,
    "mutate": _mutate,
    "io": _io,
    "ptxas": _ptxas,
    "emulator": _emulator,
}
