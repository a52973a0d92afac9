"""The backward pass of one cell as a call that can be timed: ours and torch's, both through autograd.

The forward pass runs once, before anything is timed; what is timed is `torch.autograd.grad` of its output, with the
graph kept, so both sides do the same work around their kernels. A call is timed once its output, its LSE and its
gradients are within their bounds (bench_check.py, bench_gradients.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from codegen.errors import CheckFailed, RequestError
from verify import bench_gradients, packages
from verify.bench_check import Expected
from verify.peers import Peer

Run = Callable[[], Any]
# Where autograd nodes of torch's attention keep their LSE: natural log of the scaled scores, (B,H,N) or padded rows.
SAVED_LSE = ("_saved_logsumexp", "_saved_log_sumexp")


def require(folder: Path, kind: str) -> None:
    """Refuse a package that has no backward kernels for a "cpu" or for "cuda".

    Raises: RequestError.
    """
    plan = packages.plan(folder)
    if not any((row["target"] == "cpu") == (kind == "cpu") for row in plan.get("backward", ())):
        raise RequestError(f"{plan['name']} has no backward kernels for {kind}", "emit it without --no-backward")


class BackwardPass:
    """Inputs of one cell, q, do (B,Hq,N,..), k, v (B,Hkv,N,..), and what gradients of them must be."""

    def __init__(
        self, q: Any, k: Any, v: Any, do: Any, *, causal: bool, dtype: str, deterministic: bool = False
    ) -> None:
        self._inputs, self._do, self._causal, self._dtype = (q, k, v), do, causal, dtype
        self._deterministic = deterministic
        self._expected = Expected(q, k, v, causal=causal, dtype=dtype)
        # torch's own kernel on a CPU rounds otherwise than ours.
        self._expected_of_peer = self._expected
        if q.device.type == "cpu":
            self._expected_of_peer = Expected(q, k, v, causal=causal, dtype=dtype, torch_on_cpu=True)

    def of_package(self, attn: ModuleType) -> tuple[Run, str | None]:
        """The backward pass of an emitted package, and what is wrong with it in one line."""

        def forward(q: Any, k: Any, v: Any) -> Any:
            return attn.attention(q, k, v, causal=self._causal, return_lse=True, deterministic=self._deterministic)

        return self._checked(forward, own=True)

    def of_peer(self, peer: Peer) -> tuple[Run, str | None]:
        """The same of a peer, which may raise anything."""

        def forward(q: Any, k: Any, v: Any) -> Any:
            call = peer.prepare(q, k, v, self._causal)
            return call.result(call.run())

        return self.of_torch(forward)

    def of_torch(self, attention: Callable[[Any, Any, Any], Any]) -> tuple[Run, str | None]:
        """The same of what torch's `attention(q, k, v)` returns.

        Raises: CheckFailed when that keeps no LSE that it could be checked with.
        """

        def forward(q: Any, k: Any, v: Any) -> Any:
            o = attention(q, k, v)
            return o, saved_lse(o)

        return self._checked(forward, own=False)

    def _checked(self, forward: Callable[[Any, Any, Any], Any], *, own: bool) -> tuple[Run, str | None]:
        """The call, and how its gradients differ from those at the O and LSE that `forward` returns.

        own: a package of ours. What a peer on a GPU keeps as LSE for itself may be less accurate than its output.
        """
        import torch

        leaves = [x.detach().requires_grad_() for x in self._inputs]
        with torch.enable_grad():
            o, lse = forward(*leaves)

        def run() -> Any:
            return torch.autograd.grad(o, leaves, self._do, retain_graph=True)

        o_read, lse_read = o.detach(), lse.detach()
        on_cpu, n = o.device.type == "cpu", o.shape[2]
        blocks = bench_gradients.Blocks.of_torch_cpu(n) if on_cpu and not own else None
        expected = self._expected if own else self._expected_of_peer
        wrong = expected.difference(o_read, lse_read if own or on_cpu else None) or bench_gradients.difference(
            *self._inputs, self._do, o_read, lse_read, run(), causal=self._causal, dtype=self._dtype, blocks=blocks
        )
        return run, wrong


def saved_lse(o: Any) -> Any:
    """The LSE (B,H,N) that torch's attention keeps for the backward pass of its output `o`.

    Raises: CheckFailed where it keeps none under a name that we know.
    """
    node = o.grad_fn
    for name in SAVED_LSE:
        if hasattr(node, name):
            return getattr(node, name).reshape(*o.shape[:2], -1)[..., : o.shape[2]]  # some pad the rows
    raise CheckFailed(f"{type(node).__name__} keeps no LSE to check a backward pass with")
