"""The bound as an invariant: it holds after every tile, and names the tile where a kernel went wrong."""

import numpy as np
import pytest

from verify import arithmetic, bounds, inputs, simulator
from verify.compare import ratio
from verify.oracle import balls, float64

PATHS = [
    ("fma_f32", "float32"),
    ("muladd_f32", "bf16"),
    ("fma_f64", "float64"),
    ("amx_bf16", "bf16"),
    ("amx_fp16_planes", "fp16"),
    ("mma_sm80", "bf16"),
    ("mma_sm80", "fp16"),
]


def states(x, model, bc, kernel=simulator._Kernel):
    found = {}
    kernel(model, x.scale, simulator.Errors()).run(*x, x.mask, bc, lambda j, m, l, o: found.__setitem__(j, (m, l, o)))
    return found


def first_tile_outside(x, model, bc, found):
    """The first tile whose state is outside its bound, or None."""
    oracle = balls if model.working == "float64" else float64
    for j, (m, l, o) in sorted(found.items()):
        n = (j + 1) * bc
        bound = bounds.prefix(*x, scale=x.scale, visible=x.mask, model=model, bc=bc, tile=j)
        want = oracle.attention(x.q, x.k[:n], x.v[:n], scale=x.scale, visible=x.mask[:, :n])
        with np.errstate(divide="ignore", invalid="ignore"):
            average = np.where(l[:, None] == 0, 0.0, o / np.where(l == 0, 1.0, l)[:, None])
            lse = np.where(l == 0, -np.inf, m + np.log(l))
        inside = (bound.m_low <= m) & (m <= bound.m_high)
        worst_o = ratio(average, want.o, bound.o, want_error=want.o_err).max()
        worst_lse = ratio(lse, want.lse, bound.lse, want_error=want.lse_err).max()
        if not (inside.all() and worst_o <= 1.0 and worst_lse <= 1.0):
            return j
    return None


@pytest.mark.parametrize("name, dtype", PATHS, ids=["-".join(p) for p in PATHS])
@pytest.mark.parametrize(
    "family", ["gaussian", "late_max", "falling_max", "first_tile_masked", "causal_bottom_right", "deep_gap", "drift"]
)
def test_every_state_of_a_sound_kernel_is_within_the_bound(family, name, dtype):
    x = inputs.FAMILIES[family](4, 150, 16, 8, dtype=dtype, seed=6)
    model = arithmetic.model(name, dtype)
    found = states(x, model, 32)
    assert len(found) >= 1
    assert first_tile_outside(x, model, 32, found) is None


@pytest.mark.parametrize("wrong", [0, 2, 4])
def test_the_tile_that_went_wrong_is_the_first_one_outside(wrong):
    class Stale(simulator._Kernel):
        tile = -1

        def add_values(self, o, p, v, alpha):
            self.tile += 1
            return super().add_values(o, p, np.roll(v, 1, axis=0) if self.tile == wrong else v, alpha)

    x = inputs.gaussian(4, 150, 16, 8, dtype="bf16", seed=2)
    model = arithmetic.model("mma_sm80", "bf16")
    assert first_tile_outside(x, model, 32, states(x, model, 32, Stale)) == wrong


def test_rows_that_saw_no_key_have_no_maximum():
    x = inputs.first_tile_masked(2, 200, 8, dtype="bf16")
    bound = bounds.prefix(*x, scale=x.scale, visible=x.mask, model=arithmetic.model("mma_sm80", "bf16"), bc=64, tile=1)
    assert np.isneginf(bound.m_low).all() and np.isneginf(bound.m_high).all() and not bound.o.any()


def test_the_reference_of_a_lagging_kernel_may_trail_by_the_lag_only():
    x = inputs.gaussian(2, 64, 8, dtype="bf16")
    lagging, strict = (arithmetic.model(n, "bf16") for n in ("amx_bf16", "mma_sm80"))
    a = bounds.prefix(*x, scale=x.scale, model=lagging, bc=32, tile=1)
    b = bounds.prefix(*x, scale=x.scale, model=strict, bc=32, tile=1)
    assert a.m_high - a.m_low == pytest.approx(np.log(4 * 32 * 2**0.01), rel=1e-4)
    assert (b.m_high - b.m_low < 1e-4).all()
