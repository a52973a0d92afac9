"""Cost formulas of one variant as text that anybody can evaluate: what plan.json and file headers keep.

Per head (one batch element, one query head, its own K and V head), no mask, in terms of Nq and Nk only: d,
dv, Br, Bc and the widths are printed as numbers. Traffic is that of the algorithm as listed; a short tile moves
only its rows. Forward: Q is read once, every key and value once per row tile, O and LSE are written once.
Source: FlashAttention-2 (arXiv:2307.08691) Algorithms 1 and 2; `spec.io_counts` has the same counts as functions,
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
    tiles, lse = _tiles("Nq", br), _sum_bytes(itemsize)
    return {
        "flops": f"{2 * (d + dv)} * Nq * Nk",
        "slow_memory_reads_elements": f"{d} * Nq + {d + dv} * Nk * {tiles}",
        "slow_memory_writes_elements": f"{dv + 1} * Nq",
        "slow_memory_bytes": f"{itemsize * (d + dv) + lse} * Nq + {itemsize * (d + dv)} * Nk * {tiles}",
    }


def backward(*, target: str, d: int, dv: int, br: int, bc: int, itemsize: int) -> dict[str, str]:
    """The formulas of a backward kernel, all gradients wanted, no gradient of LSE.

    target: on "cpu" the loop over rows is the outer one: dK and dV are summed in slow memory, once per row tile. On
        every other target the loop over keys is, as listed: dQ is. Sums are float32 (float64 beside float64); where
        that is wider than the gradient, a last pass converts them. What the mma.sync kernels move beyond that is in
        `spec.io_backward`, to the byte.
    br, bc: rows of a tile of Q, keys of a tile of K and V. itemsize: bytes of an element of Q, K, V, O, dO and of
        the gradients.
    """
    both, sums = d + dv, _sum_bytes(itemsize)
    converts = int(sums != itemsize)
    if target == "cpu":
        tiles = _tiles("Nq", br)
        reads = [f"{d + 2 * dv + 1} * Nq", f"{2 * both} * Nk * {tiles}", f"{converts * both} * Nk"]
        writes = [f"{d} * Nq", f"{(1 + converts) * both} * Nk", f"{both} * Nk * {tiles}"]
        per_row = itemsize * 2 * both + sums
        per_key = sums * both + converts * (sums + itemsize) * both
        per_key_and_tile = itemsize * both + 2 * sums * both
        moved = [f"{per_row} * Nq", f"{per_key} * Nk", f"{per_key_and_tile} * Nk * {tiles}"]
    else:
        tiles = _tiles("Nk", bc)
        reads = [f"{2 * dv + converts * d} * Nq", f"{both} * Nk", f"{2 * d + dv + 2} * Nq * {tiles}"]
        writes = [f"{(1 + converts) * d + 1} * Nq", f"{both} * Nk", f"{d} * Nq * {tiles}"]
        per_row = itemsize * 2 * dv + sums * (d + 1) + converts * (sums + itemsize) * d
        per_row_and_tile = itemsize * both + sums * (2 * d + 2)
        moved = [f"{per_row} * Nq", f"{2 * itemsize * both} * Nk", f"{per_row_and_tile} * Nq * {tiles}"]
    return {
        "flops": f"{2 * (3 * d + 2 * dv)} * Nq * Nk",
        "slow_memory_reads_elements": _sum(reads),
        "slow_memory_writes_elements": _sum(writes),
        "slow_memory_bytes": _sum(moved),
    }


def _tiles(rows: str, size: int) -> str:
    return f"(({rows} + {size - 1}) // {size})" if size > 1 else rows


def _sum_bytes(itemsize: int) -> int:
    """Of an element of LSE, D, and of a sum in slow memory."""
    return 8 if itemsize == 8 else 4


def _sum(terms: list[str]) -> str:
    return " + ".join(term for term in terms if not term.startswith("0 * "))


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
