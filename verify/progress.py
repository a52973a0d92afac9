"""One progress bar on stderr, so that `--json` on stdout stays clean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Step(Protocol):
    """What `bar` yields: call it once per finished piece of work, with a word on what comes next."""

    def __call__(self, advance: int = 1, note: str = "") -> None: ...


def silent(advance: int = 1, note: str = "") -> None:
    """A Step that shows nothing: for tests and for callers that have their own bar."""


@contextmanager
def bar(title: str, total: int | None) -> Iterator[Step]:
    """Show `title` with `total` steps on stderr while the block runs; on a pipe nothing is drawn."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total, note="")

        def step(advance: int = 1, note: str = "") -> None:
            progress.update(task, advance=advance, note=note)

        yield step
