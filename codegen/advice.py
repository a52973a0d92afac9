"""What to try instead of a request that has no plan: a budget, a tile, or none.

Holds always: every request that is named has a plan, on all of its targets. Whether one has is asked of `fits`, the
planners of all targets together, so that nothing here knows a rule of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .errors import PlanError
from .problem import Problem
from .sizes import LARGEST_BYTES, format_bytes

# Steps in which a legal tile is looked for beside one that was refused: every planner's granules are multiples of the
# first and divide the second; farther away, up to the fourth, the third is fine enough.
GRANULE, WIDEST_GRANULE, COARSE, MOST_SEARCHED = 8, 64, 16, 4096

Fits = Callable[[Problem], bool]  # whether every target of a request has a plan


def _smallest_sram(problem: Problem, fits: Fits) -> int | None:
    """The least budget, a multiple of 1 KB above the asked one, at which every target of `problem` has a plan.

    None when no budget helps. Relies on planners accepting every budget above one that they accept.
    """

    def enough_at(kb: int) -> bool:
        return fits(replace(problem, sram_bytes=1024 * kb))

    too_small = problem.sram_bytes // 1024
    enough = min(max(1, 2 * too_small), LARGEST_BYTES // 1024)
    while not enough_at(enough):
        too_small, enough = enough, 2 * enough
        if enough > LARGEST_BYTES // 1024:
            return None
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        too_small, enough = (too_small, middle) if enough_at(middle) else (middle, enough)
    return 1024 * enough


def advised(error: PlanError, problem: Problem, fits: Fits) -> PlanError:
    """A planner's error; when the budget is what is missing, with the budget that serves the whole request.

    When an overridden tile is, whatever the budget, with the nearest ones that every target of the request takes. When
    both are, with what serves the request without its override.
    """
    # What one target would try says nothing of the others.
    said = [line.strip() for line in str(error).splitlines() if not line.strip().startswith("try --")]
    needed = _smallest_sram(problem, fits)
    if needed is None:
        tiles = _nearest_tiles(problem, fits)
        advice = f"try {tiles}" if tiles else _without_tile(problem, fits)
        return PlanError(*said, *([advice] if advice else []))
    without = ""
    if problem.backward and fits(replace(problem, backward=False)):
        without = ", or --no-backward"
    advice = f"try --sram {format_bytes(needed)}, where every kernel for {', '.join(problem.archs)} fits{without}"
    return PlanError(*said, advice)


def _without_tile(problem: Problem, fits: Fits) -> str:
    """What to try where no other --br or --bc helps: the request without them, with more memory if it needs that."""
    free = replace(problem, br=None, bc=None)
    asked = " and ".join(f"--{side}" for side in ("br", "bc") if getattr(problem, side) is not None)
    if not asked:
        return ""
    if fits(free):
        return f"try without {asked}"
    needed = _smallest_sram(free, fits)
    return f"try --sram {format_bytes(needed)} without {asked}" if needed else ""


def _nearest_tiles(problem: Problem, fits: Fits) -> str:
    """In words, what to give instead of --br or --bc for the request to have plans: both neighbours where they do."""
    asked = {side: size for side, size in (("br", problem.br), ("bc", problem.bc)) if size is not None}
    alone = {side: _neighbours(problem, side, fits) for side in asked}
    words = [f"--{side} {' or '.join(map(str, sizes))}" for side, sizes in alone.items() if sizes]
    if words or len(asked) < 2:
        return ", or ".join(words)
    for br in _neighbours(replace(problem, bc=None), "br", fits):  # both are at fault: the rows by themselves first
        keys = _neighbours(replace(problem, br=br), "bc", fits)
        if keys:
            return f"--br {br} --bc {' or '.join(map(str, keys))}"
    return ""


def _neighbours(problem: Problem, side: str, fits: Fits) -> list[int]:
    """The nearest smaller and the nearest larger size of an overridden side with which every target has a plan."""
    size = getattr(problem, side)
    near = range(max(1, size - WIDEST_GRANULE), size + WIDEST_GRANULE + 1)
    above = [n for n in near if n > size and n % GRANULE == 0]
    below = [n for n in reversed(near) if n < size and n % GRANULE == 0]
    below += [n for n in range(min(near.start - 1, MOST_SEARCHED), 0, -1) if n % COARSE == 0]

    def legal(n: int) -> bool:
        return fits(replace(problem, br=n) if side == "br" else replace(problem, bc=n))

    found = (next(filter(legal, sizes), None) for sizes in (below, above))
    return [n for n in found if n is not None]
