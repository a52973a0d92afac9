"""A tiled backward kernel that rounds the way a model allows, in NumPy: what the backward bounds are tested against.

Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2, one head, all rows at once. Every intermediate is a value of
the format that the kernel would hold; each step is a method, so that a test can put a mistake into one of them.
"""

from __future__ import annotations

import numpy as np

from verify.bounds.backward_model import BackwardModel
from verify.formats import round_to
from verify.oracle.backward_reference import Given
from verify.simulator import Errors, _Kernel

Triple = tuple[np.ndarray, np.ndarray, np.ndarray]
RANDOM = Errors()


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    *,
    scale: float,
    visible: np.ndarray,
    given: Given,
    dlse: np.ndarray | None = None,
    model: BackwardModel,
    br: int,
    bc: int,
    heads: int = 1,
    errors: Errors = RANDOM,
) -> Triple:
    """(dq, dk, dv) in float64 from the o and lse of a forward kernel; arguments as in `bounds.backward`.

    Inputs must be finite where some row sees them; an lse of -inf marks an empty row.
    """
    return BackwardKernel(model, scale, errors).gradients(
        q, k, v, do, visible=visible, given=given, dlse=dlse, br=br, bc=bc, heads=heads
    )


class BackwardKernel(_Kernel):
    """The forward kernel's products, exp2 and operands, with the steps of the backward pass."""

    def __init__(self, model: BackwardModel, scale: float, errors: Errors):
        super().__init__(model.path, scale, errors)
        self.choices = model
        self.log2e = self.fl(np.asarray(1 / np.log(np.longdouble(2))))
        self.rounded_scale = self.fl(np.asarray(np.longdouble(scale)))

    def gradients(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        do: np.ndarray,
        *,
        visible: np.ndarray,
        given: Given,
        dlse: np.ndarray | None,
        br: int,
        bc: int,
        heads: int,
    ) -> Triple:
        row_seen, key_seen = np.asarray(visible.any(axis=1))[:, None], np.asarray(visible.any(axis=0))[:, None]
        q, do, o = (np.where(row_seen, a, 0.0).astype(self.wide) for a in (q, do, given[0]))
        k, v = (np.where(key_seen, a, 0.0).astype(self.wide) for a in (k, v))
        lse = given[1].astype(self.wide)
        d_row = self.row_sums(do, o, None if dlse is None else np.where(row_seen[:, 0], dlse, 0.0).astype(self.wide))
        p = self.recomputed_weights(self.product(q, k), lse, visible)
        ds = self.score_gradient(p, self.product(do, v), d_row)
        p_operand, ds_operand = self.operand(p), self.operand_ds(ds)
        dq = np.zeros_like(q)
        for keys in self.key_tiles(len(k), bc):
            dq = self.add_to_dq(dq, ds_operand[:, keys], k[keys])
        dk, dv = np.zeros_like(k), np.zeros_like(v)
        for head in self.query_heads(len(q), heads):
            head_dk, head_dv = (dk, dv) if heads == 1 else (np.zeros_like(k), np.zeros_like(v))
            for rows in self.query_tiles(head, br):
                head_dk = self.add_to_dk(head_dk, ds_operand[rows], p_operand[rows], q[rows])
                head_dv = self.add_to_dv(head_dv, ds_operand[rows], p_operand[rows], do[rows])
            dk, dv = (head_dk, head_dv) if heads == 1 else (self.fl(dk + head_dk), self.fl(dv + head_dv))
        return self.store(self.scaled_dq(dq)), self.store(self.scaled_dk(dk)), self.store(dv)

    # ---- dS

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a b^T: S without its scale, and dP."""
        return self.dot(np.zeros((len(a), len(b)), dtype=self.wide), a, b, self.model.s_planes)

    def row_sums(self, do: np.ndarray, o: np.ndarray, dlse: np.ndarray | None) -> np.ndarray:
        """D = rowsum(dO o O) - dLSE."""
        total = np.zeros(len(do), dtype=self.wide)
        for c in range(do.shape[1]):
            total = self.fl(total + self.fl(do[:, c] * o[:, c]))
        return total if dlse is None else self.fl(total - dlse)

    def recomputed_weights(self, s: np.ndarray, lse: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """P = exp2(S c - LSE log2 e); 0 at masked pairs and on empty rows."""
        empty = np.isneginf(lse)
        shift = self.fl(np.where(empty, 0.0, lse) * self.log2e)
        p = self.exp2(self.fl(self.base_two(s) - shift[:, None]))
        return np.where(visible & ~empty[:, None], p, 0.0)

    def base_two(self, s: np.ndarray) -> np.ndarray:
        """S c, to be fused into the subtraction or rounded by itself."""
        return self.fl(s * self.c) if self.model.product == "muladd" else s * self.c

    def score_gradient(self, p: np.ndarray, dp: np.ndarray, d_row: np.ndarray) -> np.ndarray:
        return self.fl(p * self.fl(dp - d_row[:, None]))

    def operand(self, p: np.ndarray) -> np.ndarray:
        """P as a matrix unit takes it: the sum of its planes."""
        return self.round_p(p).sum(axis=0)

    def operand_ds(self, ds: np.ndarray) -> np.ndarray:
        return self.operand(ds)

    # ---- sums over tiles

    def key_tiles(self, keys: int, bc: int) -> list[slice]:
        return [slice(j, min(j + bc, keys)) for j in range(0, keys, bc)]

    def query_heads(self, rows: int, heads: int) -> list[range]:
        length = rows // heads
        return [range(h * length, (h + 1) * length) for h in range(heads)]

    def query_tiles(self, head: range, br: int) -> list[slice]:
        return [slice(i, min(i + br, head.stop)) for i in range(head.start, head.stop, br)]

    def accumulate(self, total: np.ndarray, a: np.ndarray, b: np.ndarray, restarts: bool) -> np.ndarray:
        """total + a b."""
        if restarts:
            return self.fl(total + self.dot(np.zeros_like(total), a, b.T, self.model.o_planes))
        return self.dot(total, a, b.T, self.model.o_planes)

    def add_to_dq(self, dq: np.ndarray, ds: np.ndarray, k: np.ndarray) -> np.ndarray:
        return self.accumulate(dq, ds, k, self.choices.dq_restarts)

    def add_to_dk(self, dk: np.ndarray, ds: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return self.accumulate(dk, ds.T, q, self.choices.dkv_restarts)

    def add_to_dv(self, dv: np.ndarray, ds: np.ndarray, p: np.ndarray, do: np.ndarray) -> np.ndarray:
        return self.accumulate(dv, p.T, do, self.choices.dkv_restarts)

    # ---- results

    def scaled_dq(self, dq: np.ndarray) -> np.ndarray:
        return self.fl(dq * self.rounded_scale)

    def scaled_dk(self, dk: np.ndarray) -> np.ndarray:
        return self.fl(dk * self.rounded_scale)

    def store(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, dtype=np.float64)
        return x if self.choices.out_format is None else round_to(x, self.choices.out_format)
