"""The AMX unit of an emitted package, compiled and called through ctypes like the vector units (units.py).

What differs: the kernel has a pre-pass and memory that its workers share, which is handed over full of NaN, and the
process must ask the kernel for the tile state once.
"""

from __future__ import annotations

import ctypes
import functools
import math
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from codegen import render
from codegen.plans import cpu, cpu_amx
from tests.cpu import units

FEATURES = ("amx_tile", "amx_bf16", "avx512_bf16", "avx512bw", "avx512dq", "avx512vl")
REQUEST_PERMISSION, TILE_DATA, ARCH_PRCTL = 0x1023, 18, 158  # Linux, Documentation/arch/x86/xstate.rst


@functools.cache
def machine_lacks():
    """What keeps this machine from running the unit, "" if nothing."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "Linux on x86-64"
    words = Path("/proc/cpuinfo").read_text().split()
    missing = [name for name in FEATURES if name not in words]
    if missing:
        return ", ".join(missing)
    granted = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0
    return "" if granted else "permission to use tiles (arch_prctl)"


class ForwardKernel(ctypes.Structure):
    """csrc/forward.h."""

    _fields_ = (
        ("shared_bytes", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(units.ForwardArgs))),
        ("prepare", ctypes.CFUNCTYPE(None, ctypes.POINTER(units.ForwardArgs), ctypes.c_void_p, ctypes.c_void_p)),
        ("run", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(units.ForwardArgs), ctypes.c_void_p, ctypes.c_void_p)),
    )


def sources(problem):
    """The files of the AMX unit: name -> text."""
    header = ["Emitted by a test."]
    interface = {"problem": problem, "header": header, "exact": []}
    files = {"forward.h": render.render("package/csrc/forward.h.j2", interface)}
    for path, (template, context) in cpu.files(problem, cpu.decide(problem, "cpu")).items():
        if "amx" in path:
            files[path.removeprefix("csrc/")] = render.render(
                template, {"problem": problem, "header": header, **context}
            )
    return files


@functools.cache
def kernel(problem, dtype):
    flags = [f for f in cpu_amx.UNIT_FLAGS if f != "-fvisibility=hidden"]  # here the entry is called from outside
    library = ctypes.CDLL(str(units.build(sources(problem), "forward_cpu_amx.cpp", flags)))
    library.attention_forward_amx.restype = ctypes.POINTER(ForwardKernel)
    return library.attention_forward_amx(units.CODE[dtype]).contents


def plan(problem, dtype):
    return units.plan(problem, "amx", dtype)


def attention(problem, dtype, q, k, v, *, scale=None, causal=False, key_lengths=None, out=None, trace=False, workers=1):
    """O (B,Hq,Nq,dv), LSE (B,Hq,Nq) and, with trace=True, the trace (B,Hq,Nq,tiles,2+dv) of a debug unit.

    q, k, v: arrays of the dtype with any (batch, head, row) strides. Outputs and shared memory start as NaN.
    """
    shape = (*q.shape[:3], problem.dv)
    if out is None:
        out = np.full(shape, np.nan, np.float32 if problem.debug else units.DTYPE[dtype])
    lse = np.full(shape[:3], np.nan, np.float32)
    lengths = None if key_lengths is None else np.ascontiguousarray(key_lengths, np.int64)
    a = units.ForwardArgs(q=q.ctypes.data, k=k.ctypes.data, v=v.ctypes.data, o=out.ctypes.data, lse=lse.ctypes.data)
    a.B, a.Hq, a.Nq = q.shape[:3]
    a.Hkv, a.Nk = k.shape[1:3]
    a.q_stride, a.k_stride, a.v_stride, a.o_stride = map(units.strides, (q, k, v, out))
    a.key_lengths = None if lengths is None else lengths.ctypes.data
    a.scale = 1 / math.sqrt(problem.d) if scale is None else scale
    a.causal = units.CAUSAL[causal]
    traced = None
    if trace:
        a.trace_tiles = -(-k.shape[2] // plan(problem, dtype).bc)
        traced = np.full((*shape[:3], a.trace_tiles, 2 + problem.dv), np.nan, np.float32)
        a.trace = traced.ctypes.data
    found = kernel(problem, dtype)
    size = found.shared_bytes(ctypes.byref(a))
    memory = np.full(size + 2 * 64, 0xFF, np.uint8)  # bf16, fp16 and float32 NaN
    start = -memory.ctypes.data % 64
    shared = memory.ctypes.data + start

    def all_workers(function):
        counter = ctypes.c_int64(0)
        with ThreadPoolExecutor(workers) as pool:
            calls = [pool.submit(function, ctypes.byref(a), shared, ctypes.addressof(counter)) for _ in range(workers)]
            return [call.result() for call in calls]

    all_workers(found.prepare)
    assert all_workers(found.run) == [0] * workers
    assert (memory[start + size :] == 0xFF).all(), "the kernel wrote beyond the shared memory that it asked for"
    return (out, lse, traced) if trace else (out, lse)
