"""The command that puts figures of result files into README files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from verify.commands.options import json_option

RESULTS = Path(__file__).resolve().parents[1] / "results"
_ROOT = RESULTS.parents[1]
READMES = tuple(_ROOT / f"{folder}README.md" for folder in ("", "verify/emulator/", "codegen/templates/sm90a/"))


@click.command()
@click.option("--check", is_flag=True, help="Exit 1 if a README differs from what the result files give.")
@click.option(
    "--readme", "readmes", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True,
    help="[default: those of this checkout that hold figures]",
)  # fmt: skip
@json_option
def report(check: bool, readmes: tuple[Path, ...], as_json: bool) -> None:
    """Print the figures of the result files, and put them between the marks in the READMEs.

    With --check: say which README differs from them, and write nothing.
    """
    from verify import report as figures

    changed = [readme for readme in readmes or READMES if figures.refresh(readme, RESULTS, write=not check)]
    if as_json:
        click.echo(json.dumps(figures.collect(RESULTS), indent=1))
    elif not check:
        click.echo(figures.text(RESULTS))
    if check and changed:
        names = ", ".join(map(str, changed))
        click.echo(f"not what the result files give: {names}; try python -m verify report", err=True)
        if any(figures.CERTIFICATES in readme.read_text() for readme in changed):
            back = "git checkout generated brings the checked-in certificate back"
            click.echo(f"where a certify of your own is what changed, {back}", err=True)
        sys.exit(1)
