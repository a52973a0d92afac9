"""One backward call of a package's CUDA kernels on the emulator: its arguments, its launch, its results.

Holds at every launch: what csrc/backward.h promises to a CUDA kernel and binding_backward.h makes true. The gradients,
the scratch memory and all that a layout leaves unused are NaN before; what is read cannot be written, keys beyond a
length not even read; every element of a gradient that is wanted must be written exactly once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.errors import RequestError
from verify.cases import GRADIENTS, Array, Case, torch_dtype
from verify.emulator import build
from verify.emulator.emulator import Emulator, Run, guarded, guarded_copy
from verify.emulator.layout import bits, placed, strides
from verify.entry_points import DTYPE_CODES, BackwardArgs

READ = ("q", "k", "v", "o", "dout")  # of 2-byte elements


@dataclass
class BackwardCall:
    """The arguments of one call, and the arrays that they point to (half-precision values as uint16)."""

    args: BackwardArgs
    dtype: str
    arrays: dict[str, npt.NDArray[Any]]
    lengths: tuple[int, ...] | None

    @classmethod
    def of(cls, case: Case, given: tuple[Array, Array], *, deterministic: bool, debug: bool = False) -> BackwardCall:
        """The call that the op would make of `case` with the O and LSE that are given. debug: for the debug form."""
        words = case.backward_tensors(*given)
        arrays = {name: placed(bits(words[name])) for name in READ}
        for name in ("lse", "dlse"):
            if words[name] is not None:
                arrays[name] = guarded_copy(np.asarray(words[name].numpy()))
        for name, wanted in zip(GRADIENTS, case.wanted, strict=True):
            if wanted:
                arrays[name] = guarded(arrays[name[1]].shape, np.float32 if debug else np.uint16)
        if case.key_lengths is not None:
            arrays["key_lengths"] = guarded_copy(np.asarray(case.key_lengths, dtype=np.int64))
        args = BackwardArgs(
            **{name: array.ctypes.data for name, array in arrays.items()},
            **{name: case.sizes[name] for name in ("B", "Hq", "Hkv", "Nq", "Nk")},
            scale=case.scale, causal=words["causal"], deterministic=deterministic,
        )  # fmt: skip
        for name in (*READ, *GRADIENTS):
            if name in arrays:
                found = strides(arrays[name])
                kind, last = ctypes.c_int64 * (4 if name == "dout" else 3), [1] if name == "dout" else []
                setattr(args, f"{name}_stride", kind(*found, *last))
        for name in ("lse", "dlse"):
            if name in arrays:
                x = arrays[name]
                setattr(args, f"{name}_stride", (ctypes.c_int64 * 3)(*(step // x.itemsize for step in x.strides)))
        return cls(args, case.dtype, arrays, case.key_lengths)

    @property
    def is_done(self) -> bool:
        """Whether the binding calls no kernel: there is no pair of a row and a key, and the gradients are 0."""
        return not (self.arrays["q"].size and self.arrays["k"].size) or not any(n in self.arrays for n in GRADIENTS)

    def launch(self, emulator: Emulator, target: str) -> Run:
        """Register the arrays and run the entry point of a target, as `emulator` is configured."""
        emulator.clear()
        if self.is_done:
            for name in GRADIENTS:
                if name in self.arrays:
                    self.arrays[name][...] = 0
            return Run((), {"tensors": {}, "mma": 0, "barriers": 0, "switches": 0}, 0.0, 0)
        code, pointer = DTYPE_CODES[self.dtype], ctypes.byref(self.args)
        size_of = getattr(emulator.library, f"attention_backward_{target}_scratch")
        size_of.restype = ctypes.c_int64
        scratch = self.arrays["scratch"] = guarded((int(size_of(pointer, code)) // 4,), np.float32)
        emulator.register("scratch", scratch, writable=True)
        for name, array in self.arrays.items():
            if self.lengths is not None and name in ("k", "v"):
                for entry, length in zip(array, self.lengths, strict=True):  # the keys beyond must not be read
                    for head in entry[:, :length]:
                        emulator.register(name, head)
            elif name != "scratch":
                emulator.register(name, array, once=name in GRADIENTS)
        return emulator.launch(f"attention_backward_{target}", pointer, code, scratch, None)

    def result(self, name: str) -> Array:
        """A gradient as float64; empty if it was not wanted."""
        array = self.arrays.get(name)
        if array is None:
            return np.zeros(0)
        if array.dtype == np.float32:
            return array.astype(np.float64)
        import torch

        halves = torch.from_numpy(array.view(np.int16)).view(torch_dtype(self.dtype))
        return np.asarray(halves.to(torch.float64).numpy())


def library(folder: Folder, target: str) -> ctypes.CDLL:
    """The loaded library of the backward kernels that a package has for `target`.

    Raises: as `build.library`; RequestError when the package has none.
    """
    source = folder / "csrc" / f"backward_{target}.cu"
    if not source.is_file():
        raise RequestError(f"{folder} has no backward kernel for {target}: there is no csrc/{source.name}")
    return build.library(source)
