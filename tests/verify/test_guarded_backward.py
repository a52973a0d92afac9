"""The backward kernels in memory that tells, on the CPU: what is right passes, and each fault is a sentence."""

from __future__ import annotations

import ctypes

import pytest
import torch

from verify import guarded_backward, guarded_problems, packages
from verify.cases import CAUSAL
from verify.entry_points import BackwardArgs

UNIT = "sm80"


@pytest.fixture(scope="module")
def attn(small_package):
    return packages.load(small_package)


class Size:
    """A C function that says how many bytes of scratch memory a call needs; its restype can be set."""

    BYTES = 64

    def __call__(self, args, dtype):
        return self.BYTES


class Library:
    """A stand-in for the CUDA library: the op of a CPU package behind the C entry points of the mma.sync kernels.

    `change(gradient, number of the call)` is what it writes. beside: bytes that it writes beyond its scratch memory.
    """

    def __init__(self, attn, call, change=lambda x, turn: x, beside=0):
        self.op = getattr(torch.ops, packages.part(attn, "op").NAMESPACE).backward
        self.call, self.change, self.beside, self.turns = call, change, beside, 0
        self.attention_backward_sm80_scratch = Size()

    def attention_backward_sm80(self, pointer, dtype, scratch, stream):
        args = ctypes.cast(pointer, ctypes.POINTER(BackwardArgs)).contents
        t, self.turns = self.call.tensors, self.turns + 1
        given = (t["dout"], t["dlse"], t["q"], t["k"], t["v"], t["o"], t["lse"], self.call.lengths, args.scale)
        found = self.op(*given, args.causal, [True] * 3, bool(args.deterministic))
        ctypes.memset(scratch, 0, Size.BYTES + self.beside)
        for name, x in zip("qkv", found, strict=True):
            x = self.change(x, self.turns).to(x.dtype).contiguous()
            ctypes.memmove(getattr(args, f"d{name}"), x.data_ptr(), x.numel() * x.itemsize)
        return 0


def found(attn, problem, monkeypatch, *, op_too=True, **words):
    """(sentences, calls of the entry point)."""
    checks = packages.part(attn, "checks")
    monkeypatch.setitem(guarded_backward.DTYPE_CODES, "float32", 0)  # no CUDA kernel has it
    call = guarded_backward.prepare(problem, "float32", checks.D, checks.DV, "cpu")
    monkeypatch.setattr(guarded_backward, "prepare", lambda *asked: call)
    library = Library(attn, call, **words)
    return list(
        guarded_backward.faults(attn, problem, "float32", library, UNIT, op_too=op_too, device="cpu")
    ), library.turns


@pytest.mark.parametrize("op_too", [False, True])
def test_every_problem_passes_when_right(attn, monkeypatch, op_too):
    for problem in guarded_problems.problems(32, 16):
        with monkeypatch.context() as patch:
            assert found(attn, problem, patch, op_too=op_too) == ([], 2), problem.name


def test_the_forward_results_are_those_of_the_op(attn):
    """Made on the host by the plain formula: rows without a key included."""
    checks = packages.part(attn, "checks")
    for problem in guarded_problems.problems(32, 16):
        call = guarded_backward.prepare(problem, "float32", checks.D, checks.DV, "cpu")
        causal = False if problem.causal == "none" else problem.causal
        assert call.causal == CAUSAL.index(problem.causal)
        q, k, v = (call.tensors[name] for name in "qkv")
        o, lse = attn.attention(q, k, v, causal=causal, key_lengths=call.lengths, return_lse=True)
        torch.testing.assert_close(call.tensors["o"], o, msg=problem.name)
        torch.testing.assert_close(call.tensors["lse"], lse, msg=problem.name)


FAULTS = {
    "elements are NaN": {"change": lambda x, turn: x / 0 * 0},
    "dV: the op and the kernel's entry point differ": {"change": lambda x, turn: x * 2},
    "deterministic dQ: the op and the kernel's entry point differ": {"change": lambda x, turn: x * turn},
    "a key beyond the length": {"change": lambda x, turn: x + 1},
    "a guard byte was overwritten": {"change": lambda x, turn: torch.cat([x.flatten(), torch.zeros(1)])},
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_is_a_sentence(attn, monkeypatch, text):
    problem = next(p for p in guarded_problems.problems(32, 16) if p.name == "key lengths")
    sentences, _ = found(attn, problem, monkeypatch, **FAULTS[text])
    assert any(text in sentence for sentence in sentences)


def test_a_write_beside_the_scratch_memory_is_an_error(attn, monkeypatch):
    with pytest.raises(RuntimeError, match="scratch memory: a guard byte was overwritten"):
        found(attn, guarded_problems.problems(32, 16)[1], monkeypatch, beside=1)
