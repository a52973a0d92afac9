"""torch.compile of a training step as one graph, fake tensors and opcheck: the bits of the eager step, right shapes."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.package import autograd_calls
from tests.package.autograd_calls import DTYPES, Shape, backward_op, draw, draw_dlse, gradients, leaves, same_bits

SHAPE = Shape(2, 4, 2, 7, 9)
ALL_GOOD = {
    "test_schema": "SUCCESS", "test_autograd_registration": "SUCCESS",
    "test_faketensor": "SUCCESS", "test_aot_dispatch_dynamic": "SUCCESS",
}  # fmt: skip

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def attn():
    return autograd_calls.package("small")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Graphs:
    """A backend of torch.compile that runs forward and backward graphs as they are, and keeps them."""

    def __init__(self):
        self.backward, self.kept = [], 0
        self.backend = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def _forward(self, graph, inputs):
        self.kept += 1
        return graph.forward

    def _backward(self, graph, inputs):
        self.backward.append(graph)
        return graph.forward

    def flags(self, attn):
        """What `deterministic` is in the calls of the backward op, graph by graph."""
        op = backward_op(attn)
        return [node.args[-1] for graph in self.backward for node in graph.graph.nodes if node.target == op]


def step(attn, call, q, k, v, dout, dlse):
    inputs = leaves(q, k, v)
    results = call(*inputs)
    torch.autograd.backward(results, (dout, dlse))
    return [*results, *(x.grad for x in inputs)]


@pytest.mark.field("R103")
@pytest.mark.parametrize(
    ("backend", "causal"), [("eager", False), ("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
def test_a_training_step_is_one_graph(attn, backend, causal):
    tensors = (*draw(SHAPE), draw_dlse(SHAPE))
    lengths = torch.tensor([9, 4])

    def call(q, k, v):
        return attn.attention(q, k, v, causal=causal, key_lengths=lengths, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for _ in range(2):
        assert same_bits(step(attn, compiled, *tensors), step(attn, call, *tensors))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.field("R103")
@dtypes
def test_every_dtype_and_every_subset_of_inputs(attn, dtype):
    *qkv, dout = draw(SHAPE, dtype)
    want = gradients(attn, *qkv, dout)
    for wanted in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        inputs = [x.detach().requires_grad_(w) for x, w in zip(qkv, wanted, strict=True)]
        torch.compile(attn.attention, fullgraph=True, backend="aot_eager")(*inputs).backward(dout)
        for x, w, right in zip(inputs, wanted, want, strict=True):
            assert same_bits([x.grad], [right]) if w else x.grad is None


def test_a_model_with_other_layers_around_the_op(attn):
    """Loss, linear layers and views in one graph with the op, layouts of the incoming gradient included."""
    torch.manual_seed(0)
    project, x = torch.nn.Linear(64, 192), torch.randn(2, 33, 64)

    def loss(x):
        q, k, v = (t.transpose(1, 2) for t in project(x).unflatten(-1, (3, 4, 16)).unbind(2))
        o, lse = attn.attention(q, k, v, causal=True, return_lse=True)
        return o.transpose(1, 2).flatten(2).square().mean() + lse.mean()

    want = torch.autograd.grad(loss(x), list(project.parameters()))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x), list(project.parameters()))
    assert same_bits(got, want) and all(g.any() for g in got)


def test_one_graph_trains_at_all_lengths(attn):
    compiled = torch.compile(
        lambda q, k, v: attn.attention(q, k, v, causal=True), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for nq, nk in [(5, 7), (9, 33), (64, 3), (17, 19)]:
        q, k, v, dout = draw(Shape(2, 4, 2, nq, nk))
        inputs = leaves(q, k, v)
        compiled(*inputs).backward(dout)
        assert same_bits([x.grad for x in inputs], gradients(attn, q, k, v, dout, causal=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_compiled_backward_is_one_call_of_the_op_and_nothing_quadratic_is_kept(attn):
    graphs = Graphs()
    inputs = leaves(*draw(Shape(1, 2, 1, 40, 50))[:3])
    torch.compile(attn.attention, fullgraph=True, backend=graphs.backend)(*inputs).sum().backward()
    (graph,) = graphs.backward
    assert len(graphs.flags(attn)) == 1
    kept = [node.meta["val"].numel() for node in graph.graph.nodes if node.op == "placeholder"]
    assert max(kept) == 2 * 40 * 16 < 2 * 40 * 50 and len(kept) == 6  # q, k, v, o, lse, dO


@pytest.mark.parametrize("asked", [None, False, True])
def test_the_deterministic_flag_reaches_the_graph(attn, asked):
    """None: what use_deterministic_algorithms says, and another value of it makes another graph."""
    q, k, v, dout = draw(SHAPE)
    graphs = Graphs()
    compiled = torch.compile(
        lambda q, k, v: attn.attention(q, k, v, deterministic=asked), fullgraph=True, backend=graphs.backend
    )
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for flag in (False, True, False):
            torch.use_deterministic_algorithms(flag)
            inputs = leaves(q, k, v)
            compiled(*inputs).backward(dout)
    finally:
        torch.use_deterministic_algorithms(before)
    flags = graphs.flags(attn)
    assert set(flags) == ({False, True} if asked is None else {asked})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_checkpoints_inside_a_graph(attn, backend):
    q, k, v, dout = draw(SHAPE)

    def call(q, k, v):
        return checkpoint(lambda q, k, v: attn.attention(q, k, v, causal=True), q, k, v, use_reentrant=False)

    inputs = leaves(q, k, v)
    torch.compile(call, fullgraph=True, backend=backend)(*inputs).backward(dout)
    assert same_bits([x.grad for x in inputs], gradients(attn, q, k, v, dout, causal=True))


def test_a_compiled_autograd_engine(attn):
    q, k, v, dout = draw(SHAPE)
    inputs = leaves(q, k, v)
    o = attn.attention(*inputs, causal=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        o.backward(dout)
    assert same_bits([x.grad for x in inputs], gradients(attn, q, k, v, dout, causal=True))


@pytest.mark.field("R081")
def test_transforms_inside_a_graph(attn):
    q, k, v, dout = draw(SHAPE)

    def loss(q, k, v):
        return (attn.attention(q, k, v, causal=True) * dout).sum()

    derive = torch.func.grad(loss, argnums=(0, 1, 2))
    assert same_bits(torch.compile(derive, fullgraph=True, backend="aot_eager")(q, k, v), derive(q, k, v))


@pytest.mark.field("R080", "R081")
def test_what_is_refused_is_refused_in_a_graph(attn):
    q, k, v, _ = draw(SHAPE)

    def tangent(x):
        return torch.func.jvp(lambda y: attn.attention(y, k, v), (x,), (x,))[1]

    with pytest.raises(Exception, match="has no jvp"):
        torch.compile(tangent, fullgraph=True, backend="aot_eager")(q)
    (x,) = leaves(q)
    o = torch.compile(lambda x: attn.attention(x, k, v), fullgraph=True, backend="aot_eager")(x)
    with pytest.raises(RuntimeError):  # torch's own sentence: graphs of aot_autograd have no second derivative
        (g,) = torch.autograd.grad(o.square().sum(), x, create_graph=True)
        g.sum().backward()


@pytest.mark.field("R103")
@dtypes
def test_opcheck_of_the_forward_op_with_gradients(attn, dtype):
    op = getattr(torch.ops, attn.op.NAMESPACE).forward.default
    q, k, v, _ = draw(SHAPE, dtype)
    view = q.transpose(1, 2).contiguous().transpose(1, 2)
    for args in (
        (*leaves(q, k, v), torch.tensor([3, 9]), 0.25, 1),
        (*leaves(view), k, *leaves(v), None, 1.0, 2),
        (*leaves(q, k[:, :, :0], v[:, :, :0]), None, 0.25, 0),
    ):
        assert torch.library.opcheck(op, args) == ALL_GOOD


@pytest.mark.field("R103")
@dtypes
def test_opcheck_of_the_backward_op(attn, dtype):
    q, k, v, dout = draw(SHAPE, dtype)
    dlse, lengths = draw_dlse(SHAPE, dtype), torch.tensor([3, 9])
    o, lse = attn.attention(q, k, v, causal=True, key_lengths=lengths, return_lse=True)
    for args in (
        (dout, None, q, k, v, o, lse, lengths, 0.25, 1, [True, True, True], False),
        (dout[:, :, :, :1].expand(dout.shape), dlse, q, k, v, o, lse, lengths, 0.25, 1, [False, True, False], True),
    ):
        assert torch.library.opcheck(backward_op(attn), args) == ALL_GOOD


@pytest.mark.field("R103")
@dtypes
def test_fake_gradients_have_the_shape_dtype_and_strides_of_real_ones(attn, dtype):
    for shape in (SHAPE, Shape(2, 4, 2, 0, 5), Shape(0, 2, 2, 3, 3), Shape(1, 1, 1, 1, 1)):
        q, k, v, dout = draw(shape, dtype)
        view = q.transpose(1, 2).contiguous().transpose(1, 2)
        for a in (q, view):
            real = gradients(attn, a, k, v, dout, draw_dlse(shape, dtype))
            with FakeTensorMode() as mode:
                fake = gradients(attn, *(mode.from_tensor(x) for x in (a, k, v, dout, draw_dlse(shape, dtype))))
            meta = gradients(attn, *(x.to("meta") for x in (a, k, v, dout, draw_dlse(shape, dtype))))
            for other in (fake, meta):
                facts = [(x.shape, x.dtype, x.stride()) for x in other]
                assert facts == [(x.shape, x.dtype, x.stride()) for x in real]
