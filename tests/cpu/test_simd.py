"""The vector CPU kernels compute attention: every instruction set and type, at sizes that straddle every edge.

Kernels are compiled from the emitted unit alone and called through their C interface (tests/cpu/units.py); results are
judged by the bound that verify derives from the arithmetic of the path.
"""

import itertools

import numpy as np
import pytest

from tests.cpu import judged, units
from verify import inputs

# d, dv, Br, Bc: Br != Bc; 3 and 2 vectors per panel; rows narrower than a vector; blocks of one group of keys.
PACKAGES = [(64, 64, 96, 64), (40, 72, 32, 8), (8, 24, 64, 40), (256, 16, 192, 24)]
DTYPES = ("float32", "float64", "bf16", "fp16")
# B, Hq, Hkv, Nq, Nk: below, at and above a panel, a tile and a block; heads side by side (Nq small, Hq > Hkv); decode.
SHAPES = [
    (1, 2, 1, 97, 65),
    (2, 6, 2, 5, 77),
    (1, 4, 1, 1, 129),
    (1, 1, 1, 193, 3),
    (1, 2, 2, 64, 64),
    (2, 3, 3, 17, 1),
    (1, 8, 2, 20, 24),
    (1, 1, 1, 300, 210),
    (1, 48, 1, 2, 41),
]

isas = pytest.mark.parametrize("isa", [pytest.param(isa, id=isa) for isa in units.ISAS])
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def _machine(request):
    isa = request.node.callspec.params.get("isa", "baseline") if hasattr(request.node, "callspec") else "baseline"
    if not units.machine_runs(isa):
        pytest.skip(f"this machine does not have the instructions of {isa}")


def package(d=64, dv=64, br=96, bc=64, **more):
    return units.make_problem(d, dv, br=br, bc=bc, **more)


def draw(shape, d, dv, dtype, seed=0):
    b, hq, hkv, nq, nk = shape
    rng = np.random.default_rng([seed, *shape])
    sizes = ((b, hq, nq, d), (b, hkv, nk, d), (b, hkv, nk, dv))
    return [rng.standard_normal(s).astype(units.DTYPE[dtype]) for s in sizes]


@pytest.mark.field("R012", "R030", "R053", "R060", "R061", "R063", "R064", "R105")
@isas
@pytest.mark.parametrize("sizes", PACKAGES, ids=lambda s: "d{}_dv{}_br{}_bc{}".format(*s))
@dtypes
def test_errors_are_within_the_derived_bound(isa, dtype, sizes):
    problem = package(*sizes)
    for number, shape in enumerate(SHAPES):
        causal = (False, "bottom_right", "top_left")[number % 3]
        rng = np.random.default_rng(number)
        for mask, lengths in (
            (causal, None),
            (False if causal else "bottom_right", rng.integers(0, shape[4] + 1, shape[0])),
        ):
            q, k, v = draw(shape, *sizes[:2], dtype)
            got = units.attention(problem, isa, dtype, q, k, v, causal=mask, key_lengths=lengths)
            judged.assert_right(
                problem, isa, dtype, q, k, v, got, causal=mask, key_lengths=lengths, name=f"{shape} {mask}"
            )


@isas
@dtypes
def test_inputs_that_attack_the_algorithm_stay_within_the_bound(isa, dtype):
    """Every family of verify.inputs that needs no mask beyond those of the kernel, one and several blocks long."""
    problem = package()
    for (name, family), (nq, nk) in itertools.product(inputs.FAMILIES.items(), ((3, 65), (50, 200))):
        x = family(nq, nk, 64, dtype=dtype, seed=3)
        causal = {"causal_bottom_right": "bottom_right", "causal_top_left": "top_left"}.get(name, False)
        if x.visible is not None and not causal:
            continue
        q, k, v = (a.astype(units.DTYPE[dtype])[None, None] for a in x)
        lengths = None if x.length is None else [x.length]
        got = units.attention(problem, isa, dtype, q, k, v, scale=x.scale, causal=causal, key_lengths=lengths)
        judged.assert_right(
            problem,
            isa,
            dtype,
            q,
            k,
            v,
            got,
            scale=x.scale,
            causal=causal,
            key_lengths=lengths,
            name=f"{name} {nq}x{nk}",
        )


