"""What training code does with a graph: subsets of inputs, several backwards, hooks, checkpoints, threads, no_grad."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.package import autograd_calls
from tests.package.autograd_calls import DTYPES, Shape, draw, draw_dlse, gradients, leaves, same_bits
from tests.package.autograd_judged import assert_right

SHAPE = Shape(2, 4, 2, 37, 101)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def attn():
    return autograd_calls.package("small")


class Calls(TorchDispatchMode):
    """Records which ops of a package run, with their arguments and results."""

    def __init__(self, attn):
        super().__init__()
        self.namespace, self.seen = attn.op.NAMESPACE, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op.namespace == self.namespace:
            self.seen.append((op._opname, args, out))
        return out

    def names(self):
        return [name for name, _, _ in self.seen]


@dtypes
def test_every_subset_of_the_inputs(attn, dtype):
    """The gradients asked for have the bits that they have together; the others are neither computed nor returned."""
    *qkv, dout = draw(SHAPE, dtype)
    want = gradients(attn, *qkv, dout, causal=True)
    for wanted in itertools.product([False, True], repeat=3):
        if not any(wanted):
            continue
        inputs = [x.detach().requires_grad_(w) for x, w in zip(qkv, wanted, strict=True)]
        o = attn.attention(*inputs, causal=True)
        with Calls(attn) as calls:
            o.backward(dout)
        assert calls.names() == ["backward"]
        assert [x.numel() > 0 for x in calls.seen[0][2]] == list(wanted)
        for x, w, right in zip(inputs, wanted, want, strict=True):
            assert same_bits([x.grad], [right]) if w else x.grad is None


def test_only_the_gradients_asked_of_autograd_are_computed(attn):
    """All inputs require grad, but torch.autograd.grad names some of them."""
    *qkv, dout = draw(SHAPE)
    want = gradients(attn, *qkv, dout)
    for index in range(3):
        inputs = leaves(*qkv)
        (got,) = torch.autograd.grad(attn.attention(*inputs), inputs[index], dout)
        assert same_bits([got], [want[index]])
        attn.attention(*inputs).backward(dout, inputs=[inputs[index]])
        assert same_bits([inputs[index].grad], [want[index]]) and sum(x.grad is not None for x in inputs) == 1


@pytest.mark.field("R082")
@dtypes
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
def test_gradients_through_o_through_lse_and_through_both_are_within_the_derived_bound(attn, dtype, causal):
    shape = Shape(1, 4, 2, 37, 61)
    q, k, v, dout = draw(shape, dtype)
    dlse = draw_dlse(shape, dtype)
    for asked in ((dout, None), (None, dlse), (dout, dlse)):
        inputs = leaves(q, k, v)
        results = attn.attention(*inputs, causal=causal, return_lse=True)
        assert all(x.requires_grad for x in results)
        pairs = [(x, g) for x, g in zip(results, asked, strict=True) if g is not None]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        got = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        assert_right(attn, q, k, v, *asked, got, causal=causal)


@pytest.mark.field("R082")
def test_the_gradient_of_the_sum_of_lse_is_what_the_report_says(attn):
    """dQ = scale P K, dK = scale P^T Q, and dV = 0."""
    q, k, v, _ = draw(SHAPE)
    dq, dk, dv = gradients(attn, q, k, v, None, torch.ones(SHAPE.b, SHAPE.hq, SHAPE.nq))
    assert_right(attn, q, k, v, None, torch.ones(SHAPE.b, SHAPE.hq, SHAPE.nq), [dq, dk, dv])
    assert dq.any() and dk.any() and not dv.any()


@pytest.mark.field("R086")
@dtypes
def test_a_gradient_has_the_dtype_shape_and_device_of_its_input(attn, dtype):
    tensors = draw(SHAPE, dtype)
    for x, g in zip(tensors[:3], gradients(attn, *tensors, draw_dlse(SHAPE, dtype)), strict=True):
        assert (g.dtype, g.shape, g.device) == (x.dtype, x.shape, x.device) and not g.requires_grad


@dtypes
def test_two_backwards_through_one_graph(attn, dtype):
    q, k, v, dout = draw(SHAPE, dtype)
    other = draw(SHAPE, dtype, seed=9)[3]
    inputs = leaves(q, k, v)
    o = attn.attention(*inputs, causal=True)
    first = torch.autograd.grad(o, inputs, dout, retain_graph=True)
    second = torch.autograd.grad(o, inputs, other, retain_graph=True)
    third = torch.autograd.grad(o, inputs, dout)
    want = gradients(attn, q, k, v, dout, causal=True)
    assert same_bits(first, want) and same_bits(third, want)
    assert same_bits(second, gradients(attn, q, k, v, other, causal=True)) and not same_bits(second, want)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(o, inputs, dout)


@dtypes
def test_gradients_accumulate(attn, dtype):
    batches = [draw(SHAPE, dtype, seed=s) for s in range(3)]
    _, k, v, _ = batches[0]
    (kp, vp) = leaves(k, v)
    want = [torch.zeros_like(k), torch.zeros_like(v)]
    for q, _, _, dout in batches:
        attn.attention(q, kp, vp).backward(dout)
        want = [a + b for a, b in zip(want, gradients(attn, q, k, v, dout)[1:], strict=True)]
    assert same_bits([kp.grad, vp.grad], want)
    (x,) = leaves(batches[0][0])  # one input used twice in one graph: the engine adds
    o = attn.attention(x, k, v) + attn.attention(x, k, v, causal=True)
    o.backward(batches[0][3])
    parts = [gradients(attn, x, k, v, batches[0][3], causal=c)[0] for c in (False, True)]
    assert same_bits([x.grad], [parts[0] + parts[1]])


def test_hooks_see_and_change_gradients(attn):
    q, k, v, dout = draw(SHAPE)
    want = gradients(attn, q, k, v, dout)
    inputs, seen = leaves(q, k, v), []
    inputs[0].register_hook(lambda g: seen.append(g.clone()))
    inputs[1].register_hook(lambda g: 2 * g)
    inputs[2].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    o = attn.attention(*inputs)
    o.register_hook(lambda g: g.transpose(1, 2).contiguous().transpose(1, 2))  # another layout, the same values
    o.backward(dout)
    assert same_bits([x.grad for x in inputs], [want[0], 2 * want[1], want[2]])
    assert len(seen) == 2 and same_bits([seen[0]], [want[0]]) ^ same_bits([seen[0]], [want[2]])

    inputs = leaves(q, k, v)
    o, lse = attn.attention(*inputs, return_lse=True)
    o.register_hook(lambda g: 2 * g)
    (o.sum() + 0 * lse.sum()).backward()
    assert same_bits([inputs[2].grad], [gradients(attn, q, k, v, torch.full_like(dout, 2.0))[2]])


def test_a_module_in_the_middle_of_a_network(attn):
    """The op between linear layers: what reaches their weights is what the op's own gradients say."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(64, 3 * 64), torch.nn.Linear(64, 64)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).unbind(2)
            heads = attn.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
            return self.out(heads.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 33, 64)
    met = []
    block.register_full_backward_hook(lambda module, grad_input, grad_output: met.append(grad_output[0].shape))
    (block(x) ** 2).mean().backward()
    assert met == [(2, 33, 64)] and all(p.grad.any() and p.grad.isfinite().all() for p in block.parameters())
    packed = block.qkv(x)
    q, k, v = (t.transpose(1, 2) for t in packed.unflatten(-1, (3, 4, 16)).unbind(2))
    y = block.out(attn.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))
    (g,) = torch.autograd.grad((y**2).mean(), packed)
    assert same_bits([block.qkv.bias.grad], [g.flatten(0, 1).sum(0)])


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@dtypes
def test_checkpoints(attn, dtype, reentrant):
    q, k, v, dout = draw(SHAPE, dtype)
    inputs = leaves(q, k, v)

    def block(q, k, v):
        o, lse = attn.attention(q, k, v, causal=True, return_lse=True)
        return o * 2, lse

    with Calls(attn) as calls:
        o, lse = checkpoint(block, *inputs, use_reentrant=reentrant)
        torch.autograd.backward((o, lse), (dout, draw_dlse(SHAPE, dtype)))
    assert calls.names() == ["forward", "forward", "backward"]
    want = gradients(attn, q, k, v, 2 * dout, draw_dlse(SHAPE, dtype), causal=True)
    assert same_bits([x.grad for x in inputs], want)


