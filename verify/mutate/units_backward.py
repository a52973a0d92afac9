"""Compile one backward unit of the CPU, and call its kernel through ctypes: no torch, no binding, no forward kernel.

The unit is emitted alone, at a tile of our choosing: the backward tile of a package follows from its memory. The
caller's arrays lie between rows of NaN, as in `units`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from codegen import render
from codegen.plans import cpu, cpu_backward, cpu_backward_amx
from codegen.plans.cpu_isa import VECTOR_ISAS
from codegen.problem import Problem
from verify.cases import CAUSAL, Array
from verify.entry_points import BackwardArgs
from verify.mutate import units
from verify.mutate.probes_backward import BackwardProbe

Plan = cpu_backward.BackwardPlan | cpu_backward_amx.AmxBackwardPlan
_Pointer = ctypes.POINTER(BackwardArgs)


class BackwardKernel(ctypes.Structure):
    """csrc/backward.h."""

    _fields_ = (
        ("shared_bytes", ctypes.CFUNCTYPE(ctypes.c_int64, _Pointer)),
        ("begin", ctypes.CFUNCTYPE(None, _Pointer, ctypes.c_void_p)),
        ("run", ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, ctypes.c_void_p, ctypes.c_void_p)),
    )


def plan(isa: str, dtype: str, *, br: int, bc: int, d: int, dv: int) -> Plan:
    """The plan of one unit for one dtype."""
    if isa == "amx":
        return cpu_backward_amx.make_plan(br=br, bc=bc, d=d, dv=dv)
    return cpu_backward.make_plan(_isa(isa), dtype, br=br, bc=bc, d=d, dv=dv)


def arithmetic_of(isa: str, made: Plan) -> str:
    """The row of arithmetic.MODELS of a unit."""
    return _isa(isa).arithmetic[made.scalar] if isinstance(made, cpu_backward.BackwardPlan) else "amx_bf16"


def files(problem: Problem, isa: str, dtype: str, made: Plan) -> dict[str, bytes]:
    """The unit of one dtype and all that it includes, by path in a package. `problem` decides d, dv and the form."""
    texts: dict[str, tuple[str, Mapping[str, Any]]] = {
        f"csrc/{name}": (f"package/csrc/{name}.j2", {}) for name in ("forward.h", "backward.h")
    }
    beside = cpu.files(problem, cpu.decide(problem, "cpu"))
    if isinstance(made, cpu_backward.BackwardPlan):
        texts |= cpu_backward.files(problem, {(isa, dtype): made})
        needed: tuple[str, ...] = ("simd.h", "storage_simd.h")
    else:
        texts["csrc/backward_tasks.h"] = (cpu_backward.HEADERS["backward_tasks.h"], {})
        texts |= cpu_backward_amx.files(made)
        needed = ("forward_amx.h",)
    texts |= {path: beside[path] for path in (f"csrc/{name}" for name in needed)}
    shared = {"problem": problem, "header": ["A unit of its own."], "exact": []}
    return {path: render.render(template, {**shared, **context}) for path, (template, context) in texts.items()}


def library(sources: Mapping[str, bytes], isa: str) -> Path:
    """The compiled unit. Raises: ToolError when it does not compile."""
    return units.library(sources, isa, unit=f"backward_cpu_{isa}.cpp")


class Unit:
    """The kernel of one dtype in a compiled unit."""

    def __init__(self, built: Path, isa: str, dtype: str, *, debug: bool) -> None:
        assert units.runs_here(isa), "the machine lacks the instructions, or the permission to use tiles"
        entry = getattr(ctypes.CDLL(str(built)), f"attention_backward_{isa}")
        entry.restype = ctypes.POINTER(BackwardKernel)
        self.kernel, self.dtype, self.debug = entry(units.CODES[dtype]).contents, dtype, debug

    def __call__(self, probe: BackwardProbe) -> dict[str, Array]:
        """The wanted of dq, dk and dv as float64; they and the shared memory start as NaN."""
        made, wide = probe.case, probe.case.lse_dtype
        stored = units.DTYPES[wide if self.debug else self.dtype]
        arrays = {"q": units.placed(made.q, self.dtype, made.layout), "dout": self._dout(probe)}
        arrays["k"], arrays["v"] = units.keys_of(made, self.dtype)
        arrays["o"] = units.placed(probe.o, self.dtype, made.layout)
        arrays["lse"] = units.placed(probe.lse[..., None], wide, "contiguous")
        if probe.dlse is not None:
            arrays["dlse"] = units.placed(probe.dlse[..., None], wide, "contiguous")
        wanted = [name for name, asked in zip("qkv", made.wanted, strict=True) if asked]
        arrays |= {f"d{name}": np.full(arrays[name].shape, np.nan, stored) for name in wanted}
        lengths = None if made.key_lengths is None else np.array(made.key_lengths, np.int64)
        sizes = made.sizes
        args = BackwardArgs(
            **{name: x.ctypes.data for name, x in arrays.items()},
            **{name: sizes[name] for name in ("B", "Hq", "Hkv", "Nq", "Nk")},
            key_lengths=None if lengths is None else lengths.ctypes.data,
            scale=made.scale, causal=CAUSAL.index(made.causal), deterministic=1,
        )  # fmt: skip
        for name, x in arrays.items():
            count = 4 if name == "dout" else 3
            setattr(args, f"{name}_stride", (ctypes.c_int64 * count)(*(s // x.itemsize for s in x.strides[:count])))
        memory = np.full(self.kernel.shared_bytes(ctypes.byref(args)) + 64, 0xFF, np.uint8)
        shared = memory.ctypes.data + -memory.ctypes.data % 64
        counter = ctypes.c_int64(0)
        self.kernel.begin(ctypes.byref(args), shared)
        if self.kernel.run(ctypes.byref(args), shared, ctypes.addressof(counter)):
            raise MemoryError("the kernel found no memory")
        return {f"d{name}": arrays[f"d{name}"].astype(np.float64) for name in wanted}

    def _dout(self, probe: BackwardProbe) -> np.ndarray:
        if probe.case.do_layout == "transposed":  # stored (B, H, dv, Nq)
            return units.placed(probe.do.swapaxes(2, 3), self.dtype, "contiguous").swapaxes(2, 3)
        return units.placed(probe.do, self.dtype, probe.case.layout)


def _isa(name: str) -> Any:
    return next(isa for isa in VECTOR_ISAS if isa.name == name)
