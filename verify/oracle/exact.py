"""Exact scores: floating-point numbers as integers, and float64 products that are known to be exact.

Inputs are dyadic rationals. A row is `integers * 2**exponent`, and the dot product of two rows is an integer times a
power of two. One float64 matrix product already gives that value exactly when sum|q||k| is below 2**53 units of the
last place in use, whatever the order of summation and whether or not it uses FMA: every partial sum is then a
representable multiple of the unit. Where this fails (float32 inputs mostly) each row is split without error into a
20-bit head and a tail, and only products with a tail are rounded (Ozaki, Ogita, Oishi, Rump 2012).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNIT = 2.0**-53
HEAD_BITS = 20  # 2 * 20 + log2(d) <= 53 holds up to d = 8192
TINY = 2.0**-1074


def to_integers(x: np.ndarray) -> tuple[np.ndarray, int]:
    """Integers n (object dtype, same shape) and one exponent e with x == n * 2**e exactly, n as short as possible."""
    x = np.asarray(x, dtype=np.float64)
    if not np.isfinite(x).all():
        raise ValueError("to_integers: every element must be finite")
    n, e = _odd_parts(x)
    used = n != 0
    if not used.any():
        return np.zeros(x.shape, dtype=object), 0
    smallest = int(e[used].min())
    shift = np.where(used, e - smallest, 0)
    return np.left_shift(n.astype(object), shift.astype(object)), smallest


def _odd_parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x == n * 2**e with n odd (int64), or n == 0."""
    mantissa, exponent = np.frexp(x)
    n = np.ldexp(mantissa, 53).astype(np.int64)
    lowest_bit = (n & -n).astype(np.float64)
    zeros = np.where(n == 0, 0, np.frexp(lowest_bit)[1] - 1)
    return n >> zeros, exponent.astype(np.int64) - 53 + zeros


def _last_place(x: np.ndarray) -> np.ndarray:
    """Exponent of the lowest set bit in each row; a large number for a row of zeros (its products are all 0)."""
    n, e = _odd_parts(x)
    return np.where(n == 0, 4096, e).min(axis=1, initial=4096)


@dataclass(frozen=True)
class Scores:
    """q @ k.T as hi + lo, with |q @ k.T - (hi + lo)| <= err; err and lo are 0 where one product was exact."""

    hi: np.ndarray
    lo: np.ndarray
    err: np.ndarray
    magnitude: np.ndarray  # sum |q||k|, relative error below 2 d 2**-53


def exact_scores(q: np.ndarray, k: np.ndarray) -> Scores:
    """Raw scores (no scale) of finite q (Nq, d) and k (Nk, d)."""
    d = q.shape[1]
    one_product = q @ k.T
    magnitude = np.abs(q) @ np.abs(k).T
    unit_exponent = _last_place(q)[:, None] + _last_place(k)[None, :]
    # Below 2**-1074 a product itself may underflow: not certified.
    limit = np.ldexp(1.0, np.clip(unit_exponent + 53, -1100, 1023))
    exact = (magnitude * (1 + 4 * d * UNIT) < limit) & (unit_exponent >= -1074)
    zero = np.zeros_like(one_product)
    if exact.all():
        return Scores(one_product, zero, zero, magnitude)
    q_head, q_tail = _split(q)
    k_head, k_tail = _split(k)
    hi, low_1 = _two_sum(q_head @ k_head.T, q_head @ k_tail.T)
    hi, low_2 = _two_sum(hi, q_tail @ k_head.T)
    lo = (low_1 + low_2) + q_tail @ k_tail.T
    rounded = np.abs(q_head) @ np.abs(k_tail).T + np.abs(q_tail) @ np.abs(k_head).T + np.abs(q_tail) @ np.abs(k_tail).T
    err = 2 * (d + 4) * UNIT * rounded + 4 * UNIT * (np.abs(low_1) + np.abs(low_2)) + 4 * d * TINY
    return Scores(np.where(exact, one_product, hi), np.where(exact, 0.0, lo), np.where(exact, 0.0, err), magnitude)


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x == head + tail without error; head is a multiple of 2**-20 times a power of two above the row's maximum."""
    _, exponent = np.frexp(np.abs(x).max(axis=1, keepdims=True, initial=0.0))
    grid = np.ldexp(1.0, np.maximum(exponent - HEAD_BITS, -1074))
    head = np.rint(x / grid) * grid
    return head, x - head


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a + b == s + e exactly (Knuth)."""
    s = a + b
    b_virtual = s - a
    return s, (a - (s - b_virtual)) + (b - b_virtual)
