"""Where the backward bounds claim anything: the preconditions of the derivation, as a predicate with its reason."""

from __future__ import annotations

import math

import numpy as np

from verify.bounds.backward_model import BackwardModel
from verify.bounds.backward_output import BackwardBound
from verify.bounds.domain import outside_domain
from verify.formats import FORMATS
from verify.oracle.backward_reference import Given, Problem


def outside_backward_domain(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    *,
    scale: float,
    visible: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    given: Given | None = None,
    model: BackwardModel,
    bound: BackwardBound,
) -> str | None:
    """Why no bound is claimed for these inputs, or None where `bound` (of the same arguments) holds.

    Beside the limits of the forward pass: dO, dLSE and what was given are finite, the error of a weight stays below a
    factor of 2^8, sums of |dO||V|, |dS||K|, |dS||Q| and P|dO| keep below 2^126 (2^1022 for float64), and dS and the
    gradients fit the formats that they are rounded to.
    """
    path, log2 = model.path, math.log2
    x = Problem.of(q, k, v, do, scale=scale, visible=visible, dlse=dlse, given=given)
    if not x.visible.any():
        return None
    reason = outside_domain(x.q, x.k, x.v, scale=scale, visible=x.visible, model=path)
    if reason is not None:
        return reason
    try:
        x = x.finite("bounds.backward")
    except ValueError:
        return "do, dlse, or the given o or lse has NaN or infinity at a row with a visible key"
    limit = FORMATS[path.working].emax - 1
    with np.errstate(over="ignore"):
        reach = float((np.abs(x.q) @ np.abs(x.k).T).max(initial=0.0)) * scale * log2(math.e)
        lse = 0.0 if x.given is None else float(np.abs(x.given[1]).max()) * log2(math.e)
        dp = float((np.abs(x.do) @ np.abs(x.v).T).max(initial=0.0))
        o = 0.0 if x.given is None else float((np.abs(x.do) * np.abs(x.given[0])).sum(axis=1).max())
        operand = max(float(np.abs(a).max(initial=0.0)) for a in (x.q, x.k))
        sums = max(dp, o) + float(np.abs(x.dlse).max(initial=0.0))
    roundings = model.s_roundings + model.lse_roundings + 2 * model.argument_roundings + 8
    error = 2 * float(path.score_sum(x.q.shape[1]).g) * reach + roundings * path.unit * max(reach, lse)
    if not error < 8.0:
        return f"logits reach 2^{log2(max(reach, lse)):.0f} in base 2: a weight may be wrong by more than 2^8"
    if not 4 * sums < 2.0**limit:
        return f"sum|dO||V| or |dLSE| reaches 2^{log2(sums):.0f}, limit 2^{limit - 2}"
    n = max(x.visible.shape)
    if not bound.largest_ds * operand * n < 2.0**limit:
        return f"N |dS| max(|q|, |k|) reaches 2^{log2(bound.largest_ds * operand * n):.0f}, limit 2^{limit}"
    weights = 2.0**9 * n * float(np.abs(x.do).max(initial=0.0))
    if not weights < 2.0**limit:
        return f"N max|dO| reaches 2^{log2(weights) - 9:.0f}, limit 2^{limit - 9}"
    narrow = FORMATS.get(path.p_format or "")
    if narrow is not None and bound.largest_ds > narrow.largest:
        return f"dS reaches {bound.largest_ds:g}, more than the largest {narrow.name}"
    out = FORMATS[model.out_format or path.working]
    if bound.largest_out > out.largest:
        return f"a gradient reaches {bound.largest_out:g}, more than the largest {out.name}"
    return None
