"""What follows emission, each as a process of its own: build the package, pack a wheel, certify it.

This process never imports torch, nor anything that it just wrote. A tool that fails is a ToolError (exit 1).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import ToolError

# argv: parent folder, package name, function of the package, its arguments.
_CALL = (
    "import importlib, sys; sys.path.insert(0, sys.argv[1]); "
    "getattr(importlib.import_module(sys.argv[2]), sys.argv[3])(*sys.argv[4:])"
)


def build(package: Path, *, quiet: bool = False) -> None:
    """Compile the package for the devices of this machine, into its own build cache.

    Raises: ToolError when the build fails; its output has been shown.
    """
    _run(_call(package, "build"), f"building {package.name}", quiet)


def wheel(package: Path, folder: Path, *, quiet: bool = False) -> Path:
    """Make a wheel with the compiled library in `folder`; returns its path.

    Raises: ToolError when the build fails or no wheel came out.
    """
    before = set(folder.glob("*.whl")) if folder.is_dir() else set()
    started = {path: path.stat().st_mtime_ns for path in before}
    _run(_call(package, "wheel", str(folder.resolve())), f"packing a wheel of {package.name}", quiet)
    made = [p for p in folder.glob("*.whl") if started.get(p) != p.stat().st_mtime_ns]
    if len(made) != 1:
        raise ToolError(f"packing a wheel of {package.name} ended without one in {folder}")
    return made[0]


def verify(package: Path, device: str, *, quiet: bool = False) -> None:
    """Certify the package: `python -m verify certify`, whose table goes to the terminal.

    Raises: ToolError when a case is outside its bound, or the judge itself failed.
    """
    _run([sys.executable, "-m", "verify", "certify", str(package), "--device", device], f"certifying {package}", quiet)


def _call(package: Path, function: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", _CALL, str(package.resolve().parent), package.name, function, *arguments]


def _run(command: Sequence[str], what: str, quiet: bool) -> None:
    """Run to the end, its output on ours; with `quiet` all of it on stderr, so that stdout stays JSON."""
    sys.stdout.flush()
    try:
        done = subprocess.run(command, check=False, stdout=sys.stderr.fileno() if quiet else None, env=os.environ)
    except OSError as e:
        raise ToolError(f"{what}: cannot start {command[0]}: {e.strerror}") from e
    if done.returncode != 0:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        raise ToolError(f"{what} failed ({how}); see its output above")
