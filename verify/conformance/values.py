"""Inputs of the cases: values that name their own place, and values that are merely arbitrary.

Holds always: integer arithmetic only, so that every machine makes the same bits.
"""

from __future__ import annotations

import numpy as np

from verify.conformance.case import Array

# The patterns `codes` gives are normal numbers, far from overflow, so that a product with 1 is the number itself.
_FIRST_CODE = {"bf16": 0x3000, "f16": 0x0400}
_END_OF_CODES = {"bf16": 0x7F80, "f16": 0x7C00}
_ONE = {"bf16": 0x3F80, "f16": 0x3C00}
_FRACTION_BITS = {"bf16": 7, "f16": 10}


def codes(count: int, name: str) -> Array:
    """(count,) uint16, all different: element i of a memory says i. Normal numbers of the format."""
    if count > _END_OF_CODES[name] - _FIRST_CODE[name]:
        raise ValueError(f"{name} has no {count} different normal patterns")
    return (_FIRST_CODE[name] + np.arange(count)).astype(np.uint16)


def labels(*shape: int) -> Array:
    """uint32 that are all different, also in every byte's neighbourhood: an odd multiple of the index, mod 2^32."""
    return (np.arange(np.prod(shape), dtype=np.uint64) * 0x9E3779B1 + 0x01234567).astype(np.uint32).reshape(shape)


def bits64(count: int, seed: int) -> Array:
    """(count,) uint64 of splitmix64 (Steele, Lea, Flood, 2014), counted from `seed`."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def integers(count: int, seed: int, low: int, high: int) -> Array:
    """(count,) int64 in low..high."""
    return (bits64(count, seed) % np.uint64(high - low + 1)).astype(np.int64) + low


def small_integers(shape: tuple[int, ...], seed: int, name: str) -> Array:
    """16-bit patterns of integers from -8 to 8: a sum of 16 products is exact in every order and rounding."""
    return integer_patterns(integers(int(np.prod(shape)), seed, -8, 8), name).reshape(shape)


def integer_patterns(values: Array, name: str) -> Array:
    """16-bit patterns of integers below 2^7 in magnitude."""
    magnitude = np.abs(values)
    exponent = np.frexp(np.maximum(magnitude, 1).astype(np.float64))[1].astype(np.int64) - 1
    fraction = (magnitude << _FRACTION_BITS[name] >> exponent) - (1 << _FRACTION_BITS[name])
    pattern = _ONE[name] + (exponent << _FRACTION_BITS[name]) + fraction
    return np.where(magnitude == 0, 0, pattern | np.where(values < 0, 0x8000, 0)).astype(np.uint16)


def fractions(shape: tuple[int, ...], seed: int, name: str) -> Array:
    """16-bit patterns of both signs in (2^-6, 1): sums of their products are exact in float64, not in float32."""
    bits = bits64(int(np.prod(shape)), seed)
    fraction = bits & np.uint64((1 << _FRACTION_BITS[name]) - 1)
    exponent = (bits >> np.uint64(20)) % np.uint64(6) + np.uint64(1)
    sign = (bits >> np.uint64(40) & np.uint64(1)) << np.uint64(15)
    pattern = np.uint64(_ONE[name]) - (exponent << np.uint64(_FRACTION_BITS[name])) + fraction
    return (pattern | sign).astype(np.uint16).reshape(shape)


def repeated_identity(rows: int, columns: int, name: str) -> Array:
    """(rows, columns) patterns of 1 where row = column modulo the smaller side, else 0: reads out the other factor."""
    side = min(rows, columns)
    hit = np.arange(rows)[:, None] % side == np.arange(columns)[None, :] % side
    return np.where(hit, _ONE[name], 0).astype(np.uint16)


def background(count: int) -> Array:
    """(count,) uint8 that shared memory holds before a probe: what must not change can be seen."""
    return (np.arange(count) * 7 % 251 + 1).astype(np.uint8)
