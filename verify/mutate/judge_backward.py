"""What is asked of a backward kernel that may be broken: the stage-wise bound, NaN where it belongs, the last rounding.

Judged per K/V head, its query heads stacked. The exact gradients of all probes are computed once, before the first
mutant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from verify import special
from verify.bounds.backward_domain import outside_backward_domain
from verify.bounds.backward_model import BackwardModel
from verify.bounds.backward_output import BackwardBound, backward
from verify.cases import Array, Mask
from verify.emulator.emulator import FindingError
from verify.formats import round_to
from verify.mutate import gradients
from verify.mutate.judge_kernel import FORMS
from verify.mutate.kill import BITS, FINDING, SPECIAL, Kill
from verify.mutate.probes_backward import WRONG_LSE, BackwardProbe
from verify.oracle import backward_float64, backward_reference
from verify.oracle.backward_reference import Gradients, Problem
from verify.special_backward import ExpectedGradients

Answer = dict[str, Array]  # the wanted of dq, dk and dv, (B,H,N,columns) as float64
LEAST_NORMAL = 2.0**-126  # below it AMX-BF16 rounds to 0
BackwardRun = Callable[[BackwardProbe], Answer]  # one call of a kernel


@dataclass(frozen=True)
class _Head:
    """One K/V head of a probe: where it is, what must come out, and by form how near."""

    at: tuple[int, int]
    heads: slice
    exact: Gradients
    bounds: dict[str, BackwardBound]
    may_be_nan: dict[str, Mask]


@dataclass
class BackwardJudge:
    """The probes of one backward kernel with tiles of br rows and bc keys, and what must come out of them.

    sums_anywhere: dQ of a call without `in_order`, and with dK or dV, is summed in memory, in any order.
    """

    models: dict[str, BackwardModel]  # by form
    br: int
    bc: int
    cases: Sequence[BackwardProbe]
    sums_anywhere: bool = False
    truths: dict[str, list[_Head]] = field(default_factory=dict)

    def prepare(self, runs: dict[str, BackwardRun]) -> list[Kill]:
        """Hear the unbroken kernel, given by form; what it says wrong (nothing, or there is no use in mutants)."""
        self.truths = {probe.name: self._truth(probe) for probe in self.cases}
        return [kill for kill, _ in self.hear_all(runs, None) if kill is not None]

    def hear_all(self, runs: dict[str, BackwardRun], first: str | None) -> Iterator[tuple[Kill | None, str]]:
        """Every check on every probe, (what is wrong or None, form): `first` is the probe to begin with."""
        cases = sorted(self.cases, key=lambda p: p.name != first)
        outputs: dict[tuple[str, str], Answer] = {}
        for form, run in runs.items():
            for probe in cases:
                try:
                    got = run(probe)
                except FindingError as error:
                    yield Kill(FINDING, probe.name, None, str(error).splitlines()[0]), form
                    continue
                outputs[form, probe.name] = got
                yield self.hear(probe, form, got), form
        for probe in cases:
            if all((form, probe.name) in outputs for form in FORMS) and probe.case.dtype in ("bf16", "fp16"):
                yield self._output_rounding(probe, *(outputs[form, probe.name] for form in FORMS)), ""

    def hear(self, probe: BackwardProbe, form: str, got: Answer) -> Kill | None:
        """What is wrong with one answer, or None."""
        if probe.case.name == WRONG_LSE:
            # Weights beyond the format: no bound, but the mistake of the caller must not look like a gradient.
            text = "dq: every weight is beyond the format, and numbers come out" if np.isfinite(got["dq"]).any() else ""
            return Kill(SPECIAL, probe.name, None, text) if text else None
        for head in self.truths[probe.name]:
            b, g = head.at
            answer = {name: _stacked(x[b, head.heads]) if name == "dq" else x[b, g] for name, x in got.items()}
            kill = gradients.wrong(
                probe.name, answer, head.exact, head.bounds[form], may_be_nan=head.may_be_nan, where=f" head {b, g} "
            )
            if kill is not None:
                return kill
        return None

    def _output_rounding(self, probe: BackwardProbe, stored: Answer, wide: Answer) -> Kill | None:
        """The shipped form stores the debug form's gradients rounded to nearest: the same text computes them."""
        flushes = self.models[""].path.flushes_operands
        for name, have in stored.items():
            full = np.where(flushes & (np.abs(wide[name]) < LEAST_NORMAL), 0.0, wide[name])
            wanted = round_to(full, probe.case.dtype)
            wrong = ~((wanted == have) | (np.isnan(wanted) & np.isnan(have)))
            if wrong.any():
                at = tuple(map(int, np.argwhere(wrong)[0]))
                text = f"{name}{list(at)} = {have[at]}, and that of the debug form rounds to {wanted[at]}"
                return Kill(BITS, probe.name, None, text)
        return None

    def _truth(self, probe: BackwardProbe) -> list[_Head]:
        """Raises: ValueError for a probe outside of the domain of the bound."""
        made, found = probe.case, []
        if probe.case.name == WRONG_LSE:
            return []
        group = made.q.shape[1] // made.k.shape[1]
        for b, g in np.ndindex(made.k.shape[:2]):
            heads = slice(g * group, (g + 1) * group)
            seen = np.tile(made.visible(b), (group, 1))
            length = None if made.key_lengths is None else made.key_lengths[b]
            q, do, o, lse = (_stacked(x[b, heads]) for x in (made.q, probe.do, probe.o, probe.lse))
            dlse = None if probe.dlse is None else _stacked(probe.dlse[b, heads])
            k, v = made.k[b, g], made.v[b, g]
            asked = {"scale": made.scale, "visible": seen, "dlse": dlse, "given": (o, lse)}
            exact = backward_float64.gradients(q, k, v, do, **asked)  # type: ignore[arg-type]
            expected = ExpectedGradients.of(Problem.of(q, k, v, do, **asked))  # type: ignore[arg-type]
            classes = expected.classes(exact, self.models[""].path.product, length)
            may_be_nan = {name: found == special.NUMBER_OR_NAN for name, found in classes.items()}
            clean = special.expect(q, k, v, visible=seen, length=length)
            arrays = clean.q, clean.k, clean.v, np.nan_to_num(do)
            words = {
                "scale": made.scale,
                "visible": clean.visible,
                "dlse": None if dlse is None else np.nan_to_num(dlse),
                "given": (np.nan_to_num(o), np.where(np.isneginf(lse) | np.isfinite(lse), lse, 0.0)),
            }
            bounds = {}
            for form, made_for in self.models.items():
                in_memory = self.sums_anywhere and not probe.in_order and any(made.wanted[1:])
                model = replace(made_for, dq_restarts=made_for.dq_restarts or in_memory)
                bound = backward(*arrays, model=model, br=self.br, bc=self.bc, heads=group, **words)  # type: ignore[arg-type]
                outside = outside_backward_domain(*arrays, model=model, bound=bound, **words)  # type: ignore[arg-type]
                if outside:
                    raise ValueError(f"{probe.name}: {outside}")
                bounds[form] = bound
            found.append(_Head((b, g), heads, exact, bounds, may_be_nan))
        return found


def _stacked(x: Array) -> Array:
    """(heads, Nq, ...) as (heads Nq, ...)."""
    (stacked,) = backward_reference.stack_group(x)
    assert stacked is not None
    return stacked
