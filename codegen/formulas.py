"""Cost formulas of one variant as text that anybody can evaluate: what plan.json and file headers keep.

Per head (one batch element, one query head, its own K and V head), no mask, in terms of Nq and Nk only: d,
dv, Br and the widths are printed as numbers. Traffic is that of the algorithm as listed: Q is read once, every
key and value once per row tile, O and LSE are written once; a short tile moves only its rows.
Source: FlashAttention-2 (arXiv:2307.08691) Algorithm 1; `spec.io_counts` has the same counts as functions,
and tests/codegen/test_formulas.py compares the two.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def forward(*, d: int, dv: int, br: int, itemsize: int) -> dict[str, str]:
    """The formulas of a forward kernel that keeps a tile of `br` query rows and streams K and V past it.

    itemsize: bytes of an element of Q, K, V and O. LSE has 4 bytes, 8 beside float64.
    """
    tiles = f"((Nq + {br - 1}) // {br})" if br > 1 else "Nq"
    lse = 8 if itemsize == 8 else 4
    return {
        "flops": f"{2 * (d + dv)} * Nq * Nk",
        "slow_memory_reads_elements": f"{d} * Nq + {d + dv} * Nk * {tiles}",
        "slow_memory_writes_elements": f"{dv + 1} * Nq",
        "slow_memory_bytes": f"{itemsize * (d + dv) + lse} * Nq + {itemsize * (d + dv)} * Nk * {tiles}",
    }


def evaluate(formula: str, sizes: Mapping[str, int]) -> int:
    """The value of a formula of this module: whole numbers, the names in `sizes`, +, * and //. Exact at any size."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        raise ValueError(f"{formula}: {ast.unparse(node)} is not part of a formula")

    return value(ast.parse(formula, mode="eval").body)
