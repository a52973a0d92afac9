"""What must come out when something that is not a number goes in: the special-value table as code.

Source: the table "Special-value semantics". In words: the result of a row is a function of its query and of its
visible (key, value) pairs only; no visible key gives O = 0, LSE = -inf; a NaN is never removed; a score of +inf is
a NaN row; a visible score of -inf is weight 0. A masked key never has influence. A masked value has none where no
row of the tile may see its key; elsewhere a non-finite one may turn a result into NaN, never into a wrong number.

`expect` reduces a head with non-finite inputs to a finite problem plus a class for every output element, so that
the elements which must be numbers are judged by the same bound as everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from verify.cases import Array, Case, Mask, representable

NUMBER, NAN, NOT_FINITE, NUMBER_OR_NAN = 0, 1, 2, 3
CLASS_NAMES = ("a number within the bound", "NaN", "NaN or an infinity", "a number within the bound, or NaN")

Classes = npt.NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Expected:
    """A finite stand-in for one head, and the class of each element of O (nq, dv) and LSE (nq,)."""

    q: Array
    k: Array
    v: Array
    visible: Mask
    o: Classes
    lse: Classes


def expect(q: Array, k: Array, v: Array, *, visible: Mask, length: int | None = None) -> Expected:
    """Reduce one head (2-D arrays, any values) to what must come out of it.

    `visible` (nq, nk) includes the key length; `length` says which masked keys lie beyond it (no influence at all).
    """
    nq, dv = q.shape[0], v.shape[1]
    o, lse = np.zeros((nq, dv), np.int8), np.zeros(nq, np.int8)
    finite = np.isfinite(q).all() and np.isfinite(k).all() and np.isfinite(v).all()
    if finite:
        return Expected(q, k, v, visible, o, lse)
    with np.errstate(invalid="ignore", over="ignore"):
        scores = np.where(visible, q @ k.T, 0.0)
    bad_row = (np.isnan(scores) | np.isposinf(scores)).any(axis=1)
    seen = visible & ~np.isneginf(scores)  # a visible score of -inf has weight 0
    inside = np.arange(k.shape[0]) < (k.shape[0] if length is None else length)
    for j, c in np.argwhere(~np.isfinite(v)):
        if not inside[j]:
            continue  # beyond the key length: never read
        column = o[:, c]
        column[seen[:, j] & (column != NAN)] = NAN if np.isnan(v[j, c]) else NOT_FINITE  # a NaN outlives an infinity
        hidden = ~seen[:, j] & (o[:, c] == NUMBER)
        o[hidden, c] = NUMBER_OR_NAN
    o[bad_row], lse[bad_row] = NAN, NAN
    clean_q = np.where(np.isfinite(q).all(axis=1, keepdims=True), q, 0.0)
    clean_k = np.where(np.isfinite(k).all(axis=1, keepdims=True), k, 0.0)
    return Expected(clean_q, clean_k, np.where(np.isfinite(v), v, 0.0), seen, o, lse)


def mismatch(got: Array, classes: Classes) -> npt.NDArray[np.bool_]:
    """Where `got` breaks its class. Elements that are numbers are left to the bound."""
    nan = np.isnan(got)
    return ((classes == NAN) & ~nan) | ((classes == NOT_FINITE) & ~(nan | np.isinf(got)))


def must_be_number(got: Array, classes: Classes) -> npt.NDArray[np.bool_]:
    """Which elements the bound judges: the numbers, and where NaN is allowed whatever is not NaN."""
    return (classes == NUMBER) | ((classes == NUMBER_OR_NAN) & ~np.isnan(got))


def table(dtype: str, *, d: int, dv: int, bc: int, seed: int) -> Iterator[Case]:
    """One case per row of the special-value table that a forward pass can show; `bc` places a key in a later tile."""
    nq, nk, late = 5, bc + 3, bc + 1
    for number, (name, change) in enumerate(_ROWS.items()):
        rng = np.random.default_rng([seed, number])
        q, k, v = (representable(rng.standard_normal(s), dtype) for s in ((1, 2, nq, d), (1, 1, nk, d), (1, 1, nk, dv)))
        plain = Case(name=f"special/{name}", family="special", dtype=dtype, q=q, k=k, v=v, scale=d**-0.5, seed=seed)
        yield change(plain, late)


def poison(case: Case, tensor: str, row: int, column: int, value: float) -> Case:
    """`case` with one element (row, column, taken modulo the sizes) of every head of `tensor` set to `value`."""
    x = getattr(case, tensor).copy()
    if x.size:
        x[:, :, row % x.shape[2], column % x.shape[3]] = value
    return replace(case, **{tensor: x}, note={**case.note, "poison": [tensor, row, column, str(value)]})


def _no_keys(case: Case, late: int) -> Case:
    return replace(case, k=case.k[:, :, :0], v=case.v[:, :, :0])


def _length_zero(case: Case, late: int) -> Case:
    return replace(case, key_lengths=(0,))


def _rows_before_the_first_key(case: Case, late: int) -> Case:
    return replace(case, k=case.k[:, :, :2], v=case.v[:, :, :2], causal="bottom_right")


def _all_scores_minus_infinity(case: Case, late: int) -> Case:
    q, k = np.ones_like(case.q), np.zeros_like(case.k)
    k[..., 0] = -np.inf
    return replace(case, q=q, k=k)


def _one_score_minus_infinity(case: Case, late: int) -> Case:
    k = case.k.copy()
    k[..., late, :] = 0.0
    k[..., late, 0] = -np.inf
    return replace(case, q=np.abs(case.q) + 1.0, k=k).with_dtype(case.dtype)


def _score_plus_infinity(case: Case, late: int) -> Case:
    k = case.k.copy()
    k[..., late, 0] = np.inf
    return replace(case, q=np.abs(case.q) + 1.0, k=k).with_dtype(case.dtype)


def _zero_queries(case: Case, late: int) -> Case:
    n = 1 << max(0, (late - 1).bit_length() - 1)  # a power of two: the mean of a constant is exact
    return replace(case, q=np.zeros_like(case.q), k=case.k[:, :, :n], v=np.full_like(case.v[:, :, :n], 1.5))


def _masked_key_not_a_number(case: Case, late: int) -> Case:
    k = case.k.copy()
    k[..., late, :] = np.nan  # rows of a top-left causal problem that is 5 rows high never see it
    return replace(case, k=k, causal="top_left")


_ROWS: dict[str, Callable[[Case, int], Case]] = {
    "no_keys": _no_keys,
    "key_length_zero": _length_zero,
    "rows_before_the_first_key": _rows_before_the_first_key,
    "nan_in_a_query": lambda case, late: poison(case, "q", 2, 1, np.nan),
    "nan_in_a_key": lambda case, late: poison(case, "k", late, 1, np.nan),
    "nan_in_a_masked_key": _masked_key_not_a_number,
    "nan_in_a_value": lambda case, late: poison(case, "v", late, 3, np.nan),
    "infinity_in_a_value": lambda case, late: poison(case, "v", late, 3, np.inf),
    "score_plus_infinity": _score_plus_infinity,
    "one_score_minus_infinity": _one_score_minus_infinity,
    "all_scores_minus_infinity": _all_scores_minus_infinity,
    "zero_queries": _zero_queries,
}
