"""Tensors as the binding hands them to a CUDA kernel: in their own layout where it can read that, else copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from verify.emulator.emulator import extent, guarded, guarded_copy

VECTOR_BYTES = 16  # the kernels load whole vectors


def bits(tensor: Any) -> npt.NDArray[Any]:
    """The bits of a tensor of 2-byte elements, in its layout."""
    import torch

    return np.asarray(tensor.view(torch.int16).numpy()).view(np.uint16)


def placed(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`x` in guarded memory: in its own layout if a kernel can read that, with NaN in the gaps, else contiguous."""
    if not x.size or not is_readable(x):
        return guarded_copy(x)
    low, high = extent(x)
    home = guarded(((high - low) // x.itemsize,), x.dtype)
    made = np.lib.stride_tricks.as_strided(home[(x.ctypes.data - low) // x.itemsize :], x.shape, x.strides)
    made[...] = x
    return made


def is_readable(x: npt.NDArray[Any]) -> bool:
    """Whether a CUDA kernel takes the layout: `is_readable` of csrc/binding.h."""
    if x.strides[3] != x.itemsize or x.ctypes.data % VECTOR_BYTES:
        return False
    return all(n == 1 or stride % VECTOR_BYTES == 0 for n, stride in zip(x.shape[:3], x.strides[:3], strict=True))


def strides(x: npt.NDArray[Any]) -> list[int]:
    """Elements from one batch entry, head and row to the next: `set_strides` of csrc/binding.h."""
    packed, found = x.shape[3], [0, 0, 0]
    for i in (2, 1, 0):
        found[i] = x.strides[i] // x.itemsize if x.shape[i] > 1 else packed
        packed *= x.shape[i]
    return found
