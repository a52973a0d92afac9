"""The NumPy statements of the PTX ISA against vectors that an H200 recorded (tests/data/ptx_*.npz).

How each is compared:
  bit for bit      ldmatrix, stmatrix, shfl, vote, redux, cvt, cp.async, ld/st, atomics (the old values in any order),
                   mbarrier, named barriers, bulk and tensor copies and reductions, setmaxnreg; mma and wgmma wherever
                   the sums are exact: read-outs of every descriptor and every N, and products of small integers.
  within a bound   mma and wgmma sums of fractions: the bound that verify.arithmetic derives from the calibrated
                   block and fraction bits; they also equal the model of verify/emulator/measured.py bit for bit.
                   ex2: 2^-22 relative; rcp: 2^-23; lg2: 2^-22, absolute near 1; special values exactly.
  by refusal       tensor copies that start at an unaligned element or, when stored, below 0: the machine stops.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from verify import record
from verify.conformance import suite, values
from verify.conformance.case import Case, Near, Output
from verify.emulator import isa, isa_arithmetic, isa_fragments, isa_tensor, measured

DATA = Path(__file__).parents[1] / "data"
ILLEGAL_INSTRUCTION = 715  # cudaErrorIllegalInstruction
TOPICS = list(suite.TOPICS)


def recorded(case: Case, vectors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {output.name: vectors[suite.key(case, output.name)] for output in case.outputs}


def misses(topic: str) -> list[str]:
    vectors = suite.vectors(DATA, topic)
    relative = record.relative_error()
    return [
        miss
        for case in suite.TOPICS[topic]()
        if not case.faults
        for miss in case.misses(recorded(case, vectors), relative)
    ]


@pytest.mark.parametrize("topic", TOPICS)
def test_the_machine_does_what_the_statements_say(topic):
    assert not misses(topic)


@pytest.mark.parametrize("topic", TOPICS)
def test_the_vectors_answer_these_very_inputs(topic):
    """Otherwise record them anew: python -m verify.record --out tests/data."""
    digests = suite.record(DATA)["cases"]
    cases = suite.TOPICS[topic]()
    assert {case.name: case.digest for case in cases} == {case.name: digests.get(case.name) for case in cases}
    answered = {suite.key(case, output.name) for case in cases if not case.faults for output in case.outputs}
    assert set(suite.vectors(DATA, topic)) == answered


def test_the_machine_refuses_what_the_statements_refuse():
    refused = {case.name: case for make in suite.TOPICS.values() for case in make() if case.faults}
    assert len(refused) == 3
    assert suite.record(DATA)["faults"] == dict.fromkeys(refused, ILLEGAL_INSTRUCTION)
    for case in refused.values():
        with pytest.raises(ValueError, match="starts"):
            case.expected(0.0)


def test_the_record_names_the_machine_and_is_small():
    facts = suite.record(DATA)["machine"]
    assert facts["gpu"]["capability"] == "9.0"
    assert facts["gpu"]["driver"] and facts["nvcc"] and re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])
    assert sum(path.stat().st_size for path in DATA.glob("ptx_*")) < 2_000_000
    assert json.loads((DATA / suite.RECORD).read_text())["flags"] == list(record.FLAGS)


def test_every_wrapper_of_inline_ptx_has_a_case():
    covered = {name for make in suite.TOPICS.values() for case in make() for name in case.primitives}
    wrappers = {
        name
        for text in suite.headers().values()
        for name in re.findall(r"^__device__ __forceinline__ [\w ]*?(\w+)\(", text.decode(), re.MULTILINE)
    }
    assert len(wrappers) > 180
    assert wrappers == covered


@pytest.mark.parametrize("topic", ["warp", "wgmma"])
def test_tensor_cores_sum_like_the_measured_model(topic):
    vectors = suite.vectors(DATA, topic)
    compared = 0
    for case in suite.TOPICS[topic]():
        expected = {} if case.faults else case.expected(record.relative_error())
        if not isinstance(expected.get("d"), Near):
            continue
        got = vectors[suite.key(case, "d")]
        want = modelled(case)
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), case.name
        assert not np.array_equal(got, expected["d"].exact)  # these sums do round
        compared += got.size
    assert compared >= 1024


def modelled(case: Case) -> np.ndarray:
    """D of a case by the measured model."""
    name = "bf16" if "bf16" in case.name else "f16"
    if case.function == "probe_mma":
        a, b, c = (argument.array for argument in case.arguments[:3])
        rows = []
        for i in range(len(c)):
            left = isa.scatter(isa.decode(isa.unpack(a[i]), name), isa.mma_a(), (16, 16))
            right = isa.scatter(isa.decode(isa.unpack(b[i, :, :2]), name), isa.mma_b(), (16, 8))
            added = isa.scatter(c[i].astype(np.float64), isa.mma_d(), (16, 8))
            rows.append(isa.gather(measured.h200_product(left, right, added), isa.mma_d()))
        return np.stack(rows)
    before = -3000 + np.arange(128)[:, None] + 128 * np.arange(32)[None, :]
    added = isa.scatter(before.astype(np.float64), isa.wgmma_d(64), (64, 64))
    left, right = (isa.decode(values.fractions((64, 16), seed, name), name) for seed in (60, 61))
    return isa.gather(measured.h200_product(left, right.T, added), isa.wgmma_d(64))


# ---- Statements that are wrong on purpose: the vectors notice each of them.

_mma_a, _wgmma_d, _unpack = isa_fragments.mma_a, isa_fragments.wgmma_d, isa_fragments.unpack
_cvt_rn = isa_arithmetic.cvt_rn
_BITS_OF_AN_OFFSET = 0x3FFF


class DenseRows(isa.TensorMap):
    """Box rows follow each other without padding, whatever the span."""

    @property
    def row_bytes(self) -> int:
        return self.box[0] * self.itemsize


def leaves_the_outside(memory, tensor, *more):
    loaded = isa_tensor.tma_load(memory, tensor, *more)
    return np.where(loaded == 0, memory, loaded)


def reads_by(change):
    """read_operand with the descriptor changed, in a memory that ends nowhere near."""
    return lambda memory, descriptor, *more, **major: isa_tensor.read_operand(
        np.resize(memory, 1 << 20), change(descriptor), *more, **major
    )


def exchanged_offsets(descriptor):
    leading, stride = (descriptor >> at & _BITS_OF_AN_OFFSET for at in (16, 32))
    return descriptor & ~(_BITS_OF_AN_OFFSET << 16 | _BITS_OF_AN_OFFSET << 32) | stride << 16 | leading << 32


def next_columns(n):
    return _wgmma_d(n)[:, np.argsort(np.arange(n // 2) % 4 // 2, kind="stable")]


# name: (topic, module, function, what stands in its place)
MISTAKES = {
    "a1 and a2 of mma.m16n8k16 exchanged": (
        "warp", isa_fragments, "mma_a", lambda: _mma_a()[:, [0, 1, 4, 5, 2, 3, 6, 7]],
    ),
    "high half first": ("warp", isa_fragments, "unpack", lambda r: _unpack(r >> 16 | r << 16)),
    "ldmatrix ignores .trans": ("warp", isa, "ldmatrix_x4", lambda m, rows, trans: isa_fragments.ldmatrix_x4(m, rows)),
    "cvt truncates": (
        "warp", isa_arithmetic, "cvt_rn",
        lambda x, name: _cvt_rn((np.asarray(x).view(np.uint32) & 0xFFFF0000).view(np.float32), name),
    ),
    "shfl counts upward": ("warp", isa, "shfl_xor", lambda v, mask: np.roll(v, mask)),
    "redux compares unsigned": (
        "warp", isa, "redux_max_s32", lambda v: np.full(32, v.view(np.uint32).max()).view(np.int32),
    ),
    "rcp is exact to a quarter ulp": ("warp", isa_arithmetic, "RCP_RELATIVE_ERROR", 2.0**-27),
    "lg2 is the identity": ("warp", isa, "lg2_agrees", lambda x, y: x == y),
    "zero fill leaves the old bytes": (
        "copies", isa, "cp_async_zfill",
        lambda m, at, source, size, n: np.concatenate([m[:at], source[:n], m[at + n :]]),
    ),
    "wait_group counts from the oldest": ("copies", isa, "groups_complete", lambda committed, newest: newest),
    "boxes are not swizzled": ("tensors", isa_tensor, "swizzle", lambda address, span: address),
    "64-byte swizzle xors three bits": (
        "tensors", isa_tensor, "swizzle",
        lambda address, span: address ^ (address >> 7) % 8 * 16 if span == 64 else isa.swizzle(address, span),
    ),
    "outside elements keep what was there": ("tensors", isa, "tma_load", leaves_the_outside),
    "narrow rows are dense": (
        "tensors", isa, "tma_load", lambda m, t, box, *more: isa_tensor.tma_load(m, t, DenseRows(**vars(box)), *more),
    ),
    "leading and stride offset exchanged": ("wgmma", isa, "read_operand", reads_by(exchanged_offsets)),
    "operands are not swizzled": ("wgmma", isa, "read_operand", reads_by(lambda descriptor: descriptor & ~(3 << 62))),
    "d2 and d3 of wgmma hold the next columns": ("wgmma", isa_fragments, "wgmma_d", next_columns),
    "wgmma adds D always": (
        "wgmma", isa, "wgmma_m64nk16", lambda a, b, c: isa_arithmetic.wgmma_m64nk16(a, b, c + 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_vectors_notice_a_wrong_statement(mistake, monkeypatch):
    topic, where, name, instead = MISTAKES[mistake]
    digests = {case.name: case.digest for case in suite.TOPICS[topic]()}
    monkeypatch.setattr(where, name, instead)
    assert {case.name: case.digest for case in suite.TOPICS[topic]()} == digests  # only the statement changed
    assert misses(topic)


def test_a_recorded_value_that_changes_is_noticed():
    """Every output of every case matters: one flipped bit anywhere is a miss, or lies in a place named here."""
    # Any order; a low bit of a power, a reciprocal or a logarithm is within its bound.
    free = {
        ("atomics", "found"), ("arithmetic", "powers"), ("reciprocals", "reciprocals"), ("reciprocals", "logarithms"),
    }  # fmt: skip
    relative = record.relative_error()
    for topic in ("copies", "barriers", "warp"):
        vectors = suite.vectors(DATA, topic)
        for case in suite.TOPICS[topic]():
            for output in case.outputs:
                if (case.name, output.name) in free or case.name.endswith("sums"):
                    continue
                got = recorded(case, vectors)
                got[output.name] = flipped(output, got[output.name])
                assert case.misses(got, relative), f"{case.name}.{output.name}"


def flipped(output: Output, array: np.ndarray) -> np.ndarray:
    """The array with the lowest bit of its middle byte flipped."""
    changed = array.copy()
    changed.reshape(-1).view(np.uint8)[changed.nbytes // 2] ^= 1
    return changed
