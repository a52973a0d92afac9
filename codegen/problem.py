"""What is asked for: one frozen request, with every default filled in."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float32", "float64", "bf16", "fp16")
ITEMSIZE = {"float32": 4, "float64": 8, "bf16": 2, "fp16": 2}
HEAD_DIMS = tuple(range(8, 257, 8))

# The default targets and dtypes decide the bytes of a default package, so the set carries a version:
# a release that adds a target raises it, and packages made before say which set they meant.
DEFAULT_SET = 1
DEFAULT_ARCHS = ("cpu", "sm80")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One request. `sram_bytes` counts bytes; d and dv count elements.

    d: width of a query or key row; dv: width of a value row. dtypes and archs are sorted in the order
    of DTYPES and of devices.ARCHS. br and bc are None unless the user overrides the tile.
    """

    sram_bytes: int
    d: int
    dv: int
    dtypes: tuple[str, ...] = DTYPES
    archs: tuple[str, ...] = DEFAULT_ARCHS
    tiling: str = "paper"
    br: int | None = None
    bc: int | None = None
    # The debug form stores O in float32 (float64 for float64) and a trace of (m, l, O) per tile. Only
    # the judge compiles it; its package has its own name and digest.
    debug: bool = False
