"""Compiles the backward unit of one instruction set and calls its kernels through ctypes, as units.py does forward."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from dataclasses import replace

import numpy as np

from codegen import render
from codegen.plans import cpu, cpu_amx, cpu_backward, cpu_backward_amx
from codegen.plans.cpu_isa import Limits
from tests.cpu import units
from verify.entry_points import BACKWARD_TENSORS, BackwardArgs

Pointer = ctypes.POINTER(BackwardArgs)


class BackwardKernel(ctypes.Structure):
    _fields_ = (
        ("shared_bytes", ctypes.CFUNCTYPE(ctypes.c_int64, Pointer)),
        ("begin", ctypes.CFUNCTYPE(None, Pointer, ctypes.c_void_p)),
        ("run", ctypes.CFUNCTYPE(ctypes.c_int, Pointer, ctypes.c_void_p, ctypes.c_void_p)),
    )


def plan(problem, isa, dtype):
    """The planner's plan, or the tile that the problem asks for."""
    if isa == "amx":
        if problem.br:
            return cpu_backward_amx.make_plan(br=problem.br, bc=problem.bc, d=problem.d, dv=problem.dv)
        return cpu_backward_amx.plan_backward(problem, Limits(fast_memory_bytes=problem.sram_bytes))[0]
    chosen = units.ISAS[isa]
    if problem.br:
        return cpu_backward.make_plan(chosen, dtype, br=problem.br, bc=problem.bc, d=problem.d, dv=problem.dv)
    return cpu_backward.plan_backward(problem, dtype, chosen, Limits(fast_memory_bytes=problem.sram_bytes))[0]


def sources(problem, isa):
    """The files that the backward unit of `isa` needs: name -> text."""
    shared = {"problem": problem, "header": ["Emitted by a test."], "exact": []}  # no target of one device
    roomy = replace(problem, br=None, bc=None, sram_bytes=8 << 20)  # of the forward unit no tile is asked for
    files = cpu.files(problem, cpu.decide(roomy, "cpu"))
    wanted = {f"csrc/{name}": (f"package/csrc/{name}.j2", {}) for name in ("forward.h", "backward.h")}
    if isa == "amx":
        wanted["csrc/forward_amx.h"] = files["csrc/forward_amx.h"]
        wanted["csrc/backward_tasks.h"] = (cpu_backward.HEADERS["backward_tasks.h"], {})
        wanted.update(cpu_backward_amx.files(plan(problem, isa, "bf16")))
    else:
        wanted.update((f"csrc/{name}", files[f"csrc/{name}"]) for name in ("simd.h", "storage_simd.h"))
        plans = {(isa, dtype): plan(problem, isa, dtype) for dtype in problem.dtypes}
        wanted.update(cpu_backward.files(problem, plans))
    return {
        path.removeprefix("csrc/"): render.render(template, {**shared, **context})
        for path, (template, context) in wanted.items()
    }


@functools.cache
def kernel(problem, isa, dtype):
    """The BackwardKernel of a unit for one dtype, compiled on first use."""
    return load(sources(problem, isa), isa, dtype)


def load(files, isa, dtype):
    flags = cpu_amx.UNIT_FLAGS if isa == "amx" else units.ISAS[isa].flags
    flags = [f for f in flags if f != "-fvisibility=hidden"]  # here the entry is called from outside
    return entry(units.build(files, f"backward_cpu_{isa}.cpp", flags), isa, dtype)


def entry(library, isa, dtype):
    """The BackwardKernel that a compiled unit has for a dtype."""
    function = getattr(ctypes.CDLL(str(library)), f"attention_backward_{isa}")
    function.restype = ctypes.POINTER(BackwardKernel)
    found = function(units.CODE[dtype])
    assert found, f"{isa} has no kernel for {dtype}"
    return found.contents


def finishes_without_the_first_tile(problem, isa, dtype, q, k, v, o, lse, dout, *, by=None):
    """Whether a worker ends while another one has taken tile 0 of the first head and not yet added it to dK and dV.

    Then lets it: the turns of all blocks go to tile 1. Shared memory starts with the number of tiles taken, and, a
    cache line later, the turns.
    """
    found = by or kernel(problem, isa, dtype)
    out = empty_gradients(problem, dtype, q, k, v)
    a = arguments(problem, q, k, v, o, lse, dout, None, out)
    memory = np.zeros(found.shared_bytes(ctypes.byref(a)) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    shared = memory[start : start + len(memory) - 64].view(np.int64)
    found.begin(ctypes.byref(a), shared.ctypes.data)
    shared[0] = 1
    counter = ctypes.c_int64(0)
    worker = threading.Thread(
        target=found.run, args=(ctypes.byref(a), shared.ctypes.data, ctypes.addressof(counter)), daemon=True
    )
    worker.start()
    worker.join(0.3)
    ended = not worker.is_alive()
    shared[8 : 8 + -(-k.shape[2] // plan(problem, isa, dtype).bc)] = 1
    worker.join(60)
    assert not worker.is_alive(), "a worker waits for ever"
    return ended


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
    a = arguments(
        problem, q, k, v, o, lse, dout, dlse, out, scale=scale, causal=causal, key_lengths=key_lengths, wanted=wanted
    )
    run_on(by or kernel(problem, isa, dtype), a, workers)
    return out


def arguments(problem, q, k, v, o, lse, dout, dlse, out, *, scale=None, causal=False, key_lengths=None, wanted="qkv"):
    """BackwardArgs of arrays. Keeps the key lengths alive as its attribute `lengths`."""
    arrays = dict(zip(BACKWARD_TENSORS, (q, k, v, o, lse, dout, dlse, *out), strict=True))
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
    a.lengths, a.key_lengths = lengths, None if lengths is None else lengths.ctypes.data
    a.scale = 1 / math.sqrt(problem.d) if scale is None else scale
    a.causal = units.CAUSAL[causal]
    return a


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
