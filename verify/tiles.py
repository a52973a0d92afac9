"""The readable reference as a judge: FlashAttention-2 forward of `spec`, its invariant checked after every tile.

It runs in float64 at the kernel's own Br and Bc. Its own rounding error has a bound by the same derivation as a
kernel's, with the constants of NumPy's float64 arithmetic: products summed in any order, exp within 4 ulp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from spec import flash2, invariants
from verify import arithmetic, bounds
from verify.cases import Array, Mask
from verify.oracle.reference import Reference
from verify.special import Expected


@lru_cache(maxsize=1)
def model() -> arithmetic.ArithmeticModel:
    """How `spec` rounds: more roundings than it makes, never fewer."""
    return arithmetic.model("muladd_f64", "float64", exp2_error=2.0**-50, log_error=2.0**-50, log_tiny=2.0**-50)


def reference(head: Expected, *, scale: float, br: int, bc: int) -> Reference:
    """O and LSE of `spec` at tiles of br rows and bc keys, with a bound on their own error.

    Raises: spec.errors.InvariantError when the state after some tile breaks the invariant.
    """
    return attention(head.q, head.k, head.v, scale=scale, visible=head.visible, br=br, bc=bc)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    visible: Mask,
    br: int,
    bc: int,
    forward: Callable[..., Any] = flash2.forward,
) -> Reference:
    """As `reference`, for plain arrays of one head. `forward` can be a broken algorithm, to see it found."""
    watch = invariants.InvariantChecker(q, k, v, scale=scale, mask=visible)
    o, lse = forward(q, k, v, br=br, bc=bc, scale=scale, mask=visible, on_tile=watch)
    watch.finish(o, lse)
    room = bounds.forward(q, k, v, scale=scale, visible=visible, model=model(), bc=bc, failure=None)
    return Reference(o=np.asarray(o), lse=np.asarray(lse), o_err=room.o, lse_err=room.lse, rows=np.arange(len(q)))
