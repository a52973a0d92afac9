"""Which kernels a measured figure belongs to: hashes of their code that say nothing of comments and of other kernels.

A figure made on a GPU stays true as long as the code of its kernels does. A package's digest changes with every byte
of it; these hashes change with the kernels' files and with those functions of the PTX headers that the files call.

    stated = of(folder)                                # when the figure is made: {"csrc/forward_sm80.cu": "9f..", ...}
    assert of(folder, among=stated) == stated          # whether it is one of today's kernels
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from verify import packages

_FUNCTION = re.compile(r"(?:template\s*<[^>]*>\s*)?__device__\s+__forceinline__\s[^;{}]*?(\w+)\([^{};]*\)\s*\{")


def of(folder: Path, among: Collection[str] | None = None) -> dict[str, str]:
    """Path below the package -> hash, of every CUDA file, or of those of `among` that the package has."""
    listed = [path for path in packages.plan(folder)["files"] if path.endswith((".cu", ".cuh"))]
    texts = {path: (folder / path).read_text() for path in listed if among is None or path in among}
    callers = " ".join(text for path, text in texts.items() if not _is_ptx(path))
    return {path: code_hash(called(text, callers) if _is_ptx(path) else text) for path, text in texts.items()}


def called(header: str, callers: str) -> str:
    """A header of device functions without those that neither `callers` nor a function that stays names."""
    functions = [(found[1], found.start(), _end(header, found.end())) for found in _FUNCTION.finditer(header)]
    kept: set[int] = set()
    waiting = [callers]
    while waiting:
        words = set(re.findall(r"\w+", waiting.pop()))
        for at, (name, start, end) in enumerate(functions):
            if name in words and at not in kept:
                kept.add(at)
                waiting.append(header[start:end])
    pieces, last = [], 0
    for at, (_, start, end) in enumerate(functions):
        if at not in kept:
            pieces.append(header[last:start])
            last = end
    return "".join([*pieces, header[last:]])


def code_hash(text: str) -> str:
    """SHA-256 of C++ text without its comments, every run of white space counted as one space."""
    strings = r'"(?:\\.|[^"\\\n])*"'
    code = re.sub(rf"//[^\n]*|/\*.*?\*/|({strings})", lambda found: found[1] or " ", text, flags=re.DOTALL)
    return hashlib.sha256(" ".join(code.split()).encode()).hexdigest()


def _is_ptx(path: str) -> bool:
    return path.rsplit("/", 1)[-1].startswith("ptx_")


def _end(text: str, start: int) -> int:
    """Where the block ends whose opening brace stands right before `start`."""
    depth = 1
    for found in re.finditer(r"[{}]", text[start:]):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return start + found.end()
    raise ValueError("a brace of a header is never closed")
