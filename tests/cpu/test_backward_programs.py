"""The backward units as programs: under the address and undefined-behaviour sanitizers, and on an emulated aarch64."""

import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from codegen.plans import cpu_amx
from tests.cpu import amx_unit, backward_judged, backward_units, units
from tests.cpu.test_simd import package
from tests.cpu.test_simd_aarch64 import COMPILER, EMULATOR
from tests.cpu.test_simd_sanitized import SANITIZE
from tests.cpu.test_simd_sanitized import _sanitizers as _sanitizers

MAIN = Path(__file__).with_name("backward_program.cpp")
# B, Hq, Hkv, Nq, Nk, mask, lengths: one row or key more or less than a vector, a panel, a tile, a block; none at all.
PROBLEMS = (
    ((1, 2, 1, 65, 33), "bottom_right", None),
    ((2, 3, 1, 5, 17), "top_left", (0, 16)),
    ((1, 1, 1, 1, 1), False, None),
    ((1, 2, 2, 33, 0), True, None),
)
# Rows narrower than a vector, and not whole vectors.
UNITS = [("v4", (8, 24, 64, 32), "float32"), ("baseline", (24, 40, 64, 32), "float64"),
         ("amx", (40, 8, 64, 32), "bf16")]  # fmt: skip


def build(problem, isa, flags, *, compiler="g++"):
    """The program of one backward unit."""
    files = {**backward_units.sources(problem, isa), MAIN.name: MAIN.read_bytes()}
    more = (MAIN.name, "-lm")
    entry = f"-DENTRY=attention_backward_{isa}"
    return units.build(files, f"backward_cpu_{isa}.cpp", [*flags, entry], compiler=compiler, shared=False, more=more)


def gradients(command, problem, dtype, q, k, v, o, lse, dout, dlse, *, causal, key_lengths):
    """[dQ, dK, dV] from a program of `build`. Fails with what it wrote to stderr."""
    size = np.dtype(units.DTYPE[dtype]).itemsize
    sizes = [*q.shape[:2], *k.shape[1:2], q.shape[2], k.shape[2], units.CAUSAL[causal], size, lse.itemsize]
    head = [units.CODE[dtype], *sizes, problem.d, problem.dv, key_lengths is not None]
    sent = [np.array(head, np.int64), np.array(1 / math.sqrt(problem.d))]
    sent += [] if key_lengths is None else [np.array(key_lengths, np.int64)]
    sent += [np.ascontiguousarray(x) for x in (q, k, v, o, lse, dout, dlse)]
    done = subprocess.run(
        [str(c) for c in command], input=b"".join(x.tobytes() for x in sent), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    found, at = [], 0
    for x in (q, k, v):
        found.append(np.frombuffer(done.stdout[at : at + x.nbytes], x.dtype).reshape(x.shape))
        at += x.nbytes
    return found


def judge(command, problem, isa, dtype):
    for shape, causal, lengths in PROBLEMS:
        words = {"causal": causal, "key_lengths": lengths}
        q, k, v, dout, dlse = backward_judged.draw(shape, problem.d, problem.dv, dtype, dlse=True)
        given = backward_judged.forward(problem, isa, dtype, q, k, v, **words)
        got = gradients(command, problem, dtype, q, k, v, *given, dout, dlse, **words)
        backward_judged.assert_right(
            problem, isa, dtype, q, k, v, given, dout, dlse, got, end_to_end=False, name=str(shape), **words
        )


@pytest.mark.field("R066", "R088")
@pytest.mark.parametrize(("isa", "sizes", "dtype"), UNITS, ids=str)
def test_no_access_is_out_of_bounds_and_no_behaviour_undefined(_sanitizers, isa, sizes, dtype):
    if isa == "amx" and amx_unit.machine_lacks():
        pytest.skip(f"needs {amx_unit.machine_lacks()}")
    if isa != "amx" and not units.machine_runs(isa):
        pytest.skip(f"this machine does not have the instructions of {isa}")
    flags = cpu_amx.UNIT_FLAGS if isa == "amx" else units.ISAS[isa].flags
    problem = package(*sizes, dtypes=(dtype,))
    program = build(problem, isa, (*SANITIZE, *(f for f in flags if f != "-O3")))
    judge([program], problem, isa, dtype)


@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bf16", "fp16"])
def test_aarch64_is_within_the_derived_bound(dtype):
    problem = package(40, 72, 32, 32)
    program = build(problem, "baseline", units.ISAS["baseline"].flags, compiler=COMPILER)
    judge([EMULATOR, "-L", "/usr/aarch64-linux-gnu", program], problem, "baseline", dtype)
