"""Training on a GPU: the same bits where they are promised, streams, graphs, layouts, what a step may leave behind."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.package import autograd_calls
from tests.package.autograd_calls import Shape, backward_op, leaves, same_bits
from tests.package.autograd_judged import assert_right

pytestmark = pytest.mark.gpu

D = 64
SHAPE = Shape(2, 8, 4, 300, 400)
CAUSAL = [False, "bottom_right", "top_left"]

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def draw(shape=SHAPE, dtype=torch.bfloat16, *, d=D, dv=None, seed=0):
    tensors = autograd_calls.draw(shape, dtype, d=d, dv=d if dv is None else dv, seed=seed)
    return [x.cuda() for x in tensors]


def draw_dlse(shape=SHAPE):
    return autograd_calls.draw_dlse(shape).cuda()


def gradients(attn, *tensors, deterministic=True, **options):
    return autograd_calls.gradients(attn, *tensors, deterministic=deterministic, **options)


@pytest.fixture
def flag():
    """Sets use_deterministic_algorithms; what it was is restored."""
    before = torch.are_deterministic_algorithms_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before)


@pytest.mark.field("R013", "R065", "R082", "R083")
@dtypes
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_through_o_through_lse_and_through_both_are_within_the_derived_bound(
    attn, dtype, causal, deterministic
):
    shape = Shape(2, 4, 2, 300, 400)
    (q, k, v, dout), dlse = draw(shape, dtype), draw_dlse(shape)
    for asked in ((dout, None), (None, dlse), (dout, dlse)):
        inputs = leaves(q, k, v)
        results = attn.attention(*inputs, causal=causal, deterministic=deterministic, return_lse=True)
        pairs = [(x, g) for x, g in zip(results, asked, strict=True) if g is not None]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        got = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        assert_right(attn, q, k, v, *asked, got, causal=causal, deterministic=deterministic)


@pytest.mark.field("R084")
@dtypes
@pytest.mark.parametrize("name, d, dv", [
    ("narrowest", 8, 8), ("d no multiple of 16, Br=32, Bc=16", 24, 24), ("fast tile at d=64", 64, 64),
    ("d=80", 80, 80), ("fast tile at d=128", 128, 128), ("dv smaller than d", 192, 128), ("widest", 256, 256),
])  # fmt: skip
def test_a_hundred_deterministic_runs_give_the_same_bits(attn_of, flag, name, d, dv, dtype):
    """Asked for by the argument, and by torch's own flag."""
    attn, shape = attn_of(name), Shape(2, 8, 2, 700, 900)
    tensors = (*draw(shape, dtype, d=d, dv=dv), draw_dlse(shape))
    want = gradients(attn, *tensors, causal=True)
    for run in range(100):
        flag(run % 2 == 0)
        assert same_bits(gradients(attn, *tensors, causal=True, deterministic=None if run % 2 == 0 else True), want)


@pytest.mark.field("R085")
@dtypes
def test_dk_and_dv_have_the_same_bits_in_both_forms_and_on_every_run(attn, dtype):
    """They are sums of one block each; only dQ is added to by several. The shape of the report, its heads narrower."""
    tensors = [3 * x for x in draw(Shape(300, 1, 1, 2048, 128), dtype)]
    want = gradients(attn, *tensors)
    for _ in range(50):
        assert same_bits(gradients(attn, *tensors, deterministic=False)[1:], want[1:])
    part = [x[:1] for x in tensors]
    got = [x[:1] for x in gradients(attn, *tensors, deterministic=False)]
    assert_right(attn, *part, None, got, deterministic=False)


@pytest.mark.field("R007", "R106")
@dtypes
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_that_memory_held_before_reaches_a_gradient(attn, dtype, deterministic):
    """Scratch and gradients are handed out full of NaN: dQ that is added to must begin at zero."""
    tensors = draw(dtype=dtype)
    lengths = torch.tensor([400, 217], device="cuda")
    for _ in range(20):
        dirt = [torch.full((size,), math.nan, device="cuda") for size in (2**10, 2**14, 2**18, 2**20, 2**22)]
        del dirt
        got = gradients(attn, *tensors, causal=True, key_lengths=lengths, deterministic=deterministic)
        assert not any(x.isnan().any() for x in got)
        assert not got[1][1, :, 217:].any() and not got[2][1, :, 217:].any()


