"""Cases of the warp: ldmatrix, stmatrix, mma, shfl, vote, redux, cvt, ex2, rcp, lg2, atomics."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np

from verify.conformance import values
from verify.conformance.case import Allowed, AnyOrder, Array, Case, Exact, Expected, Input, Near, Output
from verify.emulator import isa

_IMAGE_BYTES = 1024
_LANE = np.arange(32)


def cases() -> list[Case]:
    return [
        *(_ldmatrix(trans) for trans in (False, True)),
        *(_stmatrix(trans) for trans in (False, True)),
        *(make(name) for name in ("bf16", "f16") for make in (_mma_layout, _mma_sums)),
        *(_exchange(label) for label in ("mixed", "negative")),
        _arithmetic(),
        _reciprocals(),
        _words(),
        _atomics(),
    ]


def _table(column: Array) -> Array:
    """(32, 4) uint32 with `column` first: what load_registers of the probes reads."""
    table = np.zeros((32, 4), np.uint32)
    table[: len(column), 0] = column
    return table


def _rows() -> Array:
    """(32,) byte offsets of 16-byte rows in an order that is neither ascending nor dense."""
    return 16 * ((13 * _LANE + 5) % (_IMAGE_BYTES // 16))


def _ldmatrix(trans: bool) -> Case:
    image = (np.arange(_IMAGE_BYTES // 2) * 131 + 7).astype(np.uint16).view(np.uint8)
    suffix = "_trans" if trans else ""
    return Case(
        f"ldmatrix_x4{suffix}",
        "warp_sm80.cu",
        "probe_ldmatrix",
        (f"ldmatrix_x4{suffix}", "dynamic_smem", "ld_shared_b128", "st_global_b128"),
        (
            Input(image), Input(_table(_rows())), Output("registers", np.zeros((32, 4), np.uint32)),
            ctypes.c_int(_IMAGE_BYTES), ctypes.c_int(trans),
        ),
        lambda _: {"registers": Exact(isa.ldmatrix_x4(image, _rows(), trans=trans))},
    )  # fmt: skip


def _stmatrix(trans: bool) -> Case:
    before, registers = values.background(_IMAGE_BYTES), values.labels(32, 4)
    suffix = "_trans" if trans else ""
    return Case(
        f"stmatrix_x4{suffix}",
        "warp_sm90a.cu",
        "probe_stmatrix",
        (f"stmatrix_x4{suffix}",),
        (
            Input(before), Input(_table(_rows())), Input(registers), Output("memory", np.zeros_like(before)),
            ctypes.c_int(_IMAGE_BYTES), ctypes.c_int(trans),
        ),
        lambda _: {"memory": Exact(isa.stmatrix_x4(before, _rows(), registers, trans=trans))},
    )  # fmt: skip


def _mma_layout(name: str) -> Case:
    """Products without rounding: B read out by an identity, both halves of A read out, then integers plus integers."""
    unique_a, unique_b = values.codes(256, name).reshape(16, 16), values.codes(128, name).reshape(16, 8)
    identity = values.repeated_identity(16, 16, name)
    a = [identity, unique_a, unique_a, values.small_integers((16, 16), 1, name)]
    b = [unique_b, identity[:, :8], identity[:, 8:], values.small_integers((16, 8), 2, name)]
    c = np.zeros((4, 32, 4), np.float32)
    c[3] = values.integers(128, 3, -1000, 1000).reshape(32, 4)
    return _mma(f"mma_m16n8k16_{name}_layout", name, a, b, c, lambda s, _: Exact(s.exact.astype(np.float32)))


def _mma_sums(name: str) -> Case:
    """Products of arbitrary fractions, with C = 0 and with C larger than they are."""
    a = [values.fractions((16, 16), seed, name) for seed in (10, 12, 14, 16)]
    b = [values.fractions((16, 8), seed, name) for seed in (11, 13, 15, 17)]
    c = np.zeros((4, 32, 4), np.float32)
    c[2:] = values.integers(256, 4, -(2**20), 2**20).reshape(2, 32, 4) / 2**15
    return _mma(f"mma_m16n8k16_{name}_sums", name, a, b, c, lambda s, relative: Near(*s, relative))


def _mma(
    case: str, name: str, a: list[Array], b: list[Array], c: Array, judge: Callable[[isa.Sum, float], Expected]
) -> Case:
    left = np.stack([isa.pack(isa.gather(matrix, isa.mma_a())) for matrix in a])
    right = np.zeros((len(b), 32, 4), np.uint32)
    right[..., :2] = [isa.pack(isa.gather(matrix, isa.mma_b())) for matrix in b]

    def expected(relative: float) -> Mapping[str, Expected]:
        sums = [isa.mma_m16n8k16(left[i], right[i, :, :2], c[i], name) for i in range(len(c))]
        return {"d": judge(isa.Sum(*(np.stack(part) for part in zip(*sums, strict=True))), relative)}

    return Case(
        case,
        "warp_sm80.cu",
        "probe_mma",
        (f"mma_m16n8k16_{name}",),
        (
            Input(left), Input(right), Input(c), Output("d", np.zeros_like(c)), ctypes.c_int(len(c)),
            ctypes.c_int(name == "bf16"),
        ),
        expected,
    )  # fmt: skip


def _exchange(label: str) -> Case:
    """shfl_xor by six masks; redux over numbers of both signs, or over negative ones only."""
    masks = np.array([1, 2, 4, 8, 16, 31], np.uint32)
    table = values.labels(32, 4)
    table[:, 0] = table[:, 0] >> 2 | 0x20000000  # finite floats of ordinary size
    if label == "negative":
        table[:, 1] |= 0x80000000
    signed = table[:, 1].view(np.int32)

    def expected(_: float) -> Mapping[str, Expected]:
        want = np.zeros((len(masks), 32, 4), np.uint32)
        for block, mask in enumerate(masks):
            want[block, :, 0] = isa.shfl_xor(table[:, 0], int(mask))
            want[block, :, 1] = isa.redux_max_s32(signed).view(np.uint32)
            want[block, :, 2] = block
        return {"out": Exact(want)}

    return Case(
        f"exchange_{label}",
        "warp_sm80.cu",
        "probe_exchange",
        ("shfl_xor", "redux_max_s32", "ctaid_x"),
        (
            Input(table), Input(_table(masks)), Output("out", np.zeros((len(masks), 32, 4), np.uint32)),
            ctypes.c_int(len(masks)),
        ),
        expected,
    )  # fmt: skip


def _floats() -> Array:
    """(8192,) float32: special values, ties and their neighbours in both formats, exponents of every size."""
    special = np.array(
        [
            0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF,
            0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF,
            0x3F800000, 0xBF800000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0xC77FEFFF, 0xC77FF000, 0x47800000,
            0x33000000, 0x33000001, 0x33800000, 0x33C00000, 0x387FC000, 0x387FE000, 0x38800000, 0xB3000001,
            0x7F7F7FFF, 0x7F7F8000, 0x7F7F8001, 0xFF7F8000, 0x00004000, 0x00008000, 0x00008001, 0x00018000,
            0xC2FC0000, 0xC2FBFFFF, 0xC2FC0001, 0xC3150000, 0x42FFFFFF, 0x43000000, 0xC3160000, 0x34000000,
        ],
        np.uint32,
    )  # fmt: skip
    bits = (values.bits64(8192 - len(special), 20) >> np.uint64(32)).astype(np.uint32)
    quarter = len(bits) // 4
    near_tie = (values.bits64(quarter, 21) % np.uint64(3)).astype(np.int64) - 1
    bits[:quarter] = ((bits[:quarter] & 0xFFFF0000 | 0x8000) + near_tie).astype(np.uint32)  # bf16
    exponent = 102 + bits[quarter : 2 * quarter] % 44  # from half the smallest f16 subnormal to overflow
    f16_tie = (bits[quarter : 2 * quarter] & 0x807FE000 | 0x1000) + near_tie
    bits[quarter : 2 * quarter] = (f16_tie | exponent.astype(np.int64) << 23).astype(np.uint32)
    # Arguments of ex2 whose results are ordinary: -160..140 in steps of 2^-16.
    steps = values.integers(quarter, 22, -160 << 16, 140 << 16)
    bits[2 * quarter : 3 * quarter] = (steps / 2.0**16).astype(np.float32).view(np.uint32)
    return np.concatenate([special, bits]).view(np.float32)


def _arithmetic() -> Case:
    x = _floats()
    quads = x.reshape(-1, 4)

    def expected(_: float) -> Mapping[str, Expected]:
        pairs = [isa.cvt_rn_x2(quads[:, i], quads[:, i + 1], name) for name in ("bf16", "f16") for i in (0, 2)]
        return {
            "powers": Allowed(lambda got: isa.ex2_agrees(quads, got), isa.EX2_RELATIVE_ERROR),
            "pairs": Exact(np.stack(pairs, axis=1)),
        }

    return Case(
        "arithmetic",
        "warp_sm80.cu",
        "probe_arithmetic",
        ("ex2_approx_ftz", "cvt_rn_bf16x2", "cvt_rn_f16x2"),
        (
            Input(quads), Output("powers", np.zeros_like(quads)), Output("pairs", np.zeros(quads.shape, np.uint32)),
            ctypes.c_int(len(quads) // 128),
        ),
        expected,
    )  # fmt: skip


def _reciprocals() -> Case:
    """rcp and lg2 of the same numbers as ex2: what ends a row, O / l and ln l."""
    quads = _floats().reshape(-1, 4)

    def expected(_: float) -> Mapping[str, Expected]:
        return {
            "reciprocals": Allowed(lambda got: isa.rcp_agrees(quads, got), isa.RCP_RELATIVE_ERROR),
            "logarithms": Allowed(lambda got: isa.lg2_agrees(quads, got), isa.LG2_ERROR, isa.LG2_ERROR),
        }

    return Case(
        "reciprocals",
        "warp_sm90a.cu",
        "probe_reciprocals",
        ("rcp_approx_ftz", "lg2_approx_ftz"),
        (
            Input(quads), Output("reciprocals", np.zeros_like(quads)), Output("logarithms", np.zeros_like(quads)),
            ctypes.c_int(len(quads) // 128),
        ),
        expected,
    )  # fmt: skip


def _words() -> Case:
    """st_shared_b128 against ld_shared_b32; vote, maximum of three, shfl on bits, float bits and back."""
    masks = np.array([1, 5, 16, 31], np.uint32)
    registers = values.labels(32, 4)
    registers[:, 1] = registers[:, 1] & 0x3FFFFFFF | 0x20000000  # finite floats
    registers[7, 0] = 5  # the only lane that the vote finds, for the second mask

    def expected(_: float) -> Mapping[str, Expected]:
        scratch = np.zeros((32, 4), np.uint32)
        scratch[11 * _LANE % 32] = registers
        want = np.zeros((len(masks), 32, 4), np.uint32)
        want[..., 0] = scratch.ravel()[(37 * _LANE + 5) % 128]
        want[..., 1] = registers[:, :3].view(np.int32).max(axis=1).view(np.uint32)
        want[..., 2] = registers[:, 1]
        for block, mask in enumerate(masks):
            want[block, :, 3] = isa.shfl_xor(registers[:, 3], int(mask))
        found = [[(registers[:, 0] == mask).any()] * 4 for mask in masks]
        return {"out": Exact(want), "any": Exact(np.array(found, np.uint32))}

    return Case(
        "words",
        "warp_sm90a.cu",
        "probe_words",
        ("st_shared_b128", "ld_shared_b32", "max3_s32", "float_as_s32", "s32_as_float", "shfl_xor_b32", "vote_any"),
        (
            Input(registers), Input(_table(masks)), Output("out", np.zeros((len(masks), 32, 4), np.uint32)),
            Output("any", np.zeros((len(masks), 4), np.uint32)), ctypes.c_int(len(masks)),
        ),
        expected,
    )  # fmt: skip


def _atomics() -> Case:
    """Four counters and 24 sums that 3 blocks of 64 threads add integers to: exact in every order."""
    blocks, step = 3, 7
    before = values.integers(24, 30, -100, 100).astype(np.float32)

    def expected(_: float) -> Mapping[str, Expected]:
        each = blocks * 64 // 4
        sums = before.copy()
        for thread in list(range(64)) * blocks:
            sums[thread % 8] += thread
            sums[8 + 2 * (thread % 4) :][:2] += thread + np.arange(2)
            sums[16 + 4 * (thread % 2) :][:4] += thread + np.arange(4)
        return {
            "counters": Exact(np.full(4, step * each, np.uint32)),
            "found": AnyOrder(np.repeat(step * np.arange(each, dtype=np.float32), 4)),
            "sums": Exact(sums),
        }

    return Case(
        "atomics",
        "warp_sm90a.cu",
        "probe_atomics",
        ("atomic_add_global_u32", "red_add_f32", "red_add_v2_f32", "red_add_v4_f32"),
        (
            Output("counters", np.zeros(4, np.uint32)), Output("found", np.zeros(64 * blocks, np.float32)),
            Output("sums", before), ctypes.c_int(step), ctypes.c_int(blocks),
        ),
        expected,
    )  # fmt: skip
