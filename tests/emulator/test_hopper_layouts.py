"""Where the bytes lie: boxes of tensor maps in every swizzle mode, and the operands and registers of wgmma.

The expected layouts are stated here a second time, from the PTX ISA ("Shared Memory Matrix Layout": canonical layouts;
"Tensors": bounding box, swizzling modes), as whole-array NumPy formulas. What the manual does not say of tensor copies,
tests/data says from an H200 (see verify/emulator/isa_tensor.py).
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.emulator import hopper
from verify.emulator.emulator import SCHEDULES, guarded, guarded_copy

NONE, SW32, SW64, SW128 = range(4)  # CUtensorMapSwizzle
DESCRIPTOR_MODE = {NONE: 0, SW128: 1, SW64: 2, SW32: 3}
SPAN = {NONE: 16, SW32: 32, SW64: 64, SW128: 128}


def swizzle(address: np.ndarray, mode: int) -> np.ndarray:
    """The 16-byte chunk number within a row is exclusive-or'ed with the number of the 128-byte line."""
    return address ^ ((address // 128 % (SPAN[mode] // 16)) * 16)


# ---- Operands of wgmma


def operand_addresses(extent: int, mode: int, mn_major: bool, lbo: int, sbo: int) -> np.ndarray:
    """(extent, 16): byte address of element (i, k) from the canonical layout, T = 8 elements of 16 bits."""
    i, k = np.meshgrid(np.arange(extent), np.arange(16), indexing="ij")
    wide = SPAN[mode] // 2  # elements in a row of the pattern
    if not mn_major and mode == NONE:  # ((8,m),(T,2)) : ((1T,SBO),(1,LBO))
        linear = i % 8 * 16 + i // 8 * sbo + k % 8 * 2 + k // 8 * lbo
    elif not mn_major:  # ((8,m),(T,2)) : ((wT,SBO),(1,T))
        linear = i % 8 * SPAN[mode] + i // 8 * sbo + k * 2
    elif mode == NONE:  # ((T,1,m),(8,k)) : ((1,T,SBO),(1T,LBO))
        linear = i % 8 * 2 + i // 8 * sbo + k % 8 * 16 + k // 8 * lbo
    else:  # ((T,w,m),(8,k)) : ((1,T,LBO),(wT,SBO))
        linear = i % wide * 2 + i // wide * lbo + k % 8 * SPAN[mode] + k // 8 * sbo
    return swizzle(linear, mode)


def strides(extent: int, mode: int, mn_major: bool) -> tuple[int, int]:
    """LBO and SBO of a dense tile, as the kernels lay it out; the unused one is not 0, so that using it shows."""
    eight = 8 * SPAN[mode]
    if mode == NONE:  # eight by eight blocks of 128 bytes, along the extent first
        return extent // 8 * 128, 128
    return (4096, eight) if not mn_major else (2 * eight, eight)  # 16 of K is two groups of eight


def place(matrix: np.ndarray, mode: int, mn_major: bool, image: np.ndarray, start: int) -> int:
    """Writes a (extent, 16) operand into shared memory; its descriptor."""
    lbo, sbo = strides(len(matrix), mode, mn_major)
    address = start + operand_addresses(len(matrix), mode, mn_major, lbo, sbo)
    assert len(np.unique(address)) == matrix.size
    image.view(np.uint16)[address // 2] = matrix
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | DESCRIPTOR_MODE[mode] << 62


def registers_of(matrix: np.ndarray) -> np.ndarray:
    """(128, columns / 2): accumulator registers of 64 rows. Register 4j + 2h + e is row + 8h, column 8j + 2t + e."""
    thread, index = np.meshgrid(np.arange(128), np.arange(matrix.shape[1] // 2), indexing="ij")
    row = thread // 32 * 16 + thread % 32 // 4 + index // 2 % 2 * 8
    return matrix[row, index // 4 * 8 + thread % 4 * 2 + index % 2]


def run_product(a, b, c, mode_a, mode_b, trans_a, trans_b, registers):
    emulator = hopper.emulator("hopper_product")
    n = b.shape[0]
    start_b, start_registers = 16384, 16384 + 65536
    image = guarded((start_registers + 128 * 16 + 128 * n * 2,), np.uint8)
    to_bits = (lambda x: x.astype(np.float16).view(np.uint16)) if registers else hopper.to_bf16
    a_descriptor = place(to_bits(a), mode_a, trans_a, image, 0)
    b_descriptor = place(to_bits(b), mode_b, trans_b, image, start_b)
    fragment = registers_of(to_bits(a)).astype(np.uint32)  # A's fragment is an accumulator's, two to a register
    tail = image[start_registers:].view(np.uint32)
    tail[: 128 * 4] = (fragment[:, 0::2] | fragment[:, 1::2] << 16).reshape(-1)
    tail[128 * 4 :] = registers_of(c).view(np.uint32).reshape(-1)
    out = guarded((128, n // 2), np.float32)
    emulator.clear()
    emulator.configure(SCHEDULES[0])
    emulator.register("image", image)
    emulator.register("out", out, once=True)
    descriptors = (ctypes.c_uint64(a_descriptor), ctypes.c_uint64(b_descriptor))
    flags = (int(registers), int(trans_a), int(trans_b))
    run = emulator.launch("hopper_product", image, image.nbytes, start_registers, *descriptors, out, n, *flags, None)
    return run, out


def small_integers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


@pytest.mark.parametrize("trans_b", [False, True], ids=["k_major_b", "n_major_b"])
@pytest.mark.parametrize("trans_a", [False, True, None], ids=["k_major_a", "m_major_a", "a_in_registers"])
@pytest.mark.parametrize("mode", [NONE, SW32, SW64, SW128], ids=["none", "32B", "64B", "128B"])
def test_every_operand_layout_gives_the_product(mode, trans_a, trans_b):
    for n in (8, 64, 136, 256):
        b_mode = mode if not trans_b or n % (SPAN[mode] // 2) == 0 else NONE  # N-major panels are whole spans
        a, b, c = small_integers(n, 64, 16), small_integers(n + 1, n, 16), small_integers(n + 2, 64, n)
        run, out = run_product(a, b, c, mode, b_mode, bool(trans_a), trans_b, trans_a is None)
        run.check(f"n = {n}")
        np.testing.assert_array_equal(out, registers_of(a @ b.T + c))


def test_a_descriptor_with_a_base_offset_or_stray_bits_is_refused():
    a, b = small_integers(0, 64, 16), small_integers(1, 64, 16)
    for bit, said in ((49, "base offset"), (14, "outside of its fields"), (55, "outside of its fields")):
        emulator = hopper.emulator("hopper_product")
        image, out = guarded((65536,), np.uint8), guarded((128, 32), np.float32)
        descriptor = place(hopper.to_bf16(a), SW128, False, image, 0)
        other = place(hopper.to_bf16(b), SW128, False, image, 16384)
        emulator.clear()
        emulator.register("image", image)
        emulator.register("out", out, writable=True)
        descriptors = (ctypes.c_uint64(descriptor | 1 << bit), ctypes.c_uint64(other))
        run = emulator.launch("hopper_product", image, image.nbytes, 32768, *descriptors, out, 64, 0, 0, 0, None)
        assert [one.kind for one in run.findings] == ["wgmma-descriptor"] and said in run.findings[0].sentence


# ---- Boxes of tensor maps

TYPES = {6: np.float16, 7: np.float32, 8: np.float64, 9: np.uint16, 3: np.int32, 0: np.uint8}  # 9: bf16 bits


def run_box(
    tensor, box, coordinates, mode, operation, image, *, kind=9, schedule=SCHEDULES[0],
    registered=None, dims=None, strides_bytes=None, element_strides=None, interleave=0, fill=0,
):  # fmt: skip
    """Innermost dimension last in `tensor`, first in all arguments of the map."""
    emulator = hopper.emulator("hopper_boxes")
    rank = tensor.ndim
    dims = list(reversed(tensor.shape)) if dims is None else dims
    strides_bytes = list(reversed(tensor.strides))[1:] if strides_bytes is None else strides_bytes
    ones = [1] * rank if element_strides is None else element_strides
    emulator.clear()
    emulator.configure(schedule)
    emulator.register("tensor", tensor if registered is None else registered, writable=operation != 0)
    emulator.register("image", image, writable=operation == 0)
    u64, u32, i32 = (lambda x, t=t: (t * len(x))(*x) for t in (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int))
    return emulator.launch(
        "hopper_box", tensor, kind, rank, u64(dims), u64(strides_bytes), u32(box), u32(ones), interleave, mode, fill,
        i32(coordinates), image, image.nbytes, int(np.prod(box)) * tensor.itemsize, operation, None,
    )  # fmt: skip


def box_addresses(box: list[int], itemsize: int, mode: int) -> np.ndarray:
    """Byte address of each element of the box: rows of at least one span, one after the other, swizzled by chunks."""
    rows = np.arange(np.prod(box[1:])).reshape([*reversed(box[1:]), 1])
    linear = rows * max(box[0] * itemsize, SPAN[mode]) + np.arange(box[0]) * itemsize
    return swizzle(linear // 16 * 16, mode) + linear % 16


def cut(tensor: np.ndarray, box: list[int], coordinates: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The box as an array, zero outside the tensor, and a mask of what lies inside."""
    index = np.meshgrid(*[np.arange(c, c + n) for c, n in zip(coordinates, box, strict=True)][::-1], indexing="ij")
    inside = np.ones(list(reversed(box)), bool)
    for axis, n in zip(index, tensor.shape, strict=True):
        inside &= (axis >= 0) & (axis < n)
    clipped = tuple(np.clip(axis, 0, n - 1) for axis, n in zip(index, tensor.shape, strict=True))
    return np.where(inside, tensor[clipped], 0).astype(tensor.dtype), inside


LOADED = [  # shape (innermost last), box and coordinates (innermost first), mode, data type
    pytest.param((20, 64), [64, 16], [0, 2], SW128, 9, id="2d_128B"),
    pytest.param((20, 72), [64, 16], [16, 8], SW128, 9, id="2d_128B_beyond_two_edges"),
    pytest.param((3, 40, 24), [16, 24, 2], [8, 30, 2], SW32, 6, id="3d_32B"),
    pytest.param((2, 3, 9, 64), [64, 8, 2, 1], [0, 4, 2, 1], SW128, 9, id="4d_128B"),
    pytest.param((2, 2, 3, 5, 32), [32, 4, 2, 2, 1], [0, 3, 1, 1, 1], SW64, 6, id="5d_64B"),
    pytest.param((9, 32), [32, 9], [0, 0], SW128, 7, id="2d_128B_of_float32"),
    pytest.param((9, 32), [16, 3], [0, 8], SW32, 0, id="bytes_in_rows_of_half_a_span"),
    pytest.param((9, 64), [32, 5], [32, 3], SW128, 9, id="2d_128B_in_rows_of_half_a_span"),
    pytest.param((5, 64), [64, 4], [64, 0], SW128, 9, id="2d_wholly_outside"),
]  # fmt: skip
BEFORE = [  # only loads may start before the tensor
    pytest.param((20, 72), [32, 16], [-8, -3], SW64, 9, id="2d_64B_before_both_edges"),
    pytest.param((3, 7, 8), [8, 8, 4], [0, -1, -1], NONE, 7, id="3d_none"),
]  # fmt: skip


def numbered(shape, kind):
    dtype = TYPES[kind]
    values = np.arange(1, np.prod(shape) + 1).reshape(shape)
    return guarded_copy((values % 251 + 1).astype(dtype) if kind in (0, 6) else values.astype(dtype))


@pytest.mark.parametrize("shape, box, coordinates, mode, kind", LOADED + BEFORE)
def test_a_load_puts_each_element_where_the_map_says_and_zeros_outside(shape, box, coordinates, mode, kind):
    tensor = numbered(shape, kind)
    want, inside = cut(tensor, box, coordinates)
    addresses = box_addresses(box, tensor.itemsize, mode)
    for schedule in SCHEDULES:
        image = guarded((4096 * 8,), np.uint8, fill=0xA5)
        run = run_box(tensor, box, coordinates, mode, 0, image, kind=kind, schedule=schedule).check()
        got = image.view(tensor.dtype)
        np.testing.assert_array_equal(got[addresses // tensor.itemsize], want)
        assert (np.delete(got, addresses // tensor.itemsize).view(np.uint8) == 0xA5).all()
        assert run.bytes("tensor") == (int(inside.sum()) * tensor.itemsize, 0)


@pytest.mark.parametrize("shape, box, coordinates, mode, kind", LOADED)
def test_a_store_writes_the_elements_inside_and_no_others(shape, box, coordinates, mode, kind):
    tensor, itemsize = numbered(shape, kind), np.dtype(TYPES[kind]).itemsize
    _, inside = cut(tensor, box, coordinates)
    image = guarded((4096 * 8,), np.uint8)
    values = (np.arange(inside.size).reshape(inside.shape) % 250 + 3).astype(tensor.dtype)
    image.view(tensor.dtype)[box_addresses(box, itemsize, mode) // itemsize] = values
    want = tensor.copy()
    place_of = np.meshgrid(*[np.arange(c, c + n) for c, n in zip(coordinates, box, strict=True)][::-1], indexing="ij")
    want[tuple(axis[inside] for axis in place_of)] = values[inside]
    run = run_box(tensor, box, coordinates, mode, 1, image, kind=kind).check()
    np.testing.assert_array_equal(tensor, want)
    assert run.bytes("tensor") == (0, int(inside.sum()) * itemsize)


def test_a_store_writes_the_last_chunk_of_a_row_whole():
    memory = guarded((12, 24), np.uint16, fill=0)
    tensor, image = memory[:, :20], guarded((4096,), np.uint8, fill=0x11)  # rows of 2.5 chunks, 4 elements between rows
    run_box(tensor, [24, 4], [0, 2], NONE, 1, image, registered=memory).check()
    want = np.zeros_like(memory)
    want[2:6] = 0x1111
    np.testing.assert_array_equal(memory, want)


@pytest.mark.parametrize("operation", [0, 1, 2], ids=["load", "store", "reduction"])
def test_a_box_starts_at_a_multiple_of_16_bytes(operation):
    tensor, image = numbered((16, 64), 9), guarded((4096,), np.uint8, fill=0)
    done = run_box(tensor, [64, 8], [4, 0], SW128, operation, image)
    assert [one.kind for one in done.findings] == ["tensor-coordinate"]
    assert "at coordinate 4 of dimension 0, which is not a multiple of 16 bytes" in done.findings[0].sentence


@pytest.mark.parametrize("operation", [1, 2], ids=["store", "reduction"])
@pytest.mark.parametrize("coordinates, dimension", [([-8, 0], 0), ([0, -1], 1)])
def test_a_box_is_not_written_from_before_the_tensor_on(operation, coordinates, dimension):
    tensor, image = numbered((16, 64), 9), guarded((4096,), np.uint8, fill=0)
    done = run_box(tensor, [64, 8], coordinates, SW128, operation, image)
    assert [one.kind for one in done.findings] == ["tensor-coordinate"]
    assert f"at coordinate {min(coordinates)} of dimension {dimension}" in done.findings[0].sentence


@pytest.mark.parametrize("kind", [3, 6, 7, 9], ids=["int32", "float16", "float32", "bf16"])
def test_a_reduction_adds_in_the_type_of_the_map(kind):
    shape, box, coordinates, mode = (10, 24), [16, 8], [16, 4], NONE
    to_bits = hopper.to_bf16 if kind == 9 else lambda x: x.astype(TYPES[kind])
    to_values = hopper.from_bf16 if kind == 9 else lambda x: x.astype(np.float32)
    tensor, image = guarded_copy(to_bits(small_integers(1, *shape))), guarded((4096,), np.uint8)
    _, inside = cut(tensor, box, coordinates)
    added = small_integers(2, *inside.shape)
    image.view(tensor.dtype)[box_addresses(box, tensor.itemsize, mode) // tensor.itemsize] = to_bits(added)
    want = to_values(tensor)
    want[4:10, 16:24] += added[:6, :8]
    run = run_box(tensor, box, coordinates, mode, 2, image, kind=kind).check()
    np.testing.assert_array_equal(to_values(tensor), want)
    assert run.bytes("tensor") == (48 * tensor.itemsize, 48 * tensor.itemsize)


def test_a_reduction_of_doubles_by_this_instruction_is_refused():
    tensor, image = guarded_copy(np.zeros((4, 8))), guarded((4096,), np.uint8)
    run = run_box(tensor, [8, 4], [0, 0], NONE, 2, image, kind=8)
    assert [one.kind for one in run.findings] == ["tensor-map"]


REFUSED = [
    ({"box": [64, 257]}, "box 257 of dimension 1 is not in 1..256"),
    ({"box": [72, 8]}, "the inner box has 144 bytes, more than the swizzle span of 128"),
    ({"box": [4, 8], "mode": NONE}, "the inner box has 8 bytes, which 16 does not divide"),
    ({"box": [64, 0]}, "box 0 of dimension 1 is not in 1..256"),
    ({"strides_bytes": [136]}, "stride 136 of dimension 1 is not a multiple of 16 bytes"),
    ({"strides_bytes": [1 << 40]}, "stride 1099511627776 of dimension 1 is not below 2^40"),
    ({"dims": [64, 0]}, "size 0 of dimension 1 is not in 1..2^32"),
    ({"dims": [64, (1 << 32) + 1]}, "size 4294967297 of dimension 1 is not in 1..2^32"),
    ({"element_strides": [1, 2]}, "element stride 2 of dimension 1 is not 1"),
    ({"interleave": 1}, "interleaved layouts are not supported"),
    ({"mode": 4}, "swizzle mode 4 is not supported"),
    ({"fill": 1}, "only zero fill is supported"),
    ({"kind": 14}, "data type 14 is unknown"),
]


@pytest.mark.parametrize("change, said", REFUSED, ids=[said for _, said in REFUSED])
def test_the_encoder_refuses_what_the_driver_refuses(change, said):
    words = {"box": [64, 8], "mode": SW128, **change}
    tensor, image = numbered((16, 64), 9), guarded((4096,), np.uint8)
    box, mode = words.pop("box"), words.pop("mode")
    run = run_box(tensor, box, [0, 0], mode, 0, image, **words)
    assert run.code == 1000
    reason = hopper.library("hopper_boxes").emu_tensor_map_reason
    reason.restype = ctypes.c_char_p
    assert reason().decode() == f"cuTensorMapEncodeTiled: {said}"


def test_the_encoder_refuses_a_misaligned_base():
    tensor, image = numbered((16, 72), 9)[:, 4:], guarded((4096,), np.uint8)
    run = run_box(tensor, [64, 8], [0, 0], SW128, 0, image)
    assert run.code == 1000