@isas
@dtypes
@pytest.mark.field("R033", "R078")
def test_a_row_has_the_same_bits_alone_and_in_any_batch(isa, dtype):
    """One-vector kernel, any panel, any place in a group: a row is summed in the same order everywhere."""
    problem = package()
    q, k, v = draw((2, 4, 2, 130, 150), 64, 64, dtype)
    o, lse = units.attention(problem, isa, dtype, q, k, v)
    for b, h, i in ((0, 0, 0), (1, 3, 129), (0, 2, 95), (1, 1, 96)):
        one = np.s_[b : b + 1, h // 2 : h // 2 + 1]
        alone = units.attention(problem, isa, dtype, q[b : b + 1, h : h + 1, i : i + 1], k[one], v[one])
        assert np.array_equal(alone[0][0, 0, 0], o[b, h, i]) and alone[1][0, 0, 0] == lse[b, h, i]
        few = units.attention(problem, isa, dtype, q[b : b + 1, h : h + 1, max(0, i - 19) : i + 1], k[one], v[one])
        assert np.array_equal(few[0][0, 0, -1], o[b, h, i]) and few[1][0, 0, -1] == lse[b, h, i]


@dtypes
def test_v3_and_v4_give_the_same_bits(dtype):
    """Both use FMA and one order of summation, so a product that the compiler left unfused would show here."""
    if not units.machine_runs("v4"):
        pytest.skip("this machine does not have the instructions of v4")
    problem = package()
    for shape, causal in (
        ((1, 4, 2, 70, 200), False),
        ((2, 2, 1, 200, 130), "bottom_right"),
        ((1, 6, 1, 3, 99), "top_left"),
    ):
        q, k, v = draw(shape, 64, 64, dtype)
        a, b = (units.attention(problem, isa, dtype, q, k, v, causal=causal) for isa in ("v3", "v4"))
        assert np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])


@isas
@dtypes
@pytest.mark.field("R014")
def test_masked_and_unmasked_paths_agree_bitwise(isa, dtype):
    """Bottom-right causal with one query row sees every key, and so does no mask: only the code path differs."""
    problem = package()
    q, k, v = draw((1, 2, 2, 40, 128), 64, 64, dtype)
    for n in (1, 7, 40):
        full = units.attention(problem, isa, dtype, q[:, :, :n], k, v)
        last = units.attention(problem, isa, dtype, q[:, :, :n], k, v, causal=True)
        assert np.array_equal(full[0][:, :, -1], last[0][:, :, -1])
        assert np.array_equal(full[1][:, :, -1], last[1][:, :, -1])
    # A key length that ends inside a block, against keys that are not there at all.
    short = units.attention(problem, isa, dtype, q, k[:, :, :90].copy(), v[:, :, :90].copy())
    masked = units.attention(problem, isa, dtype, q, k, v, key_lengths=[90])
    assert np.array_equal(short[0], masked[0]) and np.array_equal(short[1], masked[1])


@isas
@dtypes
def test_powers_of_two_and_signs_of_v_pass_through_exactly(isa, dtype):
    problem = package()
    q, k, v = draw((1, 2, 1, 50, 140), 64, 64, dtype)
    v = np.exp2(v.astype(np.float64) / 8).astype(v.dtype)  # near 1: no result is subnormal, in fp16 either
    o, lse = units.attention(problem, isa, dtype, q, k, v)
    for factor in (2.0, -1.0, -0.25):
        again = units.attention(problem, isa, dtype, q, k, (v.astype(np.float64) * factor).astype(v.dtype))
        assert np.array_equal(again[0].astype(np.float64), o.astype(np.float64) * factor)
        assert np.array_equal(again[1], lse)


