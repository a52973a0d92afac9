"""The plain formula in the same precision: softmax(scale * q k^T) v, one torch operation after another.

It is the yardstick that a certificate prints beside ours: how far the textbook formula is from the truth on the same
inputs, in the same dtype and on the same device. It is never a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from verify.cases import Array, Case, place, torch_dtype


@dataclass(frozen=True)
class Plain:
    """O (B,Hq,Nq,dv) and LSE (B,Hq,Nq) of the plain formula, as float64."""

    o: Array
    lse: Array


@dataclass(frozen=True)
class PlainGradients:
    """dQ (B,Hq,Nq,d), dK (B,Hkv,Nk,d) and dV (B,Hkv,Nk,dv) of the plain formula, by torch's autograd, as float64."""

    dq: Array
    dk: Array
    dv: Array


def attention(case: Case, *, device: str = "cpu") -> Plain:
    """The plain formula in `case.dtype`; masked scores are -inf, as eager code has it, so an empty row is NaN."""
    return _both(case, device)[0]


def gradients(case: Case, *, device: str = "cpu") -> PlainGradients:
    """The gradients of sum(dO o O) + sum(dLSE o LSE) by the plain formula; NaN where an empty row takes part."""
    found = _both(case, device)[1]
    if found is None:
        raise ValueError(f"{case.name} has no gradient of its output")
    return found


@lru_cache(maxsize=1)  # one after the other is asked about the same case, which is compared by identity
def _both(case: Case, device: str) -> tuple[Plain, PlainGradients | None]:
    import torch

    inputs = [place(x, case.dtype, "contiguous", device).requires_grad_() for x in (case.q, case.k, case.v)]
    with torch.set_grad_enabled(case.do is not None):
        outputs = _formula(case, *inputs)
    if case.do is None:
        return Plain(*map(_wide, outputs)), None
    loss = [place(case.do, case.dtype, "contiguous", device)]
    if case.dlse is not None:
        loss.append(torch.from_numpy(case.dlse).to(torch_dtype(case.dtype)).to(device))
    found = torch.autograd.grad(outputs[: len(loss)], inputs, loss)
    return Plain(*map(_wide, outputs)), PlainGradients(*map(_wide, found))


def _formula(case: Case, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """(O, LSE), one torch operation after another."""
    import torch

    group = case.q.shape[1] // max(1, case.k.shape[1])
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    seen = torch.from_numpy(np.stack([case.visible(b) for b in range(case.q.shape[0])])).to(q.device)[:, None]
    scores = torch.matmul(q, k.transpose(-1, -2)) * case.scale
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1), v), torch.logsumexp(scores, dim=-1)


def _wide(x: Any) -> Array:
    import torch

    return np.asarray(x.detach().to(torch.float64).cpu().numpy())
