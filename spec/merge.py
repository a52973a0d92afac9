"""Merging attention over disjoint key sets: split-KV decoding, shared prefixes, ring attention.

Over parts s with normalised outputs O_s and natural-log L_s, m = max L_s, w_s = exp(L_s - m):

    L = m + ln sum w_s        O = sum w_s O_s / sum w_s        all parts empty: O = 0, L = -inf

Associative and commutative in exact arithmetic; (0, -inf) is the identity. In a backward pass the merged L is the one
that every part must use.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spec.errors import ShapeError
from spec.head import Array, Output, finite_or_zero

MERGE_ROUNDOFFS = 8  # units of u in the error bound of `merge_partials`


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def merge_partials(o_a: Array, lse_a: Array, o_b: Array, lse_b: Array) -> Output:
    """Merge attention over two disjoint key sets into attention over their union.

    Args:
        o_a, o_b: (..., Nq, dv), each already divided by its own row sum.
        lse_a, lse_b: (..., Nq), natural log, of the scaled scores; -inf marks a row that saw no key.
    Returns: Output(o, lse) of the same shapes. A row empty on both sides has o = 0 and lse = -inf. NaN stays NaN.
    Raises: ShapeError: the shapes of an lse and its output, or of the two sides, differ.
    Error: |o - exact| <= 8u max(|o_a|, |o_b|) per element, to first order in u and barring underflow. With w the
        smaller weight and g = |lse_a - lse_b|: rounding the exponent gives u g w / (1 + w)^2 <= 0.224 u, exp (4 ulp
        = 8u) gives 8u w / (1 + w)^2 <= 2u, each times |o_a - o_b| <= 2 max; products, sums, division give 3.5 u.
    """
    if o_a.shape[:-1] != lse_a.shape or o_b.shape[:-1] != lse_b.shape or o_a.shape != o_b.shape:
        raise ShapeError(f"o_a{o_a.shape} with lse_a{lse_a.shape}, o_b{o_b.shape} with lse_b{lse_b.shape}")
    m = finite_or_zero(np.maximum(lse_a, lse_b))
    w_a, w_b = np.exp(lse_a - m), np.exp(lse_b - m)
    w = w_a + w_b
    lse = m + np.log(w)  # an empty row: 0 + ln 0 = -inf
    w = np.where(w == 0.0, 1.0, w)
    return Output((w_a[..., None] * o_a + w_b[..., None] * o_b) / w[..., None], lse)


def merge_all(parts: Iterable[Output]) -> Output:
    """Fold any number of parts, at least one, in the given order."""
    parts = iter(parts)
    total = next(parts, None)
    if total is None:
        raise ShapeError("no part to merge: the identity (0, -inf) has the shape of a part")
    for part in parts:
        total = merge_partials(total.o, total.lse, part.o, part.lse)
    return total


@np.errstate(invalid="ignore", over="ignore")
def merge_states(m: Array, l: Array, u: Array) -> tuple[Array, Array, Array]:
    """Merge un-normalised states: m, l (parts, Nq) and u = exp(S - m) V (parts, Nq, dv) into one (m, l, u)."""
    if u.shape[:-1] != m.shape or l.shape != m.shape:
        raise ShapeError(f"m{m.shape}, l{l.shape}, u{u.shape}: want (parts, Nq) twice, (parts, Nq, dv)")
    top = m.max(axis=0, initial=-np.inf)
    w = np.exp(m - finite_or_zero(top))
    return top, (w * l).sum(axis=0), (w[..., None] * u).sum(axis=0)
