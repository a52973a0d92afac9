"""The functions under the vector kernels, argument by argument: 2^x, and the conversions of 16-bit elements."""

import ctypes
import functools
from pathlib import Path

import numpy as np
import pytest

from tests.cpu import judged, units
from tests.cpu.test_simd import _machine as _machine  # skips what this machine cannot run
from tests.cpu.test_simd import isas, package

STRIDE = (
    251  # prime: 4.5 million of the 1.1 billion arguments; the README of the templates states what all of them give
)
EXP2_PROBE = Path(__file__).parents[2] / "verify" / "probes" / "exp2_cpu.cpp"
CALLS = Path(__file__).with_name("function_calls.cpp")


@functools.cache
def load_library(isa, source):
    files = {name: text for name, text in units.sources(package()).items() if name.endswith(".h")}
    flags = [f for f in units.ISAS[isa].flags if f != "-fvisibility=hidden"]
    vector = units.ISAS[isa].vector_bytes
    more = [f"-DVECTOR_BYTES={vector}", f"-DLANES={vector // 4}"]
    return ctypes.CDLL(str(units.build({**files, source.name: source.read_bytes()}, source.name, [*flags, *more])))


def call(isa, function, x, kind, *more):
    """`function` of tests/cpu/function_calls.cpp over an array; the result has dtype `kind`."""
    size = x.size
    x = np.resize(x, -(-size // 16) * 16)
    got = np.empty(x.size, kind)
    address = (ctypes.c_void_p(a.ctypes.data) for a in (x, got))
    getattr(load_library(isa, CALLS), function)(*address, ctypes.c_int64(x.size), *more)
    return got[:size]


class Found(ctypes.Structure):
    """What verify/probes/exp2_cpu.cpp reports."""

    _fields_ = tuple(
        (name, ctypes.c_double)
        for name in ("worst", "worst_at", "flushed_from", "at_zero", "at_minus_infinity", "nan_stays")
    )


@isas
def test_exp2_keeps_the_limits_of_the_model(isa):
    model = judged.model(package(), isa, "float32")
    end = int(np.float32(130).view(np.uint32))
    found = Found()
    probe = load_library(isa, EXP2_PROBE).probe
    probe.argtypes = [ctypes.c_uint32] * 4 + [ctypes.POINTER(Found)]
    probe(0, end, STRIDE, 1 << 31, found)  # from -0 to -130
    assert found.worst < model.exp2_error and found.flushed_from < model.exp2_flush
    assert (found.at_zero, found.at_minus_infinity, found.nan_stays) == (1.0, 0.0, 1.0)


@isas
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [1.0, 0.18, 1.4426950408889634, 3.7e5])
def test_exp2_of_a_scaled_argument_keeps_the_limits(isa, dtype, scale):
    """Against extended precision. Without FMA the rounding of x c belongs to the exponent, not to exp2."""
    model = judged.model(package(), isa, dtype)
    kind = units.DTYPE[dtype]
    scale = float(kind(scale))
    rng = np.random.default_rng(1)
    t = np.concatenate([-rng.random(200_000), -40 * rng.random(200_000), -(2.0 ** rng.uniform(-60, 0, 100_000))])
    x = (t / scale).astype(kind)
    got = call(isa, f"exp2_{dtype}", x, kind, ctypes.c_double(scale))
    product = x.astype(np.longdouble) * np.longdouble(scale)
    if model.product == "muladd":
        product = (x * kind(scale)).astype(np.longdouble)
    want = np.exp2(product)
    error = np.abs(got.astype(np.longdouble) / want - 1)
    assert float(error.max()) < model.exp2_error


@isas
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_exp2_has_exact_ends(isa, dtype):
    kind = units.DTYPE[dtype]
    tiny = {"float32": 125.5, "float64": 1021.5}[dtype]
    x = np.array([0.0, -0.0, -np.inf, np.nan, -1.0, -2.0, -(tiny - 0.5), -tiny - 0.01, -1e30], kind)
    got = call(isa, f"exp2_{dtype}", x, kind, ctypes.c_double(1.0))
    want = [1.0, 1.0, 0.0, np.nan, 0.5, 0.25, 2.0 ** -(tiny - 0.5), 0.0, 0.0]
    assert np.array_equal(got, np.array(want, kind), equal_nan=True)


HALF = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


@HALF
@isas
def test_every_16_bit_pattern_is_loaded_exactly(isa, dtype):
    bits = np.arange(1 << 16, dtype=np.uint16)
    got = call(isa, f"load_{dtype}", bits, np.float32)
    want = bits.view(units.DTYPE[dtype]).astype(np.float32)
    number = ~np.isnan(want)
    assert np.array_equal(got[number].view(np.uint32), want[number].view(np.uint32))
    assert np.isnan(got[~number]).all()


@HALF
@isas
def test_results_are_stored_rounded_to_nearest_even(isa, dtype):
    """Every 16-bit value, the midpoints and the floats beside them; a million bit patterns; NaN of any payload."""
    values = np.arange(1 << 16, dtype=np.uint16).view(units.DTYPE[dtype]).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    middle = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)]
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint64).astype(np.uint32).view(np.float32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65519.996, 65520.0, 3.4e38, 1e-45], np.float32)
    payloads = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFF8000, 0xFF800001], np.uint32).view(np.float32)
    x = np.concatenate([values, middle, *beside, anything, edges, payloads])
    got = call(isa, f"store_{dtype}", x, units.DTYPE[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(units.DTYPE[dtype])
    number = ~np.isnan(x)
    assert np.array_equal(got[number].view(np.uint16), want[number].view(np.uint16))
    assert np.isnan(got[~number].astype(np.float32)).all()
