"""The packages that a GPU session certifies, watches and times, by what their shape is there for.

Other judges take their examples from here: the bytes of `verify io`, the GPU tests, the hashes of measured kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verify import packages

DTYPES = ("bf16", "fp16")
_CUDA: dict[str, Any] = {"dtypes": DTYPES, "archs": ("sm80",)}

# The request of each certified package. Names say what the shape is there for.
PACKAGES: dict[str, dict[str, Any]] = {
    "the default command's": {"sram": "192KB", "d": 128},
    "the paper's tile at d=64": {"sram": "192KB", "d": 64, **_CUDA},
    "fast tile at d=128": {"sram": "163KB", "d": 128, "br": 128, "bc": 64, **_CUDA},
    "fast tile at d=64": {"sram": "163KB", "d": 64, "br": 128, "bc": 128, **_CUDA},
    "d no multiple of 16, Br=32, Bc=16": {"sram": "163KB", "d": 24, "br": 32, "bc": 16, **_CUDA},
    "smallest rows of d=16, Br=32, Bc=16": {"sram": "163KB", "d": 16, "br": 32, "bc": 16, **_CUDA},
    "more keys than rows": {"sram": "163KB", "d": 64, "br": 32, "bc": 128, **_CUDA},
    "d=72, one warp": {"sram": "64KB", "d": 72, "br": 16, "bc": 48, **_CUDA},
    "d=80": {"sram": "192KB", "d": 80, **_CUDA},
    "widest": {"sram": "192KB", "d": 256, **_CUDA},
    "dv smaller than d": {"sram": "192KB", "d": 192, "dv": 128, **_CUDA},
    "dv larger than d, neither a multiple of 16": {"sram": "192KB", "d": 40, "dv": 136, **_CUDA},
    "narrowest": {"sram": "163KB", "d": 8, "dv": 8, **_CUDA},
}
# Packages with kernels for sm_90a alone: the paper's tiles, what was measured, and tiles that leave no room for two
# buffers. Their sm_80 kernels are judged beside them.
_HOPPER: dict[str, Any] = {"sram": "227KB", "dtypes": DTYPES, "archs": ("sm90a",), "backward": False}
HOPPER: dict[str, dict[str, Any]] = {
    f"sm90a, d={d}" + (f", dv={dv}" if d != dv else "") + (", tuned" if tiling == "tuned" else ""): {
        **_HOPPER, "d": d, "dv": dv, "tiling": tiling,
    }
    for tiling, widths in (
        ("paper", (*((d, d) for d in (32, 64, 80, 96, 128, 192, 256)), (192, 128))),
        ("tuned", ((64, 64), (128, 128), (256, 256), (192, 128))),
    )
    for d, dv in widths
} | {
    "sm90a, d=128, one buffer of V": {**_HOPPER, "sram": "48KB", "d": 128},
    "sm90a, d=192, one buffer of V": {**_HOPPER, "d": 192, "br": 128, "bc": 128},
    "sm90a, d=256, one buffer of V": {**_HOPPER, "d": 256, "br": 128, "bc": 96},
    "sm90a, d=64, dv=128, one buffer of K and of V": {**_HOPPER, "sram": "16KB", "d": 64, "dv": 128},
}  # fmt: skip
# Packages whose gradients are certified, a few cases each: hearing them takes longer.
BACKWARD: dict[str, dict[str, Any]] = {
    f"gradients, d={d}": {"sram": "163KB", "d": d, **_CUDA} for d in (32, 64, 80, 96, 128, 192, 256)
} | {
    f"gradients, d={d}, dv={dv}": {"sram": "163KB", "d": d, "dv": dv, **_CUDA}
    for d, dv in ((120, 96), (192, 128), (40, 136), (32, 192))
}  # fmt: skip

# Packages whose every kernel runs under the four tools: the default, a shape that once hid a barrier fault elsewhere
# (d=192, dv=128), widths beside the granule, one warp, many warps, the debug form.
SANITIZED = (
    "the default command's", "fast tile at d=64", "d no multiple of 16, Br=32, Bc=16", "d=72, one warp", "widest",
    "dv smaller than d", "dv larger than d, neither a multiple of 16",
)  # fmt: skip
# And on sm_90a: P in shared memory with three consumers that skip key tiles, in registers with a lazy rescale, one
# consumer, panels of 16 columns and unequal widths, rings of one buffer.
SANITIZED_HOPPER: tuple[dict[str, Any], ...] = tuple(
    {"sram": "227KB", "dtypes": ("bf16",), "archs": ("sm90a",), "backward": False, **words}
    for words in (
        {"d": 128, "br": 192, "bc": 128}, {"d": 256, "br": 128, "bc": 80}, {"d": 64, "br": 64, "bc": 64},
        {"d": 72, "dv": 40, "br": 128, "bc": 64}, {"d": 64, "dv": 128, "sram": "16KB"},
    )
)  # fmt: skip
DEBUG: dict[str, Any] = {"sram": "163KB", "d": 64, "br": 64, "bc": 32, "debug": True, **_CUDA}

# Tiles to choose the fastest of, by d.
SPEED_BUDGET = "163KB"
SPEED_TILES = {
    64: ((128, 128), (128, 96), (64, 256)),
    128: ((128, 64), (64, 128), (128, 128), (128, 192)),
}


def request(words: dict[str, Any]) -> Path:
    """The folder of a package of the tables above."""
    return packages.emit(**words)


def tile_request(d: int, tile: tuple[int, int]) -> dict[str, Any]:
    """The request of one of SPEED_TILES."""
    return {"sram": SPEED_BUDGET, "d": d, "br": tile[0], "bc": tile[1], **_CUDA}


def sanitized() -> list[Path]:
    """The packages that go through the sanitizers."""
    return [request(words) for words in (*(PACKAGES[name] for name in SANITIZED), DEBUG)]
