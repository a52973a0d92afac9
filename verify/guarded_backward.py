"""The backward op of a package in memory that tells: the part of `verify.guarded` for the gradients.

Every gradient is exactly as long as it is said to be and nobody wrote to it before; keys beyond the length were never
written either. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 memcheck and initcheck know where each tensor ends and starts.

Holds, or a sentence says what does not: no NaN is left in a gradient, keys beyond the length have gradient 0, dK and dV
of two calls agree bit for bit, and so does dQ of the deterministic form. Two calls are made only where asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from verify import packages
from verify.cases import CAUSAL, torch_dtype
from verify.guarded_problems import Problem

NAMES = ("dQ", "dK", "dV")


def faults(
    attn: ModuleType, problem: Problem, dtype: str, device: str = "cuda", *, twice: bool = True
) -> Iterator[str]:
    """Run one problem in both forms, each once or twice; yields what does not hold."""
    checks = packages.part(attn, "checks")
    b, kind = problem.b, torch_dtype(dtype)
    lengths = None if problem.lengths is None else torch.tensor(problem.lengths, device=device)
    rows = (problem.nk,) * b if problem.lengths is None else problem.lengths
    q = _written((b, problem.hq, problem.nq, checks.D), (problem.nq,) * b, kind, device, 1)
    k = _written((b, problem.hkv, problem.nk, checks.D), rows, kind, device, 2)
    v = _written((b, problem.hkv, problem.nk, checks.DV), rows, kind, device, 3)
    dout = _written((b, problem.hq, problem.nq, checks.DV), (problem.nq,) * b, kind, device, 4)
    causal = False if problem.causal == "none" else problem.causal
    o, lse = attn.attention(q, k, v, return_lse=True, causal=causal, key_lengths=lengths)
    o, dlse = o.to(kind), torch.ones_like(lse)  # the debug form's O is float32: what it rounds to is the operand
    op = getattr(torch.ops, packages.part(attn, "op").NAMESPACE).backward
    scale, code = checks.D**-0.5, CAUSAL.index(problem.causal)
    for deterministic in (False, True):
        form = "deterministic " if deterministic else ""
        words: tuple[Any, ...] = (dout, dlse, q, k, v, o, lse, lengths, scale, code, [True] * 3, deterministic)
        first = op(*words)
        second = op(*words) if twice else first
        for name, one, two in zip(NAMES, first, second, strict=True):
            left = int(one.isnan().sum())
            if left:
                yield f"{form}{name}: {left} elements are NaN: not written, or wrong"
            if (deterministic or name != "dQ") and not torch.equal(one, two):
                yield f"{form}{name}: two calls differ"
            if name != "dQ" and any(bool(one[i, :, n:].any()) for i, n in enumerate(rows)):
                yield f"{form}{name}: a key beyond the length has a gradient"


def _written(shape: Sequence[int], rows: Sequence[int], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """(B,H,N,d): N(0, 1) in the first rows[b] rows of batch entry b, the others never written."""
    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)
    home = torch.empty(tuple(shape), dtype=dtype, device=device)
    for i, count in enumerate(rows):
        if count:
            home[i, :, :count] = values[i, :, :count].to(device)
    return home
