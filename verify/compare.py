"""Compare results with references under a derived bound; report where and by how much they differ.

There is no tolerance here: a caller brings a bound per element (verify/bounds) and, where the reference is itself
computed, the bound on its error. A NaN or an infinity passes only where the other side has the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Worst:
    """The element whose error is the largest fraction of its bound."""

    ratio: float  # error / bound; inf where nothing but equality was allowed, or NaN/inf disagree
    index: tuple[int, ...]
    got: float
    want: float
    error: float
    bound: float

    def text(self, tile: tuple[int, int] | None = None, key: int | None = None) -> str:
        """One line. `tile` is (br, bc) of the kernel: adds the query tile that the row belongs to."""
        where = f"at {list(self.index)}"
        if tile is not None and len(self.index) >= 1:
            row = self.index[-2] if len(self.index) > 1 else self.index[-1]
            where += f" (query tile {row // tile[0]}, row {row % tile[0]} of it)"
            if key is not None:
                where += f" (key tile {key // tile[1]})"
        return (
            f"{where}: got {self.got!r}, want {self.want!r}, |difference| {self.error:.3e}, "
            f"bound {self.bound:.3e}, error/bound {self.ratio:.4g}"
        )


def ratio(
    got: np.ndarray, want: np.ndarray, bound: np.ndarray | float, *, want_error: np.ndarray | float = 0.0
) -> np.ndarray:
    """error / (bound + want_error) per element, float64.

    0 where both sides are the same infinity or both NaN; inf where one side is NaN or infinite and the other is not
    the same, where the error is not 0 under a bound of 0, and where the bound is NaN.

    Raises:
        ValueError: shapes of got and want differ, or the bound does not broadcast to them.
    """
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    if got.shape != want.shape:
        raise ValueError(f"got has shape {got.shape}, want has shape {want.shape}")
    allowed = np.broadcast_to(np.asarray(bound, dtype=np.float64) + want_error, got.shape)
    both_finite = np.isfinite(got) & np.isfinite(want)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.where(both_finite, np.abs(got - want), 0.0)
        r = np.where(error == 0.0, 0.0, error / allowed)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    r = np.where(both_finite | same, r, np.inf)
    return np.where(np.isnan(r) | np.isnan(allowed) | (allowed < 0), np.inf, r)


def worst(
    got: np.ndarray, want: np.ndarray, bound: np.ndarray | float, *, want_error: np.ndarray | float = 0.0
) -> Worst | None:
    """The worst element, or None when there is none. Ties go to the first in row-major order."""
    r = ratio(got, want, bound, want_error=want_error)
    if r.size == 0:
        return None
    index = np.unravel_index(int(np.argmax(r)), r.shape)
    allowed = np.broadcast_to(np.asarray(bound, dtype=np.float64) + want_error, r.shape)
    a, b = float(np.asarray(got)[index]), float(np.asarray(want)[index])
    with np.errstate(invalid="ignore"):
        error = float(np.abs(np.float64(a) - np.float64(b)))
    return Worst(float(r[index]), tuple(int(i) for i in index), a, b, error, float(allowed[index]))


def assert_within(
    got: np.ndarray,
    want: np.ndarray,
    bound: np.ndarray | float,
    *,
    name: str = "result",
    want_error: np.ndarray | float = 0.0,
    tile: tuple[int, int] | None = None,
) -> float:
    """Fail unless |got - want| <= bound + want_error everywhere; return the largest error/bound.

    Args:
        got, want: equal shapes, any float dtype. A NaN or infinity must be the same on both sides.
        bound: per element or broadcast; from verify.bounds.
        want_error: bound on the error of `want` (Reference.o_err).
        tile: (br, bc) of the kernel under test, to name the query tile of the worst row.
    Raises:
        AssertionError: with the worst element, and how many elements are outside.
    """
    found = worst(got, want, bound, want_error=want_error)
    if found is None:
        return 0.0
    if found.ratio <= 1.0:
        return found.ratio
    r = ratio(got, want, bound, want_error=want_error)
    raise AssertionError(
        f"{name}: {int((r > 1.0).sum())} of {r.size} elements outside the bound; worst {found.text(tile)}"
    )
