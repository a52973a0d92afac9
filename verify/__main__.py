"""`python -m verify`: the judge's commands. Each parses, calls one function and prints.

Exit 0: everything holds. Exit 1: something was outside its bound, or a tool failed. Exit 2: a request that cannot be
met. Figures go to stdout (JSON with --json), progress to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from codegen.errors import RequestError, TileproofError

# The oracle's matrices are small: threads of the BLAS cost more than they give. Kernels use torch's threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

RESULTS = Path(__file__).resolve().parent / "results"

_device = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to run."
)
_ARITHMETIC = "How the emulator sums a matrix product."


def _judged_on(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that choose a device to judge on; `_where` makes it of them."""
    from verify.emulator.emulator import ACCUMULATIONS, SCHEDULES

    for option in (
        click.option("--accumulation", type=click.Choice(ACCUMULATIONS), default=None, help=_ARITHMETIC),
        click.option(
            "--schedule", "schedules", type=click.Choice([s.name for s in SCHEDULES]), multiple=True,
            help="Of the emulator's threads and copies; may be repeated. Default: all, and each must hold.",
        ),
        click.option("--arch", default=None, help="Target whose kernels the emulator runs.  [default: sm80]"),
        click.option(
            "--device", type=click.Choice(["cpu", "cuda", "emulator"]), default="cpu", show_default=True,
            help="Where to run; emulator: CUDA kernels thread by thread on this CPU.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def _where(device: str, arch: str | None, schedules: tuple[str, ...], accumulation: str | None) -> Any:
    from verify import devices
    from verify.emulator.emulator import SCHEDULES

    chosen = [s for s in SCHEDULES if s.name in schedules] or None
    return devices.device(device, arch=arch, schedules=chosen, accumulation=accumulation)


_seed = click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same cases.")
_json = click.option("--json", "as_json", is_flag=True, help="Print figures as JSON instead of a table.")


def _writable(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    from verify.packages import check_writable

    return None if path is None else check_writable(path)


_out = click.option(
    "--out", type=click.Path(path_type=Path), default=None, callback=_writable, help="Write the figures to this file."
)


class Commands(click.Group):
    """Turns the errors that are the user's business into one message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TileproofError as error:
            click.echo(f"verify: error: {error}", err=True)
            ctx.exit(error.exit_code)
        except RuntimeError as error:
            if type(error).__name__ != "BuildError":  # each package has a BuildError of its own
                raise
            click.echo(f"verify: error: {error}", err=True)
            ctx.exit(1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Judge emitted attention packages: certificates, fuzzing, benchmarks, calibration, a real model."""


def _finish(
    figures: dict[str, Any], as_json: bool, out: Path | None, show: Callable[[Console], None], holds: bool
) -> None:
    """Print, save, and leave with the right exit code."""
    from verify import packages

    if out is not None:
        packages.write_json(out, figures)
    if as_json:
        click.echo(packages.as_json(figures))
    else:
        show(_console())
    sys.exit(0 if holds else 1)


def _console() -> Console:
    """A console wide enough for the tables even when its output is a file."""
    probe = Console()
    return probe if probe.is_terminal else Console(width=140)


@main.command()
@click.argument("package")
@_judged_on
@_seed
@click.option(
    "--cases", "per_dtype", type=click.IntRange(1), default=None, help="Cases per dtype, special values included."
)
@click.option("--only", default=None, help="Run the one case of this name, as a violation's message says.")
@click.option("--path", default=None, help="Run only this path, such as amx/bf16.")
@click.option("--debug-form", is_flag=True, help="Also build the debug form and judge (m, l, O) after every key tile.")
@click.option("--no-balls", is_flag=True, help="Leave python-flint out even where it is installed.")
@_out
@_json
def certify(
    package: str,
    device: str,
    arch: str | None,
    schedules: tuple[str, ...],
    accumulation: str | None,
    seed: int,
    per_dtype: int | None,
    only: str | None,
    path: str | None,
    debug_form: bool,
    no_balls: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Certify PACKAGE (a folder, or a name under ./generated) and write its certificate.json.

    Every case is heard by the readable reference (its invariant checked after every tile), by float64 with its own
    bound, by ball arithmetic where installed, and by mpmath on at least 8 rows; on every path that can be forced. The
    gradients of a package that has a backward pass are heard likewise, at the O and LSE of its own kernels.
    """
    from verify import certificate, certificate_table, devices, packages, suite, trace
    from verify import certify as judged
    from verify.progress import bar

    folder = packages.find(package)
    options = judged.Options(
        seed=seed, per_dtype=per_dtype or suite.PER_DTYPE, only=only, path=path, balls=not no_balls
    )
    where = _where(device, arch, schedules, accumulation)
    total = None if only else options.per_dtype * len(devices.dtypes_of(packages.plan(folder), device))
    with bar(f"certify {folder.name} on {device}", total) as step:
        record = judged.certify(folder, where, options, step=step)
    traced = None
    if debug_form:
        with bar("debug form", None) as step:
            traced = trace.stated(folder, where, seed=seed, most=options.per_dtype, step=step)
        record.violations += traced["violations"]
    stated = record.describe(where.describe())
    if traced is not None:
        stated["debug_form"] = traced
    edited = packages.changed(folder)
    if edited:
        click.echo(f"verify: no certificate is written: {edited[0]} is not the file that plan.json names", err=True)
    elif only is None and path is None and (record.runs or record.violations):
        certificate.write(folder, certificate.key(where), stated)
    for text in record.violations[:10]:
        click.echo(text, err=True)
    if not record.runs and not record.violations:
        asked = [f"--{word} {name}" for word, name in (("only", only), ("path", path)) if name is not None]
        hint = "a violation's message names both; cases also depend on --seed and --cases"
        raise RequestError(f"{' '.join(asked)}: nothing has that name, and nothing ran", hint)
    title = f"{folder.name}: certificate on {certificate.key(where)}"
    _finish(stated, as_json, out, lambda c: c.print(*certificate_table.tables(stated, title)), not record.violations)


@main.command()
@click.argument("package", required=False)
@_judged_on
@_seed
@click.option("--examples", type=click.IntRange(1), default=500, show_default=True, help="Examples in all.")
@click.option(
    "--packages", "count", type=click.IntRange(0, 1000), default=0, help="Build this many packages and fuzz each."
)
@click.option("--mutants", is_flag=True, help="Also break the fuzzed code on purpose, and see each break found.")
@click.option(
    "--spec", "spec_examples", type=click.IntRange(0), default=0, help="Examples for the reference, all masks."
)
@_out
@_json
def fuzz(
    package: str | None,
    device: str,
    arch: str | None,
    schedules: tuple[str, ...],
    accumulation: str | None,
    seed: int,
    examples: int,
    count: int,
    mutants: bool,
    spec_examples: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Fuzz PACKAGE, or a set of packages made for it, with random problems; each is judged by its bound."""
    from verify import campaign
    from verify.progress import bar

    if package is None and not count and not mutants and not spec_examples:
        raise click.UsageError("name a PACKAGE, or use --packages, --spec or --mutants")
    where = _where(device, arch, schedules, accumulation)
    with bar(f"fuzz on {device}", None) as step:
        report = campaign.run(
            package, where, examples=examples, packages_wanted=count, mutants_wanted=mutants,
            spec_examples=spec_examples, seed=seed, step=step,
        )  # fmt: skip
    figures = report.describe()
    for text in report.failures():
        click.echo(text, err=True)
    _finish(figures, as_json, out, lambda c: c.print(*campaign.tables(figures)), not report.failures())


@main.command()
@click.argument("packages_", metavar="[PACKAGE...]", nargs=-1)
@_device
@click.option("--sram", default=None, help="Budget of the packages to time when no PACKAGE is named.  [default: 192KB]")
@click.option("--tiling", default=None, help="GPU: their tiling, paper or tuned.  [default: paper]")
@click.option("--arch", "archs", default=None, help="GPU: their targets, timed together.  [default: the GPU's best]")
@click.option("--tiles", default=None, help="BRxBC,BRxBC, or grid on a CPU. CPU: the best is timed; GPU: each is.")
@click.option("--d", "widths", default=None, help="Head widths.  [default: 64,128; GPU: 64,128,256]")
@click.option("--n", "lengths", default=None, help="Lengths.  [default: 512,2048,4096; GPU: 512 to 16384]")
@click.option("--dtype", "dtypes", default=None, help="Dtypes.  [default: all; GPU: bf16]")
@click.option("--mask", "masks", default=None, help="GPU: full, causal.  [default: both]")
@click.option("--layout", "layouts", default=None, help="GPU: order in memory, bhnd or bnhd.  [default: bhnd]")
@click.option("--gqa", "groups", default=None, help="GPU: query heads per K/V head.  [default: 1]")
@click.option("--peers", default=None, help="GPU: cudnn,fa2,efficient,flex,fa3,fa4; all, none.  [default: all]")
@click.option("--tokens", type=click.IntRange(1), default=None, help="GPU: batch x N.  [default: 16384]")
@click.option("--hidden", "columns", type=click.IntRange(1), default=None, help="GPU: heads x d.  [default: 2048]")
@click.option("--batch", type=click.IntRange(1), default=None, help="CPU.  [default: 1]")
@click.option("--heads", type=click.IntRange(1), default=None, help="CPU.  [default: 8]")
@click.option("--threads", type=click.IntRange(1), default=None, help="CPU: torch threads, for both sides.")
@click.option("--rounds", type=click.IntRange(1), default=None, help="[default: 7]")
@click.option("--seed", type=int, default=None, help="GPU: of the order within the rounds.  [default: 0]")
@click.option("--seconds", type=float, default=None, help="GPU: begin no further shape after so long.")
@click.option("--overhead", is_flag=True, default=None, help="GPU: also what a call costs the host.")
@click.option("--backward", is_flag=True, default=None, help="The backward pass alone, the forward pass outside.")
@_out
@_json
def bench(packages_: tuple[str, ...], device: str, out: Path | None, as_json: bool, **options: Any) -> None:
    """Time packages beside torch's own attention (CPU) or every installed peer (GPU), and print the ratios.

    Lists of --dtype, --layout and --gqa are forms of one shape, timed in the same rounds and compared with the first.
    --backward on a GPU: d=64,128 at N=4096 to 16384 by default, and the deterministic form beside the default one.
    On a GPU --out FILE.json also draws FILE.png where matplotlib is installed; $TILEPROOF_PEERS names folders with
    peers that are not installed.
    """
    from verify import bench_grid, bench_options, bench_plot, bench_report, bench_table
    from verify.progress import bar

    with bar(f"bench on {device}", None) as step:
        if device == "cpu":
            figures = bench_report.run(step=step, **bench_options.cpu(packages_, options))
            made = bench_report.table(figures)
        else:
            grid = bench_options.grid(packages_, options)
            figures = bench_grid.run(grid, out=out, step=step, say=lambda text: click.echo(text, err=True))
            made = bench_table.table(figures)
    if device == "cuda" and out is not None:
        click.echo(bench_plot.beside(figures, out), err=True)
    _finish(figures, as_json, out, lambda c: c.print(made), figures.get("holds", True))


@main.command()
@click.option("--arch", default="sm90a", show_default=True, help="Target whose plans are measured.")
@click.option("--d", "widths", default="64,128,256", show_default=True, help="Head widths; 192/128 is d=192, dv=128.")
@click.option("--sram", default="227KB", show_default=True, help="Plans that need more are not tried.")
@click.option("--mask", "masks", default="full,causal", show_default=True, help="Mask forms.")
@click.option("--class", "classes", default="short,long", show_default=True, help="Length classes.")
@click.option("--tiles", default=None, help="Only plans with these tiles, BRxBC,BRxBC.  [default: all candidates]")
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Of the candidates that stay.")
@_seed
@click.option("--seconds", type=float, default=None, help="Begin no further case after so long.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Default: codegen/tuning/CARD.json.")
@_json
def tune(
    arch: str, widths: str, sram: str, masks: str, classes: str, tiles: str | None, dtype: str, rounds: int, seed: int,
    seconds: float | None, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure the legal plans of a target on this GPU, alternating, and write what `codegen --tiling tuned` reads."""
    from verify import bench_options, tune_report
    from verify import tune as measuring
    from verify.progress import bar

    wanted = measuring.cases(
        arch=arch, sram=sram, widths=bench_options.widths(widths), masks=bench_options.words(masks, "--mask"),
        classes=bench_options.words(classes, "--class"), dtype=dtype,
        tiles=() if tiles is None else bench_options.tiles(tiles),
    )  # fmt: skip
    with bar(f"tune {arch}", measuring.steps(wanted, rounds)) as step:
        figures = tune_report.run(
            wanted, dtype=dtype, out=out, rounds=rounds, seed=seed, seconds=seconds, step=step,
            say=lambda text: click.echo(text, err=True),
        )  # fmt: skip
    _finish(figures, as_json, None, lambda c: c.print(tune_report.table(figures)), True)


@main.command()
@_device
@click.option("--exhaustive/--quick", default=True, show_default=True, help="Every float32 argument, or every 4099th.")
@_out
@_json
def calibrate(device: str, exhaustive: bool, out: Path | None, as_json: bool) -> None:
    """Measure this machine's arithmetic and compare it with what the error bounds assume."""
    from verify import calibrate as probes
    from verify.progress import bar

    with bar(f"calibrate {device}", None) as step:
        figures = probes.run(device, exhaustive=exhaustive, step=step)
    _finish(figures, as_json, out, lambda c: c.print(probes.table(figures)), bool(figures["holds"]))


@main.command()
@_device
@click.option("--dtype", type=click.Choice(["float32", "bf16", "fp16", "float64"]), default=None)
@click.option("--sram", default="192KB", show_default=True, help="Budget of the package made for the model.")
@click.option("--training", is_flag=True, help="Train a small GPT instead, beside torch's own attention. Dtype: all.")
@_out
@_json
def real(device: str, dtype: str | None, sram: str, training: bool, out: Path | None, as_json: bool) -> None:
    """Run a real sentence encoder on a generated package and judge every attention layer.

    With --training, train a GPT with our op and with torch's attention from the same seeds: the losses must stay as
    close as those of two of torch's own back ends. --out FILE.json then also draws FILE.png (needs matplotlib).
    """
    from verify import devices, packages
    from verify import real as encoder
    from verify.progress import bar

    where = devices.device(device)
    archs = ("cpu",) if device == "cpu" else ("sm80",)
    if training:
        from verify import training as gpt
        from verify import training_plot, training_text

        dtypes = gpt.DTYPES[device] if dtype is None else (dtype,)
        setting, header = gpt.Setting(), where.describe()  # the load at the start
        with bar("train", gpt.runs(setting, dtypes)) as step:
            folder = packages.emit(sram=sram, d=setting.size.head_dim, dtypes=dtypes, archs=archs)
            found = gpt.run(
                packages.load(folder), training_text.documentation(), device=device, dtypes=dtypes, setting=setting,
                step=step,
            )  # fmt: skip
        figures = {"kind": "training", "device": device, **found, "machine": header}
        if out is not None:
            click.echo(training_plot.beside(figures, out), err=True)
        _finish(figures, as_json, out, lambda c: c.print(gpt.table(figures)), figures["holds"])
    chosen = dtype or ("float32" if device == "cpu" else "bf16")
    with bar("real", 8) as step:
        attn = packages.load(packages.emit(sram=sram, d=encoder.HEAD_DIM, dtypes=(chosen,), archs=archs))
        report = encoder.run(attn, where, dtype=chosen, step=step)
    figures = {"kind": "real", "device": device, **report.describe(), "machine": where.describe()}
    for verdict in report.layers:
        if not verdict.holds:
            click.echo(verdict.message(), err=True)
    _finish(figures, as_json, out, lambda c: c.print(*encoder.tables(figures)), report.holds)


@main.command()
@click.argument("package", required=False)
@_device
@click.option("--dtype", type=click.Choice(["float32", "bf16", "fp16", "float64"]), default=None, help="[default: two]")
@click.option("--sram", default="192KB", show_default=True, help="Budget of the package to measure if none is named.")
@click.option("--n", "lengths", default=None, help="Lengths.  [default: 512,1024,2048,4096]")
@_out
@_json
def memory(
    package: str | None, device: str, dtype: str | None, sram: str, lengths: str | None, out: Path | None, as_json: bool
) -> None:
    """Peak memory of forward plus backward over the length: a package (default: d=64) beside the standard algorithm.

    Ours must grow linearly. --out FILE.json also draws FILE.png (needs matplotlib).
    """
    from verify import bench_options, devices, memory_plot, packages
    from verify import memory as peaks
    from verify.progress import bar

    devices.device(device)
    dtypes = peaks.DTYPES[device] if dtype is None else (dtype,)
    asked = peaks.LENGTHS if lengths is None else bench_options.numbers(lengths, "--n")
    with bar("memory", len(dtypes) * len(peaks.ALGORITHMS) * len(asked)) as step:
        if package is None:
            archs = ("cpu",) if device == "cpu" else ("sm80",)
            folder = packages.emit(sram=sram, d=peaks.Shape.d, dtypes=dtypes, archs=archs)
        else:
            folder = packages.find(package)
        shape = peaks.Shape(d=packages.plan(folder)["request"]["d"])
        found = peaks.run(folder, device=device, dtypes=dtypes, lengths=asked, shape=shape, step=step)
    figures = {"kind": "memory", "device": device, **found}
    if out is not None:
        click.echo(memory_plot.beside(figures, out), err=True)
    _finish(figures, as_json, out, lambda c: c.print(peaks.table(figures)), figures["holds"])


@main.command()
@click.argument("packages_", metavar="PACKAGE...", nargs=-1, required=True)
@click.option("--tool", "tools", multiple=True, help="memcheck, racecheck, initcheck, synccheck; default: all four.")
@click.option("--faults", is_flag=True, help="Also plant faults, and see each found by its tool.")
@click.option("--jobs", type=click.IntRange(1), default=4, show_default=True, help="Processes at a time.")
@_out
@_json
def sanitize(
    packages_: tuple[str, ...], tools: tuple[str, ...], faults: bool, jobs: int, out: Path | None, as_json: bool
) -> None:
    """Run every CUDA kernel of each PACKAGE under compute-sanitizer, in poisoned and guarded memory."""
    from verify import packages
    from verify import sanitize as tool
    from verify.progress import bar

    unknown = [name for name in tools if name not in tool.TOOLS]
    if unknown:
        raise RequestError(f"--tool {unknown[0]}: unknown", f"known: {', '.join(tool.TOOLS)}")
    with bar("sanitize", None) as step:
        folders = [packages.find(name) for name in packages_]
        figures = tool.run(folders, tools=tools or tool.TOOLS, plant=faults, jobs=jobs, step=step)
    for row in (*figures["clean"], *figures["planted"]):
        if not row["holds"]:
            click.echo(f"{row['tool']} on {row['fault'] or row['package']}:\n{row['text']}", err=True)
    _finish(figures, as_json, out, lambda c: c.print(tool.table(figures)), figures["holds"])


@main.command()
@click.argument("packages_", metavar="[PACKAGE...]", nargs=-1)
@click.option(
    "--plans", is_flag=True, help="Also the border of the register rule: tiles accepted with nothing to spare."
)
@click.option("--most", type=click.IntRange(1), default=None, help="At most this many of them, evenly spaced.")
@click.option("--wgmma", is_flag=True, help="Instead: the default plans of sm90a, and what tune would measure.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compilers at a time; default: one per core.")
@_out
@_json
def ptxas(
    packages_: tuple[str, ...], plans: bool, most: int | None, wgmma: bool, jobs: int | None, out: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Compile every CUDA unit of each PACKAGE (default: all of ./generated); fail on what only ptxas knows.

    Spills, local memory, C75xx advisories, warnings, and shared memory that is not the plan's. Needs nvcc, not a GPU.
    """
    from verify import packages, ptxas_sm90a
    from verify import ptxas as gate
    from verify.progress import bar

    if wgmma:
        with bar("ptxas", len(ptxas_sm90a.chosen(ptxas_sm90a.WIDTHS, ptxas_sm90a.TUNED))) as step:
            figures = ptxas_sm90a.run(jobs=jobs or len(os.sched_getaffinity(0)), step=step)
        for text in figures["findings"]:
            click.echo(text, err=True)
        _finish(figures, as_json, out, lambda c: c.print(ptxas_sm90a.table(figures)), figures["holds"])
    with bar("ptxas", None) as step:
        gate.tools()
        here = sorted(file.parent for file in Path("generated").glob("*/plan.json"))
        folders = [packages.find(name) for name in packages_] or [f for f in here if gate.has_cuda(f)]
        workers = jobs or len(os.sched_getaffinity(0))
        figures = gate.run(folders, plans=plans, most=most, jobs=workers, step=step)
    for text in figures["findings"]:
        click.echo(text, err=True)
    _finish(figures, as_json, out, lambda c: c.print(gate.table(figures)), figures["holds"])


@main.command()
@click.argument("packages_", metavar="[PACKAGE...]", nargs=-1)
@click.option(
    "--device",
    type=click.Choice(["emulator", "cuda"]),
    default="emulator",
    show_default=True,
    help="cuda: also what the GPU's counters saw.",
)
@click.option("--arch", default="sm80", show_default=True, help="Target whose kernels are counted.")
@click.option("--sram", default="192KB", show_default=True, help="Budget of the package that --d asks for.")
@click.option("--d", type=click.IntRange(1), default=None, help="Also the package of this head width.")
@click.option("--br", type=click.IntRange(1), default=None, help="Its query rows per tile.")
@click.option("--bc", type=click.IntRange(1), default=None, help="Its keys per tile.")
@click.option("--n", "lengths", default=None, help="One head at these lengths in place of the grid of shapes.")
@click.option("--causal", default=None, help="Its masks: none, bottom_right, top_left.  [default: none,bottom_right]")
@_out
@_json
def io(
    packages_: tuple[str, ...],
    device: str,
    arch: str,
    sram: str,
    d: int | None,
    br: int | None,
    bc: int | None,
    lengths: str | None,
    causal: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Count the bytes that each kernel moves; compare with the formula and the lower bound.

    The emulator counts loads and stores per tensor, and every byte must be the formula's. Default: nine tiles.
    """
    from verify import devices, io_calls
    from verify import io as traffic
    from verify.progress import bar

    if device == "cuda":
        devices.device("cuda")
    shapes = io_calls.asked(lengths, causal)
    with bar("io", None) as step:
        folders = traffic.chosen(packages_, sram=sram, d=d, br=br, bc=bc, target=arch)
        figures = traffic.run(folders, device=device, target=arch, shapes=shapes, step=step)
    for text in figures["differences"][:10]:
        click.echo(text, err=True)
    _finish(figures, as_json, out, lambda c: c.print(*traffic.tables(figures)), figures["holds"])


@main.command()
@click.option("--of", default="", help="Comma list: spec, cpu, cpu-amx, sm80, sm80-sync. Default: all that run here.")
@click.option("--name", "names", multiple=True, help="Only the mutants of this name or catalogue number.")
@click.option("--sample", type=click.IntRange(1), default=None, help="So many per target, the same at every run.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Mutants at a time; default: one per core.")
@_out
@_json
def mutate(
    of: str, names: tuple[str, ...], sample: int | None, jobs: int | None, out: Path | None, as_json: bool
) -> None:
    """Seed one bug at a time into spec and into emitted kernels, and see each one noticed."""
    from verify.mutate import command
    from verify.mutate import run as mutation
    from verify.progress import bar

    with bar("mutate", None) as step:
        chosen = [word.strip() for word in of.split(",") if word.strip()]
        figures = mutation.run(chosen, names=names, sample=sample, jobs=jobs, step=step)
    _finish(figures, as_json, out, lambda c: c.print(*command.tables(figures)), bool(figures["holds"]))


@main.command("gpu-session")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the result files.")
@click.option("--part", "parts", multiple=True, help="One part only; may be repeated. Default: all, in their order.")
@click.option("--seconds", type=float, default=540.0, show_default=True, help="Time for all parts together.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Processes at a time; default: one per core.")
def gpu_session(out: Path, parts: tuple[str, ...], seconds: float, jobs: int | None) -> None:
    """Judge the CUDA kernels on this machine: speed, traffic, certificates, tests, sanitizers; a file per part."""
    from verify import gpu_session as session

    holds = session.run(out, parts=parts, seconds=seconds, jobs=jobs, say=lambda text: click.echo(text, err=True))
    sys.exit(0 if holds else 1)


@main.command()
@click.option("--check", is_flag=True, help="Exit 1 if a README differs from what the result files give.")
@click.option(
    "--readme", "readmes", type=click.Path(path_type=Path), multiple=True, show_default=True,
    default=(Path("README.md"), Path("verify/emulator/README.md")),
)  # fmt: skip
@_json
def report(check: bool, readmes: tuple[Path, ...], as_json: bool) -> None:
    """Print the figures of the result files, and put them between the marks in the READMEs."""
    from verify import report as figures

    changed = {figures.refresh(readme, RESULTS, write=not check) for readme in readmes}
    if as_json:
        click.echo(json.dumps(figures.collect(RESULTS), indent=1))
    else:
        click.echo(figures.text(RESULTS))
    sys.exit(1 if check and True in changed else 0)


if __name__ == "__main__":
    main(prog_name="python -m verify")
