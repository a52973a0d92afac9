# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 9809a31fb1fd4e99
"""The op: its registration with torch, the public functions, and which kernel serves which call.

Holds always:
  * Copies of this package in one process share one registration and one loaded library per device: the namespace
    holds the digest of the content, and two libraries with one namespace would crash the process.
  * The kernels are compiled and loaded by the first call on real tensors, inside the op: torch.compile never sees it.
  * There is no backward, and nobody finds out late: a call that would need one raises, through this module, through
    torch.ops, under torch.compile, in forward and in reverse mode.
"""

from __future__ import annotations

import ctypes
import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import checks, contents
from .build import library
from .recipe import NAMESPACE, capability_of, target_for


class Variant(NamedTuple):
    """One kernel. br and bc are its tile: query rows, keys."""

    target: str
    isa: str
    dtype: str
    arithmetic: str
    br: int
    bc: int


# The dispatch rule. A CPU tensor goes to the first row of its dtype whose instruction set this machine has (or that
# TILEPROOF_CPU_ISA names); a CUDA tensor to the row of its dtype and of the target that recipe.py picks for the device.
# Rows are in the order of plan.json's "variants".
VARIANTS = [
    Variant("cpu", "v4", "float32", "fma_f32", 96, 72),
    Variant("cpu", "v3", "float32", "fma_f32", 96, 80),
    Variant("cpu", "baseline", "float32", "muladd_f32", 96, 88),
    Variant("cpu", "v4", "float64", "fma_f64", 32, 48),
    Variant("cpu", "v3", "float64", "fma_f64", 32, 48),
    Variant("cpu", "baseline", "float64", "muladd_f64", 32, 48),
    Variant("cpu", "amx", "bf16", "amx_bf16", 128, 96),
    Variant("cpu", "v4", "bf16", "fma_f32", 96, 72),
    Variant("cpu", "v3", "bf16", "fma_f32", 96, 80),
    Variant("cpu", "baseline", "bf16", "muladd_f32", 96, 88),
    Variant("cpu", "amx", "fp16", "amx_fp16_planes", 96, 64),
    Variant("cpu", "v4", "fp16", "fma_f32", 96, 72),
    Variant("cpu", "v3", "fp16", "fma_f32", 96, 80),
    Variant("cpu", "baseline", "fp16", "muladd_f32", 96, 88),
    Variant("sm80", "sm80", "bf16", "mma_sm80", 128, 192),
    Variant("sm80", "sm80", "fp16", "mma_sm80", 128, 192),
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v, over the visible keys of each query row.

    Args:
        q: (B, Hq, Nq, 128). Hq is a multiple of Hkv: query head h reads key/value head h // (Hq // Hkv).
        k: (B, Hkv, Nk, 128).
        v: (B, Hkv, Nk, 128). q, k and v share dtype and device; any strides, any lengths, 0 included.
        causal: False; True or "bottom_right": row i sees j <= i + Nk - Nq; "top_left": j <= i.
        scale: > 0. None: 1 / sqrt(128). Under torch.compile a constant: another value compiles again.
        key_lengths: (B,) int32 or int64 on q's device. Key j of batch b exists iff j < key_lengths[b]; keys beyond
            are never read. On CUDA a length outside [0, Nk] gives NaN rows, because looking would stop the stream.
        return_lse: also return the natural log of sum_j exp(scale q.k_j), (B, Hq, Nq) in float32 (float64 for float64).
    Returns:
        o (B, Hq, Nq, 128), contiguous, in q's dtype; or (o, lse). A row that sees no key has o = 0, lse = -inf.
    Raises:
        ValueError: the request breaks a rule above. NotImplementedError: it would need a gradient.
        BuildError: the kernels for this device cannot be compiled.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(t).__name__}")
    if key_lengths is not None and not isinstance(key_lengths, Tensor):
        raise TypeError(f"key_lengths must be a torch.Tensor; got {type(key_lengths).__name__}")
    factor = checks.D**-0.5 if scale is None else float(scale)
    o, lse = _forward(q, k, v, key_lengths, factor, checks.causal_code(causal))
    return (o, lse) if return_lse else o


def path(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str = False, key_lengths: Tensor | None = None
) -> dict[str, Any]:
    """What `attention` would run for these arguments: target, isa, dtype, arithmetic, br, bc, plan.

    "arithmetic" names the rounding model of the kernel, "plan" is its part of plan.json. Compiles the CPU kernels if
    they are not there yet.
    Raises: ValueError and BuildError as `attention`.
    """
    checks.check(q, k, v, key_lengths, 1.0, checks.causal_code(causal))
    short, code = checks.dtype_entry(q.dtype)
    if q.device.type == "cpu":
        target, isa = "cpu", _ask("attention_isa", code)
    else:
        target = isa = target_for(capability_of(q.device))
    for index, variant in enumerate(VARIANTS):
        if variant[:3] == (target, isa, short):
            return _facts(index)
    raise AssertionError(f"the library has a kernel {target}/{isa}/{short} that VARIANTS has not")


