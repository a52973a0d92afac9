"""`--check`: is a package on disk exactly what its request gives today?

Compares bytes with a regeneration in memory. certificate.json is the judge's: its figures are not compared, but a
certificate that was made for other content fails.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from . import emit
from .errors import CheckFailed, RequestError
from .names import check_name, package_name, parse
from .package import CERTIFICATE_FILE, PLAN_FILE, read_plan, render_package
from .problem import Problem, from_dict


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one package on disk differs in: one line per difference, none when it is fresh."""

    folder: Path
    digest: str  # of the regeneration; empty when there is none
    differences: tuple[str, ...]
    certified: bool  # whether a certificate for this digest is there and says of each device that its bounds held


def check_package(folder: Path, problem: Problem | None = None) -> Report:
    """Compare one package with the regeneration of `problem`, or of the request in its own plan.json."""
    if not folder.is_dir():
        return Report(folder=folder, digest="", differences=("missing",), certified=False)
    try:
        stated = read_plan((folder / PLAN_FILE).read_bytes())
        want = render_package(problem or from_dict(stated["request"]), folder.name)
    except OSError as e:
        return Report(folder=folder, digest="", differences=(f"{PLAN_FILE}: {e.strerror}",), certified=False)
    except RequestError as e:
        return Report(folder=folder, digest="", differences=(f"{PLAN_FILE}: {e}",), certified=False)
    digest = read_plan(want[PLAN_FILE])["digest"]
    differences = [line for path, data in want.items() if (line := _difference(folder / path, path, data))]
    differences += [f"{path}: not part of the package" for path in emit.foreign_files(folder) if path not in want]
    stale = [path for path in stated["files"] if path not in want and (folder / path).exists()]
    differences += [f"{path}: no longer part of the package" for path in stale]
    certificate, holds = folder / CERTIFICATE_FILE, False
    if certificate.exists():
        found, holds = _certificate(certificate, digest)
        differences += found
    return Report(folder=folder, digest=digest, differences=tuple(differences), certified=holds and not differences)


def check(out: Path, problem: Problem | None = None, name: str | None = None) -> list[Report]:
    """Check under `out` the package called `name`, else that of `problem`, else every package there.

    Raises: CheckFailed when a difference is found, with each difference as a hint; also when there is
        nothing to check, because a check of nothing proves nothing.
    """
    if out.is_dir() and emit.has_leftovers(out):
        with emit.locked(out):
            emit.restore(out)
    if name is not None:
        folders = [out / check_name(name)]
    elif problem is not None:
        folders = [out / package_name(problem)]
    else:
        folders = sorted(p for p in out.iterdir() if _claims_to_be_ours(p)) if out.is_dir() else []
        if not folders:
            raise CheckFailed(f"no tileproof package under {out}", "name one with --sram and --d, or another --out")
    reports = [check_package(folder, problem) for folder in folders]
    stale = [
        f"{r.folder}: missing" if line == "missing" else f"{r.folder}/{line}" for r in reports for line in r.differences
    ]
    if stale:
        # The command never overwrites a folder that it cannot read as a package.
        unreadable = any(not r.digest and r.folder.is_dir() for r in reports)
        remedy = "move it away and emit it again" if unreadable else "regenerate it"
        raise CheckFailed("not what its request gives today", *stale, f"{remedy}, or see git diff")
    return reports


def _claims_to_be_ours(folder: Path) -> bool:
    """By its plan or by its name: a package whose plan.json was damaged must not drop out of the check."""
    if not folder.is_dir() or folder.name.startswith("."):
        return False
    try:
        parse(folder.name)
    except RequestError:
        return emit.is_package(folder)
    return True


def _difference(path: Path, relative: str, want: bytes) -> str | None:
    try:
        got = path.read_bytes()
    except OSError as e:
        return f"{relative}: {(e.strerror or str(e)).lower()}"
    if got == want:
        return None
    for number, (mine, theirs) in enumerate(zip(want.splitlines(), got.splitlines(), strict=False), 1):
        if mine != theirs:
            return f"{relative}:{number}: differs"
    return f"{relative}: has {len(got)} bytes instead of {len(want)}"


def _certificate(file: Path, digest: str) -> tuple[list[str], bool]:
    """How a certificate differs from one for `digest`, and whether it says that the bounds held on every device."""
    try:
        stated = json.loads(file.read_bytes())
        made_for, devices = stated["digest"], stated["devices"]
        holds = bool(devices) and all(device["holds"] is True for device in devices.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [f"{CERTIFICATE_FILE}: not a certificate"], False
    if made_for != digest:
        return [f"{CERTIFICATE_FILE}: made for digest {str(made_for)[:12]}, the package has {digest[:12]}"], False
    return [], holds
