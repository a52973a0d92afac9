"""Small problems with an edge in every loop of a kernel, for guarded memory and for counts of traffic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Sizes, mask and layout of one call. `lengths`: keys of each batch entry, or None for all."""

    name: str
    nq: int
    nk: int
    b: int = 1
    hq: int = 1
    hkv: int = 1
    causal: str = "none"
    lengths: tuple[int, ...] | None = None
    layout: str = "contiguous"


def problems(br: int, bc: int) -> list[Problem]:
    """Shapes with an edge in every loop of a kernel with tiles of br rows and bc keys; small, as racecheck is slow."""
    return [
        Problem("one row, one key", 1, 1),
        Problem("whole tiles", br, 2 * bc),
        Problem("ragged, one row and one key more, GQA", br + 1, 2 * bc + 1, hq=4, hkv=2),
        Problem("three query tiles", 2 * br + 9, bc - 1, hq=2, hkv=1),
        Problem("causal, more keys than rows", br + 7, 2 * bc + 9, hq=2, hkv=2, causal="bottom_right"),
        Problem("causal, rows without a key", br + 23, min(bc, br) - 3, b=2, causal="bottom_right", layout="bnhd"),
        Problem("causal from the top left", br + 5, bc + 40, hq=2, hkv=1, causal="top_left", layout="padded"),
        Problem("key lengths", 9, 2 * bc + 3, b=4, hq=2, hkv=1, lengths=(0, bc + 2, 2 * bc + 3, 5), layout="padded"),
        Problem("key lengths, causal", br + 3, br + 3, b=2, causal="bottom_right", lengths=(br // 2 + 1, 1)),
        Problem("no keys", 5, 0, hq=2, hkv=2),
        Problem("strided", br + 2, bc + 2, b=2, hq=4, hkv=4, layout="bnhd"),
        Problem("few rows, many keys", 3, 512, hq=2, hkv=2),
    ]


# Every branch of a kernel once: ragged rows and keys, heads that share K and V, each mask in whole and cut tiles, rows
# without a key, key lengths of 0 and between, with and without a mask, no keys at all.
COVERING = (
    "ragged, one row and one key more, GQA", "causal, rows without a key", "key lengths", "key lengths, causal",
    "no keys",
)  # fmt: skip


def covering(br: int, bc: int) -> list[Problem]:
    """The problems of COVERING alone."""
    return [problem for problem in problems(br, bc) if problem.name in COVERING]
