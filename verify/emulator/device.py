"""The emulator as a device of the judge: the emitted CUDA kernels of one target, run on this CPU.

    python -m verify certify generated/attn_d128_sram192k --device emulator --arch sm80

A run is a run in every schedule. It fails (FindingError, with the sentences) when any of them has a finding, and when
two of them differ in one bit of O or LSE; so one result answers for all.

Holds at every launch: what csrc/forward.h promises to a CUDA kernel and binding.h makes true (16-byte aligned bases,
strides of whole 16 bytes, else a contiguous copy). O, LSE and all that a layout leaves unused are NaN before; Q, K, V
and key_lengths cannot be written, keys beyond a length not even read (by a kernel that copies whole tiles by TMA: not
used); every element of O and LSE must be written exactly once.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path as Folder
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.devices import DEVICES
from codegen.errors import RequestError
from verify import machine, packages
from verify.cases import CAUSAL, GRADIENTS, Array, Case, torch_dtype
from verify.devices import DETERMINISTIC, Given, Gradients, Path, both_forms, of_variant, takes
from verify.emulator import build, device_backward
from verify.emulator.device_backward import BackwardCall
from verify.emulator.emulator import (
    ACCUMULATIONS,
    SCHEDULES,
    Emulator,
    Finding,
    FindingError,
    Run,
    Schedule,
    guarded,
    guarded_copy,
)
from verify.emulator.layout import bits, placed, strides
from verify.entry_points import DTYPE_CODES, ForwardArgs

NAN_BITS = 0x7FFF  # a NaN in bf16 and in fp16


@dataclass
class Call:
    """The arguments of one forward call, and the arrays that they point to (half-precision values as uint16)."""

    args: ForwardArgs
    dtype: str
    arrays: dict[str, npt.NDArray[Any]]

    @classmethod
    def of(cls, case: Case, *, debug: bool = False, trace_tiles: int = 0, tma: bool = False) -> Call:
        """The call that the op would make of `case`.

        debug: for the debug form, with room for `trace_tiles` tiles. tma: for a kernel that copies whole tiles of
            keys: it may read, and must not use, keys beyond a length (NaN here); it takes some memory of its own.
        """
        sizes, words = case.sizes, case.tensors("cpu")
        rows = (sizes["B"], sizes["Hq"], sizes["Nq"])
        arrays = {name: placed(bits(words[name])) for name in ("q", "k", "v")}
        arrays["o"] = guarded((*rows, sizes["dv"]), np.float32 if debug else np.uint16)
        arrays["lse"] = guarded(rows, np.float32)
        if case.key_lengths is not None:
            arrays["key_lengths"] = guarded_copy(np.asarray(case.key_lengths, dtype=np.int64))
        if trace_tiles:
            arrays["trace"] = guarded((*rows, trace_tiles, 2 + sizes["dv"]), np.float32)
        args = ForwardArgs(
            **{name: array.ctypes.data for name, array in arrays.items()},
            **{name: sizes[name] for name in ("B", "Hq", "Hkv", "Nq", "Nk")},
            scale=case.scale, causal=CAUSAL.index(case.causal), trace_tiles=trace_tiles,
        )  # fmt: skip
        if tma:
            arrays["scratch"] = guarded((1,), np.uint32)
            arrays["scratch"][:] = 0xDEADBEEF  # it may hold anything
            for entry, length in enumerate(case.key_lengths or ()):
                for name in ("k", "v"):
                    arrays[name][entry, :, length:] = NAN_BITS
        for name in ("q", "k", "v", "o"):
            setattr(args, f"{name}_stride", (ctypes.c_int64 * 3)(*strides(arrays[name])))
        return cls(args, case.dtype, arrays)

    def launch(self, emulator: Emulator, unit: str) -> Run:
        """Register the arrays and run the entry point of a unit, as `emulator` is configured."""
        emulator.clear()
        if not self.arrays["lse"].size:  # the binding calls no kernel, and no kernel is made for it
            return Run((), {"tensors": {}, "mma": 0, "barriers": 0, "switches": 0}, 0.0, 0)
        lengths = self.arrays.get("key_lengths")
        for name, array in self.arrays.items():
            if lengths is not None and name in ("k", "v") and "scratch" not in self.arrays:
                for entry, length in zip(array, lengths, strict=True):  # the keys beyond must not be read
                    for head in entry[:, :length]:
                        emulator.register(name, head)
            else:
                emulator.register(name, array, writable=name in ("trace", "scratch"), once=name in ("o", "lse"))
        scratch = [self.arrays["scratch"]] if "scratch" in self.arrays else []
        code = DTYPE_CODES[self.dtype]
        return emulator.launch(f"attention_forward_{unit}", ctypes.byref(self.args), code, *scratch, None)

    def result(self, name: str) -> Array:
        """The array "o", "lse" or "trace" as float64."""
        array = self.arrays[name]
        if array.dtype == np.float32:
            return array.astype(np.float64)
        import torch

        halves = torch.from_numpy(array.view(np.int16)).view(torch_dtype(self.dtype))
        return np.asarray(halves.to(torch.float64).numpy())


class EmulatorDevice:
    """The kernels for one CUDA target in the emulator: a path per dtype and unit, run in every schedule."""

    name = "emulator"
    compares_runs = True

    def __init__(
        self,
        arch: str = "sm80",
        schedules: Sequence[Schedule] = SCHEDULES,
        *,
        accumulation: str = ACCUMULATIONS[0],
        ex2_error: float = 0.0,
    ) -> None:
        """
        Args:
            arch: the target, as in plan.json.
            accumulation: how a matrix product sums, one of ACCUMULATIONS.
            ex2_error: relative error put on ex2.approx.
        Raises: RequestError without a g++ that can build the emulator.
        """
        self.arch, self.schedules, self.accumulation, self.ex2_error = arch, tuple(schedules), accumulation, ex2_error
        self.compiler = build.compiler()
        words = [f"--device {self.name} --arch {arch}"]
        if self.schedules != SCHEDULES:
            words += [f"--schedule {schedule.name}" for schedule in self.schedules]
        if accumulation != ACCUMULATIONS[0]:
            words.append(f"--accumulation {accumulation}")
        self.asked = " ".join(words)
        self.launches = self.findings = 0
        self.seconds = 0.0
        self.counted: Counter[str] = Counter()
        self._emulators: dict[tuple[Folder, str], Emulator] = {}

    def paths(self, attn: ModuleType, dtype: str, case: Case) -> list[Path]:
        plan = packages.plan(attn.__path__[0])
        rows = [v for v in plan["variants"] if v["target"] == self.arch]
        if not rows:
            raise RequestError(
                f"{plan['name']} has no kernel for --arch {self.arch}",
                f"its targets: {', '.join(dict.fromkeys(v['target'] for v in plan['variants']))}",
            )
        units: dict[str, dict[str, Any]] = {}
        for row in rows:
            if row["dtype"] == dtype and takes(row, case):
                units.setdefault(row.get("unit", row["isa"]), row)
        return [of_variant(attn, self.name, row, dtype, self.name) for row in units.values()]

    def run(self, attn: ModuleType, case: Case, path: Path) -> tuple[Array, Array]:
        call = self._run(attn, case, path)
        return call.result("o"), call.result("lse")

    def trace(self, attn: ModuleType, case: Case, path: Path) -> tuple[Array, Array, Array]:
        """(O, LSE, trace) of a package's debug form; trace (B,Hq,Nq,tiles,2+dv), NaN where a row met no tile."""
        sizes, tiles = case.sizes, -(-case.k.shape[2] // path.bc)
        call = self._run(attn, case, path, trace_tiles=tiles)
        shape = (sizes["B"], sizes["Hq"], sizes["Nq"], tiles, 2 + sizes["dv"])
        return call.result("o"), call.result("lse"), call.result("trace") if tiles else np.zeros(shape)

    def backward_paths(self, attn: ModuleType, dtype: str, case: Case) -> list[Path]:
        rows = packages.plan(attn.__path__[0]).get("backward", [])
        mine = [row for row in rows if row["target"] == self.arch and row["dtype"] == dtype]
        return [path for row in mine for path in both_forms(of_variant(attn, self.name, row, dtype, self.name))]

    def run_backward(self, attn: ModuleType, case: Case, path: Path, given: Given) -> Gradients:
        return self.runs_backward(attn, case, path, given)[0]

    def runs_backward(self, attn: ModuleType, case: Case, path: Path, given: Given) -> list[Gradients]:
        """The call in every schedule: all results where they may depend on it, else the one that stands for all.

        Raises: FindingError.
        """
        target = path.isa.removesuffix(DETERMINISTIC)
        emulator = self._emulator(Folder(attn.__path__[0]), target, is_backward=True)
        emulator.option("mma", ACCUMULATIONS.index(self.accumulation))
        emulator.option("ex2_error", self.ex2_error)
        found: list[Gradients] = []
        for schedule in self.schedules:
            call = BackwardCall.of(case, given, deterministic=path.deterministic, debug=path.debug)
            emulator.configure(schedule)
            done = call.launch(emulator, target)
            self._count(done)
            done.check(f"{schedule.name}:")
            found.append((call.result("dq"), call.result("dk"), call.result("dv")))
            fixed = GRADIENTS if path.deterministic else GRADIENTS[1:]  # else dQ is summed in the order of the schedule
            self._agree(f"backward_{target}.cu", schedule, zip(GRADIENTS, found[0], found[-1], strict=True), fixed)
        return found[:1] if path.deterministic else found

    def _agree(self, file: str, schedule: Schedule, results: Iterable[tuple[str, Array, Array]], fixed: Any) -> None:
        """Raises: FindingError when a result that is `fixed` differs from the first schedule's."""
        for name, one, two in results:
            differs = _difference(one, two) if name in fixed and one.size else None
            if differs is not None:
                self.findings += 1
                what = f"{file}: {name}{differs} under {self.schedules[0].name} and {schedule.name}"
                raise FindingError([Finding("schedule-dependent", f"{what}: the result depends on the schedule")])

    def _run(self, attn: ModuleType, case: Case, path: Path, *, trace_tiles: int = 0) -> Call:
        """The call in every schedule; the one that is returned stands for all.

        Raises: FindingError.
        """
        emulator, first = self._emulator(Folder(attn.__path__[0]), path.isa), None
        exact = self.arch in DEVICES and DEVICES[self.arch].is_exact
        emulator.option("mma", ACCUMULATIONS.index(self.accumulation))  # of the library, so another device may differ
        emulator.option("ex2_error", self.ex2_error)
        for schedule in self.schedules:
            call = Call.of(case, debug=path.debug, trace_tiles=trace_tiles, tma=exact)
            emulator.configure(schedule)
            done = call.launch(emulator, path.isa)
            self._count(done)
            done.check(f"{schedule.name}:")
            if first is None:
                first = call
            results = ((name, first.result(name), call.result(name)) for name in ("o", "lse"))
            self._agree(f"forward_{path.isa}.cu", schedule, results, ("o", "lse"))
        assert first is not None
        return first

    def _emulator(self, folder: Folder, unit: str, *, is_backward: bool = False) -> Emulator:
        key = (folder, f"backward {unit}" if is_backward else unit)
        if key not in self._emulators:
            make = device_backward.library if is_backward else build.package
            self._emulators[key] = Emulator(make(folder, unit))
        return self._emulators[key]

    def _count(self, done: Run) -> None:
        self.launches += 1
        self.findings += len(done.findings)
        self.seconds += done.seconds
        for counted in done.counters["tensors"].values():
            self.counted.update(bytes_read=counted["read"], bytes_written=counted["written"])
        self.counted.update({name: done.counters[name] for name in ("mma", "barriers", "switches")})

    def describe(self) -> dict[str, Any]:
        """This machine, and what ran on the emulator so far."""
        return {
            **machine.describe("cpu"),
            "emulator": {
                "arch": self.arch,
                "compiler": self.compiler.version,
                "schedules": [schedule.name for schedule in self.schedules],
                "accumulation": self.accumulation,
                "ex2_error": self.ex2_error,
                "launches": self.launches,
                "findings": self.findings,
                "seconds": round(self.seconds, 3),
                **self.counted,
            },
        }


def _difference(a: Array, b: Array) -> str | None:
    """Where two results differ and how, or None. NaN equals itself, and 0 equals -0."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return None
    at = np.unravel_index(int(np.argmin(same)), same.shape)
    return f"[{', '.join(str(int(i)) for i in at)}] is {a[at]!r} and {b[at]!r}"
