"""Asserts that what a backward CPU unit returned is within the derived bounds of the exact gradients, per K/V head."""

from __future__ import annotations

import math

import numpy as np

from tests.cpu import amx_unit, backward_units, units
from verify import arithmetic, cases, compare, special
from verify.bounds.backward_domain import outside_backward_domain
from verify.bounds.backward_model import backward_model
from verify.bounds.backward_output import backward
from verify.oracle import backward_float64


def model(problem, isa, dtype):
    """The rounding of a backward unit: that of its forward unit, c fused, LSE log2 e rounded once from float64."""
    plan = backward_units.plan(problem, isa, dtype)
    if isa == "amx":
        path = arithmetic.model("amx_bf16", dtype, debug=problem.debug, exp_degree=plan.exp_degree)
    else:
        path = arithmetic.model(units.ISAS[isa].arithmetic[plan.scalar], dtype, debug=problem.debug)
    return backward_model(path, lse_roundings=1)


def draw(shape, d, dv, dtype, seed=0, *, dlse=False):
    """q, k, v, dout and dlse (None unless asked for), N(0, 1). shape: B, Hq, Hkv, Nq, Nk."""
    b, hq, hkv, nq, nk = shape
    rng = np.random.default_rng([seed, *shape])
    sizes = ((b, hq, nq, d), (b, hkv, nk, d), (b, hkv, nk, dv), (b, hq, nq, dv))
    arrays = [rng.standard_normal(s).astype(units.DTYPE[dtype]) for s in sizes]
    wide = np.float64 if dtype == "float64" else np.float32
    return (*arrays, rng.standard_normal((b, hq, nq)).astype(wide) if dlse else None)


def forward(problem, isa, dtype, q, k, v, **mask):
    """(O, LSE) of the forward unit, O as the other form than the debug one stores it."""
    if isa == "amx":
        o, lse = amx_unit.attention(problem, dtype, q, k, v, **mask)
    else:
        o, lse = units.attention(problem, isa, dtype, q, k, v, **mask)
    return o.astype(units.DTYPE[dtype]), lse


def run(problem, isa, dtype, q, k, v, dout, dlse=None, **words):
    """(O, LSE) of the forward unit and [dQ, dK, dV] of the backward unit that reads them."""
    mask = {name: words[name] for name in ("scale", "causal", "key_lengths") if name in words}
    o, lse = forward(problem, isa, dtype, q, k, v, **mask)
    return (o, lse), backward_units.gradients(problem, isa, dtype, q, k, v, o, lse, dout, dlse, **words)


def assert_right(
    problem, isa, dtype, q, k, v, given, dout, dlse, got, *,
    scale=None, causal=False, key_lengths=None, end_to_end=True, name="",
):  # fmt: skip
    """Fail unless got = [dQ, dK, dV] is right, at given = (O, LSE) that the unit read and, if asked, end to end.

    Where an exact gradient is not a number, the computed one must not be one either. Returns the largest error/bound
    and the number of heads that are outside the domain of the bound.
    """
    scale = 1 / math.sqrt(problem.d) if scale is None else scale
    plan, model_ = backward_units.plan(problem, isa, dtype), model(problem, isa, dtype)
    group = q.shape[1] // max(k.shape[1], 1)
    causal_name = {False: "none", True: "bottom_right"}.get(causal, causal)
    forward_bc = units.plan(problem, isa, dtype).bc
    largest, outside = 0.0, 0
    for b, g in np.ndindex(k.shape[:2]):
        heads = slice(g * group, (g + 1) * group)
        length = None if key_lengths is None else int(key_lengths[b])
        seen = cases.visible(q.shape[2], k.shape[2], causal=causal_name, length=length)
        q_, dout_, o_, lse_ = (_stacked(x[b, heads]) for x in (q, dout, *given))
        dlse_ = None if dlse is None else _stacked(dlse[b, heads])
        seen_, k_, v_ = np.tile(seen, (group, 1)), _wide(k[b, g]), _wide(v[b, g])
        results = {"dq": _stacked(got[0][b, heads]), "dk": _wide(got[1][b, g]), "dv": _wide(got[2][b, g])}
        clean = special.expect(q_, k_, v_, visible=seen_, length=length)
        # 0 times NaN: a weight of 0 from a score of -inf may pass on what its row's dO and dLSE hold. In a matrix unit
        # any weight of 0 that shares a tile with others may.
        no_gradient = ~np.isfinite(dout_).all(axis=1) | (False if dlse_ is None else ~np.isfinite(dlse_))
        may_be_nan = ((seen_ | (isa == "amx")) & ~clean.visible & no_gradient[:, None]).any(axis=0)[:, None]
        words = {"scale": scale, "dlse": dlse_}
        for stage, read in (("stage", (o_, lse_)), ("end", None))[: 2 if end_to_end else 1]:
            exact = backward_float64.gradients(q_, k_, v_, dout_, visible=seen_, given=read, **words)
            finite = None if read is None else (_finite(o_), np.where(np.isneginf(lse_), lse_, _finite(lse_)))
            arrays = clean.q, clean.k, clean.v, _finite(dout_)
            more = {"scale": scale, "dlse": None if dlse_ is None else _finite(dlse_), "visible": clean.visible}
            limits = backward(
                *arrays, given=finite, model=model_, br=plan.br, bc=plan.bc, heads=group, forward_bc=forward_bc, **more
            )
            if outside_backward_domain(*arrays, given=finite, model=model_, bound=limits, **more):
                outside += 1
                continue
            for output, result in results.items():
                want = getattr(exact, output)
                where = f"{name} {isa} {dtype} head {b, g} {output} {stage}"
                lost = np.isnan(want)
                assert not np.isfinite(result[lost]).any(), f"{where}: a number where there is none"
                if output != "dq":
                    lost = lost | (may_be_nan & np.isnan(result))
                ratio = compare.assert_within(
                    np.where(lost, 0.0, result),
                    np.where(lost, 0.0, want),
                    getattr(limits, output),
                    want_error=getattr(exact, output + "_err"),
                    name=where,
                )
                largest = max(largest, ratio)
    return largest, outside


def _wide(x):
    return x.astype(np.float64)


def _stacked(x):
    """(heads, Nq, ...) -> (heads Nq, ...): dK and dV of a K/V head are sums over the rows of all of its query heads."""
    return _wide(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]))


def _finite(x):
    return np.where(np.isfinite(x), x, 0.0)
