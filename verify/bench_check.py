"""Is a call that is about to be timed the right call? Sampled rows of its output against float64, under the bound.

A benchmark that times a wrong mask, a wrong scale or an unwritten output shows a wonderful figure. So every call, ours
and the peers', is heard once on the very tensors that are timed: some rows of two heads, the first rows (which see one
key, two keys, ... under a causal mask) and the last ones among them.

The bound is the probabilistic one of verify/bounds, which is far tighter than the worst case and holds for random
inputs such as these. One arithmetic stands for all, because a peer's is not known: that of mma.sync, 16-bit products
summed in float32, weights rounded to 16 bits once, the output once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from verify import arithmetic, bounds
from verify.compare import worst
from verify.oracle import float64
from verify.oracle.reference import Reference

EDGE_ROWS, INNER_ROWS, HEADS = 3, 4, 2
ARITHMETIC, KEYS_PER_TILE = "mma_sm80", 128


def rows_of(n: int, choose: random.Random) -> list[int]:
    """The first and last EDGE_ROWS rows and INNER_ROWS others, ascending."""
    edges = {*range(min(EDGE_ROWS, n)), *range(max(0, n - EDGE_ROWS), n)}
    return sorted(edges | {choose.randrange(n) for _ in range(INNER_ROWS)})


@dataclass(frozen=True)
class _Head:
    batch: int
    head: int
    rows: list[int]
    want: Reference
    bound: np.ndarray  # (rows, dv)


class Expected:
    """What O of one problem must be, on the sampled rows; the scale is 1/sqrt(d). One oracle run serves every call."""

    def __init__(self, q: Any, k: Any, v: Any, *, causal: bool, dtype: str, seed: int = 0) -> None:
        """q (B,Hq,N,d), k, v (B,Hkv,N,..): torch tensors on any device, as they are timed."""
        choose = random.Random(seed)
        batch, heads, n, d = q.shape
        self._shape = (batch, heads, n, v.shape[3])
        model = arithmetic.model(ARITHMETIC, dtype)
        self._heads = []
        for b, h in sorted({(choose.randrange(batch), choose.randrange(heads)) for _ in range(HEADS)}):
            rows = rows_of(n, choose)
            kv = h // (heads // k.shape[1])
            inputs = [_plain(x) for x in (q[b, h, rows], k[b, kv], v[b, kv])]
            visible = np.arange(k.shape[2]) <= np.array(rows)[:, None] if causal else None
            want = float64.attention(*inputs, scale=d**-0.5, visible=visible)
            bound = bounds.forward(*inputs, scale=d**-0.5, visible=visible, model=model, bc=KEYS_PER_TILE)
            assert bound.o_probabilistic is not None
            self._heads.append(_Head(b, h, rows, want, bound.o_probabilistic))

    def difference(self, o: Any) -> str | None:
        """What is wrong with O (B,Hq,N,dv), in one line; None when every sampled element is within its bound."""
        if tuple(o.shape) != self._shape:
            return f"the output has shape {tuple(o.shape)}, not {self._shape}"
        found: tuple[float, str] | None = None
        for x in self._heads:
            seen = worst(_plain(o[x.batch, x.head, x.rows]), x.want.o, x.bound, want_error=x.want.o_err)
            if seen is not None and not seen.ratio <= 1 and (found is None or seen.ratio > found[0]):
                found = (seen.ratio, f"batch {x.batch}, head {x.head}, row {x.rows[seen.index[0]]}: {seen.text()}")
        return None if found is None else found[1]


def _plain(x: Any) -> np.ndarray:
    return np.asarray(x.double().cpu().numpy())