@isas
@pytest.mark.parametrize("dtype", ["float32", "float64", "bf16"])
def test_the_trace_of_the_debug_form_is_the_state_after_each_key_tile(isa, dtype):
    """Tile j leaves the state that a run on the keys of tiles 0..j ends with, bit for bit."""
    problem = package(debug=True)
    bc = units.plan(problem, isa, dtype).bc
    q, k, v = draw((1, 4, 2, 70, 3 * bc - 5), 64, 64, dtype)
    for rows, causal in ((70, False), (70, "top_left"), (5, "bottom_right")):
        lengths = [2 * bc + 9]
        args = (problem, isa, dtype, q[:, :, :rows])
        o, lse, trace = units.attention(*args, k, v, causal=causal, key_lengths=lengths, trace=True)
        seen = np.minimum(
            lengths[0],
            {
                False: np.full(rows, k.shape[2]),
                "top_left": np.arange(rows) + 1,
                "bottom_right": np.arange(rows) + 1 + k.shape[2] - rows,
            }[causal],
        )
        for j in range(trace.shape[3]):
            m, total, weighted = trace[..., j, 0], trace[..., j, 1], trace[..., j, 2:]
            untouched = seen <= j * bc
            assert np.isnan(trace[:, :, untouched, j]).all() and not np.isnan(trace[:, :, ~untouched, j]).any()
            prefix = units.attention(*args, k, v, causal=causal, key_lengths=[min(lengths[0], (j + 1) * bc)])
            with np.errstate(invalid="ignore"):
                assert np.array_equal(
                    prefix[0][:, :, ~untouched], (weighted * (1 / total)[..., None])[:, :, ~untouched]
                )
            unit = np.finfo(lse.dtype).eps
            known = m + np.log(total.astype(np.float64))
            assert (np.abs(known - prefix[1]) <= 2 * unit * (np.abs(m) + np.abs(prefix[1])))[:, :, ~untouched].all()
        assert np.array_equal(o, units.attention(*args, k, v, causal=causal, key_lengths=lengths)[0])
        judged.assert_right(problem, isa, dtype, q[:, :, :rows], k, v, (o, lse), causal=causal, key_lengths=lengths)


@pytest.mark.field("R104")
@pytest.mark.parametrize("isa", units.ISAS)
def test_a_unit_shares_nothing_with_the_linker_but_its_entry(isa):
    """A weak function could be taken from a unit for a newer machine: everything else is local, nothing is std::."""
    files = units.sources(package())
    built = units.build(files, f"forward_cpu_{isa}.cpp", [*units.ISAS[isa].flags, "-c"], shared=False, name="unit.o")
    symbols = [line.split()[-2:] for line in units.output("nm", built).splitlines()]
    assert [name for kind, name in symbols if kind in "TVWuBDRC"] == [f"attention_forward_{isa}"]
    libc = {"aligned_alloc", "fma", "free", "log", "memcpy", "memset"}
    assert {name for kind, name in symbols if kind == "U"} <= libc
    for text in files.values():
        assert b"std::" not in text and b"<algorithm>" not in text


@isas
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_are_fused_exactly_where_the_model_says(isa, dtype):
    """a b - (1 + 2 e) with a = b = 1 + e: the rounded product loses e^2, a fused one keeps it."""
    problem = package()
    e = {"float32": 2.0**-12, "float64": 2.0**-27}[dtype]
    q, k = (np.zeros((1, 1, 1, 64), units.DTYPE[dtype]) for _ in range(2))
    q[..., :2], k[..., :2] = (1, 1 + e), (-(1 + 2 * e), 1 + e)
    _, lse = units.attention(problem, isa, dtype, q, k, k, scale=1.0)
    fused = judged.model(problem, isa, dtype).product == "fma"
    assert lse[0, 0, 0] == (e * e if fused else 0.0)
