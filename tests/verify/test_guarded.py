"""The forward kernels in memory that tells, on the CPU: what is right passes, and each fault is a sentence."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch

from verify import guarded, guarded_problems, packages
from verify.cases import CAUSAL
from verify.entry_points import ForwardArgs

SCRATCH_BYTES = 4
# Rows of a plan.json: one whose kernel takes no scratch memory, and one that asks for some.
VARIANTS = {
    "sm80": {"target": "sm80", "plan": {}},
    "sm90a_0": {"target": "sm90a", "unit": "sm90a_0", "plan": {"scratch_bytes": SCRATCH_BYTES}},
}


@pytest.fixture(scope="module")
def attn(small_package):
    return packages.load(small_package)


def memory(address, shape, strides=None):
    """The float32 values of a C argument, as a tensor on the same memory."""
    if 0 in shape:
        return torch.empty(shape)
    steps = [math.prod(shape[i:]) for i in range(1, len(shape) + 1)] if strides is None else [*strides, 1]
    one = np.ctypeslib.as_array((ctypes.c_float * 1).from_address(address))
    return torch.from_numpy(np.lib.stride_tricks.as_strided(one, shape, [4 * s for s in steps]))


class Library:
    """A stand-in for the CUDA library: a CPU package behind the C entry points of two kernels.

    It reads tensors and lengths from the C arguments alone. Written are `change(O)` but for the last `unwritten`
    elements, and zeros: `beyond` bytes after O, `before` bytes in front of LSE, `beside` bytes after scratch memory.
    """

    def __init__(self, attn, change=lambda o: o, *, unwritten=0, beyond=0, before=0, beside=0, error=0):
        self.attn, self.change, self.unwritten, self.error, self.calls = attn, change, unwritten, error, 0
        self.beyond, self.before, self.beside = beyond, before, beside

    def attention_forward_sm80(self, pointer, dtype, stream):
        args = ctypes.cast(pointer, ctypes.POINTER(ForwardArgs)).contents
        checks, self.calls = packages.part(self.attn, "checks"), self.calls + 1
        rows, keys = (args.B, args.Hq, args.Nq), (args.B, args.Hkv, args.Nk)
        q, k = memory(args.q, (*rows, checks.D), args.q_stride), memory(args.k, (*keys, checks.D), args.k_stride)
        v, o = memory(args.v, (*keys, checks.DV), args.v_stride), memory(args.o, (*rows, checks.DV), args.o_stride)
        lengths = None
        if args.key_lengths:
            lengths = torch.tensor(list((ctypes.c_int64 * args.B).from_address(args.key_lengths)))
        causal = CAUSAL[args.causal]
        made, lse = self.attn.attention(
            q, k, v, causal=False if causal == "none" else causal, key_lengths=lengths, scale=args.scale,
            return_lse=True,
        )  # fmt: skip
        written = o.numel() - self.unwritten
        o.view(-1)[:written] = self.change(made).reshape(-1)[:written]
        memory(args.lse, rows).copy_(lse)
        ctypes.memset(args.o + 4 * o.numel(), 0, self.beyond)
        ctypes.memset(args.lse - self.before, 0, self.before)
        return self.error

    def attention_forward_sm90a_0(self, pointer, dtype, scratch, stream):
        ctypes.memset(scratch, 0, SCRATCH_BYTES + self.beside)
        return self.attention_forward_sm80(pointer, dtype, stream)


def found(attn, unit, problem, monkeypatch, *, op_too=True, **words):
    """(sentences, calls of the entry point)."""
    monkeypatch.setitem(guarded.DTYPE_CODES, "float32", 0)  # no CUDA kernel has it
    step = guarded.Step(unit, "float32", problem, VARIANTS[unit], op_too, 1 + op_too)
    library = Library(attn, **words)
    return list(guarded.faults(attn, step, library, debug=False, device="cpu")), library.calls


@pytest.mark.parametrize("unit", VARIANTS)
@pytest.mark.parametrize("op_too", [False, True])
def test_every_problem_passes_when_right(attn, unit, monkeypatch, op_too):
    for problem in guarded_problems.problems(32, 16):
        with monkeypatch.context() as patch:
            assert found(attn, unit, problem, patch, op_too=op_too) == ([], 1), problem.name


FAULTS = {
    "O: 1 elements are NaN": {"unwritten": 1},
    "O: a guard byte was overwritten": {"beyond": 1},
    "LSE: a guard byte was overwritten": {"before": 1},
    "O: the op and the kernel's entry point differ": {"change": lambda o: o * 2},
}


@pytest.mark.parametrize("unit", VARIANTS)
@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_is_a_sentence(attn, unit, monkeypatch, text):
    problem = next(p for p in guarded_problems.problems(32, 16) if p.name == "key lengths")
    sentences, _ = found(attn, unit, problem, monkeypatch, **FAULTS[text])
    assert [sentence for sentence in sentences if sentence.startswith(text)]
    if "differ" not in text:  # the element that is not written differs from the op's too
        assert found(attn, unit, problem, monkeypatch, op_too=False, **FAULTS[text])[0] == [
            sentence for sentence in sentences if "differ" not in sentence
        ]


def test_a_write_beside_the_scratch_memory_is_an_error(attn, monkeypatch):
    with pytest.raises(RuntimeError, match="attention_forward_sm90a_0: scratch memory: a guard byte was overwritten"):
        found(attn, "sm90a_0", guarded_problems.problems(32, 16)[1], monkeypatch, beside=1)


@pytest.mark.parametrize("unit", VARIANTS)
def test_an_error_of_the_entry_point_is_an_error(attn, unit, monkeypatch):
    with pytest.raises(RuntimeError, match=f"attention_forward_{unit} returned CUDA error 7"):
        found(attn, unit, guarded_problems.problems(32, 16)[1], monkeypatch, error=7)
