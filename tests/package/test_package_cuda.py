"""The op on a GPU: the tensor's device, the caller's stream, no synchronisation, CUDA graphs, layouts."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and nvcc"),
]
D = 16


@pytest.fixture(scope="module")
def gpu(packages, tmp_path_factory):
    """A package with kernels for the CPU and for CUDA, imported."""
    return packages.imported(packages.emitted(tmp_path_factory.mktemp("emitted"), "attn_cuda", archs=("cpu", "sm80")))


def random(*shape, dtype=torch.bfloat16, seed=0, device="cuda"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def same_as_contiguous(gpu, q, k, v, **options):
    got = gpu.attention(q, k, v, return_lse=True, **options)
    want = gpu.attention(*(t.contiguous().clone() for t in (q, k, v)), return_lse=True, **options)
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_row_sees_exactly_its_keys(gpu, dtype, causal):
    for nq, nk in [(1, 8), (5, 2), (7, 16), (16, 7)]:
        lengths = torch.tensor([nk, nk // 2, 0], device="cuda")
        v = torch.eye(nk, D, dtype=dtype, device="cuda").expand(3, 2, nk, D)
        q = torch.zeros(3, 4, nq, D, dtype=dtype, device="cuda")
        k = torch.ones(3, 2, nk, D, dtype=dtype, device="cuda")
        o, lse = gpu.attention(q, k, v, causal=causal, key_lengths=lengths, return_lse=True)
        i, j = torch.arange(nq)[:, None], torch.arange(nk)
        limit = {False: nk + 0 * i, "bottom_right": i + nk - nq + 1, "top_left": i + 1}[causal]
        for b, length in enumerate(lengths.tolist()):
            visible = (j < limit) & (j < length)
            assert torch.equal(o[b].cpu() > 0, torch.nn.functional.pad(visible, (0, D - nk)).expand(4, -1, -1))
            assert torch.equal(lse[b].isneginf().cpu(), ~visible.any(-1).expand(4, -1))


@pytest.mark.field("R043", "R044", "R045", "R047", "R048")
def test_layouts(gpu):
    x = random(2, 33, 4, D).transpose(1, 2)
    assert same_as_contiguous(gpu, x, x, x, causal=True)
    wide, flat = random(2, 3, 9, D + 1), random(2 * 3 * 9 * D + 1)
    shifted = flat.as_strided((2, 3, 9, D), (3 * 9 * D, 9 * D, D, 1), storage_offset=1)
    assert shifted.data_ptr() % 16 != 0
    assert same_as_contiguous(gpu, wide[..., :D], shifted, wide[..., 1:])
    k = random(1, 1, 9, D)
    assert same_as_contiguous(gpu, random(1, 4, 5, D), k.expand(1, 4, 9, D), k.expand(1, 4, 9, D))
    columns = random(1, 2, D, 7).transpose(-1, -2)
    assert same_as_contiguous(gpu, columns, columns, columns)
    one = random(1, 1, 1, D).as_strided((1, 1, 1, D), (3, 5, 7, 1))
    assert torch.equal(gpu.attention(one, one, one), one)


@pytest.mark.field("R056", "R057", "R058")
@pytest.mark.parametrize("b, hq, hkv, nq, nk", [(0, 2, 1, 3, 4), (2, 0, 0, 3, 4), (2, 2, 2, 0, 4), (1, 2, 1, 3, 0)])
def test_empty_problems(gpu, b, hq, hkv, nq, nk):
    q, k = random(b, hq, nq, D), random(b, hkv, nk, D)
    o, lse = gpu.attention(q, k, k, return_lse=True)
    assert o.shape == (b, hq, nq, D) and not o.any() and lse.isneginf().all()


def test_lengths_out_of_range_give_nan_rows_without_a_synchronisation(gpu):
    q, k = random(4, 2, 3, D), random(4, 2, 8, D)
    gpu.attention(q, k, k)
    lengths = {dtype: torch.tensor([8, 9, -1, 0], device="cuda", dtype=dtype) for dtype in (torch.int32, torch.int64)}
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [gpu.attention(q, k, k, key_lengths=n, return_lse=True) for n in lengths.values()]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for o, lse in results:
        assert o[1:3].isnan().all() and lse[1:3].isnan().all()
        assert o[0].isfinite().all() and not o[3].any()


@pytest.mark.field("R109")
def test_the_tensor_decides_the_device(gpu):
    last = torch.cuda.device_count() - 1
    x = random(1, 2, 5, D)
    y = x.to(f"cuda:{last}")
    with torch.cuda.device(0):
        o = gpu.attention(y, y, y)
        assert torch.cuda.current_device() == 0
    assert o.device == y.device and torch.equal(o.cpu(), gpu.attention(x, x, x).cpu())
    with pytest.raises(ValueError, match=r"got q on cuda:0, k on cpu, v on cpu$"):
        gpu.attention(x, x.cpu(), x.cpu())
    with pytest.raises(ValueError, match="key_lengths must be on cuda:0 like q; it is on cpu"):
        gpu.attention(x, x, x, key_lengths=torch.tensor([1]))


def test_the_current_stream_is_used(gpu):
    """The inputs are written on a side stream after a long wait there: the op must queue behind."""
    x = random(1, 2, 64, D)
    want = gpu.attention(x, x, x)
    late, side = torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(x)
        o = gpu.attention(late, late, late)
    side.synchronize()
    assert torch.equal(o, want)


def test_a_cuda_graph_replays_the_op(gpu):
    x = random(2, 2, 33, D)
    lengths = torch.tensor([33, 5], device="cuda", dtype=torch.int32)
    wide = torch.zeros(2, 2, 33, D + 1, device="cuda", dtype=torch.bfloat16)  # a layout that is copied
    gpu.attention(x, x, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = gpu.attention(wide[..., :D], wide[..., :D], wide[..., :D], causal=True, key_lengths=lengths)
    for seed in (1, 2):
        wide[..., :D] = random(2, 2, 33, D, seed=seed)
        lengths.copy_(torch.tensor([seed, 33]))
        graph.replay()
        x = wide[..., :D].contiguous()
        assert torch.equal(o, gpu.attention(x, x, x, causal=True, key_lengths=lengths))


def test_a_first_call_inside_a_capture_says_what_to_do(packages, tmp_path):
    attn = packages.imported(packages.emitted(tmp_path, "attn_capture", archs=("cpu", "sm80"), dtypes=("bf16",)))
    attn.build()
    x = random(1, 1, 2, D)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="call attention once before capturing"), torch.cuda.graph(graph):
        attn.attention(x, x, x)
    torch.cuda.synchronize()
    assert torch.equal(attn.attention(x[:, :, :1], x[:, :, :1], x[:, :, :1]), x[:, :, :1])


@pytest.mark.field("R103")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_on_cuda(gpu, mode):
    q, k = random(2, 4, 5, D), random(2, 2, 9, D)
    compiled = torch.compile(lambda q, k: gpu.attention(q * 2, k, k, causal=True) + 1, fullgraph=True, mode=mode)
    for _ in range(3):
        got = compiled(q, k).clone()
    assert torch.equal(got, gpu.attention(q * 2, k, k, causal=True) + 1)
    forward = getattr(torch.ops, gpu.op.NAMESPACE).forward.default
    torch.library.opcheck(forward, (q, k, k, None, 0.25, 1))


@pytest.mark.field("R125", "R126")
def test_bad_requests_leave_the_context_usable(gpu):
    x = random(1, 2, 5, D)
    with pytest.raises(ValueError, match="this package has no cuda kernel for float32; it has bfloat16, float16"):
        gpu.attention(x.float(), x.float(), x.float())
    with pytest.raises(ValueError, match="made for d=16"):
        gpu.attention(x[..., :8], x, x)
    with pytest.raises(ValueError, match="scale must be"):
        gpu.attention(x, x, x, scale=0.0)
    with pytest.raises(NotImplementedError):
        gpu.attention(x.clone().requires_grad_(), x, x)
    huge = x[:, :1, :1].expand(2**32, 1, 1, D)  # 2**32 rows; the outputs do not fit
    with pytest.raises(RuntimeError):
        gpu.attention(huge, huge, huge)
    assert torch.equal(gpu.attention(x[:, :, :1], x[:, :, :1], x[:, :, :1]), x[:, :, :1])


def test_path_names_the_target(gpu):
    x = random(1, 1, 2, D)
    assert gpu.path(x, x, x) == {
        "target": "sm80", "isa": "sm80", "dtype": "bf16", "arithmetic": "reference",
        "br": 16, "bc": 16, "plan": {"br": 16, "bc": 16},
    }  # fmt: skip
