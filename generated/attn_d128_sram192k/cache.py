# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 dc9b820904dedfd4
"""Where compiled libraries are kept, and how they get there exactly once.

    <root>/<namespace>/<device>-<key>/     a finished build; it never changes and never is half there
    <root>/<namespace>/<device>-<key>.lock held while one process builds
    <root>/<namespace>/.<device>-<key>-*   a build under way, or what a killed one left

root: $TILEPROOF_CACHE, else $TORCH_EXTENSIONS_DIR, else tileproof/ in the user's cache folder.

Holds always: a folder appears by one rename(2) of a finished one, so a reader needs no lock; the lock is flock(2),
which the kernel drops when its holder dies; a build writes to a folder of its own, so that a compiler which outlives a
killed builder disturbs nobody.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from . import contents

# A second process says so when it has waited this long for the first one's build.
PATIENCE_S = 2.0


class BuildError(RuntimeError):
    """The kernels cannot be compiled, or there is no place to keep them."""


def root() -> Path:
    """The cache folder, which need not exist.

    Raises: BuildError when it starts with a ~ that stands for nothing.
    """
    for variable in ("TILEPROOF_CACHE", "TORCH_EXTENSIONS_DIR"):
        value = os.environ.get(variable, "").strip()
        if value:
            return _expanded(value)
    return _expanded(os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache") / "tileproof"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise BuildError(f"no cache folder: {path!r} names no home folder; set TILEPROOF_CACHE to a path") from error


def is_whole(folder: Path, product: str) -> bool:
    """Whether the build in `folder` still has its product: cleaners of temporary folders take files one by one."""
    try:
        return (folder / product).stat().st_size > 0
    except OSError:
        return False


def published(folder: Path, product: str, make: Callable[[Path], None]) -> Path:
    """The file `product` of `folder`, which is made by `make` if it is not there or has lost that file.

    make: fills the empty folder that it is given. Of many processes that ask at once, one calls it.
    Raises: BuildError when the cache cannot be written, or no product was made; whatever `make` raises. Nothing is
    published then.
    """
    if is_whole(folder, product):
        return folder / product
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f"{folder.name}.lock")
        _acquire(lock)
        try:
            if not is_whole(folder, product):
                _make(folder, product, make)
        finally:
            lock.release()
    except OSError as error:
        raise BuildError(
            f"cannot write to the cache {folder.parent}: {error.strerror or error}; "
            "set TILEPROOF_CACHE to a folder that can be written"
        ) from error
    return folder / product


def _acquire(lock: FileLock) -> None:
    try:
        lock.acquire(timeout=PATIENCE_S)
    except Timeout:
        print(f"{contents.NAME}: waiting for another process that builds ({lock.lock_file})", file=sys.stderr)
        lock.acquire()


def _make(folder: Path, product: str, make: Callable[[Path], None]) -> None:
    """Under the lock: fill a folder beside `folder`, then rename it."""
    prefix = f".{folder.name}-"
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        make(work)
        if not is_whole(work, product):
            raise BuildError(f"the compiler ended without an error and without {product}")
        for file in work.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        work.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)  # one that lost its product
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
