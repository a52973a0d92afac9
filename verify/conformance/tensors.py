"""Cases of the tensor copies: boxes of 2 to 5 dimensions, every swizzle, coordinates inside and outside the tensor."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from verify.conformance import values
from verify.conformance.case import Array, Case, Exact, Expected, Host, Input, Output
from verify.emulator import isa

_GUARD = 128  # bytes behind the box that must not change
# A 2D box; a store may not start below 0.
_STORED = {"inside": (0, 0), "shifted": (8, 5), "beyond": (48, 30), "right": (72, 4), "below": (0, 37)}
_LOADED = {**_STORED, "negative": (-8, -2), "left": (-200, 4), "above": (8, -100)}


class Box(ctypes.Structure):
    """`struct Box` of tensor_sm90a.cu."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rank", "is_float", "swizzle", "shared_bytes", "start", "box_bytes")),
        *((name, ctypes.c_int32 * 5) for name in ("box", "coordinate")),
        *((name, ctypes.c_int64 * 5) for name in ("dims", "strides")),
    )


def cases() -> list[Case]:
    found = []
    for span in (0, 32, 64, 128):
        flat = _map((70, 37), (144,), (span // 2 or 24, 12), 2, span)  # a row ends inside a 16-byte chunk
        found += [_load(f"2d_{span}_{label}", flat, at) for label, at in _LOADED.items()]
        found += [_store(f"2d_{span}_{label}", flat, at) for label, at in _STORED.items()]
        flat = _map((42, 21), (192,), (span // 4 or 20, 10), 4, span)
        found += [_reduce(f"2d_{span}_{label}", flat, at) for label, at in (("inside", (4, 3)), ("beyond", (24, 15)))]
        found.append(_load(f"2d_{span}_float", flat, (-4, 15)))
    # Rows shorter than the span of the swizzle, and the longest ones without any.
    for span, inner in ((128, 32), (64, 8)):
        narrow = _map((70, 37), (144,), (inner, 12), 2, span)
        found += [_load(f"2d_narrow_{span}", narrow, (8, 5)), _store(f"2d_narrow_{span}", narrow, (8, 5))]
    found.append(_load("2d_wide", _map((300, 9), (608,), (256, 4), 2, 0), (48, 6)))
    for rank, label, at, tensor_map in _many_dimensions(2):
        found.append(_load(f"{rank}d_{label}", tensor_map, at))
        found += [_store(f"{rank}d_{label}", tensor_map, at)] if min(at) >= 0 else []
    for rank, label, at, tensor_map in _many_dimensions(4):
        found += [_reduce(f"{rank}d_{label}", tensor_map, at)] if min(at) >= 0 else []
    return found + _refused()


def _refused() -> list[Case]:
    """Copies that the machine stops at: an unaligned first element, a store and a reduction that start below 0."""
    half, single = _map((64, 37), (128,), (32, 12), 2, 0), _map((40, 21), (192,), (20, 10), 4, 0)
    refused = [
        _load("2d_unaligned", half, (3, 5)),
        _store("2d_negative", half, (8, -2)),
        _reduce("2d_negative", single, (-4, 3)),
    ]
    return [replace(case, faults=True) for case in refused]


def _map(
    dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], itemsize: int, span: int
) -> isa.TensorMap:
    return isa.TensorMap(dims=dims, strides=strides, box=box, itemsize=itemsize, span=span)


def _many_dimensions(itemsize: int) -> list[tuple[int, str, tuple[int, ...], isa.TensorMap]]:
    """(rank, label, coordinates, map) of 3 to 5 dimensions with gaps between rows; three boxes lie partly outside."""
    inner = 64 // itemsize  # elements of a 64-byte row
    row = 160
    maps = {
        3: (_map((inner + 8, 10, 5), (row, 10 * row + 32), (inner // 2, 4, 3), itemsize, 32),
            ((8, 2, 1), (inner, 8, 3), (-8, 8, 3), (inner, -2, -1))),
        4: (_map((inner + 8, 6, 5, 4), (row, 6 * row, 31 * row), (inner, 3, 2, 2), itemsize, 64),
            ((0, 1, 2, 1), (8, 4, 4, 3), (8, 4, -1, 3), (-16, -1, 4, -1))),
        5: (_map((2 * inner, 4, 3, 3, 2), (row, 4 * row, 13 * row, 40 * row), (2 * inner, 2, 2, 2, 2), itemsize, 128),
            ((0, 1, 1, 0, 0), (8, 3, 2, 2, 1), (8, -1, 2, 2, 1), (-8, 3, -1, -1, -1))),
    }  # fmt: skip
    labels = ("inside", "high", "mixed", "low")
    return [
        (rank, label, at, tensor_map)
        for rank, (tensor_map, places) in maps.items()
        for label, at in zip(labels, places, strict=True)
    ]


def _start(tensor_map: isa.TensorMap) -> int:
    """Of the box in shared memory: the smallest place that shows its alignment, after what must not change."""
    return {0: 128, 32: 256, 64: 512, 128: 1024}[tensor_map.span]


def _shared_bytes(tensor_map: isa.TensorMap) -> int:
    return -(-(_start(tensor_map) + tensor_map.shared_bytes + _GUARD) // 128) * 128


def _tensor_bytes(tensor_map: isa.TensorMap) -> int:
    """The gaps of the last row included."""
    outer = sum((n - 1) * s for n, s in zip(tensor_map.dims[1:], tensor_map.strides, strict=True))
    return outer + tensor_map.strides[0]


def _filled(count: int, itemsize: int, offset: int) -> Array:
    """`count` bytes of elements that are all different: 16-bit patterns, or small integers as float32."""
    index = np.arange(count // itemsize) + offset
    elements = index.astype(np.uint16) if itemsize == 2 else index.astype(np.float32)
    return elements.view(np.uint8)


def _host(tensor_map: isa.TensorMap, at: tuple[int, ...]) -> Host:
    box = Box(
        rank=len(tensor_map.dims),
        is_float=int(tensor_map.itemsize == 4),
        swizzle=isa.TENSOR_MAP_SWIZZLE[tensor_map.span],
        shared_bytes=_shared_bytes(tensor_map),
        start=_start(tensor_map),
        box_bytes=tensor_map.box_bytes,
    )
    for name, numbers in (
        ("box", tensor_map.box), ("coordinate", at), ("dims", tensor_map.dims), ("strides", tensor_map.strides),
    ):  # fmt: skip
        getattr(box, name)[: len(numbers)] = numbers
    return Host(box)


def _load(label: str, tensor_map: isa.TensorMap, at: tuple[int, ...]) -> Case:
    tensor = _filled(_tensor_bytes(tensor_map), tensor_map.itemsize, 1)  # no element is 0, as what lies outside is
    before = values.background(_shared_bytes(tensor_map))
    rank = len(tensor_map.dims)
    return Case(
        f"tma_load_{label}",
        "tensor_sm90a.cu",
        "probe_tensor_load",
        (f"tma_load_{rank}d", "prefetch_tensormap", "fence_proxy_async", "mbarrier_arrive_expect_tx"),
        (Input(tensor), Input(before), Output("memory", np.zeros_like(before)), _host(tensor_map, at)),
        lambda _: {"memory": Exact(isa.tma_load(before, tensor, tensor_map, _start(tensor_map), at))},
    )


def _store(label: str, tensor_map: isa.TensorMap, at: tuple[int, ...]) -> Case:
    tensor = values.background(_tensor_bytes(tensor_map))
    memory = _filled(_shared_bytes(tensor_map), tensor_map.itemsize, 1)

    def expected(_: float) -> Mapping[str, Expected]:
        return {"tensor": Exact(isa.tma_store(memory, tensor, tensor_map, _start(tensor_map), at))}

    return Case(
        f"tma_store_{label}",
        "tensor_sm90a.cu",
        "probe_tensor_store",
        (f"tma_store_{len(tensor_map.dims)}d", "bulk_commit", "bulk_wait", "fence_proxy_async"),
        (Output("tensor", tensor), Input(memory), _host(tensor_map, at)),
        expected,
    )


def _reduce(label: str, tensor_map: isa.TensorMap, at: tuple[int, ...]) -> Case:
    tensor = _filled(_tensor_bytes(tensor_map), 4, 100_000)
    memory = _filled(_shared_bytes(tensor_map), 4, 1)

    def expected(_: float) -> Mapping[str, Expected]:
        return {"tensor": Exact(isa.tma_reduce_add_f32(memory, tensor, tensor_map, _start(tensor_map), at))}

    return Case(
        f"tma_reduce_add_{label}",
        "tensor_sm90a.cu",
        "probe_tensor_reduce",
        (f"tma_reduce_add_{len(tensor_map.dims)}d", "bulk_commit", "bulk_wait"),
        (Output("tensor", tensor), Input(memory), _host(tensor_map, at)),
        expected,
    )
