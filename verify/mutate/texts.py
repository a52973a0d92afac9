"""A CUDA kernel as one text: its file with the headers that are parts of it in place of the lines that include them.

A mutant may be in any of those; the PTX wrappers and the C interfaces stay headers, and are not mutated.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from verify.emulator import build

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_SEPARATE = ("ptx_", "forward.h", "backward.h")


def parts(files: Mapping[str, bytes], path: str) -> list[str]:
    """The kernel's file and the headers of ours that it includes, directly or not, without the separate ones."""
    found = [path]
    for one in found:  # grows on the way
        for name in _INCLUDE.findall(files[one].decode()):
            part = f"csrc/{name}"
            if part in files and not name.startswith(_SEPARATE) and part not in found:
                found.append(part)
    return found


def flat(files: Mapping[str, bytes], path: str) -> str:
    """The kernel's file with those headers in place of the lines that include them, each once."""
    inside, seen = parts(files, path), set[str]()

    def opened(path: str) -> str:
        def put(line: re.Match[str]) -> str:
            part = f"csrc/{line[1]}"
            if part not in inside:
                return line[0]
            if part in seen:
                return ""
            seen.add(part)
            return opened(part)

        return _INCLUDE.sub(put, files[path].decode())

    return opened(path)


def written(files: Mapping[str, bytes]) -> Path:
    """A folder with the headers of `files`, in the cache of the emulator: for the includes that stay."""
    headers = {name.removeprefix("csrc/"): data for name, data in files.items() if name.endswith((".h", ".cuh"))}
    folder = build.cache() / "headers" / hashlib.sha256(repr(sorted(headers.items())).encode()).hexdigest()[:20]
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        for name, data in headers.items():
            (made / name).write_bytes(data)
        try:
            os.rename(made, folder)
        except OSError:  # another process was first
            for name in headers:
                (made / name).unlink()
            made.rmdir()
    return folder
