"""Where bytes lie in shared memory: swizzles, TMA boxes in tiled mode, wgmma matrix descriptors.

Source: PTX ISA 9.0, "Tensors" (sections "Tiled Mode", "Swizzling Modes"), "cp.async.bulk.tensor",
"cp.reduce.async.bulk.tensor", and for wgmma "Shared Memory Matrix Layout", "Strides", "Canonical Layouts", "Matrix
Descriptor Format". CUDA Driver API, cuTensorMapEncodeTiled, for the fields of a tensor map.

Holds always: written from the manuals, never from a kernel, a wrapper or the emulator. Addresses are bytes from the
start of shared memory, whose own address is a multiple of 1024, so that a swizzle sees the same bits. Dimension 0 is
the innermost one.

Four rules of tensor copies are not in the PTX ISA; tests/data shows them on an H200:
  - Coordinate 0 is a multiple of 16 bytes, else "illegal instruction" (also seen in triton-lang/triton#7385).
  - No coordinate of a store or reduction is negative (CUDA C++ Programming Guide, "Tensor Memory Accelerator"), else
    the kernel is stopped.
  - A store writes whole 16-byte chunks of a row (also seen in triton-lang/triton#11583).
  - In shared memory, box rows shorter than the swizzle's span lie one span apart; the barrier counts the box alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

ELEMENT_BYTES = 2  # of the operands of wgmma.m64nNk16
# Codes of the swizzle span (bytes) in a tensor map and in a matrix descriptor.
TENSOR_MAP_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
DESCRIPTOR_SWIZZLE = {0: 0, 128: 1, 64: 2, 32: 3}
_ENCODED = 0x3FFFF  # matrix-descriptor-encode(x) = (x & 0x3ffff) >> 4


def swizzle(address: np.ndarray, span: int) -> np.ndarray:
    """Byte addresses after the swizzle of `span` bytes (0, 32, 64, 128).

    Inside the span the index of a 16-byte chunk is xored with the index of the 128-byte line: 1, 2 or 3 bits of it.
    Source: "Swizzling Modes"; in CuTe's words Swizzle<log2(span / 16), 4, 3>.
    """
    address = np.asarray(address)
    if span not in TENSOR_MAP_SWIZZLE:
        raise ValueError(f"there is no swizzle of {span} bytes")
    chunks = span // 16
    return address ^ ((address >> 7) % chunks << 4) if chunks else address


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves. Strides are bytes, dimension 0 is contiguous."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]  # of dimensions 1, 2, ...
    box: tuple[int, ...]
    itemsize: int
    span: int  # of the swizzle, bytes

    def __post_init__(self) -> None:
        if not 1 <= len(self.dims) <= 5 or len(self.box) != len(self.dims) or len(self.strides) != len(self.dims) - 1:
            raise ValueError(f"a tensor map has 1 to 5 dimensions, each with a box: {self}")
        inner = self.box[0] * self.itemsize
        if inner % 16 or any(s % 16 for s in self.strides) or max(self.box) > 256 or (self.span and inner > self.span):
            raise ValueError(f"the driver refuses this tensor map: {self}")

    @property
    def box_bytes(self) -> int:
        """What a load announces to its barrier."""
        return int(np.prod(self.box)) * self.itemsize

    @property
    def row_bytes(self) -> int:
        """From one row of the box to the next in shared memory: rows shorter than the swizzle's span are padded."""
        return max(self.box[0] * self.itemsize, self.span)

    @property
    def shared_bytes(self) -> int:
        """From the first byte of the box in shared memory to behind its last row."""
        return int(np.prod(self.box[1:], dtype=int)) * self.row_bytes

    def rows(self, shared: int, coordinates: tuple[int, ...]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each row of the box (dimension 0): where its bytes lie in shared memory and in global memory.

        Yields:
            (box[0] * itemsize,) byte addresses of shared memory; as many of global memory; whether they belong to an
            element inside the tensor.
        Rows follow each other in shared memory, dimension 1 fastest; then addresses are swizzled.
        Raises: ValueError when coordinate 0 is not a multiple of 16 bytes.
        """
        if coordinates[0] * self.itemsize % 16:
            raise ValueError(f"a box starts at a multiple of 16 bytes of dimension 0, not at element {coordinates[0]}")
        byte = np.arange(self.box[0] * self.itemsize)
        column = coordinates[0] + byte // self.itemsize
        # itertools.product moves its last factor fastest: dimension 1 must be the last.
        for number, outer in enumerate(itertools.product(*(range(n) for n in reversed(self.box[1:])))):
            at = [c + o for c, o in zip(coordinates[1:], reversed(outer), strict=True)]
            row_inside = all(0 <= x < n for x, n in zip(at, self.dims[1:], strict=True))
            start = sum(x * s for x, s in zip(at, self.strides, strict=True)) + coordinates[0] * self.itemsize
            place = swizzle(shared + number * self.row_bytes + byte, self.span)
            yield place, start + byte, row_inside & (column >= 0) & (column < self.dims[0])


def tma_load(
    memory: np.ndarray, tensor: np.ndarray, tensor_map: TensorMap, shared: int, coordinates: tuple[int, ...]
) -> np.ndarray:
    """Shared memory (uint8) after cp.async.bulk.tensor of the box at `coordinates`; zeros outside the tensor."""
    after = memory.copy()
    for place, source, inside in tensor_map.rows(shared, coordinates):
        after[place] = np.where(inside, tensor[np.where(inside, source, 0)], 0)
    return after


def tma_store(
    memory: np.ndarray, tensor: np.ndarray, tensor_map: TensorMap, shared: int, coordinates: tuple[int, ...]
) -> np.ndarray:
    """The tensor (uint8) after the store of a box; what lies outside the tensor is not written, but for one rest:
    the 16 bytes that hold the last element of a row are written whole, also behind that element.

    Raises: ValueError when a coordinate is negative.
    """
    if min(coordinates) < 0:
        raise ValueError(f"a box that is stored starts inside the tensor, not at {coordinates}")
    after = tensor.copy()
    for place, target, inside in tensor_map.rows(shared, coordinates):
        written = np.repeat(inside.reshape(-1, 16).any(axis=1), 16)
        after[target[written]] = memory[place[written]]
    return after


def tma_reduce_add_f32(
    memory: np.ndarray, tensor: np.ndarray, tensor_map: TensorMap, shared: int, coordinates: tuple[int, ...]
) -> np.ndarray:
    """The tensor (uint8) of float32 after cp.reduce.async.bulk.tensor.add: what a store writes is added instead."""
    addend = tma_store(memory, np.zeros_like(tensor), tensor_map, shared, coordinates)
    return (tensor.view(np.float32) + addend.view(np.float32)).view(np.uint8)


def matrix_descriptor(start: int, leading: int, stride: int, span: int) -> int:
    """64 bits of a matrix descriptor with base offset 0. start, leading and stride are bytes, multiples of 16."""
    if start % 16 or leading % 16 or stride % 16:
        raise ValueError(f"descriptor fields are multiples of 16 bytes: {start}, {leading}, {stride}")
    fields = ((start, 0), (leading, 16), (stride, 32))
    return sum((x & _ENCODED) >> 4 << at for x, at in fields) | DESCRIPTOR_SWIZZLE[span] << 62


def canonical_layout(rows: int, k: int, *, leading: int, stride: int, span: int, k_major: bool) -> np.ndarray:
    """(rows, k) byte offsets before swizzling of a 16-bit operand: rows are M of A or N of B.

    Source: "Canonical Layouts", with T = 8 elements in 16 bytes:
      K-major   none ((8,m),(T,2k)):((1T,SBO),(1,LBO))     swizzled ((8,m),(T,2k)):((span,SBO),(1,T))
      MN-major  none ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO))  swizzled ((span,m),(8,k)):((1,LBO),(span,SBO))
    """
    r, c = np.arange(rows)[:, None], np.arange(k)[None, :]
    if k_major and span:
        return r % 8 * span + r // 8 * stride + c * ELEMENT_BYTES
    if k_major:
        return r % 8 * 16 + r // 8 * stride + c % 8 * ELEMENT_BYTES + c // 8 * leading
    if span:
        wide = span // ELEMENT_BYTES
        return r % wide * ELEMENT_BYTES + r // wide * leading + c % 8 * span + c // 8 * stride
    return r % 8 * ELEMENT_BYTES + r // 8 * stride + c % 8 * 16 + c // 8 * leading


def operand_addresses(descriptor: int, rows: int, k: int = 16, *, k_major: bool) -> np.ndarray:
    """(rows, k) byte addresses that wgmma reads for an operand: the swizzle acts on the whole address."""
    start, leading, stride = (int(descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    span = {code: span for span, code in DESCRIPTOR_SWIZZLE.items()}[descriptor >> 62 & 3]
    layout = canonical_layout(rows, k, leading=leading, stride=stride, span=span, k_major=k_major)
    return swizzle(start + layout, span)


def read_operand(memory: np.ndarray, descriptor: int, rows: int, k: int = 16, *, k_major: bool) -> np.ndarray:
    """(rows, k) 16-bit patterns of the operand in shared memory (uint8)."""
    address = operand_addresses(descriptor, rows, k, k_major=k_major)
    return memory[address].astype(np.uint16) | memory[address + 1].astype(np.uint16) << np.uint16(8)


def write_operand(memory: np.ndarray, descriptor: int, matrix: np.ndarray, *, k_major: bool) -> np.ndarray:
    """Shared memory (uint8) in which the operand of the descriptor is `matrix` (rows, k) of 16-bit patterns."""
    after = memory.copy()
    address = operand_addresses(descriptor, *matrix.shape, k_major=k_major)
    after[address] = matrix & 0xFF
    after[address + 1] = matrix >> 8
    return after
