"""The kernels for sm_90a as a package dispatches to them: which one runs and why, and the same bits every time.

Each package also carries the sm_80 kernel; TILEPROOF_CUDA_ARCH forces one of the two.
"""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from verify import gpu_packages, packages
from verify.devices import ARCH_VARIABLE

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
CAUSAL = [False, True]


@pytest.fixture(autouse=True)
def hopper(gpu, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    monkeypatch.delenv(ARCH_VARIABLE, raising=False)


@pytest.fixture(params=[64, 128, 256])
def width(request) -> int:
    return request.param


@pytest.fixture(params=["paper", "tuned"])
def attn(width, request) -> ModuleType:
    name = f"sm90a, d={width}" + (", tuned" if request.param == "tuned" else "")
    words = gpu_packages.HOPPER[name]
    folder = gpu_packages.request(words)
    if words["tiling"] == "tuned" and len(packages.part(packages.load(folder), "recipe").EXACT_TARGETS["sm90a"][1]) < 2:
        pytest.skip("no tuning table has this width: the package is the paper's")
    return packages.load(folder)


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def inputs(d, b=2, hq=8, hkv=4, nq=300, nk=400, dtype=torch.bfloat16, seed=0):
    shapes = [(hq, nq), (hkv, nk), (hkv, nk)]
    return [random(b, h, n, d, dtype=dtype, seed=seed + i) for i, (h, n) in enumerate(shapes)]


def equal(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def kernels_of(call) -> list[str]:
    """The kernels that a call starts, by name."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [e.name for e in seen.events() if "attention_forward" in e.name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("nq", [1, 300, 5000])
def test_what_path_says_is_what_runs(attn, width, dtype, causal, nq):
    q, k, v = inputs(width, b=1, nq=nq, nk=5000, dtype=dtype)
    said = attn.path(q, k, v, causal=causal)
    assert said["target"] == "sm90a" and said["why"] == "the kernel for sm_90 takes the call"
    (ran,) = kernels_of(lambda: attn.attention(q, k, v, causal=causal))
    assert f"_{said['br']}x{said['bc']}" in ran
    first = attn.attention(q, k, v, causal=causal, return_lse=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ARCH_VARIABLE, said["unit"])
        assert equal(attn.attention(q, k, v, causal=causal, return_lse=True), first)
        patch.setenv(ARCH_VARIABLE, "sm80")
        said = attn.path(q, k, v, causal=causal)
        assert (said["target"], said["why"]) == ("sm80", f"{ARCH_VARIABLE}=sm80")
        (ran,) = kernels_of(lambda: attn.attention(q, k, v, causal=causal))
        assert f"_{said['br']}x{said['bc']}" in ran


@pytest.mark.parametrize("causal", CAUSAL)
def test_strides_without_a_tensor_map_take_the_other_kernel_and_are_right(attn, width, causal, monkeypatch):
    q, k, v = inputs(width, hkv=1)
    wide_k, wide_v = (x.expand(2, 8, 400, width) for x in (k, v))
    said = attn.path(q, wide_k, wide_v, causal=causal)
    assert said["target"] == "sm80" and "no tensor map" in said["why"]
    got = attn.attention(q, wide_k, wide_v, causal=causal, return_lse=True)
    monkeypatch.setenv(ARCH_VARIABLE, "sm90a")
    with pytest.raises(ValueError, match=f"{ARCH_VARIABLE}=sm90a cannot take this call: a stride"):
        attn.attention(q, wide_k, wide_v, causal=causal)
    monkeypatch.setenv(ARCH_VARIABLE, "sm80")
    assert equal(got, attn.attention(q, wide_k.contiguous(), wide_v.contiguous(), causal=causal, return_lse=True))


def test_layouts_that_a_tensor_map_expresses_equal_their_contiguous_copies(attn, width):
    x = [random(2, 300, 4, width, seed=s).transpose(1, 2) for s in range(3)]  # (B, N, H, d) in memory
    padded = [random(2, 4, 300, width + 8, seed=s)[..., :width] for s in range(3)]
    shifted = [random(2, 4, 301, width, seed=s)[:, :, 1:] for s in range(3)]
    for given in (x, padded, shifted):
        assert not given[0].is_contiguous() and attn.path(*given)["target"] == "sm90a"
        copies = [t.contiguous().clone() for t in given]
        for causal in CAUSAL:
            got = attn.attention(*given, causal=causal, return_lse=True)
            assert equal(got, attn.attention(*copies, causal=causal, return_lse=True))


@pytest.mark.field("R007", "R106")
@pytest.mark.parametrize("causal", CAUSAL)
def test_a_thousand_runs_give_the_same_bits(attn, width, causal):
    """More query tiles than multiprocessors, so that blocks take several; NaN lies where the outputs come to be."""
    q, k, v = inputs(width, b=2, hq=32, hkv=8, nq=1100, nk=1100)
    first = attn.attention(q, k, v, causal=causal, return_lse=True)
    assert not any(x.isnan().any() for x in first)
    for _ in range(1000):
        poisoned = [torch.full_like(x, math.nan) for x in first]
        del poisoned
        assert equal(attn.attention(q, k, v, causal=causal, return_lse=True), first)


@pytest.mark.field("R033", "R078")
@pytest.mark.parametrize("causal", CAUSAL)
def test_an_item_does_not_depend_on_how_many_tiles_a_block_takes(attn, width, causal):
    q, k, v = inputs(width, b=48, hq=8, hkv=2, nq=260, nk=520)
    together = attn.attention(q, k, v, causal=causal, return_lse=True)
    for i in (0, 7, 23, 47):
        alone = attn.attention(*(x[i : i + 1] for x in (q, k, v)), causal=causal, return_lse=True)
        assert equal((x[i : i + 1] for x in together), alone)


@pytest.mark.field("R006", "R122")
@pytest.mark.parametrize("causal", CAUSAL)
def test_keys_beyond_a_length_are_not_read_and_bad_lengths_give_nan_rows(attn, width, causal):
    lengths = torch.tensor([1, 400, 0, 77, -1, 401], device="cuda")
    q, k, v = inputs(width, b=6)
    assert attn.path(q, k, v, causal=causal, key_lengths=lengths)["target"] == "sm90a"
    want = attn.attention(q, k, v, causal=causal, key_lengths=lengths, return_lse=True)
    for i, n in enumerate(lengths.tolist()):
        if 0 <= n <= 400:
            k[i, :, n:] = v[i, :, n:] = math.nan
    got = attn.attention(q, k, v, causal=causal, key_lengths=lengths, return_lse=True)
    assert equal((x[:4] for x in got), (x[:4] for x in want)) and not got[0][:4].isnan().any()
    assert all(x[4:].isnan().all() for x in got)


@pytest.mark.parametrize("causal", CAUSAL)
def test_a_captured_graph_replays_on_new_inputs(attn, width, causal):
    """The counter of the query tiles is scratch memory: a replay must find it as the first run did."""
    q, k, v = inputs(width, b=4, hq=32, nq=700)
    attn.attention(q, k, v, causal=causal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attn.attention(q, k, v, causal=causal, return_lse=True)
    for seed in (1, 2, 3):
        for x, new in zip((q, k, v), inputs(width, b=4, hq=32, nq=700, seed=10 * seed), strict=True):
            x.copy_(new)
        for x in out:
            x.fill_(math.nan)
        graph.replay()
        assert equal(out, attn.attention(q, k, v, causal=causal, return_lse=True))


def test_two_streams_at_once_do_not_share_scratch_memory(attn, width):
    q, k, v = inputs(width, b=4, hq=32, nq=700)
    want = attn.attention(q, k, v, causal=True, return_lse=True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    got = []
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 4]):
            got.append(attn.attention(q, k, v, causal=True, return_lse=True))
    torch.cuda.synchronize()
    assert all(equal(one, want) for one in got)


@pytest.mark.field("R103")
def test_compiled_as_a_whole_graph_and_opcheck(attn, width):
    torch._dynamo.reset()
    q, k, v = inputs(width)
    compiled = torch.compile(lambda q, k, v: attn.attention(q * 2, k, v, causal=True, return_lse=True), fullgraph=True)
    assert equal(compiled(q, k, v), attn.attention(q * 2, k, v, causal=True, return_lse=True))
    op = getattr(torch.ops, packages.part(attn, "op").NAMESPACE).forward.default
    assert set(torch.library.opcheck(op, (q, k, v, None, 0.125, 1)).values()) == {"SUCCESS"}


@pytest.mark.field("R056", "R057", "R058")
@pytest.mark.parametrize("b, hq, hkv, nq, nk", [(0, 2, 1, 3, 4), (2, 0, 0, 3, 4), (2, 2, 2, 0, 4), (1, 2, 1, 130, 0)])
def test_empty_problems(attn, width, b, hq, hkv, nq, nk):
    shapes = ((b, hq, nq, width), (b, hkv, nk, width), (b, hkv, nk, width))
    q, k, v = (torch.ones(*shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    for causal in (False, True, "top_left"):
        o, lse = attn.attention(q, k, v, causal=causal, return_lse=True)
        assert o.shape == (b, hq, nq, width) and not o.any() and torch.isneginf(lse).all()
