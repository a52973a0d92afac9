"""Asserts that what a CPU unit returned is within the derived bound of the exact result, head by head."""

from __future__ import annotations

import functools
import math

import numpy as np

from tests.cpu import units
from verify import arithmetic, bounds, cases, compare, special
from verify.oracle import float64


def model(problem, isa, dtype):
    name = next(v.arithmetic for v in units.decide(problem).variants if (v.isa, v.dtype) == (isa, dtype))
    return arithmetic.model(name, dtype, debug=problem.debug)


class Head:
    """q, k, v of one head with its mask, as a key: equal where every bit of them is."""

    def __init__(self, q, k, v, scale, seen, length):
        self.scale = scale
        self.expected = special.expect(*(x.astype(np.float64) for x in (q, k, v)), visible=seen, length=length)
        self.key = (scale, length, *((x.dtype, x.shape, x.tobytes()) for x in (q, k, v, seen)))

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return self.key == other.key


# The instruction sets get the same inputs one after the other: `isas` is the first mark of such a test, and so varies
# fastest. Two of them have one arithmetic.
@functools.lru_cache(maxsize=256)
def _exact(head):
    want = head.expected
    return float64.attention(want.q, want.k, want.v, scale=head.scale, visible=want.visible)


@functools.lru_cache(maxsize=256)
def _bound(head, model_, bc):
    want = head.expected
    return bounds.forward(
        want.q, want.k, want.v, scale=head.scale, visible=want.visible, model=model_, bc=bc, failure=None
    )


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
        head = Head(q[b, h], k[b, h // group], v[b, h // group], scale, seen, length)
        want, exact, bound = head.expected, _exact(head), _bound(head, model_, bc)
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
