# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 16857e56cd728a1e
"""What autograd, forward mode and autocast do with the ops. No call gets silently without a derivative.

Reverse mode: one node per call, whose gradients of both outputs, by those of q, k and v that want one, come from one
run of the backward op. Saved are q, k, v, o and lse, so nothing of size Nq x Nk is kept.

Refused, in one sentence: a gradient on a device type without backward kernels, at the call; forward mode, at the call;
a derivative of the gradients, when it is asked for (create_graph=True alone, which torch.func.grad sets, is fine).
Autocast: floating-point q, k and v but float64 are cast to its dtype, as in torch's scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import checks, contents

Kernel = Callable[..., Any]
AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


# An autograd.Function hands itself to torch.func's transforms. Here, on the Autograd key, they have done their part.
class _Node(torch.autograd.function._SingleLevelFunction):
    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:  # as an autograd.Function has it
        return (ctx._autograd_function_id,)


def of_forward(op: Any, backward: Any) -> Kernel:
    """The Autograd kernel of a forward op, whose gradients the op `backward` computes; None: refused."""

    class Attention(_Node):
        @staticmethod
        def forward(
            ctx: Any, keys: Any, q: Tensor, k: Tensor, v: Tensor, key_lengths: Any, scale: float, causal: int,
            deterministic: bool | None = None,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            with torch.enable_grad():  # a node turns it off, but a transform further out looks at it too
                o, lse = _below(op, keys, q, k, v, key_lengths, scale, causal, deterministic)
            ctx.save_for_backward(q, k, v, o, lse, key_lengths)
            ctx.options = scale, causal, deterministic
            ctx.set_materialize_grads(False)
            return o, lse

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
            q, k, v, o, lse, key_lengths = ctx.saved_tensors
            scale, causal, deterministic = ctx.options
            wanted = ctx.needs_input_grad[1:4]
            if deterministic is None:
                deterministic = torch.are_deterministic_algorithms_enabled()
            if dout is None:
                dout = o.new_zeros(()).expand(o.shape)
            found = backward(dout, dlse, q, k, v, o, lse, key_lengths, scale, causal, list(wanted), deterministic)
            gradients = (one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True))
            return (None, *gradients, None, None, None, None)

    def kernel(keys: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        _refuse_tangents(q, k, v)
        if not torch.is_grad_enabled() or not (q.requires_grad or k.requires_grad or v.requires_grad):
            return _below(op, keys, q, k, v, *rest)
        if backward is not None and q.device.type in checks.BACKWARD_DEVICES:
            with enable_single_level_autograd_function():
                return Attention.apply(keys, q, k, v, *rest)
        raise NotImplementedError(
            f"{contents.NAME} has no backward for {q.device.type} tensors, but grad mode is on and an input requires "
            "grad: call it under torch.no_grad(), or detach the inputs"
        )

    return kernel


def of_backward(op: Any) -> Kernel:
    """The Autograd kernel of the backward op."""

    class Gradients(_Node):
        @staticmethod
        def forward(ctx: Any, keys: Any, *arguments: Any) -> Any:
            with torch.enable_grad():
                return _below(op, keys, *arguments)

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise NotImplementedError(f"{contents.NAME} has no second derivative: its gradients are not differentiable")

    def kernel(keys: Any, *arguments: Any) -> Any:
        tensors = [t for t in arguments if isinstance(t, Tensor)]
        _refuse_tangents(*tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            with enable_single_level_autograd_function():
                return Gradients.apply(keys, *arguments)
        return _below(op, keys, *arguments)

    return kernel


def under_autocast(op: Any, kind: str) -> Kernel:
    """The Autocast kernel of a forward op for tensors on device type `kind`."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, AUTOCAST_KEYS[kind]))

    def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        dtype = torch.get_autocast_dtype(kind)

        def cast(t: Tensor) -> Tensor:
            is_cast = t.is_floating_point() and t.dtype != torch.float64 and t.device.type == kind
            if is_cast:
                checks.check_autocast(kind, dtype)
            return t.to(dtype) if is_cast else t

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(cast(q), cast(k), cast(v), *rest)

    return kernel


def _below(op: Any, keys: Any, *arguments: Any) -> Any:
    # A node's forward runs with forward mode off; yet a transform of torch.func around this one may be forward mode.
    with torch._C._AutoDispatchBelowAutograd(), forward_ad._set_fwd_grad_enabled(True):
        return op.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


def _refuse_tangents(*tensors: Tensor) -> None:
    # Whether a level of forward mode is open; looking at three inputs takes longer than this.
    is_open = getattr(forward_ad, "_current_level", 0) >= 0
    if is_open and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(f"{contents.NAME} has no jvp (forward-mode derivative): an input has a tangent")
