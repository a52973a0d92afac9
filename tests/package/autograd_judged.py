"""Asserts that the gradients of one call are within the derived bound of the exact ones at the O and LSE it read."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from verify import devices, judge_backward
from verify.cases import Case

NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bf16", torch.float16: "fp16"}
CAUSAL = {False: "none", True: "bottom_right"}


class OutsideDomain(Exception):
    """Why no bound is claimed for these inputs."""


def assert_right(
    attn: ModuleType, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, dlse: Tensor | None, got: list[Tensor],
    *, causal: bool | str = False, key_lengths: Tensor | None = None, deterministic: bool = True,
) -> None:  # fmt: skip
    """Fail unless got = [dQ, dK, dV] is right in every element, NaN and zeros included.

    deterministic: which form made them.
    Raises: OutsideDomain where no bound is claimed.
    """
    dtype, kind = NAMES[q.dtype], q.device.type
    words = {"causal": causal, "key_lengths": key_lengths}
    with torch.no_grad():
        o, lse = attn.attention(q, k, v, return_lse=True, **words)
    case = Case(
        name="autograd", family="as given", dtype=dtype, q=_wide(q), k=_wide(k), v=_wide(v), scale=q.shape[3] ** -0.5,
        do=_wide(torch.zeros_like(o) if dout is None else dout), dlse=None if dlse is None else _wide(dlse),
        causal=CAUSAL.get(causal, causal), key_lengths=None if key_lengths is None else tuple(key_lengths.tolist()),
    )  # fmt: skip
    row = attn.path(q, k, v, backward=True, **words)
    unit = row["isa"] if kind == "cpu" else "sm_{}{}".format(*torch.cuda.get_device_capability(q.device))
    path = replace(devices.of_variant(attn, kind, row, dtype, unit), deterministic=deterministic)
    given = _wide(o), _wide(lse)
    exact = dtype == "float64"  # T0 is not accurate enough there
    truth = judge_backward.Truth(case, given, with_balls=exact)
    rows = judge_backward.ROWS if exact and not truth.with_balls else 0
    run = path, tuple(_wide(x) for x in got)
    (said,) = judge_backward.hear(case, given, [run], truth=truth, spec=False, rows=rows, compare_plain=False)
    if said.unclaimed:
        raise OutsideDomain(next(iter(said.unclaimed.values())))
    assert said.holds, said.message()


def _wide(x: Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()
