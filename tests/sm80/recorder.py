"""Runs an emitted mma.sync kernel under g++ and returns what it would have launched, read and written.

Pointers may be any numbers: nothing is dereferenced but key_lengths. So tensors of any size can be "run".
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from codegen import problem
from codegen.plans import sm80
from verify import ptxas

HERE = Path(__file__).resolve().parent
INT64_3 = ctypes.c_int64 * 3
FULL, BOTTOM_RIGHT, TOP_LEFT = 0, 1, 2
BF16, FP16 = 2, 3


class ForwardArgs(ctypes.Structure):
    """csrc/forward.h, not the debug form."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse")),
        *((name, ctypes.c_int64) for name in ("B", "Hq", "Hkv", "Nq", "Nk")),
        *((f"{name}_stride", INT64_3) for name in "qkvo"),
        ("key_lengths", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("causal", ctypes.c_int),
    ]


@dataclass(frozen=True)
class Record:
    """Arrays of one call: launches (grid, threads, shared bytes); reads and writes of global memory (address, bytes);
    accesses to shared memory (kind, thread, address), kinds as in recorded.h."""

    error: int
    launches: np.ndarray
    reads: np.ndarray
    writes: np.ndarray
    shared: np.ndarray


class Recorder:
    """One kernel, compiled for recording."""

    def __init__(self, library: Path, plan: sm80.Sm80Plan):
        self.plan = plan
        self._library = ctypes.CDLL(str(library))
        self._library.count.restype = ctypes.c_int64
        self._library.records.restype = ctypes.c_void_p
        self._library.swizzled_byte.restype = ctypes.c_uint32

    def swizzled(self, panel: int, row: int, chunk: int) -> int:
        return int(self._library.swizzled_byte(panel, ctypes.c_uint32(row), ctypes.c_uint32(chunk)))

    def run(
        self,
        args: ForwardArgs,
        *,
        dtype: int = BF16,
        blocks: Sequence[int] = (),
        attribute_error: int = 0,
        launch_error: int = 0,
    ) -> Record:
        """Call the launcher and run `blocks` of each launch, all of them if none are named."""
        chosen = np.array(blocks, dtype=np.int64)
        self._library.record(
            ctypes.c_void_p(chosen.ctypes.data), ctypes.c_int64(len(chosen)), attribute_error, launch_error
        )
        error = self._library.attention_forward_sm80(ctypes.byref(args), dtype, None)
        tables = (self._table(what, columns) for what, columns in ((2, 3), (0, 2), (1, 2), (3, 3)))
        return Record(error, *tables)

    def _table(self, what: int, columns: int) -> np.ndarray:
        count = self._library.count(what)
        if count == 0:
            return np.zeros((0, columns), dtype=np.int64)
        at = ctypes.cast(self._library.records(what), ctypes.POINTER(ctypes.c_int64))
        return np.ctypeslib.as_array(at, (count, columns)).copy()


def arguments(
    *, b: int = 1, hq: int = 1, hkv: int = 1, nq: int, nk: int, d: int, dv: int, causal: int = FULL,
    lengths: np.ndarray | None = None, bases: dict[str, int] | None = None, strides: dict[str, tuple] | None = None,
) -> ForwardArgs:  # fmt: skip
    """Contiguous tensors at far-apart made-up addresses, or at `bases` with `strides` (elements)."""
    at = {"q": 1 << 50, "k": 2 << 50, "v": 3 << 50, "o": 4 << 50, "lse": 5 << 50, **(bases or {})}
    shapes = {"q": (hq, nq, d), "k": (hkv, nk, d), "v": (hkv, nk, dv), "o": (hq, nq, dv)}
    stride = {x: (h * n * w, n * w, w) for x, (h, n, w) in shapes.items()} | (strides or {})
    args = ForwardArgs(
        at["q"], at["k"], at["v"], at["o"], at["lse"], b, hq, hkv, nq, nk, *(INT64_3(*stride[x]) for x in "qkvo"),
        None if lengths is None else lengths.ctypes.data, d**-0.5, causal,
    )  # fmt: skip
    args.kept_alive = lengths
    return args


@cache
def _library(folder: Path, plan: sm80.Sm80Plan) -> Path:
    where = folder / f"d{plan.d}_dv{plan.dv}_{plan.br}x{plan.bc}"
    ptxas.write_plan(where, plan, ("bf16", "fp16"))
    library = where / "recorder.so"
    line = [
        "g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas",
        "-include", str(HERE / "recorded.h"), f"-I{where}", str(HERE / "recorder.cpp"), "-o", str(library),
    ]  # fmt: skip
    subprocess.run(line, check=True)
    return library


def recorder(folder: Path, *, d: int, dv: int | None = None, sram_kb: int = 96, **tile: int) -> Recorder:
    """The kernel that the planner makes for this request."""
    asked = problem.make(sram_bytes=sram_kb * 1024, d=d, dv=dv, archs=["sm80"], **tile)
    plan = sm80.decide(asked, "sm80").variants[0].plan
    assert isinstance(plan, sm80.Sm80Plan)
    return Recorder(_library(folder, plan), plan)
