"""How a backward kernel rounds: what its forward path does, plus the choices that only a backward pass has.

A backward kernel makes its five products, its exp2 and its rounded operands with the arithmetic of the path that it
belongs to, so most constants are those of the `ArithmeticModel`. Counted here are the roundings of

    P = exp2(S c - LSE log2 e)      c = scale log2 e rounded; S c fused into the subtraction, or rounded by itself
    D = rowsum(dO o O) - dLSE      in the working format, any order, from O as the caller has it
    dS = P (dP - D)      one subtraction, one product; then rounded as an operand, like P
    dQ = scale (dS K), dK = scale (dS^T Q)      at the end: scale rounded to the working format, product with it

and how the sums over tiles are carried: in the accumulator from tile to tile, or from 0 in every tile and then added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from verify.arithmetic import ArithmeticModel, Sum


@dataclass(frozen=True, kw_only=True)
class BackwardModel:
    """Limits of one backward path for one input dtype."""

    path: ArithmeticModel  # products, working format, exp2, operand format; and the forward pass whose O, LSE are read
    s_roundings: int  # in the exponent, of size |s|: of c, and of the product where it is not fused
    lse_roundings: int = 2  # of size |LSE|: of log2 e, and of the product
    argument_roundings: int = 1  # of size |s - LSE|: the subtraction
    ds_roundings: int = 2  # of P (dP - D)
    ds_unit: float  # relative and absolute error of dS as an operand
    ds_tiny: float
    dq_restarts: bool  # dQ of a key tile is summed from 0 and then added
    dkv_restarts: bool  # so are dK and dV of a query tile
    final_roundings: int = 2  # of scale dQ and scale dK
    out_format: str | None  # of the gradients; None: the working format

    def dq_sum(self, counts: np.ndarray, bc: int) -> Sum:
        """Roundings of dQ before the scale. counts (Nq, T): visible keys per key tile."""
        return tile_sum(self.path, counts, bc, restarts=self.dq_restarts)

    def dkv_sum(self, counts: np.ndarray, br: int, heads: int) -> Sum:
        """Roundings of dK before the scale, and of dV. counts (Nk, T): visible rows per query tile, all heads in turn.

        Query heads that share the key either continue one sum or have sums of their own, which are added.
        """
        return tile_sum(self.path, counts, br, restarts=self.dkv_restarts, additions=heads - 1)


def backward_model(path: ArithmeticModel, /, **choices: Any) -> BackwardModel:
    """The backward path of a forward one. `choices` replace fields of BackwardModel.

    By default dQ of a truncating matrix unit is added to memory tile by tile (atomics), dK and dV stay in its
    accumulator over all query tiles, and other paths carry all sums as they carry O.
    """
    defaults: dict[str, Any] = {
        "s_roundings": path.scale_roundings + path.score_roundings + (path.product == "muladd"),
        "ds_unit": path.p_unit,
        "ds_tiny": path.p_tiny,
        "dq_restarts": path.o_restarts or path.product == "block",
        "dkv_restarts": path.o_restarts,
        "out_format": path.out_format,
    }
    return BackwardModel(path=path, **{**defaults, **choices})


# Where a kernel rounds otherwise than `backward_model` has it by default, by the name of its arithmetic model. All CPU
# kernels make LSE log2 e in float64 and round it once. The mma.sync kernels (codegen/templates/sm80) are as the default
# has it: a float32 product with a rounded log2 e, dQ of each key tile added to memory, dK and dV in the accumulator
# over all rows of all heads that share the key. Their kernel for dQ alone, also of the deterministic form, keeps dQ in
# the accumulator: dq_restarts=False at its own tile (verify/judge_backward.py).
CHOICES: dict[str, dict[str, Any]] = {
    name: {"lse_roundings": 1} for name in ("fma_f32", "muladd_f32", "fma_f64", "muladd_f64", "amx_bf16")
}


def of_path(path: ArithmeticModel, plan: Mapping[str, Any]) -> BackwardModel:
    """The model of an emitted backward kernel with this arithmetic; figures of its plan replace fields of that name."""
    known = {f.name for f in fields(BackwardModel)} - {"path"}
    return backward_model(path, **CHOICES.get(path.name, {}), **{k: v for k, v in plan.items() if k in known})


def tile_sum(path: ArithmeticModel, counts: np.ndarray, size: int, *, restarts: bool, additions: int = 0) -> Sum:
    """Roundings of a sum of products over tiles of `size` terms. counts (n, T): terms that are not exactly 0.

    A term of 0 adds exactly, so no more than the others round. Restarting sums add one rounding per tile that has
    terms; `additions` are further plain additions at the end.
    """
    tiles = (counts > 0).sum(axis=1) if restarts else 0
    if path.product in ("fma", "muladd"):
        terms = counts.max(axis=1, initial=0) if restarts else counts.sum(axis=1)
        return Sum(path, terms + (path.product == "muladd"), tiles + additions)
    blocks = np.minimum(counts, -(-size // path.block))
    steps = blocks.max(axis=1, initial=0) if restarts else blocks.sum(axis=1)
    # AMX: two chains of half a block, and their sum.
    inside = path.block // 2 + 1 if path.product == "amx" else 0
    return Sum(path, steps * path.o_planes + inside, tiles + additions)
