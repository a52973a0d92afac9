"""What the parts of a GPU session share: where results go, when it ends, how our own commands are run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verify import kernel_hashes, packages, processes

ROOT = Path(__file__).resolve().parents[1]


def identity(folder: Path) -> dict[str, Any]:
    """What a figure belongs to: the package, and its kernels by a hash of their code.

    A change elsewhere in the package changes its digest and not its kernels: see `kernel_hashes`.
    """
    return {"package": folder.name, "digest": packages.plan(folder)["digest"], "kernels": kernel_hashes.of(folder)}


@dataclass
class Session:
    """One run: where results go, when it ends, how to say what happens."""

    out: Path
    deadline: float
    jobs: int
    say: Callable[[str], None]
    held: dict[str, bool] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def keep(self, part: str, figures: dict[str, Any]) -> None:
        """Write the result file of a part."""
        self.held[part] = bool(figures["holds"])
        packages.write_json(self.out / f"{part}.json", figures)

    def command(self, words: Sequence[str], *, most: float, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one of our own commands; it is stopped when the session's time ends, with return code 124."""
        start = time.monotonic()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path, **environment}
        limit = max(1.0, min(most, self.left))
        done = processes.run([sys.executable, *words], seconds=limit, env=env, cwd=ROOT)
        if done.returncode == processes.OUT_OF_TIME:
            done.stderr += "out of time"
        self.say(f"{time.monotonic() - start:6.1f} s, exit {done.returncode}: {' '.join(words[:6])}")
        return done
