"""What each arithmetic primitive computes: mma, wgmma, cvt, ex2, rcp, lg2, shfl, redux, atomics.

Source: PTX ISA 9.0, sections named at each function.

Holds always: written from the manual, never from a kernel, a wrapper or the emulator. Tensor-core sums are returned
exactly (float64 on operands that make every partial sum exact), with sum |a b| + |c|, because the manual leaves order
and rounding of the additions open; the caller takes the bound from verify.arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from verify.emulator import isa_fragments as fragments


class Format(NamedTuple):
    """A 16-bit format: bits of the exponent and of the stored fraction."""

    exponent_bits: int
    fraction_bits: int

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1


FORMATS = {"bf16": Format(8, 7), "f16": Format(5, 10)}
CANONICAL_NAN = 0x7FFF
EX2_RELATIVE_ERROR = 2.0**-22
RCP_RELATIVE_ERROR = 2.0**-23
LG2_ERROR = 2.0**-22  # absolute for arguments in (0.5, 2), relative elsewhere
SMALLEST_NORMAL = 2.0**-126


class Sum(NamedTuple):
    """An exact sum of products and the magnitude |c| + sum |a b| that its rounding is measured against."""

    exact: np.ndarray
    magnitude: np.ndarray


def decode(bits: np.ndarray, name: str) -> np.ndarray:
    """The float64 values of 16-bit patterns."""
    form = FORMATS[name]
    bits = np.asarray(bits).astype(np.int64)
    sign = np.where(bits >> 15, -1.0, 1.0)
    exponent = bits >> form.fraction_bits & (2**form.exponent_bits - 1)
    fraction = bits & (2**form.fraction_bits - 1)
    unit = 2.0**-form.fraction_bits
    normal = (1 + fraction * unit) * np.exp2((exponent - form.bias).astype(np.float64))
    value = np.where(exponent > 0, normal, fraction * unit * 2.0 ** (1 - form.bias))
    special = np.where(fraction > 0, np.nan, np.inf)
    return sign * np.where(exponent == 2**form.exponent_bits - 1, special, value)


def cvt_rn(x: np.ndarray, name: str) -> np.ndarray:
    """16-bit patterns of float32 `x` rounded to nearest, ties to even.

    Source: "Data Movement and Conversion Instructions: cvt". Without .ftz subnormal inputs and results are kept,
    without .satfinite a finite overflow is an infinity; a NaN becomes the canonical NaN 0x7fff.
    """
    form = FORMATS[name]
    x = np.asarray(x, np.float32)
    finite = np.isfinite(x)
    magnitude = np.abs(np.where(finite, x, np.float32(0)).astype(np.float64))
    smallest = 1 - form.bias  # exponent of the smallest normal and of every subnormal
    exponent = np.frexp(magnitude)[1].astype(np.int64) - 1  # 2^exponent <= magnitude < 2^(exponent + 1)
    exponent = np.where(magnitude == 0, smallest, np.maximum(exponent, smallest))
    unit = np.exp2((exponent - form.fraction_bits).astype(np.float64))
    steps = np.rint(magnitude / unit).astype(np.int64)  # rint: ties to even
    # A carry out of the fraction moves into the exponent by itself: bits are (exponent, fraction) side by side.
    bits = steps + (exponent + form.bias - 1) * 2**form.fraction_bits
    infinity = (2**form.exponent_bits - 1) << form.fraction_bits
    bits = np.where(finite, np.minimum(bits, infinity), infinity)
    bits = bits | np.where(np.signbit(x), 0x8000, 0)
    return np.where(np.isnan(x), CANONICAL_NAN, bits).astype(np.uint16)


def cvt_rn_x2(low: np.ndarray, high: np.ndarray, name: str) -> np.ndarray:
    """uint32 of cvt.rn.{bf16x2,f16x2}.f32 d, high, low: the first source operand goes to the upper half."""
    return cvt_rn(low, name).astype(np.uint32) | cvt_rn(high, name).astype(np.uint32) << np.uint32(16)


def ex2_agrees(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Whether float32 `y` may be ex2.approx.ftz.f32 of float32 `x`, elementwise.

    Source: "Floating Point Instructions: ex2": relative error at most 2^-22; subnormal inputs count as 0 and
    subnormal results are 0; ex2(-inf) = +0, ex2(+-0) = 1, ex2(+inf) = +inf, NaN stays NaN.
    """
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        flushed = np.where(np.abs(x) < SMALLEST_NORMAL, np.float32(0), x).astype(np.float64)
        want = np.exp2(flushed)
        # exp2 of NumPy is within an ulp of float64.
        near = np.abs(y.astype(np.float64) - want) <= want * (EX2_RELATIVE_ERROR + 2.0**-50)
        least, most = want * (1 - EX2_RELATIVE_ERROR), want * (1 + EX2_RELATIVE_ERROR)
    zero = (y.view(np.uint32) == 0) & (least < SMALLEST_NORMAL)
    normal = near & (np.abs(y) >= SMALLEST_NORMAL)
    infinite = np.isposinf(y) & (most > np.finfo(np.float32).max)
    exact_one = np.where(flushed == 0, y == 1, True)
    return np.where(np.isnan(x), np.isnan(y), (zero | normal | infinite) & exact_one)


