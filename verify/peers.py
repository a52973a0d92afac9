"""The other implementations of attention on a GPU, each behind one adapter: what `verify bench --device cuda` times.

    found, absent = available(("cudnn", "fa3"))      # {"cudnn": Peer}, {"fa3": "no module flash_attn_interface"}
    call = found["cudnn"].prepare(q, k, v, causal)   # tensors are made ready here, outside the timed call
    o = call.result(call.run())                      # O (B,Hq,Nq,dv)

A peer that is not installed is left out by name, with its reason; nothing is downloaded. $TILEPROOF_PEERS names folders
to look in beside the installed packages: each is searched like a site-packages folder, its .pth files included, so an
unpacked set of wheels serves as it is.
"""

from __future__ import annotations

import importlib
import os
import site
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from codegen.errors import RequestError

FOLDERS_VARIABLE = "TILEPROOF_PEERS"


def _same(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Call:
    """One prepared problem: `run` is timed, `result` finds O (B,Hq,Nq,dv) in what it returned."""

    run: Callable[[], Any]
    result: Callable[[Any], Any] = _same


@dataclass(frozen=True)
class Peer:
    """One implementation. `module` must import; `prepare(q, k, v, causal)` takes (B,H,N,d) tensors of any strides.

    backward: its backward pass can be timed by itself: the call's output is the node of the graph that holds its LSE.
    """

    name: str
    title: str
    module: str
    prepare: Callable[[Any, Any, Any, bool], Call]
    backward: bool = False


def _sdpa(backend: str) -> Callable[[Any, Any, Any, bool], Call]:
    """torch's scaled_dot_product_attention, held to one backend."""

    def prepare(q: Any, k: Any, v: Any, causal: bool) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        chosen, grouped = getattr(SDPBackend, backend), q.shape[1] != k.shape[1]

        def run() -> Any:
            with sdpa_kernel(chosen):
                return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        return Call(run)

    return prepare


def _flex(q: Any, k: Any, v: Any, causal: bool) -> Call:
    """torch.compile of FlexAttention; the block mask is made once, as its documentation advises."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def below(b: Any, h: Any, row: Any, key: Any) -> Any:
        return row >= key

    # One compilation per problem: past its limit dynamo would run the unfused form, and that would be timed.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 4096
    mask = create_block_mask(below, None, None, q.shape[2], k.shape[2], device=q.device) if causal else None
    compiled = torch.compile(flex_attention, dynamic=False)
    return Call(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]))


def _flash(module: str) -> Callable[[Any, Any, Any, bool], Call]:
    """FlashAttention's own interface. It takes (B,N,H,d): other strides are copied to that beforehand, untimed."""

    def prepare(q: Any, k: Any, v: Any, causal: bool) -> Call:
        function = importlib.import_module(module).flash_attn_func
        rows_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        return Call(lambda: function(*rows_first, causal=causal), _output_of_flash)

    return prepare


def _output_of_flash(result: Any) -> Any:
    output = result[0] if isinstance(result, tuple) else result
    return output.transpose(1, 2)


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("cudnn", "cuDNN through torch", "torch", _sdpa("CUDNN_ATTENTION"), backward=True),
        Peer("fa2", "FlashAttention-2 in torch", "torch", _sdpa("FLASH_ATTENTION"), backward=True),
        Peer("efficient", "memory-efficient attention in torch", "torch", _sdpa("EFFICIENT_ATTENTION"), backward=True),
        Peer("flex", "FlexAttention", "torch.nn.attention.flex_attention", _flex),
        Peer("fa3", "FlashAttention-3", "flash_attn_interface", _flash("flash_attn_interface")),
        Peer("fa4", "FlashAttention-4 (CuTe)", "flash_attn.cute", _flash("flash_attn.cute")),
    )
}


def names(text: str | None) -> tuple[str, ...]:
    """The peers that a command line asks for: None or "all" for every one, "none" for none, else a comma list.

    Raises: RequestError for an unknown name.
    """
    if text in (None, "all"):
        return tuple(PEERS)
    asked = [] if text == "none" else [word.strip() for word in (text or "").split(",") if word.strip()]
    for name in asked:
        if name not in PEERS:
            raise RequestError(f"--peers {name}: unknown", f"known: {', '.join(PEERS)}; or all, none")
    return tuple(dict.fromkeys(asked))


def available(wanted: Sequence[str], *, backward: bool = False) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers of `wanted` whose module imports, and for each other one why it does not.

    backward: only those whose backward pass can be timed.
    """
    add_folders()
    found, absent = {}, {}
    for name in wanted:
        peer = PEERS[name]
        if backward and not peer.backward:
            absent[name] = "its backward pass is not timed"
            continue
        try:
            importlib.import_module(peer.module)
        except Exception as error:  # a module that breaks while it loads is as absent as one that is not there
            absent[name] = _first_line(error)
        else:
            found[name] = peer
    return found, absent


def add_folders() -> None:
    """Make the folders of $TILEPROOF_PEERS importable, after everything that is installed."""
    for folder in filter(None, os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)):
        site.addsitedir(os.path.abspath(folder))


def refusal(error: BaseException) -> str:
    """Why a peer did not take a problem, in one line."""
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]
