"""Is a call that is about to be timed the right call? Sampled rows of its output against float64, under the bound.

A benchmark that times a wrong mask, a wrong scale or an unwritten output shows a wonderful figure. So every call, ours
and the peers', is heard once on the very tensors that are timed: some rows of two heads, the first rows (which see one
key, two keys, ... under a causal mask) and the last ones among them.

The bound is the probabilistic one of verify/bounds, which is far tighter than the worst case and holds for random
inputs such as these. On a GPU one arithmetic stands for all, because a peer's is not known: that of mma.sync, 16-bit
products summed in float32, weights rounded to 16 bits once, the output once. On a CPU ours has the same by its own
matrix unit, or float32 (float64) throughout, each multiplication and addition rounded. The peer there is torch, whose
source is known: it sums l from the weights before it rounds them, where our bf16 kernel divides by the sum of the
rounded ones, and its exp for 16 bits is a cubic (arithmetic.MODELS, "torch_16").
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
KEYS_PER_TILE = 128
ON_CPU = {"float32": "muladd_f32", "float64": "muladd_f64", "bf16": "amx_bf16"}
ON_GPU = "mma_sm80"
# torch on a CPU, whatever N is: flash_attention_kernel_impl in the source that arithmetic.py names.
TORCH_KEYS_PER_TILE = 512
TORCH_ON_CPU = {"float32": "torch_f32", "float64": "torch_f64", "bf16": "torch_16", "fp16": "torch_16"}


def model_of(dtype: str, device: str) -> arithmetic.ArithmeticModel:
    """The arithmetic that every call is allowed, on a CPU every call of ours. device: a torch device type."""
    return arithmetic.model(ON_CPU.get(dtype, ON_GPU) if device == "cpu" else ON_GPU, dtype)


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
    lse_bound: np.ndarray  # (rows,)


class Expected:
    """What O of one problem must be, on the sampled rows; the scale is 1/sqrt(d). One oracle run serves every call."""

    def __init__(
        self, q: Any, k: Any, v: Any, *, causal: bool, dtype: str, torch_on_cpu: bool = False, seed: int = 0
    ) -> None:
        """q (B,Hq,N,d), k, v (B,Hkv,N,..): torch tensors on any device, as they are timed.

        torch_on_cpu: for a call of torch's own kernel on a CPU, with the roundings that it makes and no others.
        """
        choose = random.Random(seed)
        batch, heads, n, d = q.shape
        self._shape = (batch, heads, n, v.shape[3])
        model, bc = model_of(dtype, q.device.type), KEYS_PER_TILE
        if torch_on_cpu:
            model, bc = arithmetic.model(TORCH_ON_CPU[dtype], dtype), TORCH_KEYS_PER_TILE
        self._heads = []
        for b, h in sorted({(choose.randrange(batch), choose.randrange(heads)) for _ in range(HEADS)}):
            rows = rows_of(n, choose)
            kv = h // (heads // k.shape[1])
            inputs = [plain(x) for x in (q[b, h, rows], k[b, kv], v[b, kv])]
            visible = np.arange(k.shape[2]) <= np.array(rows)[:, None] if causal else None
            want = float64.attention(*inputs, scale=d**-0.5, visible=visible)
            bound = bounds.forward(*inputs, scale=d**-0.5, visible=visible, model=model, bc=bc)
            assert bound.o_probabilistic is not None and bound.lse_probabilistic is not None
            self._heads.append(_Head(b, h, rows, want, bound.o_probabilistic, bound.lse_probabilistic))

    def difference(self, o: Any, lse: Any = None) -> str | None:
        """What is wrong with O (B,Hq,N,dv) and, where it is given, LSE (B,Hq,N), in one line.

        None when every sampled element is within its bound.
        """
        if tuple(o.shape) != self._shape:
            return f"the output has shape {tuple(o.shape)}, not {self._shape}"
        if lse is not None and tuple(lse.shape) != self._shape[:3]:
            return f"LSE has shape {tuple(lse.shape)}, not {self._shape[:3]}"
        found: tuple[float, str] | None = None
        for x in self._heads:
            pairs = [("", worst(plain(o[x.batch, x.head, x.rows]), x.want.o, x.bound, want_error=x.want.o_err))]
            if lse is not None:
                got = plain(lse[x.batch, x.head, x.rows])
                pairs.append(("LSE, ", worst(got, x.want.lse, x.lse_bound, want_error=x.want.lse_err)))
            for name, seen in pairs:
                if seen is not None and not seen.ratio <= 1 and (found is None or seen.ratio > found[0]):
                    where = f"{name}batch {x.batch}, head {x.head}, row {x.rows[seen.index[0]]}"
                    found = (seen.ratio, f"{where}: {seen.text()}")
        return None if found is None else found[1]


def plain(x: Any) -> np.ndarray:
    """A tensor as float64."""
    return np.asarray(x.double().cpu().numpy())
