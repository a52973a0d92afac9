"""Who judges the judge of gradients: mistakes are put into each tier, and the other tiers must notice."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from verify import inputs
from verify.compare import ratio
from verify.oracle import backward_balls, backward_float64, backward_multiprecision, float64

TIERS = (backward_float64, backward_balls, backward_multiprecision)
# tier, text, what replaces it. Each text occurs exactly once.
MUTANTS = [
    (backward_float64, "D = D - x.dlse[rows]", "D = D + x.dlse[rows]"),
    (backward_float64, "D = D - x.dlse[rows]", "D = D"),
    (backward_float64, "g = np.where(seen, dp - D[:, None], 0.0)", "g = np.where(seen, dp, 0.0)"),
    (backward_float64, "D = (do * o).sum(axis=1)", "D = (p * dp).sum(axis=1)"),  # D of exact attention, not the given
    (backward_float64, "p = np.where(seen, np.exp(exponent), 0.0)", "p = s.p"),  # weights of exact attention
    (backward_float64, "p = np.where(seen, np.exp(exponent), 0.0)", "p = np.exp(exponent)"),  # masked pairs count
    (backward_float64, "dq[rows] = scale * (ds @ x.k)", "dq[rows] = ds @ x.k"),
    (backward_float64, "_finished(scale * dk,", "_finished(dk,"),
    (backward_float64, "dk += ds.T @ x.q[rows]", "dk = ds.T @ x.q[rows]"),  # only the last chunk of rows
    (backward_float64, "dv_sum += p.T @ x.do[rows]", "dv_sum += ds.T @ x.do[rows]"),
    (backward_float64, "dv_sum += p.T @ x.do[rows]", "dv_sum = p.T @ x.do[rows]"),
    (backward_balls, "D -= arb(float(x.dlse[i]))", "D += arb(float(x.dlse[i]))"),
    (backward_balls, "a * (b - D) if keep", "a * b - D if keep"),
    (backward_balls, "arb(s) * unit - lse).exp() if keep", "arb(s) * unit).exp() if keep"),
    (backward_balls, "return [a * inverse for a in w]", "return w"),
    (backward_balls, "dS * K * scale, dS.transpose() * Q * scale", "dS * K * scale, dS.transpose() * Q"),
    (backward_balls, "dS * K * scale, dS.transpose() * Q * scale", "P * K * scale, dS.transpose() * Q * scale"),
    (backward_balls, "P.transpose() * dO\n", "dS.transpose() * dO\n"),
    (backward_balls, "arb(2) ** product_exp", "arb(2) ** score_exp"),
    (backward_multiprecision, "+ _Scaled(dlse, dlse_exp)", "- _Scaled(dlse, dlse_exp)"),
    (backward_multiprecision, " + _Scaled(dlse, dlse_exp).at(exponent)", ""),
    (backward_multiprecision, "dp.at(exponent) - D.at(exponent)", "dp.at(exponent)"),
    (backward_multiprecision, "np.left_shift(w, wp) // int(w.sum())", "w"),
    (backward_multiprecision, "_fixed(a, s_exp + wp) - shift", "_fixed(a, s_exp + wp)"),
    (backward_multiprecision, "dk_int * weigh.scale_int", "dk_int"),
    (backward_multiprecision, "weigh.k_int[seen]) * weigh.scale_int", "weigh.k_int[seen])"),
    (backward_multiprecision, "np.outer(p, do_int[i])", "np.outer(ds, do_int[i])"),
    (backward_multiprecision, "np.left_shift(ds, ds_exp - lowest)", "ds"),
    (backward_multiprecision, "self.v_exp + do_exp", "self.v_exp"),
    (backward_multiprecision, "seen = np.flatnonzero(x.visible[i])", "seen = np.arange(int(x.visible[i].sum()))"),
]


def mutated(tier, text, replacement, monkeypatch):
    source = Path(tier.__file__).read_text()
    assert source.count(text) == 1, f"{text!r} occurs {source.count(text)} times"
    module = types.ModuleType("mutated_tier")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    exec(compile(source.replace(text, replacement), tier.__file__, "exec"), module.__dict__)
    return module


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(float64, "CHUNK", 24)  # two rows at a time


def disagreement(tiers):
    """Largest distance between any two tiers over the sum of their own error bounds."""
    worst = 0.0
    for family in ("gaussian", "random_mask", "far_below_zero"):
        x = inputs.FAMILIES[family](5, 12, 8, 3, dtype="float32", seed=6)
        rng = np.random.default_rng(7)
        do, dlse = inputs._representable(rng.standard_normal((5, 3)), "float32"), rng.standard_normal(5)
        exact = float64.attention(*x, scale=x.scale, visible=x.visible)
        for given in (None, (exact.o + 0.125, exact.lse - 0.25)):
            same = {"scale": x.scale, "visible": x.visible, "dlse": dlse, "given": given}
            with np.errstate(all="ignore"):
                found = [tier.gradients(*x, do, **same) for tier in tiers]
            for a in found:
                for b in found:
                    for n in ("dq", "dk", "dv"):
                        error, other = getattr(a, f"{n}_err"), getattr(b, f"{n}_err")
                        worst = max(worst, float(ratio(getattr(a, n), getattr(b, n), error, want_error=other).max()))
    return worst


def test_the_tiers_agree():
    assert disagreement(TIERS) <= 1.0


@pytest.mark.parametrize("tier, text, replacement", MUTANTS, ids=[f"{m.__name__[23:]}: {r}" for m, _, r in MUTANTS])
def test_a_mistake_in_one_tier_is_noticed(tier, text, replacement, monkeypatch):
    broken = mutated(tier, text, replacement, monkeypatch)
    assert disagreement([broken, *(t for t in TIERS if t is not tier)]) > 1.0
