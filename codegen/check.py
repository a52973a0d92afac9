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
    certified: bool  # whether a certificate for this digest is there


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
    certificate = folder / CERTIFICATE_FILE
    if certificate.exists():
        differences += _certificate_difference(certificate, digest)
    return Report(
        folder=folder, digest=digest, differences=tuple(differences), certified=certificate.exists() and not differences
    )


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
        raise CheckFailed("not what its request gives today", *stale, "regenerate it, or see git diff")
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


def _certificate_difference(certificate: Path, digest: str) -> list[str]:
    try:
        stated = json.loads(certificate.read_bytes())["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{CERTIFICATE_FILE}: not a certificate"]
    if stated != digest:
        return [f"{CERTIFICATE_FILE}: made for digest {str(stated)[:12]}, the package has {digest[:12]}"]
    return []
