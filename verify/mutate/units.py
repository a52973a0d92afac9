"""Compile one unit of an emitted CPU package, and call its kernel through ctypes: no torch, no binding.

The caller's arrays lie between rows of NaN, and so do the gaps of a layout: a mutant that reads too far reads NaN.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np

from codegen.errors import ToolError
from codegen.plans import cpu_amx
from codegen.plans.cpu_isa import VECTOR_ISAS
from verify import packages
from verify.cases import CAUSAL, Array, Case
from verify.entry_points import ForwardArgs

DTYPES = {"float32": np.float32, "float64": np.float64, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
CODES = {"float32": 0, "float64": 1, "bf16": 2, "fp16": 3}
MARGIN = 64  # rows of NaN before and after each array
FEATURES = {
    "v4": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"),
    "v3": ("avx2", "fma", "f16c", "bmi1", "bmi2"),
    "baseline": (),
    "amx": ("amx_tile", "amx_bf16", "avx512_bf16", "avx512bw", "avx512dq", "avx512vl", "avx512cd"),
}
# Linux, Documentation/arch/x86/xstate.rst: a process asks once for the state of the tile registers.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


class ForwardKernel(ctypes.Structure):
    """csrc/forward.h."""

    _fields_ = (
        ("shared_bytes", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ForwardArgs))),
        ("prepare", ctypes.CFUNCTYPE(None, ctypes.POINTER(ForwardArgs), ctypes.c_void_p, ctypes.c_void_p)),
        ("run", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ForwardArgs), ctypes.c_void_p, ctypes.c_void_p)),
    )


@lru_cache(maxsize=8)
def runs_here(isa: str) -> bool:
    """Whether this machine has the instructions of a unit."""
    if isa == "baseline":
        return True
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    words = Path("/proc/cpuinfo").read_text().split()
    if not all(flag in words for flag in FEATURES[isa]):
        return False
    return isa != "amx" or ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def flags_of(isa: str) -> list[str]:
    """The unit's own flags, less optimisation: mutants are compiled more often than they are run."""
    flags = cpu_amx.UNIT_FLAGS if isa == "amx" else next(i for i in VECTOR_ISAS if i.name == isa).flags
    return ["-O1" if flag == "-O3" else flag for flag in flags if flag != "-fvisibility=hidden"]


def library(files: Mapping[str, bytes], isa: str, *, unit: str | None = None, compiler: str = "g++") -> Path:
    """The library of unit `isa` of an emitted package, in the cache under the hash of all that it is made of.

    unit: the file that is compiled; default: that of the forward pass.
    Raises: ToolError when it does not compile.
    """
    sources = {path.removeprefix("csrc/"): data for path, data in files.items() if path.startswith("csrc/")}
    unit = unit or f"forward_cpu_{isa}.cpp"
    command = [compiler, *flags_of(isa), "-w", "-shared", unit]
    key = hashlib.sha256(repr((sorted(sources.items()), command, _version(compiler))).encode()).hexdigest()[:20]
    built = packages.cache().parent / "mutants" / f"{isa}-{key}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            for path, data in sources.items():
                (Path(folder) / path).write_bytes(data)
            done = subprocess.run([*command, "-o", "unit.so"], cwd=folder, capture_output=True, text=True)
            if done.returncode:
                raise ToolError(f"{unit} does not compile", *[x for x in done.stderr.splitlines() if "error" in x][:6])
            (Path(folder) / "unit.so").replace(built)
    return built


@lru_cache(maxsize=4)
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


class Unit:
    """The kernel of one dtype in a compiled unit."""

    def __init__(self, built: Path, isa: str, dtype: str, *, debug: bool) -> None:
        assert runs_here(isa), "the machine lacks the instructions, or the permission to use tiles"
        entry = getattr(ctypes.CDLL(str(built)), f"attention_forward_{isa}")
        entry.restype = ctypes.POINTER(ForwardKernel)
        self.kernel, self.dtype, self.debug = entry(CODES[dtype]).contents, dtype, debug

    def __call__(self, case: Case) -> tuple[Array, Array]:
        """O and LSE of one case, as float64; outputs and shared memory start as NaN."""
        wide = np.float64 if self.dtype == "float64" else np.float32
        q, (k, v) = placed(case.q, self.dtype, case.layout), keys_of(case, self.dtype)
        (b, hq, nq, _), (_, hkv, nk, dv) = q.shape, v.shape
        o = np.full((b, hq, nq, dv), np.nan, wide if self.debug else DTYPES[self.dtype])
        lse = np.full((b, hq, nq), np.nan, wide)
        lengths = None if case.key_lengths is None else np.array(case.key_lengths, np.int64)
        args = ForwardArgs(
            q=q.ctypes.data, k=k.ctypes.data, v=v.ctypes.data, o=o.ctypes.data, lse=lse.ctypes.data,
            B=b, Hq=hq, Hkv=hkv, Nq=nq, Nk=nk, key_lengths=None if lengths is None else lengths.ctypes.data,
            scale=case.scale, causal=CAUSAL.index(case.causal),
        )  # fmt: skip
        for name, x in (("q", q), ("k", k), ("v", v), ("o", o)):
            setattr(args, f"{name}_stride", (ctypes.c_int64 * 3)(*(s // x.itemsize for s in x.strides[:3])))
        shared, memory = None, np.zeros(0, np.uint8)
        if self.kernel.shared_bytes:
            memory = np.full(self.kernel.shared_bytes(ctypes.byref(args)) + 4096, 0xFF, np.uint8)
            shared = memory.ctypes.data + -memory.ctypes.data % 64
        for part in filter(None, (self.kernel.prepare, self.kernel.run)):
            counter = ctypes.c_int64(0)
            if part(ctypes.byref(args), shared, ctypes.addressof(counter)):
                raise MemoryError("the kernel found no memory")
        return o.astype(np.float64), lse.astype(np.float64)


def keys_of(case: Case, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """K and V as the kernel gets them: NaN beyond the key lengths."""
    k, v = case.k.copy(), case.v.copy()
    for i, n in enumerate(case.key_lengths or ()):
        k[i, :, n:] = v[i, :, n:] = np.nan
    return placed(k, dtype, case.layout), placed(v, dtype, case.layout)


def placed(x: Array, dtype: str, layout: str) -> np.ndarray:
    """`x` (B,H,N,d) as an array of `dtype` in `layout` (see cases.place), in memory that is NaN everywhere else."""
    b, h, n, d = x.shape
    wide = d + 8 if layout == "padded" else d
    shape = (b, n, h, wide) if layout == "bnhd" else (b, h, n, wide)
    before = MARGIN * h * wide + (layout == "offset")
    size = b * h * n * wide
    memory = np.full(size + 2 * MARGIN * h * wide + 1, np.nan, DTYPES[dtype])
    home = memory[before : before + size].reshape(shape)
    out = home.transpose(0, 2, 1, 3) if layout == "bnhd" else home[..., :d]
    with np.errstate(invalid="ignore", over="ignore"):
        out[...] = x.astype(DTYPES[dtype])
    return out
