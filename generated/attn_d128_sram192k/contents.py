# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 26b24bc2d205c3ea
"""What the package consists of, and how it becomes a wheel. Needs neither torch nor any other package.

Also the PEP 517 backend of pyproject.toml: `pip install <this folder>` packs these files and compiles nothing, so it
has no build requirements.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

NAME = "attn_d128_sram192k"
VERSION = "0.1.0+d9c2beaadbf93"
REQUIRES_PYTHON = ">=3.10"
REQUIRES = ("torch>=2.10", "filelock>=3.12")
FOLDER = Path(__file__).resolve().parent
# Compiled libraries, in wheels that carry them: lib/<device>.so beside lib/<device>.json, which says what for.
LIBRARY_FOLDER = "lib"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # every entry of a wheel: equal content gives equal bytes


def files() -> list[Path]:
    """The files that the package is made of, sorted, without compiled libraries."""
    found = [p for pattern in ("*.py", "*.json", "csrc/*") for p in FOLDER.glob(pattern)]
    return sorted(p for p in found if p.is_file() and not p.name.startswith("."))


def fingerprint() -> str:
    """sha256 (hex) over what decides behaviour: every file but the certificate. Times of files play no part."""
    h = hashlib.sha256()
    for file in files():
        if file.name != "certificate.json":
            data = file.read_bytes()
            h.update(f"{file.relative_to(FOLDER).as_posix()}\0{len(data)}\0".encode())
            h.update(data)
    return h.hexdigest()


def write_wheel(out: Path, extra: Iterable[tuple[str, bytes]] = (), tag: str = "py3-none-any") -> Path:
    """Write a wheel of the package to the folder `out`; returns its path.

    extra: more files, as paths relative to the package. tag: Python, ABI and platform of the wheel.
    """
    info = f"{NAME}-{VERSION}.dist-info"
    entries = [(f"{NAME}/{p.relative_to(FOLDER).as_posix()}", p.read_bytes()) for p in files()]
    entries += [(f"{NAME}/{path}", data) for path, data in extra]
    pure = "true" if tag.endswith("-any") else "false"
    entries += [
        (f"{info}/METADATA", _metadata().encode()),
        (f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: {pure}\nTag: {tag}\n".encode()),
    ]
    record = "".join(f"{path},sha256={_record_hash(data)},{len(data)}\n" for path, data in entries)
    entries.append((f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode()))
    wheel = out / f"{NAME}-{VERSION}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in entries:
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return wheel


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    """PEP 517 hook: a wheel of the sources."""
    return write_wheel(Path(wheel_directory)).name


def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
    """PEP 517 hook: the folder as it is, plus PKG-INFO."""
    base = f"{NAME}-{VERSION}"
    entries = [(p.relative_to(FOLDER).as_posix(), p.read_bytes()) for p in [*files(), FOLDER / "pyproject.toml"]]
    with tarfile.open(Path(sdist_directory) / f"{base}.tar.gz", "w:gz") as archive:
        for path, data in [*entries, ("PKG-INFO", _metadata().encode())]:
            entry = tarfile.TarInfo(f"{base}/{path}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return f"{base}.tar.gz"


def _metadata() -> str:
    requires = "".join(f"Requires-Dist: {one}\n" for one in REQUIRES)
    return (
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
        "Summary: Exact attention kernels for d=128, dv=128\n"
        f"Requires-Python: {REQUIRES_PYTHON}\n{requires}"
    )


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
