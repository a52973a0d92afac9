"""The functions under the vector kernels, argument by argument: 2^x, and the conversions of 16-bit elements."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.cpu import judged, units
from tests.cpu.test_simd import _machine as _machine  # skips what this machine cannot run
from tests.cpu.test_simd import isas, package

STRIDE = 251  # prime: 4.5 million of the 1.1 billion arguments; the README states what all of them give
EXP2_PROBE = Path(__file__).parents[2] / "verify" / "probes" / "exp2_cpu.cpp"
HALF = [pytest.param("bf16", id="bf16"), pytest.param("fp16", id="fp16")]


def load_library(isa, source):
    files = {name: text for name, text in units.sources(package()).items() if name.endswith(".h")}
    flags = [f for f in units.ISAS[isa].flags if f != "-fvisibility=hidden"]
    lanes = units.ISAS[isa].vector_bytes // 4
    return ctypes.CDLL(
        str(units.build({**files, source.name: source.read_bytes()}, source.name, [*flags, f"-DLANES={lanes}"]))
    )


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
    load_library(isa, EXP2_PROBE).probe(0, end, STRIDE, ctypes.byref(found))
    assert found.worst < model.exp2_error and found.flushed_from < model.exp2_flush
    assert (found.at_zero, found.at_minus_infinity, found.nan_stays) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("dtype", HALF)
@isas
def test_every_16_bit_pattern_is_loaded_exactly(isa, dtype):
    bits = np.arange(1 << 16, dtype=np.uint16)
    got = np.empty(bits.size, np.float32)
    getattr(load_library(isa, Path(__file__).with_name("storage_calls.cpp")), f"load_{dtype}")(
        ctypes.c_void_p(bits.ctypes.data), ctypes.c_void_p(got.ctypes.data), ctypes.c_int64(bits.size)
    )
    want = bits.view(units.DTYPE[dtype]).astype(np.float32)
    number = ~np.isnan(want)
    assert np.array_equal(got[number].view(np.uint32), want[number].view(np.uint32))
    assert np.isnan(got[~number]).all()


@pytest.mark.parametrize("dtype", HALF)
@isas
def test_results_are_stored_rounded_to_nearest_even(isa, dtype):
    """Every 16-bit value, its neighbours' midpoints and the floats beside them; every exponent; NaN of any payload."""
    values = np.arange(1 << 16, dtype=np.uint16).view(units.DTYPE[dtype]).astype(np.float32)
    values = values[np.isfinite(values)]
    middle = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)]
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint64).astype(np.uint32).view(np.float32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65519.996, 65520.0, 3.4e38, 1e-45], np.float32)
    payloads = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFF8000, 0xFF800001], np.uint32).view(np.float32)
    x = np.concatenate([values, middle, *beside, anything, edges, payloads])
    x = np.resize(x, -(-x.size // 16) * 16)
    got = np.empty(x.size, units.DTYPE[dtype])
    getattr(load_library(isa, Path(__file__).with_name("storage_calls.cpp")), f"store_{dtype}")(
        ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(got.ctypes.data), ctypes.c_int64(x.size)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(units.DTYPE[dtype])
    number = ~np.isnan(x)
    assert np.array_equal(got[number].view(np.uint16), want[number].view(np.uint16))
    assert np.isnan(got[~number].astype(np.float32)).all()
