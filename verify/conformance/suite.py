"""All cases by topic, the headers their probes include, and the recorded vectors.

A topic is one module of cases and one file `ptx_<topic>.npz` of recorded outputs; `ptx_vectors.json` says on which
machine they were recorded and to which inputs each belongs.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from codegen import render
from codegen.errors import RequestError
from verify import packages
from verify.conformance import barriers, copies, tensors, warp, wgmma
from verify.conformance.case import Array, Case

PROBES = Path(__file__).resolve().parents[1] / "probes" / "primitives"
RECORD = "ptx_vectors.json"
TOPICS: dict[str, Callable[[], list[Case]]] = {
    "warp": warp.cases,
    "copies": copies.cases,
    "barriers": barriers.cases,
    "tensors": tensors.cases,
    "wgmma": wgmma.cases,
}
# The header of sm_90a has the wgmma wrappers that a kernel asks for; the probes ask for all.
_PRODUCTS = [
    {"n": n, "form": form, "dtype": dtype}
    for n in range(8, 257, 8) for dtype in ("bf16", "f16") for form in ("ss", "rs")
]  # fmt: skip
_HEADERS = {"ptx_sm80.cuh": "sm80/ptx_sm80.cuh", "ptx_sm90a.cuh": "sm90a/ptx_sm90a.cuh.j2"}


@lru_cache(maxsize=1)
def headers() -> dict[str, bytes]:
    """The PTX headers as the probes include them: with every wrapper that there can be."""
    return {name: render.render(template, {"wgmma": _PRODUCTS}) for name, template in _HEADERS.items()}


def include_folder() -> Path:
    """A folder with the headers, made by one rename: for `nvcc -I` and for the emulator's build."""
    digest = hashlib.sha256(b"\0".join(headers().values())).hexdigest()[:16]
    folder = packages.cache().parent / "probes" / f"ptx-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            made = Path(work) / "include"
            made.mkdir()
            for name, text in headers().items():
                (made / name).write_bytes(text)
            try:
                os.rename(made, folder)
            except OSError:
                if not folder.exists():  # else another process was first
                    raise
    return folder


def key(case: Case, output: str) -> str:
    """The name of a recorded array."""
    return f"{case.name}.{output}"


def write(folder: Path, topic: str, results: Mapping[str, Array]) -> Path:
    """Store the outputs of a topic's cases, by `key`."""
    path = folder / f"ptx_{topic}.npz"
    with path.open("wb") as file:
        np.savez_compressed(file, **results)  # type: ignore[arg-type]
    return path


def record(folder: Path) -> dict[str, Any]:
    """Where and when the vectors in `folder` were recorded, and the digest of each case's inputs.

    Raises: RequestError when there are none.
    """
    try:
        return dict(json.loads((folder / RECORD).read_text()))
    except OSError as error:
        raise RequestError(f"{folder} has no recorded vectors", "python -m verify.record --out tests/data") from error


def vectors(folder: Path, topic: str) -> dict[str, Array]:
    """The recorded outputs of a topic's cases, by `key`."""
    with np.load(folder / f"ptx_{topic}.npz") as stored:
        return {name: stored[name] for name in stored.files}
