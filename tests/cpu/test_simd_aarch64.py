"""The baseline unit on aarch64: cross-compiled, run by an emulator, judged like the others."""

import functools
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.cpu import judged, units
from tests.cpu.test_simd import draw, dtypes, package

COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
PROBE = Path(__file__).with_name("emulated.cpp")

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR} (Debian: g++-aarch64-linux-gnu, qemu-user)",
)


@functools.cache
def program(problem):
    files = {n: t for n, t in units.sources(problem).items() if n.endswith(".h") or "baseline" in n}
    files[PROBE.name] = PROBE.read_bytes()
    flags = units.ISAS["baseline"].flags
    return units.build(
        files, "forward_cpu_baseline.cpp", flags, compiler=COMPILER, shared=False, more=(PROBE.name, "-lm")
    )


def attention(problem, dtype, q, k, v, *, causal=False, key_lengths=None):
    kind = units.DTYPE[dtype]
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
    (b, hq, nq, d), (_, hkv, nk, _) = q.shape, k.shape
    itemsize = np.dtype(kind).itemsize
    head = [units.CODE[dtype], b, hq, hkv, nq, nk, units.CAUSAL[causal], itemsize, itemsize, wide.itemsize, d]
    sent = (
        np.array([*head, problem.dv, key_lengths is not None], np.int64).tobytes()
        + np.float64(1 / math.sqrt(d)).tobytes()
    )
    sent += b"" if key_lengths is None else np.array(key_lengths, np.int64).tobytes()
    sent += b"".join(np.ascontiguousarray(x).tobytes() for x in (q, k, v))
    done = subprocess.run([EMULATOR, "-L", ROOT, str(program(problem))], input=sent, capture_output=True, check=True)
    o_bytes = b * hq * nq * problem.dv * itemsize
    o = np.frombuffer(done.stdout[:o_bytes], kind).reshape(b, hq, nq, problem.dv)
    return o, np.frombuffer(done.stdout[o_bytes:], wide).reshape(b, hq, nq)


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
