"""The same gradients on every run, bit for bit: thread counts, flags, repetitions, other packages in between."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.package import autograd_calls
from tests.package.autograd_calls import DTYPES, Shape, backward_op, draw, draw_dlse, gradients, leaves, same_bits
from tests.package.autograd_judged import assert_right

SHAPE = Shape(2, 4, 2, 150, 300)  # several tiles in both directions, several heads for several workers
THREADS = (1, 2, 3, 5, 8)


@pytest.fixture(scope="module")
def attn():
    return autograd_calls.package("small")


@pytest.fixture
def threads():
    """The numbers of threads to try; torch's own number is restored."""
    before = torch.get_num_threads()
    yield THREADS
    torch.set_num_threads(before)


@pytest.fixture
def flags():
    """Values of use_deterministic_algorithms to try; the one before is restored."""
    before = torch.are_deterministic_algorithms_enabled()
    yield (False, True)
    torch.use_deterministic_algorithms(before)


class Watch(TorchDispatchMode):
    """Records `deterministic` of every call of a package's backward op."""

    def __init__(self, attn):
        super().__init__()
        self.op, self.seen = backward_op(attn), []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op == self.op:
            self.seen.append(args[-1])
        return op(*args, **(kwargs or {}))


@pytest.mark.field("R084")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hundred_runs_have_the_same_bits_on_any_number_of_threads(attn, dtype, threads, flags, monkeypatch):
    tensors = (*draw(SHAPE, dtype), draw_dlse(SHAPE, dtype))
    for index, isa in enumerate(attn.isas(dtype)):
        monkeypatch.setenv("TILEPROOF_CPU_ISA", isa)
        want = None
        for run in range(100 if index == 0 else 30):
            torch.set_num_threads(threads[run % len(threads)])
            torch.use_deterministic_algorithms(flags[run % 2])
            got = gradients(attn, *tensors, causal=True)
            want = want or got
            assert same_bits(got, want), (isa, run)


@pytest.mark.field("R085", "R088")
@pytest.mark.parametrize(
    ("dtype", "shape", "gain"),
    [(torch.float16, Shape(8, 1, 1, 257, 128), 3), (torch.bfloat16, Shape(4, 3, 3, 1030, 17), 1)], ids=str,
)  # fmt: skip
def test_every_repetition_is_right(attn, dtype, shape, gain, threads, monkeypatch):
    """The shapes of the reports, on every instruction set: one result within the bound, and 10 with its bits."""
    q, k, v, dout = (gain * x for x in draw(shape, dtype))
    for isa in attn.isas(dtype):
        monkeypatch.setenv("TILEPROOF_CPU_ISA", isa)
        torch.set_num_threads(1)
        want = gradients(attn, q, k, v, dout)
        part = [x[:1] for x in (q, k, v, dout)]
        assert_right(attn, *part, None, [x[:1] for x in want])
        for run in range(10):
            torch.set_num_threads(threads[run % len(threads)])
            assert same_bits(gradients(attn, q, k, v, dout), want)


@pytest.mark.field("R110", "R111")
def test_another_package_in_between_changes_nothing(attn):
    uneven = autograd_calls.package("d != dv")
    tensors = draw(SHAPE, torch.float64)
    others = draw(SHAPE, torch.float64, d=8, dv=24)
    alone, other = gradients(attn, *tensors), gradients(uneven, *others)
    for _ in range(5):
        assert same_bits(gradients(attn, *tensors), alone) and same_bits(gradients(uneven, *others), other)
    q, k, v, _ = tensors
    inputs = leaves(q, k, v)
    o = attn.attention(*inputs)
    gradients(uneven, *others)  # between a forward pass and its backward pass as well
    assert same_bits(torch.autograd.grad(o, inputs, tensors[3]), alone)


@pytest.mark.field("R033", "R078")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_item_does_not_depend_on_its_batch(attn, dtype):
    q, k, v, dout = draw(SHAPE, dtype)
    want = gradients(attn, q, k, v, dout, causal=True)
    for b in range(SHAPE.b):
        alone = gradients(attn, *(x[b : b + 1] for x in (q, k, v, dout)), causal=True)
        assert same_bits(alone, [x[b : b + 1] for x in want])
    for g in range(SHAPE.hkv):  # nor a group of heads on the others
        alone = gradients(attn, q[:, 2 * g : 2 * g + 2], k[:, g : g + 1], v[:, g : g + 1], dout[:, 2 * g : 2 * g + 2],
                          causal=True)  # fmt: skip
        parts = (want[0][:, 2 * g : 2 * g + 2], want[1][:, g : g + 1], want[2][:, g : g + 1])
        assert same_bits(alone, parts)


@pytest.mark.parametrize("asked", [None, False, True])
def test_which_form_is_asked_for(attn, asked, flags):
    """None follows use_deterministic_algorithms at the time of the backward pass; a value given wins."""
    q, k, v, dout = draw(Shape())
    want = gradients(attn, q, k, v, dout)
    for forward in flags:
        for backward in flags:
            torch.use_deterministic_algorithms(forward)
            inputs = leaves(q, k, v)
            o = attn.attention(*inputs, deterministic=asked)
            torch.use_deterministic_algorithms(backward)
            with Watch(attn) as watch:
                o.backward(dout)
            assert watch.seen == [backward if asked is None else asked]
            assert same_bits([x.grad for x in inputs], want)  # on the CPU there is one form


def test_the_flag_reaches_a_graph_outside_of_a_transform(attn):
    """torch.func differentiates by q, and autograd around it by k: one call of the forward op, two nodes."""
    q, k, v, _ = draw(Shape())
    (kx,) = leaves(k)
    o, _ = torch.func.vjp(lambda q: attn.attention(q, kx, v, deterministic=True), q)
    with Watch(attn) as watch:
        o.sum().backward()
    assert watch.seen == [True] and same_bits([kx.grad], [gradients(attn, q, k, v, torch.ones_like(q))[1]])


@pytest.mark.parametrize("bad", ["yes", 2, 0.5, "none"])
def test_other_values_are_refused(attn, bad):
    with pytest.raises(ValueError, match="deterministic must be None, False or True; got "):
        attn.attention(*draw(Shape())[:3], deterministic=bad)


def test_a_refused_backward_leaves_the_process_usable(attn):
    """An instruction set that is not there, named between the two passes."""
    q, k, v, dout = draw(Shape())
    want = gradients(attn, q, k, v, dout)
    inputs = leaves(q, k, v)
    o = attn.attention(*inputs)
    os.environ["TILEPROOF_CPU_ISA"] = "v9"
    try:
        with pytest.raises(ValueError, match="v9"):
            o.backward(dout, retain_graph=True)
    finally:
        del os.environ["TILEPROOF_CPU_ISA"]
    o.backward(dout)
    assert same_bits([x.grad for x in inputs], want)
