"""Who judges the judge: mistakes are put into each tier, and the other tiers must notice."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from verify import inputs
from verify.compare import ratio
from verify.oracle import balls, float64, multiprecision

# tier, text, what replaces it. Each text occurs exactly once.
MUTANTS = [
    (float64, "x = (hi - top[:, None]) + scores.lo", "x = hi + scores.lo"),  # no maximum is subtracted
    (float64, "x = (x - rest[:, None]) * scale", "x = x * scale"),  # the maximum of the high parts alone
    (float64, "x = (hi - top[:, None]) + scores.lo", "x = hi - top[:, None]"),  # the low parts are lost
    (float64, "hi = np.where(visible, scores.hi, -np.inf)", "hi = scores.hi"),  # masked keys have weight
    (float64, "log_total = np.log(s.total)", "log_total = np.log2(s.total)"),
    (float64, "m=top * scale + rest * scale", "m=top + rest"),
    (float64, "chunk_lse = s.m + log_total", "chunk_lse = s.m - log_total"),
    (float64, "np.where(visible, scores.hi, -np.inf)", "np.where(visible, scores.hi, -1e4)"),
    (balls, "(q_exp + k_exp)", "-(q_exp + k_exp)"),
    (balls, "flint.arb(s - top) * unit", "flint.arb(s) * unit"),
    (balls, ".exp() if keep else flint.arb(0)", ".exp()"),  # masked keys have weight
    (balls, "total.log()", "total.log() / flint.arb(2).log()"),
    (balls, "product[i, j] / totals[i]", "product[i, j] / totals[0]"),
    (multiprecision, "ctx.mpf(int(a)) / total, v_exp)", "ctx.mpf(int(a)) / total, v_exp + 1)"),
    (multiprecision, "shift = wp + e", "shift = wp - e"),
    (multiprecision, "shift = wp + e", "shift = wp + e - 1"),
    (multiprecision, "e = k_exp + q_exp + scale_exp", "e = k_exp + q_exp"),
    (multiprecision, "top = max(s)", "top = 0"),
    (
        multiprecision,
        "k_int[seen].dot(q_int)",
        "k_int.dot(q_int)[: seen.sum()]",
    ),  # the first keys, not the visible ones
    (multiprecision, "ctx.log(ctx.ldexp(ctx.mpf(total), -wp))", "ctx.log(ctx.ldexp(ctx.mpf(total), -wp), 2)"),
]


def mutated(tier, text, replacement, monkeypatch):
    source = Path(tier.__file__).read_text()
    assert source.count(text) == 1, f"{text!r} occurs {source.count(text)} times"
    module = types.ModuleType("mutated_tier")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    exec(compile(source.replace(text, replacement), tier.__file__, "exec"), module.__dict__)
    return module


def disagreement(tiers):
    """Largest distance between any two tiers over the sum of their own error bounds."""
    cases = [
        inputs.FAMILIES[name](3, 20, 8, 3, dtype="float32", seed=6)
        for name in ("gaussian", "random_mask", "far_below_zero", "huge_logits")
    ]
    masked = inputs.FAMILIES["late_max"](
        3, 20, 8, 3, dtype="float32", seed=6
    )  # the masked keys have the largest scores
    cases.append(inputs.Inputs("", "float32", *masked, scale=40.0, visible=np.tile(np.arange(20) < 15, (3, 1))))
    deep = inputs.FAMILIES["random_mask"](3, 20, 8, 3, dtype="float32", seed=6)  # all scores are below -1e4
    q, k = 1.0 + np.abs(deep.q), -4e3 * (1.0 + np.abs(deep.k))
    cases.append(inputs.Inputs("", "float32", q, k, deep.v, scale=1e-3, visible=deep.visible))
    worst = 0.0
    for x in cases:
        with np.errstate(all="ignore"):
            found = [t.attention(*x, scale=x.scale, visible=x.visible) for t in tiers]
        for a in found:
            for b in found:
                worst = max(worst, float(ratio(a.o, b.o, a.o_err, want_error=b.o_err).max()))
                worst = max(worst, float(ratio(a.lse, b.lse, a.lse_err, want_error=b.lse_err).max()))
    return worst


def test_the_tiers_agree():
    assert disagreement([float64, balls, multiprecision]) <= 1.0


@pytest.mark.parametrize("tier, text, replacement", MUTANTS, ids=[f"{m.__name__[14:]}: {r}" for m, _, r in MUTANTS])
def test_a_mistake_in_one_tier_is_noticed(tier, text, replacement, monkeypatch):
    broken = mutated(tier, text, replacement, monkeypatch)
    others = [t for t in (float64, balls, multiprecision) if t is not tier]
    try:
        found = disagreement([broken, *others])
    except (OverflowError, ZeroDivisionError, MemoryError):
        return  # noticed loudly
    assert found > 1.0
