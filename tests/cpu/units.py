"""Compiles one CPU unit of an emitted package and calls its kernels through ctypes: no torch, no binding.

A library is kept under its content's hash in the temporary folder, so a second run of the tests compiles nothing.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from codegen import problem as problems
from codegen import render
from codegen.plans import cpu
from codegen.plans.cpu_isa import VECTOR_ISAS
from verify.entry_points import ForwardArgs

DTYPE = {"float32": np.float32, "float64": np.float64, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
CODE = {"float32": 0, "float64": 1, "bf16": 2, "fp16": 3}
CAUSAL = {False: 0, True: 1, "bottom_right": 1, "top_left": 2}
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-funsigned-char")
ISAS = {isa.name: isa for isa in VECTOR_ISAS}
CPU_FLAGS = {"baseline": (), "v3": ("avx2", "fma", "f16c"), "v4": ("avx512f", "avx512bw", "avx512dq", "avx512vl")}


def machine_runs(isa):
    """Whether this machine has the instructions of a unit."""
    if isa == "baseline":
        return True
    if platform.machine() != "x86_64":
        return False
    words = Path("/proc/cpuinfo").read_text().split()
    return all(flag in words for flag in CPU_FLAGS[isa])


def make_problem(d, dv=None, *, dtypes=("float32", "float64", "bf16", "fp16"), sram=2 << 20, **more):
    return problems.make(sram_bytes=sram, d=d, dv=dv, dtypes=dtypes, archs=("cpu",), **more)


@functools.cache
def decide(problem):
    """The planner's decision: asked for at every call of a kernel."""
    return cpu.decide(problem, "cpu")


@functools.cache
def sources(problem):
    """The files of the CPU target that a vector unit needs: name -> text."""
    decision = decide(problem)
    header = ["Emitted by a test."]
    interface = {"problem": problem, "header": header, "exact": []}
    files = {"forward.h": render.render("package/csrc/forward.h.j2", interface)}
    for path, (template, context) in cpu.files(problem, decision).items():
        if "amx" not in path:
            files[path.removeprefix("csrc/")] = render.render(
                template, {"problem": problem, "header": header, **context}
            )
    return files


def build(files, unit, flags, *, compiler="g++", shared=True, name="unit", more=()):
    """Compile `unit` of `files`; returns the library (or program) built from exactly this content."""
    command = [compiler, *WARNINGS, *flags, *(["-shared"] if shared else []), unit, *more, "-o", name]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(repr((sorted(files.items()), command, version)).encode()).hexdigest()[:24]
    root = Path(tempfile.gettempdir()) / f"tileproof_test_units_{os.getuid()}"
    built = root / key / name
    if not built.exists():
        root.mkdir(exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=root))
        for path, data in files.items():
            (work / path).write_bytes(data)
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
        try:
            work.rename(root / key)
        except OSError:  # another process was first
            shutil.rmtree(work)
    return built


class ForwardKernel(ctypes.Structure):
    _fields_ = (
        ("shared_bytes", ctypes.c_void_p),
        ("prepare", ctypes.c_void_p),
        ("run", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ForwardArgs), ctypes.c_void_p, ctypes.c_void_p)),
    )


@functools.cache
def kernel(problem, isa, dtype):
    """The ForwardKernel of a unit for one dtype, compiled on first use."""
    return load(sources(problem), isa, dtype)


def load(files, isa, dtype):
    unit = f"forward_cpu_{isa}.cpp"
    wanted = {name: text for name, text in files.items() if name.endswith(".h") or name == unit}
    flags = [f for f in ISAS[isa].flags if f != "-fvisibility=hidden"]  # here the entry is called from outside
    library = ctypes.CDLL(str(build(wanted, unit, flags)))
    entry = getattr(library, f"attention_forward_{isa}")
    entry.restype = ctypes.POINTER(ForwardKernel)
    found = entry(CODE[dtype])
    assert found, f"{isa} has no kernel for {dtype}"
    return found.contents


def plan(problem, isa, dtype):
    return next(v.plan for v in decide(problem).variants if (v.isa, v.dtype) == (isa, dtype))


def strides(x):
    assert x.strides[-1] == x.itemsize or x.size == 0
    return (ctypes.c_int64 * 3)(*(s // x.itemsize for s in x.strides[:3]))


def attention(
    problem, isa, dtype, q, k, v, *, scale=None, causal=False, key_lengths=None, out=None, trace=False, by=None
):
    """O (B,Hq,Nq,dv), LSE (B,Hq,Nq) and, with trace=True, the trace (B,Hq,Nq,tiles,2+dv) of a debug unit.

    q, k, v: arrays of the dtype with any (batch, head, row) strides. The outputs start as NaN. by: a kernel of `load`.
    """
    p = plan(problem, isa, dtype)
    wide = np.float64 if dtype == "float64" else np.float32
    shape = (*q.shape[:3], problem.dv)
    if out is None:
        out = np.full(shape, np.nan, wide if problem.debug else DTYPE[dtype])
    lse = np.full(shape[:3], np.nan, wide)
    lengths = None if key_lengths is None else np.ascontiguousarray(key_lengths, np.int64)
    a = ForwardArgs(q=q.ctypes.data, k=k.ctypes.data, v=v.ctypes.data, o=out.ctypes.data, lse=lse.ctypes.data)
    a.B, a.Hq, a.Nq = q.shape[:3]
    a.Hkv, a.Nk = k.shape[1:3]
    a.q_stride, a.k_stride, a.v_stride, a.o_stride = map(strides, (q, k, v, out))
    a.key_lengths = None if lengths is None else lengths.ctypes.data
    a.scale = 1 / math.sqrt(problem.d) if scale is None else scale
    a.causal = CAUSAL[causal]
    traced = None
    if trace:
        a.trace_tiles = -(-k.shape[2] // p.bc)
        traced = np.full((*shape[:3], a.trace_tiles, 2 + problem.dv), np.nan, wide)
        a.trace = traced.ctypes.data
    counter = ctypes.c_int64(0)
    run = (by or kernel(problem, isa, dtype)).run
    assert run(ctypes.byref(a), None, ctypes.addressof(counter)) == 0
    return (out, lse, traced) if trace else (out, lse)


def output(*command):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout
