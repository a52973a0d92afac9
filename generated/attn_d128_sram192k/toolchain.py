# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 ab70c7de3366d304
"""The compilers of this machine: found, named with their versions, and run.

CXX and MAX_JOBS mean what they mean to torch.utils.cpp_extension. CUDA_HOME (or CUDA_PATH) names the toolkit; without
it, the nvcc on PATH is asked where it lives, because it may be a script that starts another one.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .cache import BuildError


class Compiler(NamedTuple):
    """command: the start of a command line. version: what tells one release of it from another."""

    command: tuple[str, ...]
    version: str


class CudaToolkit(NamedTuple):
    """An installed toolkit: its root, and the folder that has libcudart.so."""

    home: Path
    library_folder: Path
    nvcc: Compiler


def cxx() -> Compiler:
    """The C++ compiler: $CXX, else g++, else c++.

    Raises: BuildError when there is none.
    """
    asked = os.environ.get("CXX", "").strip()
    try:
        candidates = [shlex.split(asked)] if asked else [["g++"], ["c++"]]
    except ValueError as error:
        raise BuildError(f"CXX={asked!r} is not a command: {error}") from error
    for name, *more in candidates:
        found = shutil.which(name)
        if found:
            command = (found, *more)
            return Compiler(command, _version(command))
    if asked:
        raise BuildError(f"CXX={asked!r} is not a command; the kernels need a C++17 compiler (g++ 11 or later)")
    raise BuildError("no C++ compiler: neither g++ nor c++ is on PATH; install g++ 11 or later, or set CXX")


def cuda_toolkit() -> CudaToolkit:
    """The CUDA toolkit to compile with.

    Raises: BuildError, with the bad value if a variable holds one.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        value = os.environ.get(variable, "")
        if value.strip():
            for part in value.split(os.pathsep):
                if part.strip() and _nvcc_in(Path(part.strip())):
                    return _toolkit(Path(part.strip()))
            raise BuildError(f"{variable}={value!r} holds no bin/nvcc: set it to a CUDA toolkit's root, or unset it")
    on_path = shutil.which("nvcc")
    candidates = [_home_of(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda"))
    for home in candidates:
        if home is not None and _nvcc_in(home):
            return _toolkit(home)
    raise BuildError(
        "no CUDA toolkit: CUDA_HOME is not set, nvcc is not on PATH and /usr/local/cuda has none; "
        "kernels for the GPU need one, kernels for the CPU do not"
    )


def run_all(commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Run the commands in `folder`, at most $MAX_JOBS (default: one per processor) at a time.

    Raises: BuildError with the output of the first command that fails.
    """
    jobs = os.environ.get("MAX_JOBS", "").strip()
    workers = int(jobs) if jobs.isdigit() and int(jobs) else len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for command, done in zip(commands, pool.map(lambda c: _run(c, folder), commands), strict=True):
            if done.returncode:
                pool.shutdown(cancel_futures=True)
                raise BuildError(f"{shlex.join(command)}\nfailed with status {done.returncode}:\n{done.stdout}")


def _run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", check=False,
    )  # fmt: skip


def _version(command: tuple[str, ...]) -> str:
    """The line of `--version` that has the release: the last for nvcc, the first for others."""
    try:
        lines = _run((*command, "--version")).stdout.strip().splitlines()
    except OSError as error:
        raise BuildError(f"cannot run {shlex.join(command)}: {error.strerror or error}") from error
    if not lines:
        raise BuildError(f"{shlex.join(command)} --version says nothing")
    return lines[-1 if "nvcc" in command[0] else 0]


def _nvcc_in(home: Path) -> bool:
    return os.access(home / "bin" / "nvcc", os.X_OK)


def _home_of(nvcc: str) -> Path | None:
    """The toolkit that an nvcc command really runs: the TOP that its dry run prints."""
    try:
        output = _run((nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull)).stdout
    except OSError:
        return None
    top = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else Path(nvcc).resolve().parent.parent


def _toolkit(home: Path) -> CudaToolkit:
    home = home.resolve()
    for folder in (home / "lib64", home / "lib", *sorted(home.glob("targets/*/lib"))):
        if (folder / "libcudart.so").exists():
            command = (str(home / "bin" / "nvcc"),)
            return CudaToolkit(home, folder, Compiler(command, _version(command)))
    raise BuildError(f"the CUDA toolkit {home} has no libcudart.so in lib64, lib or targets/*/lib")
