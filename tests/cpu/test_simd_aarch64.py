"""The baseline unit on aarch64: cross-compiled, run by an emulator, judged like the others."""

import shutil

import numpy as np
import pytest

from tests.cpu import judged, programs, units
from tests.cpu.test_simd import draw, dtypes, package

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR} (Debian: g++-aarch64-linux-gnu, qemu-user)",
)


def attention(problem, dtype, *tensors, **more):
    program = programs.build(problem, "baseline", units.ISAS["baseline"].flags, compiler=COMPILER)
    return programs.attention([EMULATOR, "-L", "/usr/aarch64-linux-gnu", program], problem, dtype, *tensors, **more)


@pytest.mark.field("R104")
@pytest.mark.parametrize("sizes", [(64, 64, 96, 64), (40, 72, 32, 8), (8, 24, 64, 40)], ids=str)
@dtypes
def test_aarch64_is_within_the_derived_bound(dtype, sizes):
    """FMA rounds less than the separate products that the model of the baseline unit allows for."""
    problem = package(*sizes)
    for shape, causal, lengths in (
        ((1, 4, 2, 70, 90), "bottom_right", None),
        ((2, 2, 1, 5, 77), "top_left", (0, 51)),
        ((1, 1, 1, 100, 65), False, None),
        ((1, 2, 2, 3, 0), True, None),
    ):
        q, k, v = draw(shape, *sizes[:2], dtype)
        got = attention(problem, dtype, q, k, v, causal=causal, key_lengths=lengths)
        judged.assert_right(
            problem, "baseline", dtype, q, k, v, got, causal=causal, key_lengths=lengths, name=str(shape)
        )


@dtypes
def test_aarch64_and_v3_give_the_same_bits(dtype):
    """FMA in one order of summation on both, whatever the vector length and the compiler."""
    if not units.machine_runs("v3"):
        pytest.skip("this machine does not have the instructions of v3")
    problem = package()
    q, k, v = draw((1, 3, 1, 110, 130), 64, 64, dtype)
    here = units.attention(problem, "v3", dtype, q, k, v, causal=True)
    there = attention(problem, dtype, q, k, v, causal=True)
    assert np.array_equal(here[0], there[0]) and np.array_equal(here[1], there[1])
