"""Kernels broken on purpose: each of these one-line mistakes in the emitted text is noticed by the probes below."""

import numpy as np
import pytest

from tests.cpu import judged, units
from tests.cpu.test_simd import draw, package
from verify import inputs

ISA = "v3" if units.machine_runs("v3") else "baseline"
SIZES = (24, 40, 32, 16)

# name -> (file, what is there, what stands there instead)
MUTANTS = {
    "O is not rescaled": ("block_simd.h", "sum = sum * alpha[n] + acc[c][n];", "sum = sum + 0 * alpha[n] + acc[c][n];"),
    "l is not rescaled": ("block_simd.h", "l = l * alpha[n] + sum[n];", "l = l + sum[n];"),
    "alpha the other way round": ("block_simd.h", "(m - base[n], scale_log2)", "(base[n] - m, scale_log2)"),
    "the maximum of the block, not the running one": (
        "block_simd.h",
        "max[n] = *(const Vector*)&panel.m",
        "max[n] = -1e30f + *(const Vector*)&panel.l",
    ),
    "no guard for rows without a key": (
        "block_simd.h",
        "base[n] = max[n] == -(Scalar)__builtin_inf() ? Vector{} : max[n];",
        "base[n] = max[n];",
    ),
    "one key too many": ("block_simd.h", "> (Integer)(j + g - keys.shared)", ">= (Integer)(j + g - keys.shared)"),
    "masked with a finite number": (
        "block_simd.h",
        "broadcast<Vector>(-(Scalar)__builtin_inf());\n",
        "broadcast<Vector>((Scalar)-10000);\n",
    ),
    "the mask comes after the maximum": (
        "block_simd.h",
        "        if constexpr (kMasked) {",
        "        max[n] = acc[g][n] > max[n] ? acc[g][n] : max[n];\n        if constexpr (kMasked) {",
    ),
    "the last group of keys is left out": (
        "block_simd.h",
        "for (; j < keys.count; j += kKeys) {",
        "for (; j + kKeys <= keys.count; j += kKeys) {",
    ),
    "the last dims are left out": ("block_simd.h", "t < kD; t++", "t < kD - 1; t++"),
    "the last columns are left out": (
        "block_simd.h",
        "column < kDv; column += kColumns",
        "column < kDv - kColumns; column += kColumns",
    ),
    "natural exponent": ("forward_simd.h", "__builtin_fma(a.scale, kLog2e, a.scale * kLog2eTail)", "a.scale"),
    "top-left for bottom-right": ("forward_simd.h", "a.causal == kBottomRight ? a.Nk - a.Nq : 0", "0"),
    "causal with the length in place of Nk": (
        "forward_simd.h",
        "a.causal == kBottomRight ? a.Nk - a.Nq : 0",
        "a.causal == kBottomRight ? length - a.Nq : 0",
    ),
    "head modulo group": ("forward_simd.h", "tile.kv_head = kv % a.Hkv;", "tile.kv_head = first % a.Hkv;"),
    "empty rows by the maximum": (
        "forward_simd.h",
        "l[r] == 0 ? -__builtin_inf() : lse",
        "m[r] == -(Scalar)__builtin_inf() ? -__builtin_inf() : lse",
    ),
    "NaN rows count as empty": (
        "forward_simd.h",
        "square[i] = sum == 0 ? Vector{} : square[i];",
        "square[i] = sum > 0 ? square[i] : Vector{};",
    ),
    "LSE without the maximum": ("forward_simd.h", "m[r] * a.scale + __builtin_log", "0 * m[r] + __builtin_log"),
    "degree 3": (
        "simd.h",
        "Vector p = broadcast<Vector>(0x1.470b48p-13f);",
        "Vector p = broadcast<Vector>(0.0f); r = r + 1e-6f;",
    ),
}


def probes():
    """(name, q, k, v, scale, causal, key_lengths), float32."""
    d, dv = SIZES[:2]
    for shape, causal, lengths in (
        ((2, 4, 2, 40, 45), "bottom_right", None),
        ((1, 2, 1, 70, 53), "bottom_right", (29,)),
        ((1, 2, 2, 5, 24), "top_left", None),
        ((2, 6, 3, 3, 41), False, (0, 38)),
        ((1, 1, 1, 33, 1), False, None),
    ):
        yield str(shape), *draw(shape, d, dv, "float32"), d**-0.5, causal, lengths
    for name in ("late_max", "falling_max", "far_below_zero"):
        x = inputs.FAMILIES[name](9, 50, d, dv, dtype="float32", seed=5)
        yield name, *(a.astype(np.float32)[None, None] for a in x), x.scale, "bottom_right", (45,)
    q, k, v = draw((1, 1, 1, 9, 50), d, dv, "float32")
    q[..., 0], k[:, :, :20], k[:, :, :20, 0] = 1, 0, -np.inf  # the first block leaves m = -inf
    yield "late first key", q, k, v, d**-0.5, False, None
    q[:], k[:], k[..., :1, 0] = 0, 0, -256 / d**-0.5  # row 0 sees this key alone, beside masked ones 256 above it
    q[..., 0] = 1
    yield "masked keys above", q, k, v, d**-0.5, "top_left", None
    q, k, v = draw((1, 1, 1, 9, 50), d, dv, "float32")
    q[:, :, 3, 0] = np.nan
    yield "NaN query", q, k, v, d**-0.5, False, None


def assert_probes_pass(problem, kernel):
    for name, q, k, v, scale, causal, lengths in probes():
        more = {"scale": scale, "causal": causal, "key_lengths": lengths}
        got = units.attention(problem, ISA, "float32", q, k, v, by=kernel, **more)
        judged.assert_right(problem, ISA, "float32", q, k, v, got, name=name, **more)


def test_the_kernel_itself_passes():
    problem = package(*SIZES, dtypes=("float32",))
    assert_probes_pass(problem, units.kernel(problem, ISA, "float32"))


@pytest.mark.field("R032")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_kernel_is_noticed(mutant):
    problem = package(*SIZES, dtypes=("float32",))
    file, there, instead = MUTANTS[mutant]
    files = units.sources(problem)
    assert files[file].count(there.encode()) == 1, "the mutant no longer fits the text"
    files[file] = files[file].replace(there.encode(), instead.encode())
    kernel = units.load(files, ISA, "float32")
    with pytest.raises(AssertionError, match=r"outside the bound|head"):
        assert_probes_pass(problem, kernel)
