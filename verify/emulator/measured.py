"""How the tensor cores of an H200 sum, bit for bit: the manual leaves order and rounding open, the machine does not.

Source: the vectors in tests/data (all mma.m16n8k16 and wgmma sums equal this model), along the lines of Fasi, Higham,
Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores" (PeerJ CS 7:e330, 2021) and Khattak and Mikaitis
(arXiv:2512.07004). Block and fraction bits are those of verify/calibration/mma_sm80.sm_90.json.
"""

from __future__ import annotations

import numpy as np

FRACTION_BITS = 25
BLOCK = 16  # all products of one instruction are added at once
_NO_EXPONENT = -10_000  # of a zero: below every other


def h200_product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """(m, n) float32 of c + a b with a (m, 16), b (16, n), c (m, n) float64; finite, no subnormal operands.

    Products and c are cut off (toward zero) at 2^-25 of the largest exponent among them, added exactly, and the sum is
    cut off to float32. The exponent of a product is the sum of its factors' exponents, not that of their product,
    which may be one larger.
    """
    if a.shape[1] != BLOCK:
        raise ValueError(f"one instruction sums {BLOCK} products, not {a.shape[1]}")
    columns = b.T[None, :, :]
    products = a[:, None, :] * columns  # (m, n, 16), exact
    exponents = _exponent(a)[:, None, :] + _exponent(columns)
    exponents = np.where(products == 0, _NO_EXPONENT, exponents)
    largest = np.maximum(exponents.max(axis=-1), np.where(c == 0, _NO_EXPONENT, _exponent(c)))
    unit = np.exp2(np.maximum(largest - FRACTION_BITS, -1000).astype(np.float64))
    total = (np.trunc(products / unit[..., None]).sum(axis=-1) + np.trunc(c / unit)) * unit
    nearest = total.astype(np.float32)
    away = np.abs(nearest.astype(np.float64)) > np.abs(total)
    return np.where(away, np.nextafter(nearest, np.float32(0)), nearest)


def _exponent(x: np.ndarray) -> np.ndarray:
    """Floor of log2 |x|."""
    return np.frexp(x)[1].astype(np.int64) - 1