def test_selective_checkpoints_can_keep_the_output_of_the_op(attn):
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    forward = getattr(torch.ops, attn.op.NAMESPACE).forward.default
    q, k, v, dout = draw(SHAPE)
    inputs = leaves(q, k, v)

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == forward else CheckpointPolicy.PREFER_RECOMPUTE

    with Calls(attn) as calls:
        o = checkpoint(
            lambda q, k, v: attn.attention(q * 2, k, v), *inputs, use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )  # fmt: skip
        o.backward(dout)
    assert calls.names() == ["forward", "backward"]
    dq, dk, dv = gradients(attn, 2 * q, k, v, dout)
    assert same_bits([x.grad for x in inputs], [2 * dq, dk, dv])


@pytest.mark.parametrize("which", ["q", "k", "v", "key_lengths", "o", "lse"])
def test_a_change_of_what_was_saved_is_detected(attn, which):
    q, k, v, dout = draw(SHAPE)
    given = {"q": leaves(q)[0] * 1, "k": k, "v": v, "key_lengths": torch.tensor([50, 60])}
    o, lse = attn.attention(*(given[x] for x in "qkv"), key_lengths=given["key_lengths"], return_lse=True)
    given |= {"o": o, "lse": lse}
    with torch.no_grad():
        given[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward((o, lse), (dout, draw_dlse(SHAPE)))


def test_what_is_saved_grows_with_the_length_only(attn):
    """q, k, v, O and LSE, and nothing that has Nq x Nk elements; packed and unpacked once each."""
    shape = Shape(2, 4, 2, 200, 300)
    q, k, v, dout = draw(shape)
    inputs, kept = leaves(q, k, v), []

    def pack(x):
        kept.append(x.shape)
        return x.numpy(force=True).copy()

    with saved_tensors_hooks(pack, torch.from_numpy):
        o = attn.attention(*inputs)
    o.backward(dout)
    assert sorted(kept) == sorted([q.shape, k.shape, v.shape, o.shape, o.shape[:3]])
    want = gradients(attn, q, k, v, dout)
    assert same_bits([x.grad for x in inputs], want)
    inputs = leaves(q, k, v)
    with save_on_cpu():
        o = attn.attention(*inputs)
    o.backward(dout)
    assert same_bits([x.grad for x in inputs], want)


def test_a_dropped_graph_is_freed_at_once(attn):
    """No cycle through saved outputs that only the garbage collector would find."""
    q, k, v = leaves(*draw(SHAPE)[:3])
    gc.collect()
    gc.disable()
    try:
        middle = q * 2
        o, lse = attn.attention(middle, k, v, return_lse=True)
        watched = [weakref.ref(middle), weakref.ref(o), weakref.ref(lse), weakref.ref(o.grad_fn)]
        assert all(x() is not None for x in watched)
        del middle, o, lse
        assert all(x() is None for x in watched)
    finally:
        gc.enable()


@dtypes
def test_nothing_is_recorded_without_grad_mode(attn, dtype):
    q, k, v, _ = draw(SHAPE, dtype)
    inputs = leaves(q, k, v)
    want = attn.attention(q, k, v, return_lse=True)
    assert not any(x.requires_grad for x in want)
    saved = []
    with saved_tensors_hooks(saved.append, lambda x: x):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                got = attn.attention(*inputs, return_lse=True)
            assert same_bits(got, want) and not any(x.requires_grad or x.grad_fn for x in got)
    assert saved == []
    got = attn.attention(*inputs, return_lse=True)  # with grad mode the values are the same, and they are recorded
    assert same_bits(got, want) and all(x.requires_grad and x.grad_fn is not None for x in got)


def test_anomaly_mode(attn):
    q, k, v, dout = draw(SHAPE)
    want = gradients(attn, q, k, v, dout)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert same_bits(gradients(attn, q, k, v, dout), want)
        with pytest.raises(RuntimeError, match="returned nan values"):
            gradients(attn, q, k, v, dout.fill_(torch.nan))


def test_threads_that_train_at_the_same_time(attn):
    """Each with a graph of its own, and all through one graph that is retained."""
    q, k, v, dout = draw(SHAPE)
    want = gradients(attn, q, k, v, dout, causal=True)
    shared = leaves(q, k, v)
    o = attn.attention(*shared, causal=True)
    results, errors = [], []

    def work():
        try:
            for _ in range(20):
                results.append(gradients(attn, q, k, v, dout, causal=True))
                results.append(torch.autograd.grad(o, shared, dout, retain_graph=True))
        except BaseException as error:  # shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == [] and len(results) == 240 and all(same_bits(r, want) for r in results)
