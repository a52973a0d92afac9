"""What a judge says of one run: the worst element per judge and output, and whether everything is within its bound.

An element is (batch, head, row, column) of O and dQ, (batch, head, row) of LSE, and (batch, K/V head, key, column) of
dK and dV.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verify import special
from verify.cases import GRADIENT_WORDS, GRADIENTS, Array, Case
from verify.devices import Path

OUTPUTS = ("o", "lse")
BY_KEY = ("dk", "dv")  # their elements name a K/V head and a key


@dataclass(frozen=True)
class Figure:
    """The worst element of one output in the eyes of one judge."""

    judge: str
    output: str
    ratio: float  # |got - want| / bound; above 1 is a violation
    element: tuple[int, ...]
    got: float
    want: float
    bound: float
    elements: int  # how many it looked at

    def describe(self) -> dict[str, Any]:
        return {**vars(self), "element": list(self.element)}


@dataclass(frozen=True)
class Verdict:
    """All that was found about one run of one case, forward (o, lse) or backward (the gradients that were wanted)."""

    case: Case
    path: Path
    figures: list[Figure]
    ratios: dict[str, Array]  # per output: err/bound of every element that is a number
    worst_error: dict[str, float]  # per output: worst |error|, absolute; of a gradient: against exact attention's
    plain_error: dict[str, float]  # the same for the plain formula in the case's dtype
    plain_ratio: dict[str, float]  # its err/bound, with this path's bound
    broken_classes: list[str] = field(default_factory=list)
    rows_mpmath: int = 0
    elements_balls: int = 0
    keys_mpmath: int = 0
    unclaimed: dict[str, str] = field(default_factory=dict)  # statement -> why the bound claims nothing here

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(self.worst_error)

    @property
    def worst(self) -> Figure:
        return max(self.figures, key=lambda f: f.ratio)

    @property
    def holds(self) -> bool:
        return not self.broken_classes and all(f.ratio <= 1 for f in self.figures)

    def message(self, how: str = "") -> str:
        """What a person needs to see when it does not hold."""
        words = self.case.describe()
        sizes = " ".join(f"{k}={words[k]}" for k in ("B", "Hq", "Hkv", "Nq", "Nk", "d", "dv"))
        lines = [
            f"{words['case']} on {self.path} ({self.path.arithmetic}, Br={self.path.br} Bc={self.path.bc}): "
            "not within its bound",
            f"  {sizes} causal={words['causal']} key_lengths={words['key_lengths']} scale={words['scale']!r} "
            f"layout={words['layout']} seed={words['seed']}",
        ]
        if set(GRADIENTS) & set(self.outputs):
            lines.append("  " + " ".join(f"{word}={words[word]}" for word in GRADIENT_WORDS))
        lines += [f"  {text}" for text in self.broken_classes[:6]]
        for f in sorted((f for f in self.figures if not f.ratio <= 1), key=lambda f: -f.ratio)[:6]:
            lines.append(
                f"  {f.output}{list(f.element)}: got {f.got!r}, {f.judge} says {f.want!r}, bound {f.bound:.3e}, "
                f"err/bound {f.ratio:.3g}; {self._place(f)}"
            )
        if self.case.note.get("description"):
            lines.append(f"  drawn as {self.case.note['description']}")
        if how:
            lines.append(f"  again: {how}")
        return "\n".join(lines)

    def _place(self, f: Figure) -> str:
        """The tile of an element, and the tiles that it depends on."""
        batch, _, at = f.element[:3]
        seen, br, bc = self.case.visible(batch), self.path.br, self.path.bc
        if f.output in BY_KEY:
            rows = np.flatnonzero(seen[:, at])
            by = f"query tiles {rows[0] // br}..{rows[-1] // br}" if rows.size else "no row sees it"
            return f"key tile {at // bc}, {by}"
        keys = np.flatnonzero(seen[at])
        sees = f"key tiles {keys[0] // bc}..{keys[-1] // bc}" if keys.size else "no key visible"
        return f"query tile {at // br}, {sees}"


Where = Callable[[tuple[int, ...]], tuple[int, ...]]  # an index of a 2-D result -> the element's name


def at_rows(head: tuple[int, int], rows: Any) -> Where:
    """Names the elements of a result that holds these rows (or keys) of one head."""
    return lambda at: (*head, int(rows[at[0]]), *at[1:])


class Found:
    """Figures as they come in: the worst element per judge and output."""

    def __init__(self) -> None:
        self._worst: dict[tuple[str, str], Figure] = {}

    def keep(
        self, judge: str, output: str, ratios: Array, got: Array, want: Array, room: Array, where: Where, heard: int
    ) -> None:
        """Remember the worst element of a head; `heard`: how many of its elements were judged."""
        before = self._worst.get((judge, output))
        elements = heard + (before.elements if before else 0)
        if ratios.size:
            at = np.unravel_index(int(ratios.argmax()), ratios.shape)
            if before is None or ratios[at] > before.ratio:
                self._worst[judge, output] = Figure(
                    judge, output, float(ratios[at]), where(tuple(int(i) for i in at)),
                    got=float(got[at]), want=float(want[at]), bound=float(room[at]), elements=elements,
                )  # fmt: skip
                return
        if before is not None:
            self._worst[judge, output] = Figure(**{**vars(before), "elements": elements})

    @property
    def figures(self) -> list[Figure]:
        return list(self._worst.values())


def largest(got: Array, want: Array, where: Any) -> float:
    """Worst |got - want| over `where`; equal infinities differ by 0."""
    with np.errstate(invalid="ignore"):
        e = np.where(got == want, 0.0, np.abs(got - want))
    return float(e[where].max(initial=0.0))


def broken(got: Array, classes: special.Classes, output: str, where: Where) -> list[str]:
    """A text for each of the first elements that are not of the class that they must have."""
    found = []
    for at in np.argwhere(special.mismatch(got, classes))[:3]:
        value, wanted = float(got[tuple(at)]), special.CLASS_NAMES[classes[tuple(at)]]
        found.append(f"{output}{list(where(tuple(int(i) for i in at)))}: got {value!r}, must be {wanted}")
    return found
