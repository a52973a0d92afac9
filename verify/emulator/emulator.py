"""Run a compiled kernel in the emulator: register its arrays, launch, read what was found and counted.

    emulator = Emulator(build.library(path))
    emulator.configure(timing="late", order="ascending")
    emulator.register("k", k)
    emulator.register("o", o, writable=True, once=True)
    run = emulator.launch("attention_forward_sm80", ctypes.byref(args), 2, None)
    run.check()                                     # raises FindingError when anything was found

`run.counters["tensors"]["k"]["read"]` are bytes that the kernel read from the array registered as "k".

Holds always: an array must be registered before a kernel may touch it, and stays alive as long as it is. Each element
of one that is registered `once` must be written exactly once: register it again before the next launch.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from verify.emulator.build import INCLUDE_NAME

TIMINGS = ("late", "early", "random")  # when asynchronous operations happen, in the order of the C interface
ORDERS = ("ascending", "descending", "random")  # which thread runs next
ACCUMULATIONS = ("chain", "exact", "truncating")  # how a matrix product sums
GUARD_BYTES = 1 << 20  # around each array of `guarded`, so that an access beyond its end meets no other array
ALIGNMENT = 256  # of each allocation, as cudaMalloc has it

_NAME = re.compile(r"\w[\w ]*")
_PLACE = re.compile(r"(?P<file>[^\s:]+):\d+\x01(?P<code>\d+)\x02")  # a line and its address, as report.cpp writes it


@dataclass(frozen=True)
class Schedule:
    """When asynchronous operations happen and which thread runs next."""

    timing: str
    order: str
    seed: int = 0

    @property
    def name(self) -> str:
        return "random" if (self.timing, self.order) == ("random", "random") else f"{self.order}-{self.timing}"


# Late operations show a missing wait, early ones a buffer that is released too soon.
SCHEDULES = (Schedule("late", "ascending"), Schedule("early", "descending"), Schedule("random", "random", seed=1))


@dataclass(frozen=True)
class Finding:
    """One fault. `file` and `line` are of the emitted text; `other` is the line of the other access, if any."""

    kind: str
    sentence: str
    file: str = ""
    line: int = 0
    other: int | None = None
    other_file: str | None = None
    thread: int | None = None
    block: tuple[int, int, int] = (0, 0, 0)
    count: int = 1  # how often, under `collect`

    def __str__(self) -> str:
        return self.sentence


class FindingError(AssertionError):
    """The emulator found faults in a kernel; the text is their sentences."""

    def __init__(self, findings: Sequence[Finding], context: str = ""):
        self.findings = tuple(findings)
        super().__init__("\n".join([*([context] if context else []), *dict.fromkeys(map(str, findings))]))


@dataclass(frozen=True)
class Run:
    """What one call of a host function did."""

    findings: tuple[Finding, ...]
    counters: dict[str, Any]
    seconds: float  # wall time of the call
    code: int  # what the function returned: a cudaError_t

    def check(self, context: str = "") -> Run:
        """Itself.

        Raises: FindingError when anything was found, or when the function returned an error.
        """
        if self.findings:
            raise FindingError(self.findings, context)
        if self.code:
            raise FindingError([Finding("host-error", f"the launch returned CUDA error {self.code}")], context)
        return self

    def bytes(self, name: str) -> tuple[int, int]:
        """Bytes read from and written to the array registered as `name`."""
        counted = self.counters["tensors"].get(name, {"read": 0, "written": 0})
        return int(counted["read"]), int(counted["written"])


class Emulator:
    """One loaded library and its emulator. Two of one library share their state."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        # Of the library, like the state that it guards.
        self._lock: threading.Lock = library.__dict__.setdefault("_tileproof_lock", threading.Lock())
        self._configuration = (0, 0, 1, 0, 0)
        self._arrays: list[npt.NDArray[Any]] = []
        library.emu_configure.argtypes = [ctypes.c_int] * 4 + [ctypes.c_uint64]
        library.emu_option.argtypes = [ctypes.c_char_p, ctypes.c_double]
        library.emu_register.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_char_p,
        ]  # fmt: skip
        sizes = ctypes.POINTER(ctypes.c_int64)
        library.emu_expect_written.argtypes = [ctypes.c_void_p, ctypes.c_size_t, sizes, sizes, ctypes.c_int]
        for name in ("emu_findings", "emu_counters"):
            getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        for name in ("emu_configure", "emu_option", "emu_register", "emu_unregister_all", "emu_expect_written"):
            getattr(library, name).restype = None
        self.clear()
        self.configure()

    def configure(
        self,
        schedule: Schedule | None = None,
        *,
        timing: str = "late",
        order: str = "ascending",
        check: bool = True,
        collect: bool = False,
        seed: int = 0,
    ) -> None:
        """How the launches from here on run.

        Args:
            schedule: in place of timing, order and seed.
            check: look for races and reads of what nobody wrote; without, only values and counts are right.
            collect: go on after a finding; otherwise the launch ends with the first.
        """
        chosen = schedule or Schedule(timing, order, seed)
        if chosen.timing not in TIMINGS or chosen.order not in ORDERS:
            raise ValueError(f"{chosen}: timing is one of {', '.join(TIMINGS)}, order one of {', '.join(ORDERS)}")
        self._configuration = (
            TIMINGS.index(chosen.timing), ORDERS.index(chosen.order), int(check), int(collect), chosen.seed,
        )  # fmt: skip
        with self._alone():
            self.library.emu_configure(*self._configuration)

    def option(self, name: str, value: float) -> None:
        """Set an option of the library, for all launches from here on: "mma" (index of ACCUMULATIONS), "ex2_error"."""
        self.library.emu_option(name.encode(), value)

    def register(self, name: str, array: npt.NDArray[Any], *, writable: bool = False, once: bool = False) -> None:
        """Allow kernels to read `array` (and to write it). An array without elements allows nothing.

        Several arrays may have one name: their bytes are counted together.
        once: each element must be written exactly once. The array may have gaps between rows: those must not be
        written.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r}: an array's name is of letters, digits, blanks and _")
        if not array.size:
            return
        low, high = extent(array)
        with self._alone():
            self._arrays.append(array)
            self.library.emu_register(low, high - low, int(writable or once), int(once), name.encode())
            if once and not array.flags.c_contiguous:
                self._expect_written(array)

    def _expect_written(self, array: npt.NDArray[Any]) -> None:
        if array.ndim and array.strides[-1] == array.itemsize:
            row, sizes, strides = array.shape[-1] * array.itemsize, array.shape[:-1], array.strides[:-1]
        else:
            row, sizes, strides = array.itemsize, array.shape, array.strides
        of = ctypes.c_int64 * max(1, len(sizes))
        self.library.emu_expect_written(array.ctypes.data, row, of(*sizes), of(*strides), len(sizes))

    def clear(self) -> None:
        """Forget all registered arrays."""
        with self._alone():
            self.library.emu_unregister_all()
            self._arrays.clear()

    def launch(self, function: str, *args: Any) -> Run:
        """Call an extern "C" host function that launches kernels.

        args: arrays go as their pointers; all else as ctypes takes it.
        """
        host = getattr(self.library, function)
        host.restype = ctypes.c_int
        with self._alone():
            self.library.emu_configure(*self._configuration)  # forgets the findings and counts of the call before
            start = time.perf_counter()
            code = host(*(ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in args))
            seconds = time.perf_counter() - start
            self.library.emu_check_outputs()
            return Run(self._findings(), json.loads(self._text("emu_counters")), seconds, int(code))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raises: RuntimeError while another thread is in the library, whose state has no room for two."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another thread is using this emulator: load a library, or start a process, for each")
        try:
            yield
        finally:
            self._lock.release()

    def _findings(self) -> tuple[Finding, ...]:
        if not self.library.emu_findings(None, 0):
            return ()
        found = json.loads(self._text("emu_findings"))
        codes = tuple(sorted({int(at["code"]) for one in found for at in _PLACE.finditer(one["sentence"])}))
        calls = dict(zip(codes, _calls(self.library._name, codes), strict=True))
        return tuple(
            Finding(**{**one, "block": tuple(one["block"]), "sentence": _with_calls(one["sentence"], calls)})
            for one in found
        )

    def _text(self, function: str) -> str:
        """What a text-writing function of the C interface says, whatever its length."""
        size = 1 << 14
        while True:
            buffer = ctypes.create_string_buffer(size)
            getattr(self.library, function)(buffer, size)
            if len(buffer.value) < size - 1:
                return buffer.value.decode(errors="replace")
            size *= 4


def _with_calls(sentence: str, calls: dict[int, tuple[tuple[str, str], ...]]) -> str:
    """A sentence whose places name the calls around them: "k.cuh:12 (called at k.cu:40)"."""

    def named(at: re.Match[str]) -> str:
        line = at[0].split("\x01")[0]
        around = ", ".join(f"{'' if file == at['file'] else file}:{number}" for file, number in calls[int(at["code"])])
        return f"{line} (called at {around})" if around else line

    return _PLACE.sub(named, sentence)


@lru_cache(maxsize=256)
def _calls(library: str, codes: tuple[int, ...]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """For each address of a library the calls around its line, (file, line), from the innermost that was inlined.

    None where binutils' addr2line is not at hand, or the compiler did not inline the function.
    """
    command = ["addr2line", "--inlines", "--addresses", "--exe", library]
    try:
        done = subprocess.run([*command, *map(hex, codes)], capture_output=True, text=True, errors="replace")
    except OSError:
        return ((),) * len(codes)
    if done.returncode or not codes:
        return ((),) * len(codes)
    chains: list[list[tuple[str, str]]] = []
    for line in done.stdout.splitlines():
        if line.startswith("0x"):
            chains.append([])
        else:
            path, _, number = line.partition(" (")[0].rpartition(":")
            chains[-1].append((path, number))
    return tuple(tuple(_around(chain)) for chain in chains)


def _around(chain: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of the frames of an address those of the kernel's text, but the first, which is the line itself."""
    frames = list(chain)
    while frames and frames[0][0].startswith(INCLUDE_NAME):
        del frames[0]
    own = []
    for path, number in frames:
        if path.startswith((INCLUDE_NAME, "/usr/", "?")):  # the launch
            break
        own.append((Path(path).name, number))
    return own[1:]


def extent(array: npt.NDArray[Any]) -> tuple[int, int]:
    """The first address of an array that has elements, and the first one behind it."""
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    low = array.ctypes.data + sum(x for x in reach if x < 0)
    return low, array.ctypes.data + sum(x for x in reach if x > 0) + array.itemsize


def guarded(shape: Sequence[int], dtype: npt.DTypeLike, *, fill: int = 0xFF) -> npt.NDArray[Any]:
    """A new C-contiguous array of bytes `fill` (0xff is NaN in every float), with nothing registered near it."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + 2 * GUARD_BYTES + ALIGNMENT, dtype=np.uint8)
    start = GUARD_BYTES + -(memory.ctypes.data + GUARD_BYTES) % ALIGNMENT
    inside = memory[start : start + size]
    inside[:] = fill
    return inside.view(kind).reshape(tuple(shape))


def guarded_copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A C-contiguous copy of `array` in memory of its own."""
    made = guarded(array.shape, array.dtype)
    made[...] = array
    return made