def rcp_agrees(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Whether float32 `y` may be rcp.approx.ftz.f32 of float32 `x`, elementwise.

    Source: "Floating Point Instructions: rcp": relative error at most 2^-23; subnormal inputs and results are zeros of
    the same sign; rcp(+-0) = +-inf, rcp(+-inf) = +-0, NaN stays NaN.
    """
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        flushed = np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x).astype(np.float64)
        want = 1 / flushed
        near = np.abs(y.astype(np.float64) - want) <= np.abs(want) * (RCP_RELATIVE_ERROR + 2.0**-50)
        subnormal = np.abs(want) * (1 - RCP_RELATIVE_ERROR) < SMALLEST_NORMAL
    zero = (y == 0) & subnormal
    normal = near & (np.abs(y) >= SMALLEST_NORMAL) & np.isfinite(want)
    infinite = np.isinf(y) & np.isinf(want)
    return np.where(np.isnan(x), np.isnan(y), (zero | normal | infinite) & (np.signbit(y) == np.signbit(want)))


def lg2_agrees(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Whether float32 `y` may be lg2.approx.ftz.f32 of float32 `x`, elementwise.

    Source: "Floating Point Instructions: lg2": absolute error at most 2^-22 for arguments in (0.5, 2), relative error
    at most 2^-22 elsewhere; subnormal inputs are zeros; lg2(+-0) = -inf, lg2(+inf) = +inf, NaN below zero.
    """
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        flushed = np.where(np.abs(x) < SMALLEST_NORMAL, np.float32(0), x).astype(np.float64)
        want = np.log2(flushed)
        allowed = LG2_ERROR * np.where((flushed > 0.5) & (flushed < 2), 1, np.abs(want)) * (1 + 2.0**-25)
        near = np.abs(y.astype(np.float64) - want) <= allowed
    return np.where(np.isnan(want), np.isnan(y), np.where(np.isinf(want), y == want, near))


def mma_m16n8k16(a: np.ndarray, b: np.ndarray, c: np.ndarray, name: str) -> Sum:
    """(32, 4) each: d of mma.sync.m16n8k16 for registers a (32, 4), b (32, 2) uint32 and c (32, 4) float32.

    Source: "Matrix Fragments for mma.m16n8k16 with floating point type", "Warp-level Matrix Instructions: mma".
    """
    at_d = fragments.mma_d()
    left = fragments.scatter(decode(fragments.unpack(a), name), fragments.mma_a(), (16, 16))
    right = fragments.scatter(decode(fragments.unpack(b), name), fragments.mma_b(), (16, 8))
    product = left @ right
    magnitude = np.abs(left) @ np.abs(right)
    c = c.astype(np.float64)
    return Sum(fragments.gather(product, at_d) + c, fragments.gather(magnitude, at_d) + np.abs(c))


def wgmma_m64nk16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Sum:
    """(128, n / 2) each: d of wgmma.m64nNk16 for matrices a (64, 16), b (16, n) float64 and c (128, n / 2).

    Source: "Asynchronous Multiply-and-Accumulate Instruction: wgmma.mma_async"; scale-d = 0 means c = 0.
    """
    at_d = fragments.wgmma_d(b.shape[1])
    c = c.astype(np.float64)
    exact = fragments.gather(a @ b, at_d) + c
    return Sum(exact, fragments.gather(np.abs(a) @ np.abs(b), at_d) + np.abs(c))


def shfl_xor(values: np.ndarray, mask: int) -> np.ndarray:
    """values (32,) of lane ^ mask. Source: "shfl.sync", mode .bfly with c = 31."""
    return values[np.arange(fragments.LANES) ^ mask]


def redux_max_s32(values: np.ndarray) -> np.ndarray:
    """The largest of the 32 signed values, in every lane. Source: "redux.sync"."""
    return np.full(fragments.LANES, values.max(), np.int32)
