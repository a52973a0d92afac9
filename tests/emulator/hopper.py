"""What the tests of the emulated sm_90a primitives share: building their kernels, bf16, the rendered PTX headers.

Inputs are small integers and powers of two, chosen so that every sum in the kernel is exact: results are compared bit
for bit, whatever the order of accumulation.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from codegen import render
from verify import packages
from verify.emulator import build
from verify.emulator.emulator import Emulator

KERNELS = Path(__file__).parent / "kernels"
NAMES = tuple(sorted(path.stem for path in KERNELS.glob("hopper_*.cu")))
_PRODUCT = re.compile(r"\bwgmma_m64n(\d+|##N##)k16_(bf16|f16)_(ss|rs)\b")
_EXPANDED = re.compile(r"^HOPPER_PRODUCTS\((\d+)\)", re.MULTILINE)


def products(text: str) -> list[SimpleNamespace]:
    """The wgmma wrappers that a kernel's text calls, as the template of the PTX header wants them."""
    widths = _EXPANDED.findall(text)
    found = {
        (int(n), dtype, form)
        for width, dtype, form in _PRODUCT.findall(text)
        for n in (widths if width == "##N##" else [width])
    }
    return [SimpleNamespace(n=n, dtype=dtype, form=form) for n, dtype, form in sorted(found)]


@lru_cache(maxsize=1)
def headers() -> Path:
    """A folder with the PTX headers as they are emitted, with every wgmma wrapper that the kernels here call."""
    text = "".join(path.read_text() for path in sorted(KERNELS.glob("hopper_*.cu")))
    folder = packages.cache().parent / "emulator" / "hopper_headers"
    folder.mkdir(parents=True, exist_ok=True)
    for name, context in (("sm80/ptx_sm80.cuh", {}), ("sm90a/ptx_sm90a.cuh.j2", {"wgmma": products(text)})):
        path = folder / Path(name).name.removesuffix(".j2")
        content = render.render(name, context)
        if not path.exists() or path.read_bytes() != content:
            made = path.with_name(f".{path.name}.{os.getpid()}")
            made.write_bytes(content)
            made.replace(path)  # another process may be compiling with it
    return folder


@lru_cache(maxsize=len(NAMES))
def library(name: str):
    return build.library(KERNELS / f"{name}.cu", includes=[headers()])


def emulator(name: str) -> Emulator:
    return Emulator(library(name))


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 values rounded to nearest even, as uint16. No NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)
