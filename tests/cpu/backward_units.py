"""Compiles the backward unit of one instruction set and calls its kernels through ctypes, as units.py does forward."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from dataclasses import replace

import numpy as np

from codegen import render
from codegen.plans import cpu_backward
from codegen.plans.cpu_isa import Limits
from tests.cpu import units

NAMES = ("q", "k", "v", "o", "lse", "dout", "dlse", "dq", "dk", "dv")
STRIDED = ("q", "k", "v", "o", "lse", "dout", "dlse", "dq", "dk", "dv")


class BackwardArgs(ctypes.Structure):
    """csrc/backward.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in NAMES),
        *((name, ctypes.c_int64) for name in ("B", "Hq", "Hkv", "Nq", "Nk")),
        *((f"{name}_stride", ctypes.c_int64 * (4 if name == "dout" else 3)) for name in STRIDED),
        ("key_lengths", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("causal", ctypes.c_int),
    )


Pointer = ctypes.POINTER(BackwardArgs)


class BackwardKernel(ctypes.Structure):
    _fields_ = (
        ("shared_bytes", ctypes.CFUNCTYPE(ctypes.c_int64, Pointer)),
        ("begin", ctypes.CFUNCTYPE(None, Pointer, ctypes.c_void_p)),
        ("run", ctypes.CFUNCTYPE(ctypes.c_int, Pointer, ctypes.c_void_p, ctypes.c_void_p)),
    )


def plan(problem, isa, dtype):
    """The planner's plan, or the tile that the problem asks for."""
    chosen = units.ISAS[isa]
    if problem.br:
        return cpu_backward.make_plan(chosen, dtype, br=problem.br, bc=problem.bc, d=problem.d, dv=problem.dv)
    return cpu_backward.plan_backward(problem, dtype, chosen, Limits(fast_memory_bytes=problem.sram_bytes))[0]


def sources(problem, isa):
    """The files that the backward unit of `isa` needs: name -> text."""
    plans = {(isa, dtype): plan(problem, isa, dtype) for dtype in problem.dtypes}
    shared = {"problem": problem, "header": ["Emitted by a test."]}
    forward = units.sources(replace(problem, br=None, bc=None, sram_bytes=8 << 20))  # its tile is not asked for
    files = {name: forward[name] for name in ("forward.h", "simd.h", "storage_simd.h")}
    for path, (template, context) in cpu_backward.files(problem, plans).items():
        files[path.removeprefix("csrc/")] = render.render(template, {**shared, **context})
    return files


@functools.cache
def kernel(problem, isa, dtype):
    """The BackwardKernel of a unit for one dtype, compiled on first use."""
    return load(sources(problem, isa), isa, dtype)


def load(files, isa, dtype):
    flags = [f for f in units.ISAS[isa].flags if f != "-fvisibility=hidden"]  # here the entry is called from outside
    library = ctypes.CDLL(str(units.build(files, f"backward_cpu_{isa}.cpp", flags)))
    entry = getattr(library, f"attention_backward_{isa}")
    entry.restype = ctypes.POINTER(BackwardKernel)
    found = entry(units.CODE[dtype])
    assert found, f"{isa} has no kernel for {dtype}"
    return found.contents


def empty_gradients(problem, dtype, q, k, v):
    """dQ, dK, dV of NaN."""
    wide = np.float64 if dtype == "float64" else np.float32
    kind = wide if problem.debug else units.DTYPE[dtype]
    return [np.full(x.shape, np.nan, kind) for x in (q, k, v)]


def gradients(
    problem, isa, dtype, q, k, v, o, lse, dout, dlse=None, *,
    scale=None, causal=False, key_lengths=None, out=None, wanted="qkv", workers=1, by=None,
):  # fmt: skip
    """[dQ, dK, dV] from arrays of the dtype with any strides; those not in `wanted` stay as they were (NaN).

    out: arrays to write to. workers: threads that run the kernel at the same time.
    """
    out = empty_gradients(problem, dtype, q, k, v) if out is None else out
    arrays = dict(zip(NAMES, (q, k, v, o, lse, dout, dlse, *out), strict=True))
    for name in "qkv":
        if name not in wanted:
            arrays["d" + name] = None
    a = BackwardArgs()
    for name, x in arrays.items():
        if x is None:
            continue
        setattr(a, name, x.ctypes.data)
        assert name == "dout" or x.ndim == 3 or x.strides[3] == x.itemsize or x.size == 0
        count = 4 if name == "dout" else 3
        setattr(a, f"{name}_stride", (ctypes.c_int64 * count)(*(s // x.itemsize for s in x.strides[:count])))
    a.B, a.Hq, a.Nq = q.shape[:3]
    a.Hkv, a.Nk = k.shape[1:3]
    lengths = None if key_lengths is None else np.ascontiguousarray(key_lengths, np.int64)
    a.key_lengths = None if lengths is None else lengths.ctypes.data
    a.scale = 1 / math.sqrt(problem.d) if scale is None else scale
    a.causal = units.CAUSAL[causal]
    run_on(by or kernel(problem, isa, dtype), a, workers)
    return out


def run_on(kernel, a, workers):
    """Run the kernel as a binding would: shared memory full of garbage, `begin` once, `run` on every worker."""
    size = kernel.shared_bytes(ctypes.byref(a))
    guard = 0xA5
    memory = np.full(size + 128, guard, np.uint8)
    start = -memory.ctypes.data % 64
    shared = memory.ctypes.data + start
    kernel.begin(ctypes.byref(a), shared)
    counter = ctypes.c_int64(0)
    codes = []

    def work():
        codes.append(kernel.run(ctypes.byref(a), shared, ctypes.addressof(counter)))

    threads = [threading.Thread(target=work) for _ in range(workers - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    assert codes == [0] * workers
    assert (memory[:start] == guard).all() and (memory[start + size :] == guard).all(), "wrote outside shared memory"
