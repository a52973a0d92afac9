"""Builds a CPU unit into a program that runs one problem, and runs it: for emulators and sanitizers."""

from __future__ import annotations

import functools
import math
import subprocess
from pathlib import Path

import numpy as np

from tests.cpu import units

MAIN = Path(__file__).with_name("program.cpp")


@functools.cache
def build(problem, isa, flags, *, compiler="g++"):
    """The program of one unit."""
    unit = f"forward_cpu_{isa}.cpp"
    files = {name: text for name, text in units.sources(problem).items() if name.endswith(".h") or name == unit}
    files[MAIN.name] = MAIN.read_bytes()
    entry = f"-DENTRY=attention_forward_{isa}"
    return units.build(files, unit, [*flags, entry], compiler=compiler, shared=False, more=(MAIN.name, "-lm"))


def attention(command, problem, dtype, q, k, v, *, causal=False, key_lengths=None):
    """O and LSE from a program of `build`. Raises CalledProcessError with what it wrote to stderr in `.stderr`."""
    kind = units.DTYPE[dtype]
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
    (b, hq, nq, d), (_, hkv, nk, _) = q.shape, k.shape
    size = np.dtype(kind).itemsize
    sizes = [b, hq, hkv, nq, nk, units.CAUSAL[causal], size, size, wide.itemsize, d, problem.dv]
    sent = [np.array([units.CODE[dtype], *sizes, key_lengths is not None], np.int64), np.array(1 / math.sqrt(d))]
    sent += [] if key_lengths is None else [np.array(key_lengths, np.int64)]
    sent += [np.ascontiguousarray(x) for x in (q, k, v)]
    data = b"".join(x.tobytes() for x in sent)
    done = subprocess.run([str(c) for c in command], input=data, capture_output=True, check=True)
    o_bytes = b * hq * nq * problem.dv * size
    o = np.frombuffer(done.stdout[:o_bytes], kind).reshape(b, hq, nq, problem.dv)
    return o, np.frombuffer(done.stdout[o_bytes:], wide).reshape(b, hq, nq)
