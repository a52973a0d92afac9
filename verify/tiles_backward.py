"""The readable backward pass as a judge: FlashAttention-2, Algorithm 2, of `spec`, with its invariants.

It runs in float64 at the kernel's own Br and Bc, head by head, and its own rounding error has a bound by the same
derivation as a kernel's (see tiles.py). A K/V head's dK and dV are the sums over its query heads.

Holds for every result, whatever O and LSE were read (S = Q K^T is bilinear, so both sides are scale sum dS o S):
  B1  <dQ, Q> = <dK, K>.
Euler's identity; the bound on its error is sum B_dQ |Q| + sum B_dK |K|.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spec import flash2
from spec.errors import InvariantError
from verify import tiles
from verify.bounds.backward_model import backward_model
from verify.bounds.backward_output import backward
from verify.cases import Array
from verify.oracle.backward_reference import Gradients, Problem

DOT_UNIT = 2.0**-52  # of one product and one addition, in any order


def reference(
    x: Problem, *, heads: int, has_dlse: bool, br: int, bc: int, algorithm: Callable[..., Any] = flash2.backward
) -> Gradients:
    """Gradients of `heads` stacked query heads at tiles of br rows and bc keys, with a bound on their own error.

    x: finite where a row sees something, with a given O and LSE. `algorithm` can be a broken one, to see it found.
    Raises: spec.errors.InvariantError when B1 does not hold.
    """
    assert x.given is not None
    o, lse = x.given
    rows = len(x.q) // max(heads, 1)
    dq, dk, dv = np.zeros_like(x.q), np.zeros_like(x.k), np.zeros_like(x.v)
    for head in (slice(h * rows, (h + 1) * rows) for h in range(heads)):
        found = algorithm(
            x.q[head], x.k, x.v, o[head], lse[head], x.do[head],
            br=br, bc=bc, scale=x.scale, mask=x.visible[head], dlse=x.dlse[head],
        )  # fmt: skip
        dq[head] = found.dq
        dk += found.dk
        dv += found.dv
    room = backward(
        x.q, x.k, x.v, x.do, scale=x.scale, visible=x.visible, dlse=x.dlse if has_dlse else None, given=x.given,
        model=backward_model(tiles.model()), br=br, bc=bc, heads=max(heads, 1),
    )  # fmt: skip
    made = Gradients(dq, dk, dv, room.dq, room.dk, room.dv, rows=np.arange(len(x.q)), keys=np.arange(len(x.k)))
    check(x, made)
    return made


def check(x: Problem, found: Gradients) -> None:
    """Raises: InvariantError when B1 does not hold for these gradients."""
    left, left_error = _inner(found.dq, found.dq_err, x.q)
    right, right_error = _inner(found.dk, found.dk_err, x.k)
    if not abs(left - right) <= left_error + right_error:
        raise InvariantError(
            f"B1: <dQ, Q> = {left!r} and <dK, K> = {right!r} differ by more than {left_error + right_error:.3e}"
        )


def _inner(a: Array, error: Array, b: Array) -> tuple[float, float]:
    """(<a, b>, bound on its error when a is known to `error`)."""
    size = float((np.abs(a) * np.abs(b)).sum())
    return float((a * b).sum()), float((error * np.abs(b)).sum()) + (a.size + 2) * DOT_UNIT * size
