"""The backward bound: never violated by a kernel that rounds as its model says, violated by one that does not.

The mistakes are those of a catalogue of backward bugs that plain tolerances let through; each has the cheapest input on
which it shows. "stage" is the bound at the O and LSE that the kernel read.
"""

from dataclasses import replace

import numpy as np
import pytest

from spec import flash2
from verify import arithmetic, inputs, simulator
from verify.bounds.backward_domain import outside_backward_domain
from verify.bounds.backward_model import backward_model
from verify.bounds.backward_output import backward
from verify.compare import assert_within, ratio
from verify.formats import round_to
from verify.oracle import backward_balls, backward_float64
from verify.oracle.backward_reference import stack_group
from verify.simulator_backward import BackwardKernel

PATHS = [
    ("fma_f32", "float32"),
    ("fma_f32", "bf16"),
    ("fma_f32", "fp16"),
    ("muladd_f32", "float32"),
    ("fma_f64", "float64"),
    ("muladd_f64", "float64"),
    ("amx_bf16", "bf16"),
    ("amx_fp16_planes", "fp16"),
    ("mma_sm80", "bf16"),
    ("mma_sm80", "fp16"),
]
IDS = ["-".join(p) for p in PATHS]
SOUND = simulator.Errors("none")


def gradient_of_loss(x, seed, *, kind="normal", dlse=True):
    """dO (values of the dtype) and dLSE (of the working format) for the inputs x."""
    rng = np.random.default_rng([seed, len(x.q)])
    do = rng.standard_normal((len(x.q), x.v.shape[1]))
    if kind == "aligned":  # with a value: dP and D are large and cancel
        do = np.tile(np.nan_to_num(x.v[:1]) if len(x.v) else 1.0, (len(do), 1))
    if kind == "mixed":
        do = do * np.exp(rng.normal(0.0, 2.0, do.shape))
    if kind == "positive":
        do = np.abs(do) + 0.5
    wide = "float64" if x.dtype == "float64" else "float32"
    do = inputs._representable(do, x.dtype)
    return do, round_to(rng.standard_normal(len(do)), wide) if dlse else None


def judge(
    x,
    do,
    dlse,
    model,
    br,
    bc,
    *,
    heads=1,
    errors=SOUND,
    kernel=BackwardKernel,
    seen_by_kernel=None,
    model_of_bound=None,
    modes=("stage",),
):
    """Largest error/bound of dq, dk and dv per mode; None where the mode is outside the domain."""
    arrays = {"scale": x.scale, "visible": x.mask}
    given = simulator.forward(*x, **arrays, model=model.path, bc=bc, errors=errors)
    seen = x.mask if seen_by_kernel is None else seen_by_kernel
    with np.errstate(all="ignore"):
        got = kernel(model, x.scale, errors).gradients(
            *x, do, visible=seen, given=given, dlse=dlse, br=br, bc=bc, heads=heads
        )
    oracle = backward_balls if x.dtype == "float64" else backward_float64
    found = []
    for mode in modes:
        same = {**arrays, "dlse": dlse, "given": given if mode == "stage" else None}
        bound = backward(*x, do, **same, model=model_of_bound or model, br=br, bc=bc, heads=heads)
        if outside_backward_domain(*x, do, **same, model=model, bound=bound) is not None:
            found.append(None)
            continue
        want = oracle.gradients(*x, do, **same)
        found.append(
            [
                float(
                    ratio(g, getattr(want, n), getattr(bound, n), want_error=getattr(want, f"{n}_err")).max(initial=0.0)
                )
                for n, g in zip(("dq", "dk", "dv"), got, strict=True)
            ]
        )
    return found


@pytest.mark.parametrize("name, dtype", PATHS, ids=IDS)
@pytest.mark.parametrize("family", inputs.FAMILIES)
def test_a_kernel_that_rounds_as_its_model_says_is_within_both_bounds(family, name, dtype):
    judged = 0
    cases = [(70, 16, 16, "random", "normal"), (33, 8, 64, "low", "aligned"), (97, 32, 32, "high", "mixed")]
    for seed, (nk, br, bc, direction, kind) in enumerate(cases):
        path = arithmetic.model(name, dtype, debug=seed != 1)
        model = backward_model(path) if seed else backward_model(path, dq_restarts=False, dkv_restarts=True)
        x = inputs.FAMILIES[family](10, nk, 24, 8, dtype=dtype, seed=seed)
        do, dlse = gradient_of_loss(x, seed, kind=kind, dlse=seed != 2)
        errors = simulator.Errors(direction, seed)
        for found in judge(x, do, dlse, model, br, bc, heads=1 + seed % 2, errors=errors, modes=("stage", "end")):
            if found is not None:
                judged += 1
                assert max(found) <= 1.0
    assert judged or family == "huge_values"  # 1e30 squared is outside the domain of float32