@pytest.mark.field("R112")
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_pass_waits_for_its_inputs(attn, deterministic):
    """dO gets its values late, on the stream of the caller; so do q, k and v, on a side stream."""
    q, k, v, dout = draw()
    want = gradients(attn, q, k, v, dout)
    first = 1 if not deterministic else 0  # dQ of the other form differs from run to run
    inputs = leaves(q, k, v)
    o = attn.attention(*inputs, deterministic=deterministic)
    late = torch.full_like(dout, math.nan)
    for _ in range(1000):
        late.fill_(math.nan)
        torch.cuda._sleep(20_000)
        late.copy_(dout)
        got = torch.autograd.grad(o, inputs, late, retain_graph=True)
        assert same_bits(got[first:], want[first:]) and not got[0].isnan().any()
    late = [torch.full_like(x, math.nan) for x in (q, k, v, dout)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for x, value in zip(late, (q, k, v, dout), strict=True):
            x.copy_(value)
        got = gradients(attn, *late, deterministic=deterministic)
    side.synchronize()
    assert same_bits(got[first:], want[first:])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_training_step_replays_on_new_inputs(attn, deterministic):
    tensors = draw()
    lengths = torch.tensor([400, 100], device="cuda")
    words = {"causal": True, "key_lengths": lengths, "deterministic": deterministic}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(attn, *tensors, **words)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gradients(attn, *tensors, **words)
    first = 1 if not deterministic else 0
    for seed in range(3):
        for x, new in zip(tensors, draw(seed=10 * seed + 1), strict=True):
            x.copy_(new)
        lengths.copy_(torch.tensor([37 * seed, 399]))
        for x in out:
            x.fill_(math.nan)
        graph.replay()
        want = gradients(attn, *tensors, **words)
        assert same_bits(out[first:], want[first:]) and not out[0].isnan().any()


@pytest.mark.field("R103")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_training_step(attn, backend):
    torch._dynamo.reset()
    q, k, v, dout = draw()
    lengths = torch.tensor([400, 100], device="cuda")

    def call(q, k, v):
        return attn.attention(q, k, v, causal=True, key_lengths=lengths, deterministic=True)

    inputs = leaves(q, k, v)
    torch.compile(call, fullgraph=True, backend=backend)(*inputs).backward(dout)
    want = gradients(attn, q, k, v, dout, causal=True, key_lengths=lengths)
    assert same_bits([x.grad for x in inputs], want)


@pytest.mark.field("R103")
@dtypes
def test_opcheck_of_both_ops(attn, dtype):
    q, k, v, dout = draw(Shape(2, 4, 2, 9, 20), dtype)
    op = getattr(torch.ops, attn.op.NAMESPACE).forward.default
    lengths = torch.tensor([3, 20], device="cuda")
    found = torch.library.opcheck(op, (*leaves(q, k, v), lengths, 0.25, 1, True))
    assert set(found.values()) == {"SUCCESS"}
    o, lse = attn.attention(q, k, v, causal=True, scale=0.25, key_lengths=lengths, return_lse=True)
    args = (dout, draw_dlse(Shape(2, 4, 2, 9, 20)), q, k, v, o, lse, lengths, 0.25, 1, [True, False, True], True)
    assert set(torch.library.opcheck(backward_op(attn), args).values()) == {"SUCCESS"}


@pytest.mark.field("R043", "R044", "R045", "R048", "R049", "R050")
@dtypes
def test_each_layout_of_each_tensor(attn, dtype):
    tensors = draw(Shape(2, 4, 2, 130, 140), dtype)
    want = gradients(attn, *tensors, causal=True)
    for index, x in enumerate(tensors):
        others = autograd_calls.layouts(x)
        flat = torch.cat([x.new_full((3,), math.nan), x.flatten()])
        others["unaligned"] = flat[3:].view(x.shape)
        for name, other in others.items():
            changed = [*tensors[:index], other, *tensors[index + 1 :]]
            assert same_bits(gradients(attn, *changed, causal=True), want), f"{index}, {name}"
    q, k, v, dout = tensors
    for g in (dout[..., :1], dout[:1], dout[:, :, :1, :1], dout[:1, :1, :1, :1]):
        g = g.expand(dout.shape)
        assert same_bits(gradients(attn, q, k, v, g), gradients(attn, q, k, v, g.contiguous()))
    kx, vx = (x[:, :1].expand(2, 4, 140, D) for x in (k, v))
    assert same_bits(gradients(attn, q, kx, vx, dout), gradients(attn, q, kx.contiguous(), vx.contiguous(), dout))
    dlse = draw_dlse(Shape(2, 4, 2, 130, 140))
    want = gradients(attn, *tensors, dlse)
    assert same_bits(gradients(attn, *tensors, dlse.transpose(1, 2).contiguous().transpose(1, 2)), want)


@pytest.mark.field("R051")
@dtypes
def test_zero_inputs_have_zero_gradients_whatever_the_strides(attn, dtype):
    q, k, v, dout = draw(Shape(2, 4, 2, 130, 140), dtype)
    for name in autograd_calls.layouts(q):
        zero = [autograd_calls.layouts(torch.zeros_like(x))[name] for x in (q, k, v)]
        first = gradients(attn, *zero, dout)
        assert same_bits(gradients(attn, *zero, dout), first)
        assert not first[0].any() and not first[1].any() and first[2].any()


@pytest.mark.field("R053", "R055", "R059")
@pytest.mark.parametrize("causal", CAUSAL)
def test_empty_problems_and_rows(attn, causal):
    for shape in (Shape(2, 4, 2, 0, 5), Shape(2, 4, 2, 5, 0), Shape(0, 4, 2, 5, 7), Shape(2, 0, 0, 5, 7)):
        tensors = draw(shape)
        got = gradients(attn, *tensors, draw_dlse(shape), causal=causal)
        assert [x.shape for x in got] == [x.shape for x in tensors[:3]] and not any(x.any() for x in got)
    shape = Shape(2, 4, 2, 300, 140)
    q, k, v, dout = draw(shape)
    dlse = draw_dlse(shape)
    got = gradients(attn, q, k, v, dout, dlse, causal=True)
    assert not got[0][:, :, :160].any() and got[0][:, :, 160:].any()
    for x in (q, dout, dlse):
        x[:, :, :160] = 0
    assert same_bits(gradients(attn, q, k, v, dout, dlse, causal=True), got)


@pytest.mark.field("R006", "R021", "R122")
@dtypes
def test_key_lengths(attn, dtype):
    """Padding has gradients of 0 and no influence; a length out of range gives NaN gradients of its entry only."""
    lengths = torch.tensor([1, 130, 0, 77, -1, 132], device="cuda")
    q, k, v, dout = draw(Shape(6, 4, 2, 70, 131), dtype)
    want = gradients(attn, q, k, v, dout, causal=True, key_lengths=lengths)
    assert all(x[4:].isnan().all() for x in want) and not any(x[:4].isnan().any() for x in want)
    good = gradients(attn, *(x[:4] for x in (q, k, v, dout)), causal=True, key_lengths=lengths[:4])
    assert same_bits([x[:4] for x in want], good)
    for i, n in enumerate(lengths[:4].tolist()):
        assert not want[1][i, :, n:].any() and not want[2][i, :, n:].any()
        k[i, :, n:] = v[i, :, n:] = math.nan
    assert same_bits([x[:4] for x in gradients(attn, q, k, v, dout, causal=True, key_lengths=lengths)], good)


@pytest.mark.field("R027", "R028")
@dtypes
@pytest.mark.parametrize("nq", [1, 76, 146])
def test_one_key_and_large_values(attn, dtype, nq):
    q, k, v, dout = (3 * x for x in draw(Shape(3, 2, 1, nq, 1), dtype))
    for causal in CAUSAL:
        assert_right(attn, q, k, v, dout, None, gradients(attn, q, k, v, dout, causal=causal), causal=causal)


@pytest.mark.field("R071")
def test_more_than_2_to_the_31_scores(attn_of):
    """The size of the report: dQ of the first and the last rows, dK and dV of a dO that only the last rows have.

    The last head, whose scores lie beyond 2^32, is judged at all 53936 keys. The others have the bits of a call alone.
    """
    attn, n = attn_of("fast tile at d=128"), 53936
    q, k, v, dout = draw(Shape(1, 3, 3, n, n), d=128)
    given = gradients(attn, q, k, v, dout, causal=True)
    for head in range(3):
        alone = gradients(attn, *(x[:, head : head + 1] for x in (q, k, v, dout)), causal=True)
        assert same_bits([x[:, head : head + 1] for x in given], alone)
    top = slice(0, 176)
    first = [x[:, :, top].contiguous() for x in (q, k, v, dout)]
    alone = gradients(attn, *first, causal=True)
    assert_right(attn, *first, None, [given[0][:, :, top], *alone[1:]], causal=True)
    few = 16  # one step of the kernel's products in its last tile; a judge of so many keys is slow
    tail = slice(n - few, n)
    last = [q[:, 2:, tail].contiguous(), k[:, 2:], v[:, 2:], dout[:, 2:, tail].contiguous()]
    dout[:, :, : n - few] = 0  # then the rows above add exact zeros
    _, dk, dv = gradients(attn, q, k, v, dout, causal=True)
    assert_right(attn, *last, None, [given[0][:, 2:, tail], dk[:, 2:], dv[:, 2:]], causal=True)


@dtypes
def test_subsets_steps_and_checkpoints(attn, dtype):
    q, k, v, dout = draw(dtype=dtype)
    want = gradients(attn, q, k, v, dout, causal=True)
    for index in range(3):
        inputs = [x.detach().requires_grad_(i == index) for i, x in enumerate((q, k, v))]
        attn.attention(*inputs, causal=True, deterministic=True).backward(dout)
        assert same_bits([inputs[index].grad], [want[index]]) and sum(x.grad is not None for x in inputs) == 1

    def block(q, k, v):
        return attn.attention(q, k, v, causal=True, deterministic=True)

    for reentrant in (False, True):
        inputs = leaves(q, k, v)
        checkpoint(block, *inputs, use_reentrant=reentrant).backward(dout)
        assert same_bits([x.grad for x in inputs], want)
    o = block(*inputs)
    for _ in range(2):
        assert same_bits(torch.autograd.grad(o, inputs, dout, retain_graph=True), want)


@dtypes
def test_autocast(attn, dtype):
    q, k, v, dout = draw(dtype=dtype)
    want = gradients(attn, q, k, v, dout)
    inputs = leaves(*(x.float() for x in (q, k, v)))
    with torch.autocast("cuda", dtype=dtype):
        o = attn.attention(*inputs, deterministic=True)
    o.backward(dout)
    assert o.dtype == dtype and same_bits([x.grad for x in inputs], [g.float() for g in want])


@pytest.mark.field("R080", "R081")
def test_what_has_no_derivative_is_refused(attn):
    q, k, v, _ = draw(Shape(1, 2, 2, 5, 7))
    (x,) = leaves(q)
    (g,) = torch.autograd.grad(attn.attention(x, k, v).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        g.sum().backward()
    with pytest.raises(NotImplementedError, match="has no jvp"):
        torch.func.jvp(lambda x: attn.attention(x, k, v), (q,), (q,))


@pytest.mark.field("R109")
def test_the_device_of_the_tensors_decides(attn):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = draw()
    want = gradients(attn, *tensors)
    assert torch.cuda.current_device() == 0
    got = gradients(attn, *(x.to("cuda:1") for x in tensors))
    assert {x.device.index for x in got} == {1} and same_bits([x.cpu() for x in got], [x.cpu() for x in want])


def test_a_dtype_without_kernels_is_refused_whatever_requires_grad(attn):
    q, k, v, _ = draw()
    with pytest.raises(ValueError, match="no cuda kernel for float32"):
        attn.attention(*leaves(*(x.float() for x in (q, k, v))))
