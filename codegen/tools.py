"""What follows emission, each as a process of its own: build the package, pack a wheel, certify it.

This process never imports torch, nor anything that it just wrote. A tool that fails is a ToolError (exit 1).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import ToolError

STDERR = 2  # file descriptor


def build(package: Path, cuda_archs: Sequence[str] = (), *, quiet: bool = False) -> None:
    """Compile the package into its own build cache.

    cuda_archs: GPUs to compile for ("sm_80"); none given: those of this machine.
    Raises: ToolError when the build fails; its output has been shown.
    """
    _run_module(package, ["build", *_cuda(cuda_archs)], f"building {package.name}", _stdout(quiet))


def wheel(package: Path, folder: Path, cuda_archs: Sequence[str] = ()) -> Path:
    """Make a wheel with the compiled libraries in `folder`; returns its path.

    The package's own command prints that path: its stdout is dropped, and the path is the caller's to print.
    Raises: ToolError when the build fails or no wheel came out.
    """
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.whl")}
    words = ["wheel", str(folder.resolve()), *_cuda(cuda_archs)]
    _run_module(package, words, f"packing a wheel of {package.name}", subprocess.DEVNULL)
    made = [path for path in folder.glob("*.whl") if before.get(path) != path.stat().st_mtime_ns]
    if len(made) != 1:
        raise ToolError(f"packing a wheel of {package.name} ended without one in {folder}")
    return made[0]


def judged_devices(archs: Sequence[str], nodes: Path = Path("/dev")) -> list[str]:
    """The devices of this machine that a package for these targets can be certified on, as the judge names them.

    A GPU counts if the driver has made its node; without one a package that has only CUDA targets is still handed to
    the judge, whose message says that none is there.
    """
    devices = ["cpu"] if "cpu" in archs else []
    if any(arch != "cpu" for arch in archs) and (not devices or any(nodes.glob("nvidia[0-9]*"))):
        devices.append("cuda")
    return devices


def verify(package: Path, device: str, *, quiet: bool = False) -> None:
    """Certify the package: `python -m verify certify`, whose table goes to the terminal.

    Raises: ToolError when a case is outside its bound, or the judge itself failed.
    """
    words = [sys.executable, "-m", "verify", "certify", str(package), "--device", device]
    _run(words, f"certifying {package}", _stdout(quiet))


def _cuda(archs: Sequence[str]) -> list[str]:
    return [word for arch in archs for word in ("--cuda-arch", arch)]


def _stdout(quiet: bool) -> int | None:
    """Where a tool's output goes: on ours, or with `quiet` all of it on stderr, so that stdout stays JSON."""
    return STDERR if quiet else None


def _run_module(package: Path, words: Sequence[str], what: str, stdout: int | None) -> None:
    """`python -m PACKAGE WORDS`, the package found by its parent folder."""
    path = os.pathsep.join(filter(None, (str(package.resolve().parent), os.environ.get("PYTHONPATH"))))
    _run([sys.executable, "-m", package.name, *words], what, stdout, {**os.environ, "PYTHONPATH": path})


def _run(command: Sequence[str], what: str, stdout: int | None, env: Mapping[str, str] | None = None) -> None:
    """Run to the end; what it says on stderr is shown."""
    sys.stdout.flush()
    try:
        done = subprocess.run(command, check=False, stdout=stdout, env=env)
    except OSError as e:
        raise ToolError(f"{what}: cannot start {command[0]}: {e.strerror}") from e
    if done.returncode != 0:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        raise ToolError(f"{what} failed ({how}); see its output above")