@pytest.mark.parametrize("name, dtype", PATHS, ids=IDS)
def test_the_smallest_problems_are_within_the_bounds(name, dtype):
    model = backward_model(arithmetic.model(name, dtype))
    for nq, nk in ((1, 1), (2, 1), (1, 17), (17, 2), (3, 0)):
        for family in ("gaussian", "all_masked_row"):
            x = inputs.FAMILIES[family](nq, nk, 8, 8, dtype=dtype, seed=nk)
            do, dlse = gradient_of_loss(x, nq)
            for found in judge(x, do, dlse, model, 16, 16, modes=("stage", "end")):
                assert max(found) <= 1.0


@pytest.mark.parametrize(
    "change, name, dtype, family, shape",
    [
        ({"ds_unit": 0.0}, "mma_sm80", "bf16", "gaussian", (2, 40, 16, 8)),
        ({"ds_tiny": 0.0}, "mma_sm80", "fp16", "late_max", (1, 30, 8, 2)),
        ({"out_format": None}, "fma_f32", "bf16", "gaussian", (2, 40, 16, 8)),
        ({"p_unit": 0.0}, "mma_sm80", "bf16", "gaussian", (1, 40, 16, 8)),
        ({"p_tiny": 0.0}, "mma_sm80", "fp16", "late_max", (1, 30, 8, 2)),
        ({"exp2_error": 1e-9}, "fma_f32", "float32", "odd_scale", (1, 1, 1, 1)),
        ({"exp2_flush": 0.0}, "fma_f32", "float32", "deep_gap", (1, 30, 8, 2)),
        ({"dropped": 0.0}, "amx_fp16_planes", "fp16", "late_max", (1, 1, 8, 1)),
        ({"operation_tiny": 0.0}, "mma_sm80", "bf16", "subnormal_values", (1, 1, 1, 1)),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_a_model_that_understates_the_kernel_is_found_out(change, name, dtype, family, shape):
    path = arithmetic.model(name, dtype, debug="out_format" not in change)
    model, fields = backward_model(path), vars(backward_model(path))
    low = replace(model, **change) if next(iter(change)) in fields else replace(model, path=replace(path, **change))
    most = {"sound": 0.0, "low": 0.0}
    for seed, kind, direction in [(s, k, d) for s in range(3) for k in ("normal", "aligned") for d in ("low", "high")]:
        x = inputs.FAMILIES[family](*shape, dtype=dtype, seed=seed)
        do, dlse = gradient_of_loss(x, seed + 1, kind=kind)
        for which, used in (("sound", model), ("low", low)):
            errors = simulator.Errors(direction, seed)
            found = judge(x, do, dlse, model, 16, 16, errors=errors, model_of_bound=used)[0]
            most[which] = max(most[which], *found)
    assert most["sound"] <= 1.0 < most["low"]


def test_the_roundings_of_the_exponent_are_needed():
    """Logits of -50 to -100 and one key: P is 1 up to them, v = 0 leaves no other error of size |s|."""
    q = round_to(-1.0 - np.random.default_rng(0).random((400, 1)), "float32")
    x = inputs.Inputs("", "float32", q, np.array([[512.0]]), np.zeros((1, 1)), scale=0.1)
    do, dlse = np.ones((400, 1)), np.ones(400)
    model = backward_model(arithmetic.model("fma_f32", "float32"))
    low = replace(model, s_roundings=0, lse_roundings=0)
    assert 0.4 < max(judge(x, do, dlse, model, 16, 16)[0]) <= 1.0
    assert max(judge(x, do, dlse, model, 16, 16, model_of_bound=low)[0]) > 1.5


@pytest.mark.parametrize("family", ["gaussian", "late_max", "huge_logits", "mixed_scales", "random_mask"])
def test_the_readable_reference_is_within_the_bounds(family):
    """FlashAttention-2 of `spec` in float64: products in any order, exp within 4 ulp, no base 2."""
    path = arithmetic.model("muladd_f64", "float64", exp2_error=2.0**-50, log_error=2.0**-50, log_tiny=2.0**-50)
    x = inputs.FAMILIES[family](20, 50, 16, 8, dtype="float64", seed=3)
    do, dlse = gradient_of_loss(x, 4)
    tiles = {"br": 8, "bc": 16}
    given = flash2.forward(*x, **tiles, scale=x.scale, mask=x.mask)
    got = flash2.backward(*x, *given, do, **tiles, scale=x.scale, mask=x.mask, dlse=dlse)
    for stage in (True, False):
        same = {"scale": x.scale, "visible": x.mask, "dlse": dlse, "given": tuple(given) if stage else None}
        bound = backward(*x, do, **same, model=backward_model(path), **tiles)
        want = backward_balls.gradients(*x, do, **same)
        for n in ("dq", "dk", "dv"):
            assert_within(getattr(got, n), getattr(want, n), getattr(bound, n), want_error=getattr(want, f"{n}_err"))


class Broken(BackwardKernel):
    """A backward kernel with one mistake."""

    mistake = ""

    def row_sums(self, do, o, dlse):
        if self.mistake == "dLSE forgotten":
            dlse = None
        if self.mistake == "dLSE with the wrong sign":
            dlse = -dlse
        if self.mistake == "D from half of the columns":
            do, o = do[:, ::2], o[:, ::2]
        D = super().row_sums(do, o, dlse)
        if self.mistake == "D missing":
            return np.zeros_like(D)
        if self.mistake == "D scaled":
            return self.fl(D * self.rounded_scale)
        return round_to(D, "bf16") if self.mistake == "D in bf16" else D

    def product(self, a, b):
        found = super().product(a, b)
        return round_to(found, "bf16") if self.mistake == "S and dP in bf16" else found

    def recomputed_weights(self, s, lse, visible):
        if self.mistake == "LSE taken for base 2":
            self.log2e = self.fl(np.asarray(1.0))
        if self.mistake == "LSE missing":
            lse = np.where(np.isneginf(lse), lse, 0.0)
        if self.mistake == "LSE in bf16":
            lse = round_to(lse, "bf16")
        if self.mistake == "empty rows not guarded":
            masked = np.where(visible, s, -np.inf)
            return self.exp2(self.fl(masked * self.c - self.fl(lse * self.log2e)[:, None]))
        if self.mistake == "masked by a product":  # 0 times what exp2(s + inf) gave
            return self.exp2(self.fl(s * self.c - self.fl(lse * self.log2e)[:, None])) * visible
        return super().recomputed_weights(s, lse, visible)

    def score_gradient(self, p, dp, d_row):
        if self.mistake == "dS = P dP - D":
            return self.fl(self.fl(p * dp) - d_row[:, None])
        if self.mistake == "dS = P (dP + D)":
            d_row = -d_row
        return super().score_gradient(p, dp, d_row)

    def operand(self, p):
        if self.mistake == "P and dS truncated":
            return round_to(p, self.model.p_format, toward_zero=True)
        return super().operand(p)

    def operand_ds(self, ds):
        return round_to(ds, "bf16") if self.mistake == "dS in bf16" else super().operand_ds(ds)

    def key_tiles(self, keys, bc):
        found = super().key_tiles(keys, bc)
        return found[:-1] if self.mistake == "last key tile lost" else found

    def query_heads(self, rows, heads):
        found = super().query_heads(rows, heads)
        return found[:-1] if self.mistake == "last query head lost" else found

    def query_tiles(self, head, br):
        found = super().query_tiles(head, br)
        return found[:-1] if self.mistake == "last query tile lost" and len(found) > 1 else found

    def add_to_dq(self, dq, ds, k):
        if self.mistake == "dQ overwritten":
            dq = np.zeros_like(dq)
        found = super().add_to_dq(dq, ds, k)
        return round_to(found, "bf16") if self.mistake == "dQ added up in bf16" else found

    def add_to_dk(self, dk, ds, p, q):
        return super().add_to_dk(dk, p if self.mistake == "dK from P" else ds, p, q)

    def add_to_dv(self, dv, ds, p, do):
        return super().add_to_dv(dv, ds, ds if self.mistake == "dV from dS" else p, do)

    def scaled_dq(self, dq):
        if self.mistake == "dQ not scaled":
            return dq
        return super().scaled_dq(super().scaled_dq(dq) if self.mistake == "dQ scaled twice" else dq)

    def scaled_dk(self, dk):
        if self.mistake == "dK not scaled":
            return dk
        found = super().scaled_dk(dk)
        return self.fl(found * self.log2e) if self.mistake == "dK times log2 e" else found


def with_mistake(mistake):
    return type("Broken", (Broken,), {"mistake": mistake})


# mistake, path, dtype, family, (Nq, Nk, query heads)
MISTAKES = [
    ("D missing", "mma_sm80", "bf16", "gaussian", (1, 1, 1)),
    ("D scaled", "mma_sm80", "bf16", "gaussian", (1, 1, 1)),
    ("D from half of the columns", "mma_sm80", "bf16", "gaussian", (1, 1, 1)),
    ("D in bf16", "fma_f32", "float32", "gaussian", (4, 20, 1)),
    ("dS = P dP - D", "mma_sm80", "bf16", "gaussian", (4, 16, 1)),
    ("dS = P (dP + D)", "mma_sm80", "bf16", "gaussian", (1, 1, 1)),
    ("dQ not scaled", "mma_sm80", "bf16", "gaussian", (4, 16, 1)),
    ("dQ scaled twice", "mma_sm80", "bf16", "gaussian", (4, 16, 1)),
    ("dK not scaled", "mma_sm80", "bf16", "gaussian", (4, 16, 1)),
    ("dK times log2 e", "mma_sm80", "bf16", "gaussian", (4, 16, 1)),
    ("dV from dS", "mma_sm80", "bf16", "gaussian", (1, 1, 1)),
    ("dK from P", "mma_sm80", "bf16", "gaussian", (1, 1, 1)),
    ("LSE taken for base 2", "mma_sm80", "bf16", "gaussian", (1, 1, 1)),
    ("LSE missing", "mma_sm80", "bf16", "gaussian", (1, 1, 1)),
    ("LSE in bf16", "mma_sm80", "bf16", "gaussian", (4, 16, 1)),
    ("LSE in bf16", "fma_f32", "bf16", "gaussian", (4, 16, 1)),
    ("S and dP in bf16", "fma_f32", "bf16", "gaussian", (4, 16, 1)),
    ("S and dP in bf16", "amx_bf16", "bf16", "gaussian", (4, 16, 1)),
    ("dS in bf16", "mma_sm80", "fp16", "gaussian", (4, 16, 1)),
    ("last query tile lost", "mma_sm80", "bf16", "gaussian", (32, 48, 1)),
    ("last key tile lost", "mma_sm80", "bf16", "gaussian", (4, 17, 1)),
    ("dQ overwritten", "mma_sm80", "bf16", "gaussian", (4, 17, 1)),
    ("P and dS truncated", "mma_sm80", "bf16", "gaussian", (1, 16, 1)),
    ("P and dS truncated", "mma_sm80", "fp16", "gaussian", (1, 16, 1)),
    ("P and dS truncated", "amx_bf16", "bf16", "gaussian", (1, 16, 1)),
    ("empty rows not guarded", "mma_sm80", "bf16", "all_masked_row", (4, 20, 1)),
    ("masked by a product", "mma_sm80", "bf16", "all_masked_row", (4, 20, 1)),
    ("last query head lost", "mma_sm80", "bf16", "gaussian", (4, 20, 2)),
    ("dLSE forgotten", "mma_sm80", "bf16", "gaussian", (4, 20, 1)),
    ("dLSE with the wrong sign", "mma_sm80", "bf16", "gaussian", (4, 20, 1)),
]


@pytest.mark.parametrize("mistake, name, dtype, family, shape", MISTAKES, ids=["-".join(m[:3]) for m in MISTAKES])
def test_a_broken_kernel_is_outside_the_stage_wise_bound(mistake, name, dtype, family, shape):
    model = backward_model(arithmetic.model(name, dtype, debug=True))
    nq, nk, heads = shape
    x = inputs.FAMILIES[family](nq * heads, nk, 16, 16, dtype=dtype, seed=2)
    do, dlse = gradient_of_loss(x, 3, dlse="dLSE" in mistake)
    sound = judge(x, do, dlse, model, 16, 16, heads=heads)[0]
    broken = judge(x, do, dlse, model, 16, 16, heads=heads, kernel=with_mistake(mistake))[0]
    assert max(sound) <= 1.0
    assert max(broken) > 1.0


def band(nq, nk, *, last, width=None):
    """Row i sees keys i + last - width .. i + last."""
    i, j = np.arange(nq)[:, None], np.arange(nk)[None]
    return (j <= i + last) & (True if width is None else j >= i + last - width)


@pytest.mark.parametrize(
    "right, wrong",
    [
        (band(20, 20, last=0), np.ones((20, 20), bool)),
        (band(5, 24, last=19), band(5, 24, last=0)),
        (band(12, 12, last=0, width=3), band(12, 12, last=0)),
        (band(12, 12, last=0, width=3), band(12, 12, last=0, width=4)),
        (band(20, 20, last=0), band(20, 20, last=-1)),
        (band(20, 20, last=0), band(20, 20, last=0).T),
    ],
    ids=[
        "causal mask missing",
        "top-left for bottom-right",
        "window missing",
        "window too wide",
        "strict",
        "transposed",
    ],
)
def test_a_kernel_with_another_mask_is_outside_the_bound(right, wrong):
    model = backward_model(arithmetic.model("mma_sm80", "bf16", debug=True))
    x = replace(inputs.gaussian(*right.shape, 16, 16, dtype="bf16", seed=4), visible=right)
    do, dlse = gradient_of_loss(x, 5)
    assert max(judge(x, do, dlse, model, 16, 16)[0]) <= 1.0
    assert max(judge(x, do, dlse, model, 16, 16, seen_by_kernel=wrong)[0]) > 10.0


def test_a_narrow_accumulator_of_dq_shows_on_a_long_drift():
    """1024 keys whose dS all push the same way: 64 tiles, each a small part of what has been added up."""
    drift = inputs.drift(2, 1024, 16, 16, dtype="bf16", seed=0)
    x = replace(drift, k=drift.v, q=np.zeros_like(drift.q))
    do, dlse = np.ones((2, 16)), np.full(2, 64.0)
    for debug in (True, False):
        model = backward_model(arithmetic.model("mma_sm80", "bf16", debug=debug))
        sound = judge(x, do, dlse, model, 16, 16)[0]
        broken = judge(x, do, dlse, model, 16, 16, kernel=with_mistake("dQ added up in bf16"))[0]
        assert max(sound) <= 1.0 < broken[0]


def test_the_query_heads_of_a_group_are_one_problem():
    """dK and dV of a group are the sums over its heads; dQ and its bound are those of each head alone."""
    rng = np.random.default_rng(1)
    q, do = (inputs._representable(rng.standard_normal((3, 10, 16)), "bf16") for _ in range(2))
    k, v = (inputs._representable(rng.standard_normal((20, 16)), "bf16") for _ in range(2))
    seen = np.broadcast_to(band(10, 20, last=10), (3, 10, 20))
    model = backward_model(arithmetic.model("mma_sm80", "bf16"))
    q_all, do_all, seen_all = stack_group(q, do, seen)
    whole = backward(q_all, k, v, do_all, scale=0.25, visible=seen_all, model=model, br=8, bc=16, heads=3)
    each = [backward(q[h], k, v, do[h], scale=0.25, visible=seen[h], model=model, br=8, bc=16) for h in range(3)]
    assert whole.dq == pytest.approx(np.concatenate([b.dq for b in each]), rel=1e-12)
    exact = backward_float64.gradients(q_all, k, v, do_all, scale=0.25, visible=seen_all)
    parts = [backward_float64.gradients(q[h], k, v, do[h], scale=0.25, visible=seen[h]) for h in range(3)]
    assert exact.dk == pytest.approx(sum(p.dk for p in parts), abs=1e-12)
    assert exact.dq == pytest.approx(np.concatenate([p.dq for p in parts]), abs=1e-13)
    # Rounding to the output once, not three times; one long sum and two additions.
    out = sum(2.0**-8 * np.abs(p.dk) for p in parts)
    assert (whole.dk <= sum(b.dk for b in each) + out + 1e-4).all() and (whole.dk > each[0].dk * 0.5).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["gaussian", "all_positive", "cancelling_values", "random_mask"])
def test_another_order_of_the_key_tiles_changes_dq_by_no_more_than_its_bound(family, dtype):
    class Shuffled(BackwardKernel):
        def key_tiles(self, keys, bc):
            tiles = super().key_tiles(keys, bc)
            return [tiles[t] for t in np.random.default_rng(7).permutation(len(tiles))]

    x = inputs.FAMILIES[family](9, 200, 24, 16, dtype=dtype, seed=5)
    do, dlse = gradient_of_loss(x, 6)
    for debug in (True, False):
        model = backward_model(arithmetic.model("mma_sm80", dtype, debug=debug))
        given = simulator.forward(*x, scale=x.scale, visible=x.mask, model=model.path, bc=16, errors=SOUND)
        same = {"visible": x.mask, "given": given, "dlse": dlse, "br": 16, "bc": 16}
        bound = backward(*x, do, scale=x.scale, **same, model=model)
        kernels = [kernel(model, x.scale, SOUND) for kernel in (BackwardKernel, Shuffled)]
        a, b = (kernel.gradients(*x, do, **same, heads=1) for kernel in kernels)
        changed = np.abs(a[0] - b[0])
        assert (changed <= bound.dq_order).all() and (a[1] == b[1]).all() and (a[2] == b[2]).all()
        if debug:
            live = x.mask.any(axis=1)
            assert changed.max() > 0 and (bound.dq_order[live] < bound.dq[live]).all()
    carried = backward_model(model.path, dq_restarts=False)
    assert not backward(*x, do, scale=x.scale, **same, model=carried).dq_order.any()
