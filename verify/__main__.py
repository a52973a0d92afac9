"""`python -m verify`: the judge's commands. Each parses, calls one function and prints.

Exit 0: everything holds. Exit 1: something was outside its bound, or a tool failed. Exit 2: a request that cannot be
met. Figures go to stdout (JSON with --json), progress to stderr.
"""

from __future__ import annotations

from typing import Any

import click

from codegen.errors import TileproofError
from verify.commands import judging, machine, memory, report, timing


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


for command in (
    judging.certify, judging.fuzz, judging.real, judging.mutate,
    timing.bench, timing.tune,
    memory.memory, memory.io,
    machine.calibrate, machine.sanitize, machine.ptxas, machine.gpu_session,
    report.report,
):  # fmt: skip
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="python -m verify")
