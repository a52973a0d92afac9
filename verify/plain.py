"""The plain formula in the same precision: softmax(scale * q k^T) v, one torch operation after another.

It is the yardstick that a certificate prints beside ours: how far the textbook formula is from the truth on the same
inputs, in the same dtype and on the same device. It is never a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verify.cases import Array, Case, place


@dataclass(frozen=True)
class Plain:
    """O (B,Hq,Nq,dv) and LSE (B,Hq,Nq) of the plain formula, as float64."""

    o: Array
    lse: Array


def attention(case: Case, *, device: str = "cpu") -> Plain:
    """The plain formula in `case.dtype`; masked scores are -inf, as eager code has it, so an empty row is NaN."""
    import torch

    group = case.q.shape[1] // max(1, case.k.shape[1])
    q, k, v = (place(x, case.dtype, "contiguous", device) for x in (case.q, case.k, case.v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    seen = torch.from_numpy(np.stack([case.visible(b) for b in range(case.q.shape[0])])).to(device)[:, None]
    with torch.no_grad():
        scores = torch.matmul(q, k.transpose(-1, -2)) * case.scale
        scores = scores.masked_fill(~seen, float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        o = torch.matmul(torch.softmax(scores, dim=-1), v)
    return Plain(*(x.to(torch.float64).cpu().numpy() for x in (o, lse)))
