"""What is asked of a kernel that may be broken: the bound, the special values, and the bits of its roundings.

The truths of all probes are computed once, before the first mutant; a mutant costs its compilation, its runs and a
comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from verify import judge
from verify.arithmetic import gamma
from verify.cases import Array, Case
from verify.compare import ratio
from verify.devices import Path
from verify.emulator.emulator import FindingError
from verify.formats import round_to
from verify.mutate.kill import BITS, BOUND, FINDING, SPECIAL, Kill
from verify.mutate.probes import LOST_ROWS, ROUNDED_WEIGHTS

Run = Callable[[Case], tuple[Array, Array]]  # one call of a kernel: O and LSE as float64
FORMS = ("", "debug")  # as shipped; with O in float32, where a 16-bit output hides less


@dataclass
class Judge:
    """The probes of one kernel and what must come out of them."""

    paths: dict[str, Path]  # by form
    cases: Sequence[Case]
    truths: dict[str, judge.Truth] = field(default_factory=dict)

    def prepare(self, runs: dict[str, Run]) -> list[Kill]:
        """Hear the unbroken kernel, given by form; what it says wrong (nothing, or there is no use in mutants)."""
        self.truths = {case.name: judge.Truth(case, with_balls=False) for case in self.cases}
        return [kill for kill, _ in self.hear_all(runs, None) if kill is not None]

    def hear_all(self, runs: dict[str, Run], first: str | None) -> Iterator[tuple[Kill | None, str]]:
        """Every check on every case, (what is wrong or None, form): `first` is the case to begin with."""
        cases = sorted(self.cases, key=lambda c: c.name != first)
        outputs: dict[tuple[str, str], Array] = {}
        for form, run in runs.items():
            for case in cases:
                try:
                    o, lse = run(case)
                except FindingError as error:
                    yield Kill(FINDING, case.name, None, str(error).splitlines()[0]), form
                    continue
                outputs[form, case.name] = o
                yield self.hear(case, form, o, lse), form
        for case in cases:
            if all((form, case.name) in outputs for form in FORMS) and case.dtype in ("bf16", "fp16"):
                yield _output_rounding(case, *(outputs[form, case.name] for form in FORMS)), ""

    def hear(self, case: Case, form: str, o: Array, lse: Array) -> Kill | None:
        """What is wrong with one answer, or None."""
        path, truth = self.paths[form], self.truths[case.name]
        if case.name == LOST_ROWS:
            lost = np.argwhere(np.isneginf(lse))
            text = f"lse{list(map(int, lost[0]))} = -inf, but the row sees keys" if len(lost) else ""
            return Kill(SPECIAL, case.name, None, text) if text else None
        verdict = judge.hear(case, [(path, o, lse)], truth=truth, spec=False, rows=0, compare_plain=False)[0]
        if verdict.broken_classes:
            return Kill(SPECIAL, case.name, None, verdict.broken_classes[0])
        worst = verdict.worst
        if not worst.ratio <= 1:
            text = f"{worst.output}{list(worst.element)}: got {worst.got}, want {worst.want}, bound {worst.bound:.3e}"
            return Kill(BOUND, case.name, worst.ratio, text)
        return self._weight_rounding(case, path, o)

    def _weight_rounding(self, case: Case, path: Path, o: Array) -> Kill | None:
        """P is the weights rounded to nearest. In this probe the maximum is 0 and no weight is near a midpoint, so the
        rounded weights are known; what is left are the errors of the sums, of l, and of the division."""
        model = judge.model_of(path)
        if case.name != ROUNDED_WEIGHTS or model.p_format not in ("bf16", "fp16") or model.out_format is not None:
            return None  # a 16-bit output would hide it: the debug form is asked
        head = self.truths[case.name].expected[0]
        s = case.scale * (head.q[0] @ head.k.T)
        p = np.exp(s)
        rounded = round_to(p, model.p_format)
        total = (rounded if model.l_of_rounded_p else p).sum()
        wanted = (rounded @ head.v) / total
        counts, rescales = np.array([[len(p)]]), np.array([0])
        roundings = model.scale_roundings + model.gap_roundings + 2
        of_weight = model.exp2_error + roundings * model.unit * (1 + np.abs(s).max())
        of_l = gamma(model.l_roundings(counts, path.bc, rescales, rounded=model.l_of_rounded_p), model.unit)[0]
        of_l += 0.0 if model.l_of_rounded_p else of_weight
        of_o = model.o_sum(counts, path.bc, rescales).g[0]
        size = (rounded @ np.abs(head.v)) / total
        room = (of_o + of_l + gamma(model.final_roundings, model.unit)) * size * (1 + 2.0**-6)  # products of these
        r = ratio(o[0, 0], np.broadcast_to(wanted, o[0, 0].shape), np.broadcast_to(room, o[0, 0].shape))
        if r.max() <= 1:
            return None
        return Kill(BITS, case.name, float(r.max()), "O is not made of the weights rounded to nearest")


def _output_rounding(case: Case, stored: Array, wide: Array) -> Kill | None:
    """The shipped form stores the debug form's O rounded to nearest: the same text computes it."""
    wanted = round_to(wide, case.dtype)
    wrong = ~((wanted == stored) | (np.isnan(wanted) & np.isnan(stored)))
    if not wrong.any():
        return None
    at = tuple(map(int, np.argwhere(wrong)[0]))
    return Kill(BITS, case.name, None, f"O{list(at)} = {stored[at]}, and O of the debug form rounds to {wanted[at]}")
