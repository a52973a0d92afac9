"""Where the bounds claim anything: the preconditions of the derivation, as a predicate that gives its reason."""

from __future__ import annotations

import math

import numpy as np

from verify.arithmetic import ArithmeticModel
from verify.formats import FORMATS


def outside_domain(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, visible: np.ndarray, model: ArithmeticModel
) -> str | None:
    """Why no bound is claimed for these inputs, or None where the bound holds.

    The limits keep every intermediate of the kernel finite and every log-weight error below what exp2 can hold:
    sum|q||k| < 2^100 (2^996 for float64), N max|v| times the largest weight < 2^126 (2^1022), the rounding of m c below
    8 in base 2 (a factor of 2^8 on every weight), |O| representable in the output format.
    """
    work = FORMATS[model.working]
    if not visible.any():
        return None
    rows, keys = visible.any(axis=1), visible.any(axis=0)
    q, k, v = q[rows], k[keys], v[keys]
    for array, name in ((q, "q"), (k, "k"), (v, "v")):
        if not np.isfinite(array).all():
            return f"{name} has NaN or infinity at a visible position"
    c = scale * math.log2(math.e)
    if not 2.0**work.emin <= c < 2.0 ** (work.emax - 27):
        return f"scale {scale:g} does not fit {model.working}"
    log2 = math.log2
    with np.errstate(over="ignore"):
        dot = float((np.abs(q) @ np.abs(k).T).max(initial=0.0))
        sum_v = len(v) * float(np.abs(v).max(initial=0.0))
    if not dot < 2.0 ** (work.emax - 27):
        return f"sum|q||k| reaches 2^{log2(dot):.0f}, limit 2^{work.emax - 27}"
    headroom = log2(max(2.0**model.lag_log2, model.most_weight))  # of the sum of the weights over N
    if not sum_v * 2.0**headroom < 2.0 ** (work.emax - 1):
        return f"N max|v| reaches 2^{log2(sum_v):.0f}, limit 2^{work.emax - 1 - headroom:g}"
    if not dot * c * model.unit * model.top_roundings < 8.0:
        return f"logits reach 2^{log2(dot * c):.0f} in base 2: the rounding of m c exceeds a factor of 2^8"
    if model.out_format is not None:
        largest = FORMATS[model.out_format].largest
        # An average cannot leave the range of V; the rounding of P lets its computed value pass the last finite number.
        if float(np.abs(v).max(initial=0.0)) > largest * (1 - 4 * FORMATS[model.out_format].unit):
            return f"max|v| is within 4 units of the largest {model.out_format}"
    return None
