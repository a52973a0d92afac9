"""The cases that a certificate is made of: every input family on shapes that straddle the tiles of every path.

    for case in cases("bf16", d=128, dv=128, tiles=[(128, 96)], count=PER_DTYPE, seed=0): ...

Shapes and families are dealt like two packs of cards of different length, so that over the suite every family meets
many shapes, masks, head groupings and layouts; and so are the gradients of the output, which of dQ, dK and dV are
wanted, and the layouts of dO. The special-value table comes last. Equal arguments give equal cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from verify import output_gradients, special_backward
from verify.cases import DO_LAYOUTS, Case
from verify.inputs import FAMILIES, Family

PER_DTYPE = 60
MOST_KEYS, MOST_ROWS = 300, 200
# Families whose mask no kernel of today takes: the reference has them (`fuzz --spec`).
WITHOUT_KERNEL = ("random_mask", "all_masked_row", "first_tile_masked")
# Families that show nothing unless there are many keys.
LONG = {"drift": 1100, "equal_weights_at_a_midpoint": 700}
# What is dealt to the cases beside: mostly all three gradients.
WANTED = (
    *(5 * ((True, True, True),)),
    *((True, False, False), (False, True, False), (False, False, True)),
    *((False, True, True), (True, False, True), (True, True, False)),
)
PACKED_BY_MASK = ("causal_bottom_right", "causal_top_left")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes, mask and layout of one case. `lengths` are fractions of Nk, one per batch element."""

    b: int = 1
    hq: int = 1
    hkv: int = 1
    nq: int
    nk: int
    causal: str = "none"
    lengths: tuple[float, ...] | None = None
    layout: str = "contiguous"


def shapes(tiles: Sequence[tuple[int, int]]) -> list[Shape]:
    """What is dealt to the families. `tiles` are the (br, bc) of all paths: each has its edges among the lengths.

    Every shape has at least 8 rows over its heads: that many go through mpmath.
    """
    found: list[Shape] = [
        Shape(nq=1, nk=1, b=2, hq=4, hkv=2),
        Shape(nq=20, nk=20, causal="bottom_right", hq=2, hkv=1),
        Shape(nq=24, nk=5, causal="bottom_right"),
        Shape(nq=5, nk=24, causal="bottom_right", layout="bnhd", hq=4, hkv=2),
        Shape(nq=5, nk=24, causal="top_left", hq=2),
        Shape(nq=3, nk=40, b=2, hq=6, hkv=2, lengths=(1.0, 0.4), layout="padded"),
        Shape(nq=1, nk=97, hq=8, hkv=1),
        Shape(nq=7, nk=130, b=3, lengths=(0.0, 0.51, 1.0), layout="offset"),
        Shape(nq=50, nk=70, causal="top_left", b=2, lengths=(0.7, 0.2)),
        Shape(nq=70, nk=50, causal="bottom_right", b=2, lengths=(0.3, 1.0), layout="bnhd"),
        Shape(nq=2, nk=3, b=2, hq=3, hkv=3, layout="offset"),
    ]
    for br, bc in dict.fromkeys(tiles):
        rows, keys = min(br, MOST_ROWS - 1), min(bc, MOST_KEYS - 1)
        found += [
            Shape(nq=rows, nk=keys),
            Shape(nq=rows + 1, nk=min(2 * bc + 1, MOST_KEYS), causal="bottom_right"),
            Shape(nq=9, nk=keys - 1, hq=2, hkv=2, layout="padded"),
            Shape(nq=33, nk=keys + 1, hq=2, hkv=1, layout="bnhd"),
            Shape(nq=max(1, rows - 1), nk=max(1, rows - 1), causal="top_left"),
            Shape(nq=17, nk=min(3 * bc - 1, MOST_KEYS), causal="bottom_right", hq=2),
        ]
    return found


def cases(
    dtype: str, *, d: int, dv: int, tiles: Sequence[tuple[int, int]], count: int = PER_DTYPE, seed: int = 0
) -> list[Case]:
    """`count` cases of one dtype for kernels of width d, dv and these tiles; the special-value table is among them."""
    table = list(special_backward.table(dtype, d=d, dv=dv, bc=min(tiles[0][1], MOST_KEYS), seed=seed))
    ordinary = max(0, count - len(table))
    families = [f for name, f in FAMILIES.items() if name not in (*WITHOUT_KERNEL, *PACKED_BY_MASK)]
    pack = shapes(tiles)
    # A stride that shares no factor with the pack's size visits every shape before one comes again.
    stride = next(n for n in range(7, 7 + len(pack)) if np.gcd(n, len(pack)) == 1)
    found = []
    for i in range(ordinary):
        family, shape = families[i % len(families)], pack[(i * stride) % len(pack)]
        made = case(family, shape, f"{family.name}/{dtype}/{i}", dtype=dtype, d=d, dv=dv, seed=seed + i)
        found.append(with_gradient(made, i, seed))
    return [*found, *islice(table, count - ordinary)]


def with_gradient(case: Case, turn: int, seed: int) -> Case:
    """`case` with the gradient, the wanted ones and the layout of dO that are dealt in this turn.

    The family whose errors are shown beside those of the plain formula gets N(0, 1) for dO too, and wants all three.
    """
    names, kinds, compared = tuple(output_gradients.GRADIENTS), output_gradients.DLSE, case.family == "gaussian"
    return output_gradients.attach(
        case,
        names[0 if compared else turn % len(names)],
        dlse=kinds[turn % len(kinds)] if turn % 3 == 0 else kinds[turn % 2],
        layout=DO_LAYOUTS[turn % len(DO_LAYOUTS)],
        wanted=WANTED[0 if compared else turn % len(WANTED)],
        seed=seed + turn,
    )


def case(family: Family, shape: Shape, name: str, *, dtype: str, d: int, dv: int, seed: int) -> Case:
    """One family on one shape: each K/V head from a seed of its own, and the queries of its group with it."""
    nk = max(shape.nk, LONG.get(family.name, 0))
    group = shape.hq // shape.hkv
    heads = [
        [family(shape.nq, nk, d, dv, dtype=dtype, seed=seed + 1000 * (b * shape.hq + h)) for h in range(shape.hq)]
        for b in range(shape.b)
    ]
    own = [[row[h * group] for h in range(shape.hkv)] for row in heads]  # whose K and V a group shares
    lengths = None if shape.lengths is None else tuple(round(x * nk) for x in shape.lengths)
    if family.name == "poisoned_padding":
        lengths = tuple(one[0].length or 0 for one in own)

    def stack(which: str, of: Sequence[Sequence[object]]) -> np.ndarray:
        return np.nan_to_num(np.stack([np.stack([getattr(x, which) for x in row]) for row in of]), nan=0.0)

    return Case(
        name=name,
        family=family.name,
        dtype=dtype,
        q=stack("q", heads),
        k=stack("k", own),
        v=stack("v", own),
        scale=heads[0][0].scale,
        causal=shape.causal,
        key_lengths=lengths,
        layout=shape.layout,
        seed=seed,
    )


def smallest(dtype: str, *, d: int, dv: int) -> Case:
    """The least problem there is: to ask a package which paths it has."""
    return case(FAMILIES["gaussian"], Shape(nq=1, nk=1), "one_key", dtype=dtype, d=d, dv=dv, seed=0)
