# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 912eb34a55b45666
"""The op: its registration with torch, the public functions, and which kernel serves which call.

Holds always:
  * Copies of this package in one process share one registration and one loaded library per device: the namespace
    holds the digest of the content, and two libraries with one namespace would crash the process.
  * The kernels are compiled and loaded by the first call on real tensors, inside the op: torch.compile never sees it.
  * A derivative that there is no kernel for is refused, and nobody finds out late: through this module, through
    torch.ops, under torch.compile, in forward and in reverse mode (derivatives.py).
"""

from __future__ import annotations

import ctypes
import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks, contents, derivatives
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
# The kernels of the gradients: plan.json's "backward". For a CPU tensor the row of the instruction set that its forward
# call takes, or of the next best one; for a CUDA tensor the row of its dtype and of recipe.py's target for the device.
BACKWARD_VARIANTS = [
    Variant("cpu", "v4", "float32", "fma_f32", 48, 48),
    Variant("cpu", "v3", "float32", "fma_f32", 48, 48),
    Variant("cpu", "baseline", "float32", "muladd_f32", 24, 96),
    Variant("cpu", "v4", "float64", "fma_f64", 24, 24),
    Variant("cpu", "v3", "float64", "fma_f64", 12, 48),
    Variant("cpu", "baseline", "float64", "muladd_f64", 12, 48),
    Variant("cpu", "amx", "bf16", "amx_bf16", 64, 64),
    Variant("cpu", "v4", "bf16", "fma_f32", 48, 48),
    Variant("cpu", "v3", "bf16", "fma_f32", 48, 48),
    Variant("cpu", "baseline", "bf16", "muladd_f32", 24, 104),
    Variant("cpu", "v4", "fp16", "fma_f32", 48, 48),
    Variant("cpu", "v3", "fp16", "fma_f32", 48, 48),
    Variant("cpu", "baseline", "fp16", "muladd_f32", 24, 104),
    Variant("sm80", "sm80", "bf16", "mma_sm80", 64, 128),
    Variant("sm80", "sm80", "fp16", "mma_sm80", 64, 128),
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
    deterministic: bool | None = None,
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
        deterministic: whether equal calls must give equal gradients, bit for bit; None:
            torch.are_deterministic_algorithms_enabled() when they are computed. On the CPU they always do.
    Returns:
        o (B, Hq, Nq, 128), contiguous, in q's dtype; or (o, lse). A row that sees no key has o = 0, lse = -inf.
        Both are differentiable by q, k and v, once. Under autocast q, k and v are cast to its dtype, float64 excepted.
    Raises:
        ValueError: the request breaks a rule above. NotImplementedError: it would need a derivative that
            there is no kernel for.
        BuildError: the kernels for this device cannot be compiled.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(t).__name__}")
    if key_lengths is not None and not isinstance(key_lengths, Tensor):
        raise TypeError(f"key_lengths must be a torch.Tensor; got {type(key_lengths).__name__}")
    if deterministic not in (None, False, True):
        raise ValueError(f"deterministic must be None, False or True; got {deterministic!r}")
    factor = checks.D**-0.5 if scale is None else float(scale)
    o, lse = _forward(q, k, v, key_lengths, factor, checks.causal_code(causal), deterministic)
    return (o, lse) if return_lse else o


def path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    key_lengths: Tensor | None = None,
    backward: bool = False,
) -> dict[str, Any]:
    """What `attention` would run for these arguments: target, isa, dtype, arithmetic, br, bc, plan.

    backward: what would compute the gradients instead.
    "arithmetic" names the rounding model of the kernel, "plan" is its part of plan.json. Compiles the CPU kernels if
    they are not there yet.
    Raises: ValueError and BuildError as `attention`, NotImplementedError where there are no gradients.
    """
    checks.check(q, k, v, key_lengths, 1.0, checks.causal_code(causal))
    short, code = checks.dtype_entry(q.dtype)
    if backward:
        return _backward_path(q, short, code)
    if q.device.type == "cpu":
        target, isa = "cpu", _ask("attention_isa", code)
    else:
        target = isa = target_for(capability_of(q.device))
    index = _row(VARIANTS, target, isa, short)
    return _facts(index)


def _backward_path(q: Tensor, short: str, code: int) -> dict[str, Any]:
    """What would compute the gradients of a call with this q, whose dtype has these names."""
    if q.device.type not in checks.BACKWARD_DEVICES:
        raise NotImplementedError(f"{contents.NAME} has no backward for {q.device.type} tensors")
    if q.device.type == "cpu":
        target, isa = "cpu", _ask("attention_backward_isa", code)
    else:
        target = isa = target_for(capability_of(q.device))
    index = _row(BACKWARD_VARIANTS, target, isa, short)
    return {**BACKWARD_VARIANTS[index]._asdict(), "plan": _plans("backward")[index]["plan"]}


