"""Options that several commands take, and how each command ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console


def judged_on(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that choose a device to judge on; `where_of` makes it of them."""
    from verify.emulator.emulator import ACCUMULATIONS, SCHEDULES

    for option in (
        click.option(
            "--accumulation", type=click.Choice(ACCUMULATIONS), default=None,
            help="How the emulator sums a matrix product.",
        ),
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


def where_of(device: str, arch: str | None, schedules: tuple[str, ...], accumulation: str | None) -> Any:
    """The device that the options of `judged_on` name."""
    from verify import devices
    from verify.emulator.emulator import SCHEDULES

    chosen = [s for s in SCHEDULES if s.name in schedules] or None
    return devices.device(device, arch=arch, schedules=chosen, accumulation=accumulation)


def _writable(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    from verify.packages import check_writable

    return None if path is None else check_writable(path)


device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to run."
)
seed_option = click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same cases."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print figures as JSON instead of a table.")
out_option = click.option(
    "--out", type=click.Path(path_type=Path), default=None, callback=_writable, help="Write the figures to this file."
)


def finish(
    figures: dict[str, Any],
    as_json: bool,
    out: Path | None,
    show: Callable[[Console], None],
    holds: bool,
    draw: Callable[[dict[str, Any], Path], None] | None = None,
) -> NoReturn:
    """Save, draw the plot beside, print, and leave with the right exit code."""
    from verify import packages, plots

    if out is not None:
        packages.write_json(out, figures)  # before the plot: an error there must not cost the figures
        if draw is not None:
            click.echo(plots.beside(draw, figures, out), err=True)
    if as_json:
        click.echo(packages.as_json(figures))
    else:
        show(_console())
    sys.exit(0 if holds else 1)


def _console() -> Console:
    """A console wide enough for the tables even when its output is a file."""
    probe = Console()
    return probe if probe.is_terminal else Console(width=140)