def _facts(index: int) -> dict[str, Any]:
    """A row of VARIANTS with its plan."""
    plan = json.loads((Path(__file__).parent / "plan.json").read_text())["variants"][index]["plan"]
    return {**VARIANTS[index]._asdict(), "plan": plan}


def isas(dtype: torch.dtype | str) -> list[str]:
    """The CPU instruction sets that TILEPROOF_CPU_ISA may name on this machine for a dtype, best first."""
    _, code = checks.dtype_entry(dtype)
    return [isa for isa in _ask("attention_isas", code).split(", ") if isa]


def _ask(function: str, dtype_code: int) -> str:
    """Call a text-writing function of the CPU library."""
    text = ctypes.create_string_buffer(1024)
    failed = getattr(_load("cpu"), function)(dtype_code, text, len(text))
    if failed:
        raise ValueError(text.value.decode())
    return text.value.decode()


class _Process:
    """What the copies of this package in one process share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.fingerprint: str | None = None
        self.registrations: torch.library.Library | None = None
        self.libraries: dict[str, ctypes.CDLL] = {}


def _load(kind: str) -> ctypes.CDLL:
    """The loaded library with the kernels for a device type ("cpu", "cuda"), compiled if need be."""
    loaded = _process.libraries.get(kind)
    if loaded is not None:
        return loaded
    with _process.lock:
        if kind not in _process.libraries:
            if kind == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("the kernels are not loaded yet: call attention once before capturing a CUDA graph")
            file = library(kind)
            torch.ops.load_library(file)  # its static initialisers register the kernels
            _process.libraries[kind] = ctypes.CDLL(str(file))
        return _process.libraries[kind]


def _in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open. Looking at three inputs takes longer than this."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def _register(name: str, signature: str, fake: Any) -> torch._ops.OpOverload:
    """Define the op `name` and all of it that is not compiled. Returns its overload."""
    ops = _process.registrations
    assert ops is not None
    ops.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def refuse_gradients(keys: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise NotImplementedError(
                f"{contents.NAME} has no backward yet, but grad mode is on and an input requires grad: "
                "call it under torch.no_grad(), or detach the inputs"
            )
        if _in_forward_mode() and any(forward_ad.unpack_dual(t).tangent is not None for t in (q, k, v)):
            raise NotImplementedError(f"{contents.NAME} has no jvp (forward-mode derivative): an input has a tangent")
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, q, k, v, *rest)

    def load_and_call(q: Tensor, k: Tensor, v: Tensor, key_lengths: Any, scale: float, causal: int, *rest: Any) -> Any:
        checks.check(q, k, v, key_lengths, scale, causal)
        kind = q.device.type
        _load(kind)
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), kind.upper()):
            raise AssertionError(f"the loaded library has no {kind} kernel of {op.name()}")
        return op(q, k, v, key_lengths, scale, causal, *rest)

    def batched(info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, key_lengths: Any, *rest: Any) -> Any:
        """vmap: the mapped dimension is folded into the batch."""
        folded = []
        for t, dim in zip((q, k, v, key_lengths), in_dims, strict=False):
            if t is not None:
                t = t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
                t = t.flatten(0, 1)
            folded.append(t)
        outputs = op(*folded, *rest)
        inner = q.shape[0] if in_dims[0] is None else q.movedim(in_dims[0], 0).shape[1]
        return tuple(t.unflatten(0, (info.batch_size, inner)) for t in outputs), (0,) * len(outputs)

    ops.impl(name, refuse_gradients, "Autograd", with_keyset=True)
    ops.impl(name, load_and_call, "CompositeExplicitAutograd")  # any device whose own kernel is not there yet
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=ops)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", batched, lib=ops)
    return op


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None, scale: float, causal: int
) -> tuple[Tensor, Tensor]:
    checks.check(q, k, v, key_lengths, scale, causal)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = q.shape[:3]
    return q.new_empty((*rows, checks.DV)), q.new_empty(rows, dtype=wide)


_SIGNATURE = "(Tensor q, Tensor k, Tensor v, Tensor? key_lengths, float scale, int causal"
# torch.ops keeps the namespace object for the life of the process, so what copies share hangs there.
_process: _Process = vars(getattr(torch.ops, NAMESPACE)).setdefault("_shared_by_copies", _Process())
with _process.lock:
    if _process.fingerprint is None:
        _process.registrations = torch.library.Library(NAMESPACE, "DEF")
        _register("forward", _SIGNATURE + ") -> (Tensor o, Tensor lse)", _fake_forward)
        _process.fingerprint = contents.fingerprint()
    elif _process.fingerprint != contents.fingerprint():
        raise ImportError(
            f"{contents.FOLDER} differs from a copy of it that this process has imported, but both carry the digest "
            f"in {NAMESPACE}: one of them was edited by hand; emit it again"
        )
_forward = getattr(torch.ops, NAMESPACE).forward.default
