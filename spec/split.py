"""Split-KV attention (Flash-Decoding): FlashAttention-2 on disjoint key ranges, then one merge.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023). Masks, bias and dropout see the
absolute key position, so the result does not depend on the split in exact arithmetic.

An LSE is a float and holds ln l only to within u |LSE|: at scores of size X the merge weighs the parts with a relative
error of about u X, where one pass has none. `merge.merge_states` merges (m, l, U) and does not have it.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from spec import flash2
from spec.errors import TileError
from spec.head import Output
from spec.merge import merge_all


def key_ranges(nk: int, parts: int) -> list[tuple[int, int]]:
    """`parts` consecutive ranges of ceil(Nk / parts) keys; the last ones may be short or empty."""
    if parts < 1:
        raise TileError(f"{parts} parts: want at least 1")
    size = -(-nk // parts)
    return [(min(p * size, nk), min((p + 1) * size, nk)) for p in range(parts)]


def forward(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, *, parts: int, br: int, bc: int, **arguments: Any
) -> Output:
    """Attention as the merge of `parts` partial results. Other arguments as in `flash2.forward`.

    The partial outputs are not rounded: a `rounding.o` is applied once, to the merged output.
    """
    rounding = arguments.pop("rounding", None)
    unrounded = None if rounding is None else type(rounding)(inputs=rounding.inputs, p=rounding.p)
    ranges = key_ranges(len(k), parts)  # type: ignore[arg-type]
    whole = merge_all(
        flash2.forward(q, k, v, br=br, bc=bc, keys=keys, rounding=unrounded, **arguments) for keys in ranges
    )
    return whole if rounding is None else Output(rounding.of_o(whole.o), whole.lse)
