"""What the autograd tests share: packages with the real CPU kernels, inputs, one step of training, comparison by bits.

Most of these tests compare bits: how a gradient is asked for must not change it. That it is right is what
test_autograd_gradcheck.py shows by finite differences, and the certificates by a derived bound.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verify import packages

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# "small" is that of tests/kernels, so that both folders compile it once.
REQUESTS: dict[str, dict[str, Any]] = {
    "small": {"d": 16, "br": 32, "bc": 96},
    "d != dv": {"d": 8, "dv": 24, "br": 32, "bc": 96, "dtypes": ("float64",)},
}


@functools.cache
def package(name: str) -> ModuleType:
    """A package of REQUESTS, imported and compiled."""
    attn = packages.load(packages.emit(archs=("cpu",), **REQUESTS[name]))
    attn.isas("float64")
    return attn


class Shape(NamedTuple):
    """Sizes of one problem."""

    b: int = 2
    hq: int = 4
    hkv: int = 2
    nq: int = 37
    nk: int = 101


def draw(shape: Shape, dtype: torch.dtype = torch.float32, *, d: int = 16, dv: int = 16, seed: int = 0) -> list[Tensor]:
    """q, k, v and dO, N(0, 1)."""
    b, hq, hkv, nq, nk = shape
    make = torch.Generator().manual_seed(seed)
    sizes = ((b, hq, nq, d), (b, hkv, nk, d), (b, hkv, nk, dv), (b, hq, nq, dv))
    return [torch.randn(size, generator=make, dtype=torch.float64).to(dtype) for size in sizes]


def draw_dlse(shape: Shape, dtype: torch.dtype = torch.float32, *, seed: int = 1) -> Tensor:
    """dLSE, N(0, 1), in the type of the LSE."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    make = torch.Generator().manual_seed(seed)
    return torch.randn((shape.b, shape.hq, shape.nq), generator=make, dtype=torch.float64).to(wide)


def leaves(*tensors: Tensor) -> list[Tensor]:
    """The same tensors, strides included, as inputs that require grad."""
    return [t.detach().requires_grad_() for t in tensors]


def gradients(
    attn: ModuleType, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, dlse: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """[dQ, dK, dV] of sum(dO o O) + sum(dLSE o LSE), either of which may be None."""
    inputs = leaves(q, k, v)
    results = attn.attention(*inputs, return_lse=True, **options)
    asked = [(x, g) for x, g in zip(results, (dout, dlse), strict=True) if g is not None]
    return list(torch.autograd.grad([x for x, _ in asked], inputs, [g for _, g in asked]))


def backward_op(attn: ModuleType) -> Any:
    """The backward op itself, as a caller of torch.ops has it."""
    return getattr(torch.ops, attn.op.NAMESPACE).backward.default


def bits(x: Tensor) -> Tensor:
    """The bits of `x` as integers: -0 is not 0, and NaN equals itself."""
    return x.detach().contiguous().view(INTEGERS[x.element_size()])


def same_bits(got: Any, want: Any) -> bool:
    """Whether two lists of tensors agree in shape, dtype and bits."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        for a, b in zip(got, want, strict=True)
    )


def layouts(x: Tensor) -> dict[str, Tensor]:
    """`x` (B, H, N, width) in the layouts that models produce; what lies between the elements is NaN."""
    b, h, n, width = x.shape

    def inside(shape: tuple[int, ...], *index: Any) -> Tensor:
        """`x` copied into a part of a NaN tensor."""
        room = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
        room[index] = x
        return room[index]

    everything = slice(None)
    return {
        "contiguous": x.contiguous(),
        "(B, N, H, width)": x.transpose(1, 2).contiguous().transpose(1, 2),
        "(N, B, H, width)": x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "last stride not 1": x.transpose(2, 3).contiguous().transpose(2, 3),
        "columns of wider rows": inside((b, h, n, width + 3), ..., slice(1, 1 + width)),
        "every second element": inside((b, h, n, 2 * width), ..., slice(None, None, 2)),
        "rows of a longer tensor": inside((b, h, n + 5, width), everything, everything, slice(3, 3 + n)),
    }
