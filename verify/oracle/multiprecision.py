"""Tier T2: attention to 50 digits with mpmath alone, and the literal textbook formula for tiny shapes.

Three steps. Scores are exact integers (`exact.to_integers`). x = s - max s is put into fixed point with one rounding,
and the weights exp(x), at most 1, are taken in fixed point with an absolute error of a few units 2**-wp: relative to
the largest weight, which is exactly 1, that is what a softmax needs. P V is exact in integers; one division follows.

mpmath's fixed-point exponential is a private function. It is tried against mp.exp on 20 arguments at first use, and
mp.exp takes its place when it is missing or differs. Precision is a property of a private mpmath context, so nothing
here reads or changes the global `mp.prec`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpmath.ctx_mp import MPContext

from verify.oracle.exact import to_integers
from verify.oracle.reference import Reference, checked_inputs

GUARD_BITS = 40
# exp_fixed was seen within 5.2 units in the last place on 2000 arguments; flooring x adds at most 1.
WEIGHT_ULPS = 16


@dataclass(frozen=True)
class ManyDigits(Reference):
    """A Reference that also keeps the values themselves."""

    o_digits: list[list[Any]]  # mpf
    lse_digits: list[Any]
    digits: int


def precision_bits(digits: int) -> int:
    """Bits of working precision for a number of decimal digits, guard bits included."""
    return int(digits * 3.3219281) + 1 + GUARD_BITS


@functools.cache
def _fixed_exp(wp: int) -> Callable[[int], int]:
    """floor-like exp for fixed point: takes and returns integers that count units of 2**-wp."""
    ctx = MPContext()
    ctx.prec = wp + 20

    def by_mpf(x: int) -> int:
        return int(ctx.floor(ctx.ldexp(ctx.exp(ctx.ldexp(ctx.mpf(x), -wp)), wp)))

    try:
        from mpmath.libmp import MPZ
        from mpmath.libmp.libelefun import exp_fixed, ln2_fixed

        ln2 = ln2_fixed(wp)

        def private(x: int) -> int:
            return int(exp_fixed(MPZ(x), wp, ln2))

        trials = [-((i * 7919 << wp) // 3571) for i in range(20)]
        if all(abs(private(x) - by_mpf(x)) <= WEIGHT_ULPS - 1 for x in trials):
            return private
    except (ImportError, TypeError, ValueError, AttributeError):
        pass  # another mpmath: the public function gives the same digits, three times slower
    return by_mpf


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    visible: np.ndarray | None = None,
    rows: Iterable[int] | None = None,
    digits: int = 50,
) -> ManyDigits:
    """Attention of the given query rows (all for None) to `digits` digits relative to max|v|.

    Arguments as in `float64.attention`; inputs must be finite. o_err and lse_err bound the distance of the float64
    values from the exact ones: their own rounding plus N * WEIGHT_ULPS * 2**-wp.

    Raises:
        ValueError: shapes disagree, or an input that a listed row can see is not finite.
    """
    q, k, v, visible = checked_inputs(q, k, v, scale, visible)
    index = np.arange(len(q)) if rows is None else np.asarray(list(rows), dtype=np.int64)
    used = visible[index].any(axis=0)
    if not (np.isfinite(q[index]).all() and np.isfinite(k[used]).all() and np.isfinite(v[used]).all()):
        raise ValueError("multiprecision.attention needs finite inputs; float64.attention knows the special values")
    wp = precision_bits(digits)
    ctx = MPContext()
    ctx.prec = wp + 20
    exp = _fixed_exp(wp)
    k_int, k_exp = to_integers(k[used])
    v_int, v_exp = to_integers(v[used])
    scale_int, scale_exp = to_integers(np.array([scale]))
    n, dv = k_int.shape[0], v.shape[1]
    lowest = -(wp + 8) << wp  # exp(x) is below one unit: the weight is 0 to the precision kept
    o_digits: list[list[Any]] = []
    lse_digits: list[Any] = []
    for i in index:
        seen = visible[i][used]
        if not seen.any():
            o_digits.append([ctx.mpf(0)] * dv)
            lse_digits.append(ctx.ninf)
            continue
        q_int, q_exp = to_integers(q[i])
        s = [int(a) for a in k_int[seen].dot(q_int) * int(scale_int[0])]
        e = k_exp + q_exp + scale_exp
        top = max(s)
        shift = wp + e
        x = [(a - top) << shift if shift >= 0 else (a - top) >> -shift for a in s]
        p = np.array([exp(a) if a > lowest else 0 for a in x], dtype=object)
        total = int(p.sum())
        numerator = p.dot(v_int[seen])
        o_digits.append([ctx.ldexp(ctx.mpf(int(a)) / total, v_exp) for a in numerator])
        lse_digits.append(ctx.ldexp(ctx.mpf(top), e) + ctx.log(ctx.ldexp(ctx.mpf(total), -wp)))
    o = np.array([[float(x) for x in row] for row in o_digits]).reshape(len(index), dv)
    lse = np.array([float(x) for x in lse_digits])
    tail = 2 * max(n, 1) * WEIGHT_ULPS * 2.0**-wp
    v_max = np.abs(v[used]).max(axis=0, initial=0.0)
    live = np.isfinite(lse)
    return ManyDigits(
        o=o,
        lse=lse,
        o_err=np.where(live[:, None], 2.0**-53 * np.abs(o) + tail * v_max + 2.0**-1074, 0.0),
        lse_err=np.where(live, 2.0**-53 * np.abs(np.where(live, lse, 0.0)) + tail, 0.0),
        rows=index,
        o_digits=o_digits,
        lse_digits=lse_digits,
        digits=digits,
    )


def textbook(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    visible: np.ndarray | None = None,
    digits: int = 50,
) -> tuple[list[list[Any]], list[Any]]:
    """exp(s_k) / sum exp(s_k) exactly as textbooks print it: no maximum, no integers. (o, lse) as mpf.

    For tiny shapes (about 2 ms per key at d = 64): an independent transcription for the fast forms to agree with.
    """
    q, k, v, visible = checked_inputs(q, k, v, scale, visible)
    ctx = MPContext()
    ctx.dps = digits + 10
    o, lse = [], []
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if visible[i, j]]
        if not keys:
            o.append([ctx.mpf(0)] * v.shape[1])
            lse.append(ctx.ninf)
            continue
        e = [ctx.exp(ctx.mpf(scale) * ctx.fdot(map(float, q[i]), map(float, k[j]))) for j in keys]
        total = ctx.fsum(e)
        o.append([ctx.fdot(e, [float(v[j, c]) for j in keys]) / total for c in range(v.shape[1])])
        lse.append(ctx.log(total))
    return o, lse
