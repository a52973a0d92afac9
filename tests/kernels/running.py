"""Runs an emitted package on every instruction set of this machine, compares bits, and judges by the derived bound."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

from verify import devices, judge, packages
from verify.cases import Case, representable, torch_dtype
from verify.devices import ISA_VARIABLE

DTYPES = ("float32", "float64", "bf16", "fp16")
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def each_isa(attn: ModuleType, dtype: str) -> Iterator[str]:
    """Forces one instruction set after the other; conftest.py ends the last one."""
    names = attn.isas(dtype)
    assert "baseline" in names
    for isa in names:
        os.environ[ISA_VARIABLE] = isa
        yield isa
    os.environ.pop(ISA_VARIABLE, None)


def run(attn: ModuleType, q: Any, k: Any, v: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, LSE)."""
    return attn.attention(q, k, v, return_lse=True, **options)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(INTEGERS[x.element_size()])


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    """O and LSE agree bit for bit: -0 is not 0, and NaN equals itself."""
    return all(x.shape == y.shape and torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def draw(dtype: str, *shapes: tuple[int, ...], seed: int = 0, gain: float = 1.0) -> list[torch.Tensor]:
    """One N(0, 1) tensor for each shape; `gain` multiplies the second, the keys."""
    generator = torch.Generator().manual_seed(seed)
    out = [torch.randn(*shape, generator=generator).to(torch_dtype(dtype)) for shape in shapes]
    if len(out) > 1:
        out[1] = out[1] * gain
    return out


def problem(
    attn: ModuleType, dtype: str, b: int, hq: int, hkv: int, nq: int, nk: int, *, gain: float = 1.0, **words: Any
) -> Case:
    """A N(0, 1) case for `attn`: the sizes of the issue under test, the widths of the package."""
    request = packages.plan(attn.__path__[0])["request"]
    d, dv = request["d"], request["dv"]
    rng = np.random.default_rng([b, hq, hkv, nq, nk, d, dv])
    q, k, v = (rng.standard_normal(s) for s in ((b, hq, nq, d), (b, hkv, nk, d), (b, hkv, nk, dv)))
    words = {"name": "field report", "family": "gaussian", "scale": d**-0.5, **words}
    return Case(dtype=dtype, q=representable(q, dtype), k=representable(gain * k, dtype),
                v=representable(v, dtype), **words)  # fmt: skip


def judged(attn: ModuleType, case: Case) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Run `case` on every instruction set and fail unless each element is within its bound; the results by ISA.

    Judges: float64 with its own bound for every element, 50 digits for eight rows.
    """
    device = devices.Cpu()
    runs = [(path, *device.run(attn, case, path)) for path in device.paths(attn, case.dtype, case)]
    truth = judge.Truth(case, with_balls=False)
    bad = [v.message() for v in judge.hear(case, runs, truth=truth, spec=False) if not v.holds]
    assert not bad, "\n".join(bad)
    return {path.isa: (o, lse) for path, o, lse in runs}


def sparse(dtype: str, elements: int) -> torch.Tensor:
    """A flat tensor of zeros whose pages exist only once they are written: 64-bit offsets without the memory."""
    size = elements * torch_dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    home = mmap.mmap(-1, size, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        home.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(home, dtype=torch_dtype(dtype))
