"""The bounds on the gradients are tight enough: each seeded bug of the tiled backward passes exceeds them."""

from __future__ import annotations

import inspect
from types import ModuleType

import numpy as np
import pytest

from spec import flash1, flash2, masks
from spec.dropout import Dropout
from tests.spec.problems import Problem, assert_gradients


def problems():
    """A causal problem with empty rows (Nk < Nq), and one with dropout, soft cap and bias."""
    rng = np.random.default_rng(0)

    def arrays(nq, nk):
        return [rng.normal(size=s) for s in ((nq, 5), (nk, 5), (nk, 3), (nq, 3))]

    yield Problem(*arrays(23, 17), 8, 4, {"mask": masks.Causal(masks.BOTTOM_RIGHT)})
    rest = {"dropout": Dropout(p=0.3, seed=1), "softcap": 2.0, "bias": rng.normal(size=(1, 23))}
    yield Problem(*arrays(17, 23), 4, 8, rest)


def notices(module, backward):
    """Whether the gradients of `backward` leave their bounds on some problem."""
    for p in problems():
        tiled = {"br": p.br, "bc": p.bc} | p.options
        out = module.forward(*p.inputs, **tiled)
        saved = (out.o, out.m, out.l) if module is flash1 else (out.o, out.lse)
        try:
            with np.errstate(all="ignore"):
                assert_gradients(backward(*p.inputs, *saved, p.do, **tiled), p)
        except AssertionError:
            return True
    return False


def mutant(module, old, new):
    source = inspect.getsource(module)
    head, tail = source.split("def backward", 1)
    assert old in tail, f"{old!r} is nowhere in {module.__name__}.backward"
    broken = ModuleType(f"{module.__name__}_mutant")
    exec(compile(head + "def backward" + tail.replace(old, new), broken.__name__, "exec"), broken.__dict__)
    return broken.backward


@pytest.mark.parametrize("module", [flash1, flash2])
def test_the_right_backward_passes_stay_within_their_bounds(module):
    assert not notices(module, module.backward)


COMMON = {
    "scale missing in dQ": ("head.scale * sum_over_visible(dSij, Kj", "sum_over_visible(dSij, Kj"),
    "scale twice in dK": ("head.scale * sum_over_visible(dSij.T", "head.scale**2 * sum_over_visible(dSij.T"),
    "dQ overwritten": ("dQ[rows] +=", "dQ[rows] ="),
    "dV overwritten": ("dV[cols] +=", "dV[cols] ="),
    "dK from P": ("sum_over_visible(dSij.T, Qi", "sum_over_visible(Pij.T, Qi"),
    "dV from dS": ("times(Pij, Zij).T", "select(Pij * (dOi @ Vj.T), visible).T"),
    "parenthesis: P dP - D": ("Pij * (dPij - Di[:, None])", "(Pij * dPij - Di[:, None])"),
    "D added": ("(dPij - Di[:, None])", "(dPij + Di[:, None])"),
    "D missing": ("(dPij - Di[:, None])", "dPij"),
    "last row tile lost": ("tiles(head.nq, br)", "tiles(head.nq - 1, br)"),
    "last key tile lost": ("tiles(head.nk, bc)", "tiles(head.nk - 1, bc)"),
    "mask missing": ("head.scores(rows, cols, visible)", "head.scores(rows, cols, None)"),
    "dropout missing in dP": ("times(dOi @ Vj.T, Zij)", "dOi @ Vj.T"),
    "dropout missing in dV": ("times(Pij, Zij).T", "Pij.T"),
    "dropout of the first tile": ("head.z(rows, cols)", "head.z(slice(0, rows.stop - rows.start), cols)"),
    "soft cap not differentiated": ("times(dSij, head.score_slope(rows, cols))", "dSij"),
    "dP rounded to bf16": (
        "times(dOi @ Vj.T, Zij)",
        "__import__('spec.rounding').rounding.round_to(dOi @ Vj.T, 'bf16')",
    ),
}
FLASH1 = COMMON | {
    "l missing": (
        "divide_rows(np.exp(Sij - finite_or_zero(mi)[:, None]), li)",
        "np.exp(Sij - finite_or_zero(mi)[:, None])",
    ),
    "m missing": ("np.exp(Sij - finite_or_zero(mi)[:, None])", "np.exp(Sij)"),
}
FLASH2 = COMMON | {
    "LSE in base 2": ("np.exp(Sij - Li[:, None])", "np.exp(Sij - Li[:, None] / np.log(2))"),
    "LSE missing": ("np.exp(Sij - Li[:, None])", "np.exp(Sij)"),
    "D rounded to float32": ("D = (dO * O).sum(axis=1)", "D = (dO * O).astype(np.float32).sum(axis=1)"),
}
CASES = [(m, name, change) for m, table in ((flash1, FLASH1), (flash2, FLASH2)) for name, change in table.items()]


@pytest.mark.parametrize("module, name, change", CASES, ids=[f"{m.__name__[5:]}: {name}" for m, name, _ in CASES])
def test_every_bug_of_a_backward_pass_is_noticed(module, name, change):
    broken = mutant(module, *change)
    if name == "mask missing":
        # equivalent: P and dS are selected by the mask as well, so that junk behind it stays out
        assert not notices(module, broken)
        broken = mutant(module, "visible = head.visible(rows, cols, tile)", "visible = None")
    assert notices(module, broken)
