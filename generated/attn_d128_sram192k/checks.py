# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 eb2363503eb75307
"""What a request must satisfy: the rules of csrc/binding.h again, with the same sentences.

The bindings check every call on real tensors. These checks serve where no binding runs: on fake and meta tensors
(torch.compile), and before the kernels are built. tests/package of the generator compare the two, sentence by sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

D = 128
DV = 128
# plan.json's name -> (code in csrc/forward.h, torch dtype)
DTYPES = {
    "float32": (0, torch.float32),
    "float64": (1, torch.float64),
    "bf16": (2, torch.bfloat16),
    "fp16": (3, torch.float16),
}
# Device type -> the dtypes that have a kernel there.
SUPPORTED = {
    "cpu": {"float32", "float64", "bf16", "fp16"},
    "cuda": {"bf16", "fp16"},
}
# Device types whose calls may need a gradient; meta tensors stand for any.
BACKWARD_DEVICES = {"cpu", "cuda", "meta"}
CAUSAL_CODES = {False: 0, True: 1, "bottom_right": 1, "top_left": 2}


def causal_code(causal: bool | str) -> int:
    """The op's integer for a value of `causal`.

    Raises: ValueError.
    """
    try:
        code = CAUSAL_CODES.get(causal)
    except TypeError:  # not hashable
        code = None
    if code is None:
        raise ValueError(f"causal must be False, True, 'bottom_right' or 'top_left'; got {causal!r}")
    return code


def dtype_entry(dtype: torch.dtype | str) -> tuple[str, int]:
    """(plan.json's name, code) of a dtype given as torch.bfloat16, "bfloat16" or "bf16".

    Raises: ValueError when no kernel of this package takes it.
    """
    for short, (code, torch_dtype) in DTYPES.items():
        if dtype in (torch_dtype, short, _name(torch_dtype)):
            return short, code
    raise ValueError(f"no kernel takes {dtype}; dtypes are {', '.join(DTYPES)}")


def check(q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None, scale: float, causal: int) -> None:
    """Raise ValueError, with one sentence, unless a kernel of this package can serve the request.

    The values in key_lengths are not looked at.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.layout != torch.strided or t.is_nested or t.is_quantized:
            raise ValueError(f"{name} must be a dense tensor; its layout is {t.layout}, {t.dtype}")
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(
            "q, k and v must have 4 dimensions (batch, heads, length, width); "
            f"got q {_shape(q)}, k {_shape(k)}, v {_shape(v)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must share one dtype; got q {_name(q.dtype)}, k {_name(k.dtype)}, v {_name(v.dtype)} "
            "(autocast leaves float64 as it is: cast them)"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device; got q on {q.device}, k on {k.device}, v on {v.device}")
    if q.shape[3] != D or k.shape[3] != D:
        raise ValueError(f"this package is made for d={D}; q has d={q.shape[3]} and k has d={k.shape[3]}")
    if v.shape[3] != DV:
        raise ValueError(f"this package is made for dv={DV}; v has dv={v.shape[3]}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, heads and length; got k {_shape(k)}, v {_shape(v)}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]}, k and v have batch {k.shape[0]}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if (heads != 0) if kv_heads == 0 else (heads % kv_heads != 0):
        raise ValueError(
            f"Hq={heads} query heads cannot share Hkv={kv_heads} key/value heads: Hq must be a multiple of Hkv"
        )
    _check_dtype(q)
    _check_scale(scale, q.dtype)
    if causal not in (0, 1, 2):
        raise ValueError(f"causal must be 0 (none), 1 (bottom_right) or 2 (top_left); got {causal}")
    if key_lengths is not None:
        _check_key_lengths(key_lengths, q)


def check_results(dout: Tensor, dlse: Tensor | None, q: Tensor, o: Tensor, lse: Tensor, wanted: Sequence[bool]) -> None:
    """Raise ValueError, with one sentence, unless the backward op can take these beside q, k and v that `check` passed.

    o, lse: what the forward op returned. wanted: which of dq, dk and dv to compute.
    """
    rows = tuple(q.shape[:3])
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, t, shape, dtype in (
        ("dout", dout, (*rows, DV), q.dtype), ("dlse", dlse, rows, wide),
        ("o", o, (*rows, DV), q.dtype), ("lse", lse, rows, wide),
    ):  # fmt: skip
        if t is None:
            continue
        if t.layout != torch.strided or t.is_nested:
            raise ValueError(f"{name} must be a dense tensor; its layout is {t.layout}, {t.dtype}")
        if (tuple(t.shape), t.dtype, t.device) != (shape, dtype, q.device):
            raise ValueError(
                f"{name} must be {_name(dtype)} of shape {shape} on {q.device} for these q, k and v; "
                f"got {_name(t.dtype)} of shape {_shape(t)} on {t.device}"
            )
    if len(wanted) != 3:
        raise ValueError(f"wanted must say for each of dq, dk, dv whether to compute it; got {len(wanted)} values")


def check_autocast(kind: str, dtype: torch.dtype) -> None:
    """Raise ValueError if autocast would cast to a dtype that no kernel for this device type takes."""
    known = _dtypes_of(kind)
    if known and dtype not in known:
        raise ValueError(
            f"autocast casts q, k and v to {_name(dtype)}, which no {kind} kernel of this package takes; it has "
            f"{', '.join(map(_name, known))}: turn autocast off around the call"
        )


def _check_dtype(q: Tensor) -> None:
    kind = q.device.type
    if kind == "meta":
        return
    if kind not in SUPPORTED:
        raise ValueError(f"this package has kernels for {' and '.join(SUPPORTED)}; q is on {q.device}")
    known = _dtypes_of(kind)
    if q.dtype not in known:
        raise ValueError(
            f"this package has no {kind} kernel for {_name(q.dtype)}; it has {', '.join(map(_name, known))}"
        )


def _dtypes_of(kind: str) -> list[torch.dtype]:
    return [dtype for short, (_, dtype) in DTYPES.items() if short in SUPPORTED.get(kind, ())]


def _check_scale(scale: float, dtype: torch.dtype) -> None:
    low, high = (2.0**-1022, 2.0**1023) if dtype == torch.float64 else (2.0**-126, 2.0**127)
    if not low <= scale <= high:
        raise ValueError(f"scale must be a number from {low:g} to {high:g}; got {scale:g}")


def _check_key_lengths(lengths: Tensor, q: Tensor) -> None:
    if lengths.layout != torch.strided or lengths.is_nested:
        raise ValueError(f"key_lengths must be a dense tensor; its layout is {lengths.layout}")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"key_lengths must be int32 or int64; got {_name(lengths.dtype)}")
    if lengths.ndim != 1 or lengths.shape[0] != q.shape[0]:
        raise ValueError(
            f"key_lengths must have shape ({q.shape[0]},), one length per batch entry; got {_shape(lengths)}"
        )
    if lengths.device != q.device:
        raise ValueError(f"key_lengths must be on {q.device} like q; it is on {lengths.device}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(t: Tensor) -> str:
    return str(tuple(t.shape))
