"""Is a backward pass that is about to be timed the right one? Sampled gradients against float64, under the bound.

As bench_check.py for outputs: dQ of some rows of a head, dK and dV of some keys, the first and the last among them, on
the very tensors that are timed. Stage-wise: the reference takes the O and LSE that the pass itself read, so any
implementation can be held to it, and a row or a key costs N dot products, not N^2. What was read is checked first: O
and LSE of the forward pass against float64 (bench_check.Expected).

The arithmetic is the one that bench_check allows, with P and dS rounded as operands once and the gradients once. Where
query heads share a key, each may store its dK and dV, to be added and rounded once more: most peers do it that way.
torch's CPU kernel keeps its gradients in their own type and rounds them after every block of rows and keys: a peer's
`Blocks` say how many, and its bound has a rounding for each. Ours has no such allowance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verify.bench_check import KEYS_PER_TILE, TORCH_KEYS_PER_TILE, model_of, plain, rows_of
from verify.bounds.backward_model import BackwardModel, backward_model
from verify.bounds.backward_output import backward
from verify.cases import GRADIENTS
from verify.compare import worst
from verify.formats import FORMATS
from verify.oracle import backward_float64


@dataclass
class _Want:
    """A gradient at the sampled rows or keys, and how far a right one can be from it."""

    value: np.ndarray
    bound: np.ndarray


@dataclass(frozen=True)
class Blocks:
    """After how many rows dK and dV, and after how many keys dQ, are rounded to their own type and added to again."""

    rows: int
    keys: int

    @staticmethod
    def of_torch_cpu(n: int) -> Blocks:
        """Source: pytorch, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention_backward."""
        return Blocks(rows=256 if n >= 768 else 64 if n >= 192 else 32, keys=TORCH_KEYS_PER_TILE)


def difference(
    q: Any, k: Any, v: Any, do: Any, o: Any, lse: Any, got: Sequence[Any],
    *, causal: bool, dtype: str, blocks: Blocks | None = None, seed: int = 0,
) -> str | None:  # fmt: skip
    """What is wrong with the gradients `got`, in one line; None when every sampled element is within its bound.

    Args:
        q, do, o (B,Hq,N,..), k, v (B,Hkv,N,..), lse (B,Hq,N): torch tensors on any device; o and lse as the pass read
            them. The scale is 1/sqrt(d).
        got: dq, dk, dv, as the inputs.
        blocks: for a peer that rounds its gradients in between.
    """
    for name, x, of in zip(GRADIENTS, got, (q, k, v), strict=True):
        if x is None or tuple(x.shape) != tuple(of.shape):
            return f"{name} has shape {None if x is None else tuple(x.shape)}, not {tuple(of.shape)}"
    choose, model = random.Random(seed), backward_model(model_of(dtype, q.device.type))
    batch, heads, n, _ = q.shape
    group = heads // k.shape[1]
    found: list[tuple[float, str]] = []

    def compare(where: str, at: list[int], got: Any, want: _Want) -> None:
        seen = worst(plain(got), want.value, want.bound)
        if seen is not None and not seen.ratio <= 1:
            found.append((seen.ratio, f"{where} {at[seen.index[0]]}: {seen.text()}"))

    b, h = choose.randrange(batch), choose.randrange(heads)
    kv, sampled, every = h // group, rows_of(n, choose), list(range(n))
    keys, values = plain(k[b, kv]), plain(v[b, kv])
    rows = [plain(x[b, h, sampled]) for x in (q, do, o, lse)]
    parts = [
        _gradients(rows, keys[at], values[at], sampled, every[at], causal, model)
        for at in _slices(n, blocks.keys if blocks else n)
    ]
    dq = _accumulated([of["dq"] for of in parts], model)
    compare(f"dq, batch {b}, head {h}, row", sampled, got[0][b, h, sampled], dq)

    each = []
    for g in range(kv * group, (kv + 1) * group):
        rows = [plain(x[b, g]) for x in (q, do, o, lse)]
        parts = [
            _gradients([x[at] for x in rows], keys[sampled], values[sampled], every[at], sampled, causal, model)
            for at in _slices(n, blocks.rows if blocks else n)
        ]
        each.append({name: _accumulated([of[name] for of in parts], model) for name in ("dk", "dv")})
    for name, x in (("dk", got[1]), ("dv", got[2])):
        where = f"{name}, batch {b}, K/V head {kv}, key"
        compare(where, sampled, x[b, kv, sampled], _added([of[name] for of in each], model))
    return max(found)[1] if found else None


def _gradients(
    rows: Sequence[np.ndarray],
    k: np.ndarray,
    v: np.ndarray,
    row_numbers: Sequence[int],
    key_numbers: Sequence[int],
    causal: bool,
    model: BackwardModel,
) -> dict[str, _Want]:
    """Gradients of one query head by some of its rows (q, do, o, lse) and some keys, as if there were no others."""
    q, do, *given = rows
    visible = np.array(key_numbers)[None] <= np.array(row_numbers)[:, None] if causal else None
    words: dict[str, Any] = {"scale": q.shape[1] ** -0.5, "visible": visible, "given": tuple(given)}
    want = backward_float64.gradients(q, k, v, do, **words)
    bound = backward(q, k, v, do, **words, model=model, br=KEYS_PER_TILE, bc=KEYS_PER_TILE)
    return {name: _Want(getattr(want, name), getattr(bound, name) + getattr(want, f"{name}_err")) for name in GRADIENTS}


def _slices(n: int, size: int) -> list[slice]:
    """n rows or keys in blocks of `size`."""
    return [slice(at, min(at + size, n)) for at in range(0, n, size)]


def _accumulated(parts: Sequence[_Want], model: BackwardModel) -> _Want:
    """The sum over blocks, stored after each."""
    total = parts[0]
    for part in parts[1:]:
        total = _added([total, part], model)
    return total


def _added(each: Sequence[_Want], model: BackwardModel) -> _Want:
    """The sum over query heads that share a key, each stored before it is added, and the sum once more."""
    if len(each) == 1:
        return each[0]
    value, bound = sum(x.value for x in each), sum(x.bound for x in each)
    out = FORMATS[model.out_format or model.path.working]
    terms = sum(np.abs(x.value) + x.bound for x in each)
    bound = bound + len(each) * model.path.unit * terms  # the additions, in the working format
    return _Want(np.asarray(value), bound + out.unit * (np.abs(value) + bound) + out.half_subnormal)
