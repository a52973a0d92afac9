"""The debug form of the kernel shows its inside: the state after every key tile, and O before it is rounded."""

from __future__ import annotations

import pytest
import torch

from verify import arithmetic, gpu_packages, packages
from verify.arithmetic import gamma

pytestmark = pytest.mark.gpu
WORDS = {name: value for name, value in gpu_packages.DEBUG.items() if name != "debug"}


@pytest.fixture(scope="module")
def debug(gpu):
    return packages.load(gpu_packages.request(gpu_packages.DEBUG))


def inputs(dtype, nq=150, nk=210):
    made = torch.Generator().manual_seed(5)
    return [torch.randn(2, h, n, 64, generator=made).to(dtype).cuda() for h, n in ((4, nq), (2, nk), (2, nk))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
def test_the_output_is_the_wide_output_rounded_once(debug, dtype, causal):
    """To nearest, ties to even: a truncated or twice rounded output stays within its bound and is seen here only."""
    attn = packages.load(gpu_packages.request(WORDS))
    args = inputs(dtype)
    wide, wide_lse = debug.attention(*args, causal=causal, return_lse=True)
    o, lse = attn.attention(*args, causal=causal, return_lse=True)
    assert wide.dtype == torch.float32 and torch.equal(o, wide.to(dtype)) and torch.equal(lse, wide_lse)


@pytest.mark.parametrize("causal", [0, 1, 2])
def test_the_state_after_every_key_tile(debug, causal):
    """m is the maximum so far, 1 <= l <= keys seen up to rounding, and O / l ends as the output."""
    q, k, v = inputs(torch.bfloat16)
    scale, bc, nq, nk = 0.125, 32, q.shape[2], k.shape[2]
    op = getattr(torch.ops, debug.op.NAMESPACE).forward_trace
    o, _, trace = op(q, k, v, None, scale, causal, -(-nk // bc))
    i, j = torch.arange(nq, device="cuda")[:, None], torch.arange(nk, device="cuda")
    seen = (j <= i + (nk - nq if causal == 1 else 0)) if causal else (j >= 0).expand(nq, nk)
    q, k = q.double(), k.repeat_interleave(2, 1).double().transpose(-1, -2)
    s = (q @ k * scale).masked_fill(~seen, -torch.inf)
    rounds = arithmetic.model("mma_sm80", "bf16")
    steps = -(-64 // rounds.block) + 1  # sums of products, then the scale
    room = gamma(steps, rounds.step_unit) * (q.abs() @ k.abs()).amax(-1) * scale

    written = ~trace[..., 0].isnan()
    assert written[..., 0].all() and not (written[..., 1:] & ~written[..., :-1]).any()
    for t in range(trace.shape[3]):
        here, m, l = written[..., t], trace[..., t, 0].double(), trace[..., t, 1].double()
        keys = seen[:, : (t + 1) * bc].sum(-1).double().expand_as(m)
        some = here & (keys > 0)
        assert ((m - s[..., : (t + 1) * bc].amax(-1)).abs() <= room)[some].all()
        assert torch.isneginf(m[here & (keys == 0)]).all() and (l[here & (keys == 0)] == 0).all()
        # Each weight errs by less than 2^-20 (exp2 of an argument below 16 and its rounding), each addition by 2^-24.
        rounding = 1 + 2.0**-20 + 2.0**-24 * keys
        assert (l * rounding >= 1)[some].all() and (l <= keys * rounding)[here].all()
        if t:
            assert (m >= trace[..., t - 1, 0].double())[here].all()
    last = (written.sum(-1) - 1)[..., None, None].expand(*o.shape[:3], 1, trace.shape[-1])
    final = trace.gather(3, last).squeeze(3)
    l, raw = final[..., 1:2], final[..., 2:]
    assert torch.equal(torch.where(l == 0, 0.0, raw * (1.0 / l)), o)
