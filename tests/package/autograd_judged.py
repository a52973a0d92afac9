"""Asserts that the gradients of one call are within the derived bound of the exact ones at the O and LSE it read."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from verify import arithmetic, cases, compare
from verify.bounds.backward_domain import outside_backward_domain
from verify.bounds.backward_model import backward_model
from verify.bounds.backward_output import backward
from verify.oracle import backward_float64


class OutsideDomain(Exception):
    """Why no bound is claimed for these inputs."""


NAMES = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16"}  # float64 needs a finer judge


def assert_right(
    attn: ModuleType, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, dlse: Tensor | None, got: list[Tensor],
    *, causal: bool | str = False, key_lengths: Tensor | None = None,
) -> float:  # fmt: skip
    """Fail unless got = [dQ, dK, dV] is right in every element; returns the largest error/bound.

    Raises: OutsideDomain where no bound is claimed.
    """
    with torch.no_grad():
        o, lse = attn.attention(q, k, v, causal=causal, key_lengths=key_lengths, return_lse=True)
    row = attn.path(q, k, v, causal=causal, key_lengths=key_lengths, backward=True)
    model = backward_model(arithmetic.model(row["arithmetic"], NAMES[q.dtype], **row["plan"]), lse_roundings=1)
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    mask = {False: "none", True: "bottom_right"}.get(causal, causal)
    dout = torch.zeros_like(o) if dout is None else dout
    largest = 0.0
    for b, g in np.ndindex(*k.shape[:2]):
        heads = slice(g * group, (g + 1) * group)
        length = None if key_lengths is None else int(key_lengths[b])
        seen = np.tile(cases.visible(q.shape[2], k.shape[2], causal=mask, length=length), (group, 1))
        arrays = _stacked(q[b, heads]), _wide(k[b, g]), _wide(v[b, g]), _stacked(dout[b, heads])
        words = {"scale": scale, "visible": seen, "given": (_stacked(o[b, heads]), _stacked(lse[b, heads])),
                 "dlse": None if dlse is None else _stacked(dlse[b, heads])}  # fmt: skip
        exact = backward_float64.gradients(*arrays, **words)
        bound = backward(*arrays, model=model, br=row["br"], bc=row["bc"], heads=group, **words)
        reason = outside_backward_domain(*arrays, model=model, bound=bound, **words)
        if reason is not None:
            raise OutsideDomain(reason)
        results = {"dq": _stacked(got[0][b, heads]), "dk": _wide(got[1][b, g]), "dv": _wide(got[2][b, g])}
        for name, result in results.items():
            error = getattr(exact, f"{name}_err")
            where = f"{row['isa']} {NAMES[q.dtype]} head {b, g} {name}"
            limit = getattr(bound, name)
            ratio = compare.assert_within(result, getattr(exact, name), limit, want_error=error, name=where)
            largest = max(largest, ratio)
    return largest


def _wide(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def _stacked(x: Tensor) -> np.ndarray:
    """(heads, Nq, ...) -> (heads Nq, ...): dK and dV of a K/V head are sums over the rows of all of its query heads."""
    return _wide(x.flatten(0, 1))
