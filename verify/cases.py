"""One attention problem as the judge holds it: exact inputs in float64, plus everything needed to run it anywhere.

A case holds values that its dtype represents exactly, so that the oracle (which reads float64) and the kernel
(which reads the dtype) see the same numbers. Masks are explicit boolean arrays made here from the words of the
public API; neither `spec` nor an emitted kernel takes part in making them.

Holds always: keys at or beyond a batch's key length reach a kernel as NaN (they must never be read), and so does
every gap between rows of a non-contiguous layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from verify.formats import FORMATS, round_to

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

CAUSAL = ("none", "bottom_right", "top_left")
LAYOUTS = ("contiguous", "bnhd", "padded", "offset")
# Of dO also: stored (B,H,dv,N), as a transposed consumer leaves it; one row for all; one number for all.
DO_LAYOUTS = (*LAYOUTS, "transposed")
GRADIENT_LAYOUTS = (*DO_LAYOUTS, "expanded", "scalar")
GRADIENTS = ("dq", "dk", "dv")  # in the order of Case.wanted
GRADIENT_WORDS = ("gradient", "dlse", "wanted", "do_layout")  # what `describe` says of it
# Largest magnitude of V that stays inside the domain of the bound with room to spare (verify/bounds/domain.py).
ROOM = {"float32": 2.0**40, "float64": 2.0**40, "bf16": 2.0**40, "fp16": 60000.0}


def representable(x: npt.ArrayLike, dtype: str) -> Array:
    """`x` rounded to values of `dtype`, as float64. Finite input stays finite: it saturates, it never overflows."""
    wide = np.asarray(x, dtype=np.float64)
    top = FORMATS[dtype].largest
    return round_to(np.where(np.isfinite(wide), np.clip(wide, -top, top), wide), dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """One problem. Arrays are float64 with values of `dtype`: q (B,Hq,Nq,d), k (B,Hkv,Nk,d), v (B,Hkv,Nk,dv).

    With `do` (B,Hq,Nq,dv) it is a problem for the backward pass too: the gradients of sum(do o O) + sum(dlse o LSE),
    dlse (B,Hq,Nq) in the dtype of LSE, or None for 0.
    """

    name: str  # unique in its suite; enough, with the seed, to make the case again
    family: str
    dtype: str
    q: Array
    k: Array
    v: Array
    scale: float
    causal: str = "none"
    key_lengths: tuple[int, ...] | None = None
    layout: str = "contiguous"
    seed: int = 0
    do: Array | None = None
    dlse: Array | None = None
    gradient: str = "none"  # the name of dO and dLSE, as `family` is that of the inputs
    wanted: tuple[bool, bool, bool] = (True, True, True)  # which of dQ, dK and dV
    do_layout: str = "contiguous"
    note: dict[str, Any] = field(default_factory=dict)  # how it was drawn, for messages

    def __post_init__(self) -> None:
        (b, hq, _, d), (bk, hkv, nk, dk), (bv, hv, nv, _) = self.q.shape, self.k.shape, self.v.shape
        if (b, hkv, nk) != (bv, hv, nv) or b != bk or d != dk or (hkv and hq % hkv) or self.causal not in CAUSAL:
            raise ValueError(f"{self.name}: q{self.q.shape} k{self.k.shape} v{self.v.shape} causal={self.causal}")
        if self.key_lengths is not None and (
            len(self.key_lengths) != b or any(not 0 <= n <= nk for n in self.key_lengths)
        ):
            raise ValueError(f"{self.name}: key_lengths {self.key_lengths} for B={b}, Nk={nk}")
        rows = self.q.shape[:3]
        if (self.do is not None and self.do.shape != (*rows, self.v.shape[3])) or (
            self.dlse is not None and (self.do is None or self.dlse.shape != rows)
        ):
            raise ValueError(f"{self.name}: do and dlse are not of the rows {rows}")

    @property
    def sizes(self) -> dict[str, int]:
        (b, hq, nq, d), (_, hkv, nk, dv) = self.q.shape, self.v.shape
        return {"B": b, "Hq": hq, "Hkv": hkv, "Nq": nq, "Nk": nk, "d": d, "dv": dv}

    def visible(self, batch: int) -> Mask:
        """(Nq, Nk): which keys each query row of `batch` may see."""
        return visible(
            self.q.shape[2],
            self.k.shape[2],
            causal=self.causal,
            length=None if self.key_lengths is None else self.key_lengths[batch],
        )

    def heads(self) -> Iterator[tuple[int, int, Array, Array, Array]]:
        """Each (batch, query head) with its own 2-D q, k, v: query head h reads K/V head h // (Hq // Hkv)."""
        b, hq = self.q.shape[:2]
        group = hq // self.k.shape[1]
        for i in range(b):
            for h in range(hq):
                yield i, h, self.q[i, h], self.k[i, h // group], self.v[i, h // group]

    def groups(self) -> Iterator[tuple[int, int, slice]]:
        """Each (batch, K/V head) with the query heads that read it."""
        hq, hkv = self.q.shape[1], self.k.shape[1]
        for i in range(self.q.shape[0]):
            for g in range(hkv):
                yield i, g, slice(g * (hq // hkv), (g + 1) * (hq // hkv))

    @property
    def lse_dtype(self) -> str:
        """The dtype of LSE, and of its gradient."""
        return "float64" if self.dtype == "float64" else "float32"

    def tensors(self, device: str = "cpu") -> dict[str, Any]:
        """Arguments for `attn.attention`: poisoned, laid out as `layout` says, on `device`."""
        import torch

        k, v = self.k.copy(), self.v.copy()
        lengths = None
        if self.key_lengths is not None:
            for i, n in enumerate(self.key_lengths):
                k[i, :, n:] = np.nan
                v[i, :, n:] = np.nan
            lengths = torch.tensor(self.key_lengths, dtype=torch.int64, device=device)
        return {
            "q": place(self.q, self.dtype, self.layout, device),
            "k": place(k, self.dtype, self.layout, device),
            "v": place(v, self.dtype, self.layout, device),
            "causal": False if self.causal == "none" else self.causal,
            "scale": self.scale,
            "key_lengths": lengths,
        }

    def backward_tensors(self, o: Array, lse: Array, device: str = "cpu") -> dict[str, Any]:
        """Arguments for the op `backward`, by name, for the O and LSE that a forward pass returned."""
        import torch

        assert self.do is not None
        words, wide = self.tensors(device), torch_dtype(self.lse_dtype)
        return {
            "dout": place(self.do, self.dtype, self.do_layout, device),
            "dlse": None if self.dlse is None else torch.from_numpy(self.dlse).to(wide).to(device),
            **{name: words[name] for name in ("q", "k", "v")},
            "o": place(o, self.dtype, self.layout, device),
            "lse": torch.from_numpy(np.ascontiguousarray(lse)).to(wide).to(device),
            "key_lengths": words["key_lengths"],
            "scale": self.scale,
            "causal": CAUSAL.index(self.causal),
            "wanted": list(self.wanted),
        }

    def with_dtype(self, dtype: str) -> Case:
        """The same problem rounded to another dtype."""
        q, k, v = (representable(x, dtype) for x in (self.q, self.k, self.v))
        made = replace(self, dtype=dtype, q=q, k=k, v=v, do=None, dlse=None)
        do = None if self.do is None else representable(self.do, dtype)
        dlse = None if self.dlse is None else representable(self.dlse, made.lse_dtype)
        return replace(made, do=do, dlse=dlse)

    def describe(self) -> dict[str, Any]:
        """What a reader needs to see in a message: JSON types only."""
        return {
            "case": self.name,
            "family": self.family,
            "dtype": self.dtype,
            **self.sizes,
            "scale": self.scale,
            "causal": self.causal,
            "key_lengths": list(self.key_lengths) if self.key_lengths is not None else None,
            "layout": self.layout,
            "seed": self.seed,
            **({} if self.do is None else self._gradient()),
            **self.note,
        }

    def _gradient(self) -> dict[str, Any]:
        names = "".join(name for name, wanted in zip("qkv", self.wanted, strict=True) if wanted)
        values = (self.gradient, self.dlse is not None, names, self.do_layout)
        return dict(zip(GRADIENT_WORDS, values, strict=True))


def visible(nq: int, nk: int, *, causal: str = "none", length: int | None = None) -> Mask:
    """(nq, nk) boolean mask of the public API: causal alignment and key length intersect.

    bottom_right: row i sees key j iff j <= i + nk - nq; top_left: iff j <= i; nk is the size of the tensor.
    """
    i, j = np.arange(nq)[:, None], np.arange(nk)[None, :]
    mask = np.ones((nq, nk), dtype=bool)
    if causal != "none":
        mask &= j <= i + (nk - nq if causal == "bottom_right" else 0)
    if length is not None:
        mask &= j < length
    return mask


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a dtype name."""
    import torch

    return {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def place(x: Array, dtype: str, layout: str, device: str = "cpu") -> torch.Tensor:
    """`x` (B,H,N,d) as a tensor of `dtype` in `layout`; whatever the layout leaves unused is NaN.

    contiguous; bnhd: stored (B,N,H,d), as most models hold it; padded: rows 8 elements apart from their
    neighbours; offset: contiguous, but starting one element into its storage (an unaligned pointer); transposed: stored
    (B,H,d,N); expanded: one row with stride 0 everywhere else; scalar: one element.

    Raises: ValueError for an unknown layout, and where `x` does not have the equal rows or elements of its layout.
    """
    import torch

    kind = torch_dtype(dtype)
    b, h, n, d = x.shape
    values = torch.from_numpy(np.ascontiguousarray(x)).to(kind)
    if layout == "contiguous" or not x.size:
        return values.to(device)
    if layout in ("expanded", "scalar"):
        one = values[0, 0, 0] if layout == "expanded" else values[0, 0, 0, 0]
        if not torch.equal(values.nan_to_num(nan=math.pi), one.expand_as(values).nan_to_num(nan=math.pi)):
            raise ValueError(f"layout {layout}: the elements differ")
        return one.clone().to(device).expand(values.shape)
    if layout == "bnhd":
        home = torch.empty((b, n, h, d), dtype=kind, device=device)
        out = home.permute(0, 2, 1, 3)
    elif layout == "padded":
        home = torch.full((b, h, n, d + 8), math.nan, dtype=kind, device=device)
        out = home[..., :d]
    elif layout == "transposed":
        out = torch.empty((b, h, d, n), dtype=kind, device=device).transpose(-1, -2)
    elif layout == "offset":
        home = torch.full((b * h * n * d + 1,), math.nan, dtype=kind, device=device)
        out = home[1:].view(b, h, n, d)
    else:
        raise ValueError(f"layout {layout!r}: one of {', '.join(GRADIENT_LAYOUTS)}")
    out.copy_(values)
    return out
