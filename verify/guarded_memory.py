"""Memory that tells: outputs of NaN between guard bytes, inputs with gaps that nobody wrote.

Guarded memory is filled and looked at on the host and copied as a whole: no kernel touches it before the one that a
tool watches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

GUARD_BYTES, GUARD = 4096, 0xA5
NAN_BYTE = 0xFF  # a float of any width made of these bytes is NaN


class Guarded:
    """A tensor of NaN between guard bytes, in one allocation."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: str = "cuda") -> None:
        self._inside = slice(GUARD_BYTES, GUARD_BYTES + math.prod(shape) * dtype.itemsize)
        made = torch.full((self._inside.stop + GUARD_BYTES,), GUARD, dtype=torch.uint8)
        made[self._inside] = NAN_BYTE
        self._memory = made.to(device)
        self.values = self._memory[self._inside].view(dtype).view(tuple(shape))

    def read(self) -> torch.Tensor:
        """The values, on the host."""
        return self.values.cpu()

    def faults(self, name: str) -> Iterator[str]:
        """A sentence if a guard byte is not as it was."""
        memory = self._memory.cpu()
        if (memory[: self._inside.start] != GUARD).any() or (memory[self._inside.stop :] != GUARD).any():
            yield f"{name}: a guard byte was overwritten"


def unwritten(name: str, x: torch.Tensor) -> Iterator[str]:
    """A sentence if `x` holds NaN. On a GPU this reads every element there: initcheck tells what nobody wrote."""
    left = int(x.isnan().sum())
    if left:
        yield f"{name}: {left} elements are NaN: not written, or wrong"


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """N(0, 1), on the host."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scattered(
    values: torch.Tensor, rows: Iterable[int], layout: str, device: str = "cuda", *, fill: bool = False
) -> torch.Tensor:
    """`values` (B,H,N,d) on the device: the first rows[b] rows of batch entry b; gaps between rows were never written.

    fill: later rows are NaN; else they were never written either.
    """
    b, h, n, d = values.shape
    if layout == "bnhd":
        home = torch.empty((b, n, h, d), dtype=values.dtype, device=device).permute(0, 2, 1, 3)
    elif layout == "padded":
        home = torch.empty((b, h, n, d + 8), dtype=values.dtype, device=device)[..., :d]
    else:
        home = torch.empty(values.shape, dtype=values.dtype, device=device)
    for i, count in enumerate(rows):
        if count:
            home[i, :, :count] = values[i, :, :count].to(device)
        if fill and count < n:
            home[i, :, count:] = math.nan
    return home
