"""Commands that ask what only a machine or its CUDA tools know: its arithmetic, registers, stray accesses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from codegen.errors import RequestError
from verify.commands.options import device_option, finish, json_option, out_option


@click.command()
@device_option
@click.option("--exhaustive/--quick", default=True, show_default=True, help="Every float32 argument, or every 4099th.")
@out_option
@json_option
def calibrate(device: str, exhaustive: bool, out: Path | None, as_json: bool) -> None:
    """Measure this machine's arithmetic and compare it with what the error bounds assume."""
    from verify import calibrate as probes
    from verify.progress import bar

    with bar(f"calibrate {device}", None) as step:
        figures = probes.run(device, exhaustive=exhaustive, step=step)
    finish(figures, as_json, out, lambda c: c.print(probes.table(figures)), bool(figures["holds"]))


@click.command()
@click.argument("packages_", metavar="[PACKAGE...]", nargs=-1)
@click.option(
    "--plans", is_flag=True, help="Also the border of the register rule: tiles accepted with nothing to spare."
)
@click.option("--most", type=click.IntRange(1), default=None, help="At most this many of them, evenly spaced.")
@click.option("--wgmma", is_flag=True, help="Instead: the default plans of sm90a, and what tune would measure.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compilers at a time; default: one per core.")
@out_option
@json_option
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
        finish(figures, as_json, out, lambda c: c.print(ptxas_sm90a.table(figures)), figures["holds"])
    with bar("ptxas", None) as step:
        gate.tools()
        here = sorted(file.parent for file in Path("generated").glob("*/plan.json"))
        folders = [packages.find(name) for name in packages_] or [f for f in here if gate.has_cuda(f)]
        workers = jobs or len(os.sched_getaffinity(0))
        figures = gate.run(folders, plans=plans, most=most, jobs=workers, step=step)
    for text in figures["findings"]:
        click.echo(text, err=True)
    finish(figures, as_json, out, lambda c: c.print(gate.table(figures)), figures["holds"])


@click.command()
@click.argument("packages_", metavar="PACKAGE...", nargs=-1, required=True)
@click.option("--tool", "tools", multiple=True, help="memcheck, racecheck, initcheck, synccheck; default: all four.")
@click.option("--faults", is_flag=True, help="Also plant faults, and see each found by its tool.")
@click.option("--jobs", type=click.IntRange(1), default=4, show_default=True, help="Processes at a time.")
@out_option
@json_option
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
    done = tool.did_as_asked(figures, tools or tool.TOOLS)
    finish(figures, as_json, out, lambda c: c.print(tool.table(figures)), done)


@click.command("gpu-session")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the result files.")
@click.option("--part", "parts", multiple=True, help="One part only; may be repeated. Default: the usual ones.")
@click.option("--seconds", type=float, default=540.0, show_default=True, help="Time for all parts together.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Processes at a time; default: one per core.")
def gpu_session(out: Path, parts: tuple[str, ...], seconds: float, jobs: int | None) -> None:
    """Judge the CUDA kernels on this machine: speed, traffic, certificates, tests, sanitizers; a file per part."""
    from verify import gpu_session as session

    holds = session.run(out, parts=parts, seconds=seconds, jobs=jobs, say=lambda text: click.echo(text, err=True))
    sys.exit(0 if holds else 1)
