"""Cases of wgmma: where each descriptor reads A and B, the fragments of every N, integers and sums.

In a read-out one factor is an identity (repeated along its longer side) and every 16-bit element of shared memory is
different: each element of D then names the address, or the register, that it came from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from verify.conformance import values
from verify.conformance.case import Array, Case, Exact, Expected, Input, Near, Output
from verify.emulator import isa

_K = 16
_M = 64
_BASIC = ("wgmma_fence", "wgmma_commit", "wgmma_wait", "pin", "fence_proxy_async")


@dataclass(frozen=True)
class Layout:
    """How an operand lies in shared memory; bytes. `leading` and `stride` are the descriptor's."""

    span: int
    k_major: bool
    leading: int
    stride: int
    start: int = 0

    def descriptor(self, base: int = 0) -> int:
        return isa.matrix_descriptor(base + self.start, self.leading, self.stride, self.span)

    def size(self, rows: int) -> int:
        """Bytes from the base to behind the operand, whole swizzle patterns."""
        reach = isa.operand_addresses(self.descriptor(), rows, _K, k_major=self.k_major).max() + 2
        return -(-int(reach) // 1024) * 1024

    @property
    def name(self) -> str:
        major = "k" if self.k_major else "mn"
        return f"{major}{self.span}_l{self.leading}_s{self.stride}" + (f"_at{self.start}" if self.start else "")


PLAIN = Layout(0, True, leading=128, stride=256)  # core matrices side by side: what an identity is stored in
ROWS_128 = Layout(128, True, leading=16, stride=1024)


def layouts(rows: int) -> Iterator[Layout]:
    """Layouts of an operand with `rows` rows (M or N): every mode, both majors, dense, padded and shifted."""
    groups = rows // 8
    yield PLAIN
    yield Layout(0, True, leading=128 * groups, stride=128)
    yield Layout(0, True, leading=128 * groups + 256, stride=128)
    yield Layout(0, False, leading=128 * groups, stride=128)
    yield Layout(0, False, leading=128, stride=256)
    for span in (32, 64, 128):
        atom = 8 * span
        # The leading offset of swizzled K-major layouts is not used: two values must give the same.
        yield Layout(span, True, leading=16, stride=atom)
        yield Layout(span, True, leading=1280, stride=atom)
        if rows <= 64:
            yield Layout(span, True, leading=16, stride=3 * atom)
        for start in range(32, span, 32):  # the next steps in k
            yield Layout(span, True, leading=16, stride=atom, start=start)
        atoms = -(-rows // (span // 2))
        yield Layout(span, False, leading=2 * atom, stride=atom)
        yield Layout(span, False, leading=atom, stride=atoms * atom)
        if rows * 2 < span:
            yield Layout(span, False, leading=atom, stride=atom, start=span - 2 * rows)  # a later slice of columns


def cases() -> list[Case]:
    found = []
    for name in ("bf16", "f16"):
        found += [_reads_b(n, ROWS_128, name) for n in range(8, 257, 8)]
        found += [_reads_registers(n, name) for n in range(8, 257, 8)]
    for n in (8, 40, 256):
        found += [_reads_b(n, layout, "bf16") for layout in layouts(n) if layout != ROWS_128]
    found += [_reads_a(layout) for layout in layouts(_M)]
    for name in ("bf16", "f16"):
        for k_major in (True, False):
            for registers in (False, True):
                found += [_multiplies(name, k_major, registers, kind) for kind in ("integers", "added", "sums")]
    return found


def _reads_b(n: int, layout: Layout, name: str) -> Case:
    """D[m][n] = B[m mod 16][n], which lies in an image of unique elements."""
    b_bytes = layout.size(n)
    left = isa.matrix_descriptor(b_bytes, PLAIN.leading, PLAIN.stride, 0)
    image = values.codes((b_bytes + _M * _K * 2) // 2, name).view(np.uint8)
    image = isa.write_operand(image, left, values.repeated_identity(_M, _K, name), k_major=True)
    b = Operand(layout.descriptor(), layout.k_major)
    return _case(f"wgmma_{name}_n{n}_b_{layout.name}", name, n, image, Operand(left, True), b)


def _reads_a(layout: Layout) -> Case:
    """D[m][n] = A[m][n] for N = 16."""
    n, a_bytes = 16, layout.size(_M)
    right = isa.matrix_descriptor(a_bytes, PLAIN.leading, PLAIN.stride, 0)
    image = values.codes((a_bytes + n * _K * 2) // 2, "bf16").view(np.uint8)
    image = isa.write_operand(image, right, values.repeated_identity(n, _K, "bf16"), k_major=True)
    a = Operand(layout.descriptor(), layout.k_major)
    return _case(f"wgmma_bf16_n{n}_a_{layout.name}", "bf16", n, image, a, Operand(right, True))


def _reads_registers(n: int, name: str) -> Case:
    """D[m][n] = A[m][n mod 16], A unique in registers; the identity B has a 128-byte swizzle, K-major for bf16."""
    layout = ROWS_128 if name == "bf16" else Layout(128, False, leading=2048, stride=1024)
    image = np.zeros(layout.size(n), np.uint8)
    identity = values.repeated_identity(n, _K, name)
    image = isa.write_operand(image, layout.descriptor(), identity, k_major=layout.k_major)
    a = values.codes(_M * _K, name).reshape(_M, _K)
    return _case(f"wgmma_{name}_n{n}_registers", name, n, image, a, Operand(layout.descriptor(), layout.k_major))


def _multiplies(name: str, k_major: bool, registers: bool, kind: str) -> Case:
    """N = 64, both operands K-major or both MN-major: integers, integers added to D, fractions added to D."""
    n = 64
    make = values.fractions if kind == "sums" else values.small_integers
    layout = Layout(128, k_major, leading=2048, stride=1024)
    base = layout.size(_M)
    left, right = make((_M, _K), 60, name), make((n, _K), 61, name)
    image = np.zeros(base + layout.size(n), np.uint8)
    image = isa.write_operand(image, layout.descriptor(base), right, k_major=k_major)
    a: Operand | Array = left
    if not registers:
        image = isa.write_operand(image, layout.descriptor(), left, k_major=k_major)
        a = Operand(layout.descriptor(), k_major)
    label = f"wgmma_{name}_{'rs' if registers else 'ss'}_{'k' if k_major else 'mn'}_{kind}"
    b = Operand(layout.descriptor(base), k_major)
    return _case(label, name, n, image, a, b, accumulate=kind != "integers", exact=kind != "sums")


@dataclass(frozen=True)
class Operand:
    """A matrix in shared memory."""

    descriptor: int
    k_major: bool


def _case(
    label: str,
    name: str,
    n: int,
    image: Array,
    a: Operand | Array,
    b: Operand,
    *,
    accumulate: bool = False,
    exact: bool = True,
) -> Case:
    """One wgmma. a: an operand in shared memory, or the matrix (64, 16) of patterns that goes to registers.

    Without `accumulate` D holds other numbers before, which must not matter.
    """
    from_registers = not isinstance(a, Operand)
    registers = np.zeros((128, 4), np.uint32)
    if not isinstance(a, Operand):
        registers = isa.pack(isa.gather(a, isa.wgmma_a()))
    first = -3000
    before = first + np.arange(128)[:, None] + 128 * np.arange(n // 2)[None, :]

    def expected(relative: float) -> Mapping[str, Expected]:
        if isinstance(a, Operand):
            left = isa.read_operand(image, a.descriptor, _M, _K, k_major=a.k_major)
        else:
            left = isa.scatter(isa.unpack(registers), isa.wgmma_a(), (_M, _K))
        right = isa.read_operand(image, b.descriptor, n, _K, k_major=b.k_major)
        c = before if accumulate else np.zeros_like(before)
        total = isa.wgmma_m64nk16(isa.decode(left, name), isa.decode(right, name).T, c)
        return {"d": Exact(total.exact.astype(np.float32)) if exact else Near(*total, relative)}

    return Case(
        label,
        "wgmma_sm90a.cu",
        "probe_wgmma",
        (f"wgmma_m64n{n}k16_{name}_{'rs' if from_registers else 'ss'}", *_BASIC),
        (
            Input(image), Input(registers), Output("d", np.zeros((128, n // 2), np.float32)),
            ctypes.c_uint64(0 if not isinstance(a, Operand) else a.descriptor), ctypes.c_uint64(b.descriptor),
            *(ctypes.c_int(word) for word in (
                len(image), n, isinstance(a, Operand) and not a.k_major, not b.k_major, name == "bf16", from_registers,
                first, accumulate,
            )),
        ),
        expected,
    )  # fmt: skip
