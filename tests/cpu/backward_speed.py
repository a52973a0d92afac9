"""Times the backward CPU kernels against torch's SDPA backward: ratios of alternating pairs, never asserted.

    python -m tests.cpu.backward_speed --d 64,128 --n 512,2048 --dtype float32 --isa v4 --pairs 5

Prints torch's time over ours per shape, (B, H) = (1, 8), full and causal, and the geometric mean. Both run on as many
threads as torch has. Ours is the bare kernel on threads of a pool, without a binding. On a busy machine --cpu-time
compares the processor time of one thread each, where waiting for a core does not count.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.cpu import amx_unit, backward_units, units

TORCH = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def arguments(q, k, v, o, lse, dout, gradients, *, causal):
    """BackwardArgs of tensors of shape (B,H,N,d)."""
    a = backward_units.BackwardArgs()
    named = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "dout": dout}
    for name, x in {**named, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}.items():
        count = 4 if name == "dout" else 3
        setattr(a, name, x.data_ptr())
        setattr(a, f"{name}_stride", (ctypes.c_int64 * count)(*x.stride()[:count]))
    a.B, a.Hq, a.Nq = q.shape[:3]
    a.Hkv, a.Nk = k.shape[1:3]
    a.scale = 1 / math.sqrt(q.shape[3])
    a.causal = units.CAUSAL["top_left"] if causal else 0
    return a


def ratio(pool, threads, clock, isa, dtype, sram, n, d, heads, pairs, *, causal, tile):
    """(torch's time over ours, GFLOP/s of ours, largest difference of the gradients), medians over the pairs."""
    torch.manual_seed(0)
    shape = (1, heads, n, d)
    q, k, v = (torch.randn(shape).to(TORCH[dtype]).requires_grad_() for _ in range(3))
    dout = torch.randn(shape).to(TORCH[dtype])
    o = sdpa(q, k, v, is_causal=causal)
    wide = torch.float64 if dtype == "float64" else torch.float32
    with torch.no_grad():
        s = q.to(wide) @ k.to(wide).transpose(-1, -2) / math.sqrt(d)
        if causal:
            s.masked_fill_(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf)
        lse = torch.logsumexp(s, -1).contiguous()
        del s
    problem = units.make_problem(d, dtypes=(dtype,), sram=sram, **tile)
    kernel = backward_units.kernel(problem, isa, dtype)
    mine = [torch.empty_like(x) for x in (q, k, v)]
    a = arguments(q.detach(), k.detach(), v.detach(), o.detach().contiguous(), lse, dout, mine, causal=causal)
    memory = np.empty(kernel.shared_bytes(ctypes.byref(a)) + 64, np.uint8)
    shared = memory.ctypes.data + -memory.ctypes.data % 64

    def ours():
        counter = ctypes.c_int64(0)
        kernel.begin(ctypes.byref(a), shared)
        work = [pool.submit(kernel.run, ctypes.byref(a), shared, ctypes.addressof(counter)) for _ in range(threads - 1)]
        assert kernel.run(ctypes.byref(a), shared, ctypes.addressof(counter)) == 0
        assert all(w.result() == 0 for w in work)

    def theirs():
        return torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)

    ours()
    difference = max(float((x.to(wide) - y.to(wide)).abs().max()) for x, y in zip(mine, theirs(), strict=True))
    times = []
    for _ in range(pairs):
        start = clock()
        ours()
        middle = clock()
        theirs()
        times.append((middle - start, clock() - middle))
    operations = 10 * heads * n * n * d / (2 if causal else 1)
    best = statistics.median(t for t, _ in times)
    return statistics.median(b / t for t, b in times), operations / best / 1e9, difference


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--d", "64,128"), ("--n", "512,2048"), ("--dtype", "float32"), ("--isa", "v4")):
        parser.add_argument(name, default=default)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sram", type=int, default=192, help="KB")
    parser.add_argument("--tile", default="", help="Br,Bc in place of the planner's")
    parser.add_argument("--cpu-time", action="store_true")
    asked = parser.parse_args()
    clock = time.process_time if asked.cpu_time else time.perf_counter
    assert asked.isa != "amx" or not amx_unit.machine_lacks()  # asks for the tiles
    if asked.cpu_time:
        torch.set_num_threads(1)
    threads = torch.get_num_threads()
    ratios = []
    br, bc = (int(x) for x in asked.tile.split(",")) if asked.tile else (None, None)
    tile = {} if br is None else {"br": br, "bc": bc}
    with ThreadPoolExecutor(threads) as pool:
        for d in map(int, asked.d.split(",")):
            problem = units.make_problem(d, dtypes=(asked.dtype,), sram=asked.sram << 10, **tile)
            plan = backward_units.plan(problem, asked.isa, asked.dtype)
            print(f"d={d}: Br={plan.br} Bc={plan.bc}, {plan.fast_memory_bytes} bytes")
            for n in map(int, asked.n.split(",")):
                for causal in (False, True):
                    speed, rate, difference = ratio(
                        pool, threads, clock, asked.isa, asked.dtype, asked.sram << 10, n, d, asked.heads, asked.pairs,
                        causal=causal, tile=tile,
                    )  # fmt: skip
                    ratios.append(speed)
                    mask = "causal" if causal else "full"
                    print(f"d={d} N={n} {mask}: {speed:.2f} x torch, {rate:.0f} GFLOP/s, differ by {difference:.1e}")
    print(f"geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.2f}")


if __name__ == "__main__":
    main()
