"""Asserts that what a CPU unit returned is within the derived bound of the exact result, head by head."""

from __future__ import annotations

import math

import numpy as np

from codegen.plans import cpu
from tests.cpu import units
from verify import arithmetic, bounds, cases, compare, special
from verify.oracle import float64


def model(problem, isa, dtype):
    name = next(v.arithmetic for v in cpu.decide(problem, "cpu").variants if (v.isa, v.dtype) == (isa, dtype))
    return arithmetic.model(name, dtype, debug=problem.debug)


def assert_right(
    problem, isa, dtype, q, k, v, got, *, scale=None, causal=False, key_lengths=None, name="", model_=None
):
    """Fail unless got = (O, LSE) is right: within the bound where the exact result is a number, and of the class that
    the table of special values names elsewhere. Returns the largest error/bound."""
    scale = 1 / math.sqrt(problem.d) if scale is None else scale
    model_ = model_ or model(problem, isa, dtype)
    bc = units.plan(problem, isa, dtype).bc
    group = q.shape[1] // max(k.shape[1], 1)
    causal_name = {False: "none", True: "bottom_right"}.get(causal, causal)
    largest = 0.0
    for b, h in np.ndindex(q.shape[:2]):
        length = None if key_lengths is None else int(key_lengths[b])
        seen = cases.visible(q.shape[2], k.shape[2], causal=causal_name, length=length)
        head = (x.astype(np.float64) for x in (q[b, h], k[b, h // group], v[b, h // group]))
        want = special.expect(*head, visible=seen, length=length)
        exact = float64.attention(want.q, want.k, want.v, scale=scale, visible=want.visible)
        bound = bounds.forward(
            want.q, want.k, want.v, scale=scale, visible=want.visible, model=model_, bc=bc, failure=None
        )
        for output, result, classes in (("o", got[0][b, h], want.o), ("lse", got[1][b, h], want.lse)):
            result = result.astype(np.float64)
            where = f"{name} {isa} {dtype} head {b, h} {output}"
            assert not special.mismatch(result, classes).any(), where
            number = special.must_be_number(result, classes)
            largest = max(
                largest,
                compare.assert_within(
                    np.where(number, result, 0.0),
                    np.where(number, getattr(exact, output), 0.0),
                    getattr(bound, output),
                    want_error=getattr(exact, output + "_err"),
                    name=where,
                ),
            )
    return largest