def _row(table: list[Variant], target: str, isa: str, dtype: str) -> int:
    for index, variant in enumerate(table):
        if variant[:3] == (target, isa, dtype):
            return index
    raise AssertionError(f"the library has a kernel {target}/{isa}/{dtype} that op.py has not")


def _facts(index: int) -> dict[str, Any]:
    """A row of VARIANTS with its plan."""
    return {**VARIANTS[index]._asdict(), "plan": _plans("variants")[index]["plan"]}


def _plans(table: str) -> list[dict[str, Any]]:
    return json.loads((Path(__file__).parent / "plan.json").read_text())[table]


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


def _register(name: str, signature: str, fake: Any, check: Any) -> torch._ops.OpOverload:
    """Define the op `name` with all of it that is neither compiled nor about derivatives. Returns its overload.

    check: raises unless the arguments obey the rules.
    """
    ops = _process.registrations
    assert ops is not None
    ops.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def load_and_call(*arguments: Any) -> Any:
        check(*arguments)
        kind = arguments[0].device.type
        _load(kind)
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), kind.upper()):
            raise AssertionError(f"the loaded library has no {kind} kernel of {op.name()}")
        return op(*arguments)

    def checked_fake(*arguments: Any) -> Any:
        check(*arguments)
        return fake(*arguments)

    def batched(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """vmap: the mapped dimension is folded into the batch."""
        folded: list[Any] = list(arguments)
        for i, (t, dim) in enumerate(zip(arguments, in_dims, strict=True)):
            if isinstance(t, Tensor):
                t = t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
                inner, folded[i] = t.shape[1], t.flatten(0, 1)
        outputs = op(*folded)
        # A gradient that is not wanted has one dimension and no batch.
        dims = tuple(0 if t.ndim > 1 else None for t in outputs)
        split = (info.batch_size, inner)
        return tuple(t if dim is None else t.unflatten(0, split) for t, dim in zip(outputs, dims, strict=True)), dims

    ops.impl(name, load_and_call, "CompositeExplicitAutograd")  # any device whose own kernel is not there yet
    torch.library.register_fake(f"{NAMESPACE}::{name}", checked_fake, lib=ops)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", batched, lib=ops)
    return op


def _register_forward(name: str, signature: str, fake: Any, backward: Any) -> None:
    """Define a forward op, whose gradients the op `backward` computes."""
    op = _register(name, signature, fake, _check_forward)
    assert _process.registrations is not None
    _process.registrations.impl(name, derivatives.of_forward(op, backward), "Autograd", with_keyset=True)
    for kind, key in derivatives.AUTOCAST_KEYS.items():
        _process.registrations.impl(name, derivatives.under_autocast(op, kind), key)


def _check_forward(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None, scale: float, causal: int, *_: Any
) -> None:
    checks.check(q, k, v, key_lengths, scale, causal)


def _fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = q.shape[:3]
    return q.new_empty((*rows, checks.DV)), q.new_empty(rows, dtype=wide)


def _check_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    key_lengths: Tensor | None, scale: float, causal: int, wanted: list[bool], deterministic: bool,
) -> None:  # fmt: skip
    checks.check(q, k, v, key_lengths, scale, causal)
    checks.check_results(dout, dlse, q, o, lse, wanted)


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    key_lengths: Tensor | None, scale: float, causal: int, wanted: list[bool], deterministic: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(t.new_empty(t.shape if is_wanted else (0,)) for t, is_wanted in zip((q, k, v), wanted, strict=True))


_SIGNATURE = "(Tensor q, Tensor k, Tensor v, Tensor? key_lengths, float scale, int causal"
_BACKWARD_SIGNATURE = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? key_lengths, float scale, "
    "int causal, bool[3] wanted, bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv)"
)
# torch.ops keeps the namespace object for the life of the process, so what copies share hangs there.
_process: _Process = vars(getattr(torch.ops, NAMESPACE)).setdefault("_shared_by_copies", _Process())
with _process.lock:
    if _process.fingerprint is None:
        _process.registrations = torch.library.Library(NAMESPACE, "DEF")
        _backward = _register("backward", _BACKWARD_SIGNATURE, _fake_backward, _check_backward)
        _process.registrations.impl("backward", derivatives.of_backward(_backward), "Autograd", with_keyset=True)
        _register_forward(
            "forward", _SIGNATURE + ", bool? deterministic=None) -> (Tensor o, Tensor lse)", _fake_forward, _backward
        )
        _process.fingerprint = contents.fingerprint()
    elif _process.fingerprint != contents.fingerprint():
        raise ImportError(
            f"{contents.FOLDER} differs from a copy of it that this process has imported, but both carry the digest "
            f"in {NAMESPACE}: one of them was edited by hand; emit it again"
        )
_forward = getattr(torch.ops, NAMESPACE).forward.default
