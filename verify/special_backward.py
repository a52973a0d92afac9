"""What must come out of a backward pass when something that is not a number goes in.

A gradient is a function of the visible pairs only: an empty row has dQ = 0 and adds nothing, a key that no row sees
gets 0, and a NaN is never removed. The oracle says which elements are lost (`oracle.backward_float64`); a kernel must
not have a number there, an infinity will do. A pair that is masked, or absent because its score is -inf, has influence
in one way only: 0 times what is not finite. Who may do that, and where:

    any path        a visible pair with a score of -inf may pass on what is not finite in dO and dLSE of its row
    matrix units    so may any masked pair within the key length, as long as its row is not an empty one
    mma.sync        also what is not finite in q, O, k or v of a masked pair within the key length

Keys beyond the length and empty rows have no influence at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from verify import output_gradients, special
from verify.cases import Case, Mask
from verify.oracle.backward_float64 import Poison
from verify.oracle.backward_reference import Gradients, Problem
from verify.special import NOT_FINITE, NUMBER, NUMBER_OR_NAN, Classes

VECTOR_PRODUCTS = ("fma", "muladd")


@dataclass(frozen=True, eq=False)
class ExpectedGradients:
    """The gradients of the query heads of one K/V head, as it stands and with finite numbers only."""

    problem: Problem
    finite: Problem  # the same gradients wherever they are numbers

    @classmethod
    def of(cls, problem: Problem) -> ExpectedGradients:
        return cls(problem, Poison.of(problem).clean(problem))

    @property
    def is_finite(self) -> bool:
        """Whether every input that some gradient may depend on is a number."""
        x = self.problem
        rows, keys = np.asarray(x.visible.any(axis=1)), np.asarray(x.visible.any(axis=0))
        of_rows = (x.q, x.do, x.dlse, *(x.given or ()))
        return all(np.isfinite(a[rows]).all() for a in of_rows) and all(np.isfinite(a[keys]).all() for a in (x.k, x.v))

    def classes(self, exact: Gradients, product: str, length: int | None) -> dict[str, Classes]:
        """The class of every element of dq, dk and dv, for a kernel with these products and keys up to `length`."""
        rows, keys = self._may_be_nan(product, length)
        found = {}
        for name, leaky in (("dq", rows), ("dk", keys), ("dv", keys)):
            lost = np.isnan(getattr(exact, name))
            numbers = np.where(np.broadcast_to(leaky[:, None], lost.shape), NUMBER_OR_NAN, NUMBER)
            found[name] = np.where(lost, NOT_FINITE, numbers).astype(np.int8)
        return found

    def _may_be_nan(self, product: str, length: int | None) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """(rows whose dq, keys whose dk and dv) may be NaN because a pair without influence multiplied one by 0."""
        x = self.problem
        bad_row, bad_key = ~np.isfinite(x.do).all(axis=1) | ~np.isfinite(x.dlse), np.zeros(len(x.k), bool)
        if product == "block":
            bad_row |= ~np.isfinite(x.q).all(axis=1)
            if x.given is not None:
                bad_row |= ~np.isfinite(x.given[0]).all(axis=1)
            bad_key = ~(np.isfinite(x.k).all(axis=1) & np.isfinite(x.v).all(axis=1))
        if not (bad_row.any() or bad_key.any()):
            return np.zeros(len(x.q), bool), np.zeros(len(x.k), bool)
        absent = self._absent(product, length)
        return np.asarray((absent & bad_key).any(axis=1)), np.asarray((absent & bad_row[:, None]).any(axis=0))

    def _absent(self, product: str, length: int | None) -> Mask:
        """(Nq, Nk): pairs without influence that a kernel of this kind may still multiply."""
        x = self.problem
        if product in VECTOR_PRODUCTS:
            touched = x.visible
        else:
            inside = np.arange(len(x.k)) < (len(x.k) if length is None else length)
            touched = np.asarray(x.visible.any(axis=1))[:, None] & inside
        return np.asarray(touched & ~self.finite.visible)


def table(dtype: str, *, d: int, dv: int, bc: int, seed: int) -> Iterator[Case]:
    """The special-value table of the forward pass with gradients of its outputs, and what only they can show."""
    for case in special.table(dtype, d=d, dv=dv, bc=bc, seed=seed):
        yield output_gradients.attach(case, "normal", dlse="normal", seed=seed)
    plain = next(case for case in special.table(dtype, d=d, dv=dv, bc=bc, seed=seed) if case.name == _PLAIN)
    for name, change in _ROWS.items():
        fresh = replace(special.poison(plain, "q", 2, 1, 1.0), name=f"special/{name}", note={})
        yield change(output_gradients.attach(fresh, "normal", dlse="normal", seed=seed))


def _spoilt(tensor: str, row: int, value: float) -> Callable[[Case], Case]:
    """The change that puts `value` into one element of every head of dO or dLSE."""

    def change(case: Case) -> Case:
        x = getattr(case, tensor).copy()
        x[(..., row, 3) if tensor == "do" else (..., row)] = value
        return replace(case, **{tensor: x})

    return change


def _empty_rows_hold_nan(case: Case) -> Case:
    """Rows before the first key, with NaN in all that they hold."""
    made = replace(
        case, k=case.k[:, :, :2], v=case.v[:, :, :2], causal="bottom_right",
        **{name: getattr(case, name).copy() for name in ("q", "do", "dlse")},
    )  # fmt: skip
    for x in (made.q, made.do, made.dlse):
        assert x is not None
        x[:, :, :3] = np.nan
    return made


_PLAIN = "special/nan_in_a_query"  # N(0, 1) but for one element
_ROWS: dict[str, Callable[[Case], Case]] = {
    "nan_in_do": _spoilt("do", 2, np.nan),
    "infinity_in_do": _spoilt("do", 1, np.inf),
    "nan_in_dlse": _spoilt("dlse", 3, np.nan),
    "empty_rows_hold_nan": _empty_rows_hold_nan,
}
