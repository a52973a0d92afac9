"""Writes a package as one step that a kill cannot halve.

A package folder is never edited in place. Under a lock on the parent folder:

    1  build   .NAME.tileproof-new   beside the target, every file flushed to disk
    2  rename  NAME                  -> .NAME.tileproof-old      (only if it exists)
    3  rename  .NAME.tileproof-new   -> NAME
    4  rename  .NAME.tileproof-old   -> .NAME.tileproof-dead, and delete that

Holds after a kill at any point: NAME is a whole package, or it is absent and .NAME.tileproof-old is the
whole one that was there; the next run that writes to or checks the same parent puts it back first. Only a
folder that no longer matters is ever incomplete (-new, -dead). Nothing is moved or deleted but a tileproof
package or such a leftover, and a package that already has the bytes is left alone, with its certificate.

The lock is flock(2) on the parent folder: no lock file stays behind, and the kernel drops it when the
writer dies. Source: POSIX rename(2), "atomically"; the order of fsync calls follows Pillai et al., "All File
Systems Are Not Created Equal" (OSDI 2014).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .errors import RequestError, TileproofError, ToolError
from .package import CERTIFICATE_FILE, PLAN_FILE, read_plan, render_package
from .problem import Problem

NEW, OLD, DEAD = ".tileproof-new", ".tileproof-old", ".tileproof-dead"
LOCK_TIMEOUT_S = 60.0
# What building, importing or packing a package leaves in it: ours to drop.
BY_PRODUCTS = ("__pycache__", "build", "dist", ".eggs", CERTIFICATE_FILE)


def write_package(problem: Problem, out: Path | str, name: str | None = None) -> Path:
    """Render the package for `problem` and write it to `out`/<name>. Returns that folder.

    Raises: PlanError, RequestError as `package.render_package`; RequestError when the target holds
        something else; ToolError when the file system refuses.
    """
    return write_files(render_package(problem, name), Path(out))


def write_files(files: Mapping[str, bytes], out: Path) -> Path:
    """Write a rendered package to `out`/<its name>; returns that folder.

    Raises: RequestError when the target is not a package of ours or holds files that we did not write.
    """
    name = read_plan(files[PLAN_FILE])["name"]
    target = out / name
    try:
        out.mkdir(parents=True, exist_ok=True)
        with locked(out):
            restore(out)
            refuse_foreign(target)
            if not _has_bytes(target, files):
                _replace(target, files)
    except (FileExistsError, NotADirectoryError) as e:
        raise RequestError(f"{e.filename} is not a folder to write packages to") from e
    except OSError as e:
        raise ToolError(f"cannot write {target}: {e.strerror or e}") from e
    return target


def restore(out: Path) -> None:
    """Undo or finish what a killed writer left in `out`. The caller holds the lock."""
    for old in sorted(out.glob(f".*{OLD}")):
        target = out / old.name[1 : -len(OLD)]
        if os.path.lexists(target):
            _discard(old)
        else:
            _rename(old, target)
    for leftover in sorted([*out.glob(f".*{NEW}"), *out.glob(f".*{DEAD}")]):
        _remove(leftover)


def has_leftovers(out: Path) -> bool:
    """Whether a writer was killed in `out`, or is at work there."""
    return any(path for suffix in (NEW, OLD, DEAD) for path in out.glob(f".*{suffix}"))


def is_package(folder: Path) -> bool:
    """Whether `folder` has a plan.json of ours."""
    try:
        read_plan((folder / PLAN_FILE).read_bytes())
    except (OSError, RequestError):
        return False
    return True


def foreign_files(folder: Path) -> list[str]:
    """Files below a package folder that neither emission nor a build of it wrote, sorted relative paths."""
    listed = {PLAN_FILE, *read_plan((folder / PLAN_FILE).read_bytes())["files"]}
    found = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        by_product = any(part in BY_PRODUCTS or part.endswith(".egg-info") for part in relative.parts)
        folder_of_ours = path.is_dir() and not path.is_symlink()
        if not folder_of_ours and relative.as_posix() not in listed and not by_product:
            found.append(relative.as_posix())
    return found


def refuse_foreign(target: Path) -> None:
    """Raise RequestError unless `target` is absent or holds nothing but a package of ours."""
    if not os.path.lexists(target):
        return
    elsewhere = "choose another place with --out or --name, or move it away"
    if target.is_symlink() or not target.is_dir():
        raise RequestError(f"{target} exists and is not a folder of ours: left untouched", elsewhere)
    if not is_package(target):
        if not any(target.iterdir()):
            return
        raise RequestError(f"{target} exists and is not a tileproof package: left untouched", elsewhere)
    foreign = foreign_files(target)
    if foreign:
        shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
        raise RequestError(f"{target} holds files that codegen did not write: left untouched", shown, elsewhere)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclusive among processes that write packages into `folder`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ToolError(f"{folder} is locked by another writer for {LOCK_TIMEOUT_S:.0f} seconds") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _has_bytes(target: Path, files: Mapping[str, bytes]) -> bool:
    try:
        return all((target / path).read_bytes() == data for path, data in files.items())
    except OSError:
        return False


def _replace(target: Path, files: Mapping[str, bytes]) -> None:
    new, old = _beside(target, NEW), _beside(target, OLD)
    for path, data in files.items():
        _write(new / path, data)
    for folder in sorted({(new / path).parent for path in files} | {new}):
        _flush(folder)
    had_one = target.exists()
    if had_one:
        _rename(target, old)
    _rename(new, target)
    _flush(target.parent)
    if had_one:
        _discard(old)


def _discard(old: Path) -> None:
    """Delete a folder that is whole. Renamed first: a half-deleted folder must not look restorable."""
    dead = old.with_name(old.name.removesuffix(OLD) + DEAD)
    if dead.exists():
        _remove(dead)
    _rename(old, dead)
    _remove(dead)


def _beside(target: Path, suffix: str) -> Path:
    return target.parent / f".{target.name}{suffix}"


# The four functions below are every change that we make to a file system: tests kill the process at each call.


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _flush(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def _remove(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        raise TileproofError(f"{folder} is in the way and not a folder of ours: left untouched")
    shutil.rmtree(folder)
