"""Block-sparse FlashAttention: Algorithm 1 with every tile skipped whose entry of the block mask is 0.

Source: Dao et al., "FlashAttention" (arXiv:2205.14135), Algorithm 5 (line 8 is the test; the rest is Algorithm 1).
The block mask is one more mask of the language (`masks.Blocks`), so it combines with any other, and the backward pass
skips the same tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spec import flash1
from spec.head import Array, Gradients
from spec.masks import Blocks, Explicit, Mask


def forward(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    blocks: Array,
    br: int,
    bc: int,
    mask: Mask | Array | None = None,
    **arguments: Any,
) -> flash1.Flash1Output:
    """blocks: boolean (Tr, Tc), True = live. Other arguments as in `flash1.forward`."""
    return flash1.forward(q, k, v, br=br, bc=bc, mask=_sparse(blocks, br, bc, mask), **arguments)


def backward(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    o: npt.ArrayLike,
    m: npt.ArrayLike,
    l: npt.ArrayLike,
    do: npt.ArrayLike,
    *,
    blocks: Array,
    br: int,
    bc: int,
    mask: Mask | Array | None = None,
    **arguments: Any,
) -> Gradients:
    """Algorithm 4 over the live tiles. Arguments as in `forward` and `flash1.backward`."""
    return flash1.backward(q, k, v, o, m, l, do, br=br, bc=bc, mask=_sparse(blocks, br, bc, mask), **arguments)


def _sparse(blocks: Array, br: int, bc: int, mask: Mask | Array | None) -> Mask:
    live = Blocks(blocks, br, bc)
    if mask is None:
        return live
    return live & (Explicit(mask) if isinstance(mask, np.ndarray) else mask)
