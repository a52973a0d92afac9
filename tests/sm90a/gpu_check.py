"""The sm_90a kernels on a Hopper GPU: built side by side, checked against float64, timed against cuDNN.

    python -m tests.sm90a.gpu_check OUT_FOLDER [--plans REGEX] [--widths 64,128] [--lengths 512,8192] [--no-time]

Every plan of PLANS is checked in a process of its own with a time limit, so that a kernel that hangs costs that limit
and nothing more. Outputs start as NaN. Times are taken in random order, in several rounds, ours and torch's cuDNN
attention in one process; the ratio is the median over the rounds. Results go to OUT_FOLDER/{check,time}.json.
Needs nvcc and an sm_90 GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from codegen.plans.sm90a import Sm90aPlan
from tests.sm90a import kernels

TIME_LIMIT_S = 120  # of the check of one plan


def plan(br: int, bc: int, d: int, dv: int | None = None, **more: Any) -> Sm90aPlan:
    usual = {"stages_k": 2, "stages_v": 2, "p_in_shared": False, "ping_pong": br > 64, "lazy_rescale": d > 192}
    return Sm90aPlan(br=br, bc=bc, d=d, dv=dv or d, **{**usual, **more})


PLANS: dict[str, tuple[Sm90aPlan, tuple[str, ...]]] = {
    "d128_192x128": (plan(192, 128, 128, p_in_shared=True), ("bf16",)),
    "d128_192x128_skip": (plan(192, 128, 128, p_in_shared=True, skips_masked=True), ("bf16",)),
    "d128_128x128": (plan(128, 128, 128), ("bf16", "fp16")),
    "d128_128x176": (plan(128, 176, 128, ping_pong=False), ("bf16",)),
    "d64_192x128": (plan(192, 128, 64), ("bf16", "fp16")),
    "d64_192x128_skip": (plan(192, 128, 64, skips_masked=True), ("bf16",)),
    "d64_256x64": (plan(256, 64, 64), ("bf16",)),
    "d64_128x64_2": (plan(128, 64, 64, p_in_shared=True, ping_pong=False, blocks_per_sm=2), ("bf16",)),
    "d64_64x96_3": (plan(64, 96, 64, blocks_per_sm=3), ("bf16",)),
    "d256_128x80": (plan(128, 80, 256), ("bf16", "fp16")),
    "d256_128x64": (plan(128, 64, 256), ("bf16",)),
    "d192_dv128": (plan(128, 128, 192, 128, ping_pong=False), ("bf16",)),
    "d192_128x96": (plan(128, 96, 192, ping_pong=False), ("bf16",)),
    "d96_192x96": (plan(192, 96, 96), ("bf16",)),
    "d80_192x112": (plan(192, 112, 80), ("bf16",)),
    "d72_dv40": (plan(128, 128, 72, 40, stages_v=1, ping_pong=False), ("bf16",)),
    "d32_192x128": (plan(192, 128, 32), ("bf16",)),
    "d8_dv256": (plan(64, 64, 8, 256), ("bf16",)),
}


# ---- One call


class Call:
    """One problem on the GPU and its outputs, poisoned with NaN."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: str = "full",
        lengths: torch.Tensor | None = None,
        counter: bool = True,
    ) -> None:
        self.q, self.k, self.v, self.causal, self.lengths = q, k, v, causal, lengths
        self.scale = q.shape[-1] ** -0.5
        self.o = torch.full((*q.shape[:3], v.shape[-1]), torch.nan, device=q.device, dtype=q.dtype)
        self.lse = torch.full(q.shape[:3], torch.nan, device=q.device)
        self.scratch = torch.empty(1, dtype=torch.int32, device=q.device) if counter else None
        self.args = kernels.ForwardArgs(
            *(t.data_ptr() for t in (q, k, v, self.o, self.lse)), q.shape[0], q.shape[1], k.shape[1], q.shape[2],
            k.shape[2], *((ctypes.c_int64 * 3)(*t.stride()[:3]) for t in (q, k, v, self.o)),
            None if lengths is None else lengths.data_ptr(), self.scale, kernels.CAUSAL_CODES[causal],
        )  # fmt: skip
        self.code = kernels.DTYPE_CODES["bf16" if q.dtype == torch.bfloat16 else "fp16"]
        self.stream = torch.cuda.current_stream().cuda_stream

    def run(self, entry: Callable[..., int]) -> int:
        scratch = None if self.scratch is None else self.scratch.data_ptr()
        return entry(ctypes.byref(self.args), self.code, scratch, self.stream)


def reference(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """O, LSE, and what bounds their errors: the weighted |V| per element, the largest |score| sum per row; float64."""
    group = call.q.shape[1] // call.k.shape[1]
    q, k, v = call.q.double(), call.k.double(), call.v.double()
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    keys = torch.arange(k.shape[2], device=q.device)
    seen = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if call.lengths is not None:
        seen = seen & (keys < call.lengths[:, None, None, None])
        alive = (keys < call.lengths[:, None])[:, None, :, None]
        k, v = k.where(alive, 0), v.where(alive, 0)
    if call.causal != "full":
        rows = torch.arange(q.shape[2], device=q.device)
        delta = k.shape[2] - q.shape[2] if call.causal == "bottom_right" else 0
        seen = seen & (keys <= rows[:, None] + delta)
    s = (q @ k.mT * call.scale).masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(s, -1) if k.shape[2] else torch.full(q.shape[:3], -torch.inf, device=q.device)
    weights = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])
    sizes = (q.abs() @ k.abs().mT * call.scale).masked_fill(~seen, 0.0)
    largest = sizes.amax(-1) if k.shape[2] else torch.zeros_like(lse)
    return weights @ v, lse, weights @ v.abs(), largest


def errors(call: Call, o: torch.Tensor, lse: torch.Tensor) -> tuple[float, float, bool]:
    """Largest error over bound of O and of LSE, and whether exactly the rows without a key have O = 0, LSE = -inf.

    To first order: a score is wrong by at most (d + 4) 2^-23 of its sum of absolute products (products in float32,
    truncated) and its exponential by 2^-21 more (ex2 and the rounding of its argument, |c s| <= 2^6 here). P is rounded
    to 16 bits, so is O; sums of n float32 terms add n 2^-23. A factor 2 stands for all higher orders.
    """
    o_true, lse_true, spread, largest = reference(call)
    n, d = max(call.k.shape[2], 1), call.q.shape[3]
    unit = 2.0**-8 if o.dtype == torch.bfloat16 else 2.0**-11
    score = (d + 4) * 2.0**-23 * largest + 2.0**-17
    bound_o = unit * (spread + o_true.abs()) + 2 * (2 * score[..., None] + n * 2.0**-22) * spread + 2.0**-24
    bound_lse = 2 * (score + n * 2.0**-23) + 2.0**-22 * lse_true.abs() + 2.0**-20
    empty = lse_true.isneginf()
    shown = bool((lse.isneginf() == empty).all()) and bool((o[empty] == 0).all())
    if not bool(torch.isfinite(o).all()):
        return float("inf"), float("inf"), shown
    worst_o = ((o.double() - o_true).abs() / bound_o).max().item()
    worst_lse = ((lse.double() - lse_true).abs() / bound_lse)[~empty]
    return worst_o, worst_lse.max().item() if worst_lse.numel() else 0.0, shown


# ---- The check of one plan

# B, Hq, Hkv, Nq, Nk
SHAPES = (
    (1, 1, 1, 128, 128), (1, 1, 1, 1, 1), (2, 2, 2, 70, 133), (1, 3, 3, 133, 70), (2, 4, 2, 256, 256), (1, 2, 2, 65, 1),
    (3, 8, 1, 191, 515), (1, 3, 3, 1000, 1000), (2, 12, 12, 1024, 1024), (1, 40, 40, 512, 2048), (5, 30, 30, 384, 384),
    (1, 2, 2, 2048, 64), (2, 2, 2, 300, 0),
)  # fmt: skip


def problems(p: Sm90aPlan, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)

    for b, hq, hkv, nq, nk in SHAPES:
        for causal in kernels.CAUSAL_CODES:
            q, k, v = normal(b, hq, nq, p.d), normal(b, hkv, nk, p.d), normal(b, hkv, nk, p.dv)
            for counter in (True, False):
                title = f"{(b, hq, hkv, nq, nk)} {causal} {'counter' if counter else 'no counter'}"
                yield title, Call(q, k, v, causal=causal, counter=counter)
    for causal in kernels.CAUSAL_CODES:
        q, k, v = normal(2, 4, 600, p.d).abs(), -normal(2, 2, 600, p.d).abs(), normal(2, 2, 600, p.dv)
        yield f"negative scores {causal}", Call(q, k, v, causal=causal)
        q, k, v = normal(7, 4, 300, p.d), normal(7, 2, 500, p.d), normal(7, 2, 500, p.dv)
        lengths = torch.tensor([0, 1, 127, 128, 129, 499, 500], device="cuda")
        for batch, length in enumerate(lengths.tolist()):
            k[batch, :, length:] = torch.nan
            v[batch, :, length:] = torch.nan
        yield f"key lengths {causal}", Call(q, k, v, causal=causal, lengths=lengths)
        packed = normal(2, 333, 3, 4, max(p.d, p.dv))
        q, k, v = (packed[:, :, i].transpose(1, 2)[..., :w] for i, w in enumerate((p.d, p.d, p.dv)))
        yield f"(B,N,H,d) strides {causal}", Call(q, k, v, causal=causal)
    q, k, v = normal(2, 2, 200, p.d), normal(2, 2, 300, p.d), normal(2, 2, 300, p.dv)
    k *= torch.linspace(0.01, 8, 300, device="cuda", dtype=dtype)[:, None]  # the maximum moves late
    yield "late maximum", Call(q, k, v, causal="bottom_right")


def check(name: str, library: Path) -> dict[str, Any]:
    """Every problem within its bound, equal bits on repetition, refusals refused."""
    p, dtypes = PLANS[name]
    entry = kernels.load(library)
    torch.manual_seed(1)
    worst, failures, count = [0.0, 0.0], [], 0
    for dtype in ({"bf16": torch.bfloat16, "fp16": torch.float16}[t] for t in dtypes):
        for title, call in problems(p, dtype):
            code = call.run(entry)
            torch.cuda.synchronize()
            o, lse = call.o.clone(), call.lse.clone()
            ratio_o, ratio_lse, shown = errors(call, o, lse)
            call.o.fill_(torch.nan)
            code |= call.run(entry)
            torch.cuda.synchronize()
            same = torch.equal(o.view(torch.int16), call.o.view(torch.int16))
            same &= torch.equal(lse.view(torch.int32), call.lse.view(torch.int32))
            worst = [max(worst[0], ratio_o), max(worst[1], ratio_lse)]
            count += 1
            if code != 0 or not (ratio_o <= 1 and ratio_lse <= 1 and shown and same):
                found = f"code {code}, O {ratio_o:.2f}, LSE {ratio_lse:.2f}, empty rows {shown}, equal bits {same}"
                failures.append(f"{title}: {found}")
    failures += special(p, entry)
    return {"plan": name, "calls": count, "worst_o": worst[0], "worst_lse": worst[1], "failures": failures}


def special(p: Sm90aPlan, entry: Callable[..., int]) -> list[str]:
    """What is not an error bound: invalid lengths give NaN, NaN stays visible, odd strides are refused, bits repeat."""
    failures = []
    q, k, v = (torch.randn(3, 2, 200, w, device="cuda").bfloat16() for w in (p.d, p.d, p.dv))
    call = Call(q, k, v, lengths=torch.tensor([-1, 200, 201], device="cuda"))
    call.run(entry)
    nan = call.o.isnan().flatten(1).all(1).tolist(), call.lse.isnan().flatten(1).all(1).tolist()
    if nan != ([True, False, True],) * 2:
        failures.append(f"invalid lengths: NaN {nan}")
    for causal in ("full", "bottom_right"):
        for bits in (0x7FC0, -0x40):  # NaN of either sign
            broken = k.clone()
            broken[1, 1, 150] = torch.tensor([bits], dtype=torch.int16, device="cuda").view(torch.bfloat16)
            call = Call(q, broken, v, causal=causal)
            call.run(entry)
            rows = call.o.isnan().all(-1) & call.lse.isnan()
            expected = torch.zeros_like(rows)
            expected[1, 1, 0 if causal == "full" else 150 :] = True
            if not torch.equal(rows, expected):
                failures.append(f"NaN key, {causal}, {bits:#x}: {int(rows.sum())} rows show it")
    padded = torch.zeros(3, 2, 200, p.d + 2, device="cuda").bfloat16()[..., : p.d]
    for title, wide in (("broadcast heads", k[:, :1].expand(3, 2, 200, p.d)), ("rows 4 bytes wider", padded)):
        code = Call(q, wide, v).run(entry)
        if code != kernels.NOT_SUPPORTED:
            failures.append(f"{title}: code {code}")
    for causal in ("full", "bottom_right"):
        q, k, v = (torch.randn(2, 32, 1024, w, device="cuda").bfloat16() for w in (p.d, p.d, p.dv))
        call, first = Call(q, k, v, causal=causal), None
        for _ in range(50):
            call.o.fill_(torch.nan)
            call.run(entry)
            torch.cuda.synchronize()
            first = call.o.clone() if first is None else first
            if not torch.equal(first.view(torch.int16), call.o.view(torch.int16)):
                failures.append(f"bits differ on repetition, {causal}")
                break
    return failures


# ---- Times

ROUNDS = 7
FORMS = ("d128_128x128", "d64_192x128", "d256_128x80")  # plans timed in other forms than the plain one
CELL_TOKENS, CELL_WIDTH = 16384, 2048  # batch * length, heads * d


def seconds(function: Callable[[], Any], budget_s: float = 0.012) -> float:
    """Time of one call: back-to-back calls between two events, as many as fill the budget."""

    def measure(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / count

    return measure(max(3, int(budget_s / max(measure(2), 1e-6))))


def time_cell(
    d: int, causal: bool, n: int, libraries: dict[str, Path], more: Callable[..., dict[str, Callable[[], Any]]] | None
) -> list[dict[str, Any]]:
    """Rows of one cell of the table: bf16, 16384 tokens, heads * d = 2048."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    b, h = CELL_TOKENS // n, CELL_WIDTH // d
    q, k, v = (torch.randn(b, h, n, d, device="cuda").bfloat16() for _ in range(3))

    def cudnn() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    functions: dict[str, Callable[[], Any]] = {"cudnn": cudnn}
    true = cudnn().float()
    rows = []
    for name, library in libraries.items():
        p = PLANS[name][0]
        if (p.d, p.dv) != (d, d):
            continue
        for counter in (True, False) if causal else (False,):
            entry = kernels.load(library)
            call = Call(q, k, v, causal="bottom_right" if causal else "full", counter=counter)
            title = name + ("+counter" if counter else "")
            if call.run(entry) != 0 or not (call.o.float() - true).abs().max().item() < 0.05:
                rows.append({"d": d, "causal": causal, "n": n, "name": title, "wrong": True})
                continue
            functions[title] = lambda call=call, entry=entry: call.run(entry)
    if more is not None:
        functions.update(more(q, k, v, causal))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        seconds(function)
    for _ in range(ROUNDS):
        for name in random.sample(list(functions), len(functions)):
            times[name].append(seconds(functions[name]))
    flop = 4 * b * h * n * n * d * (0.5 if causal else 1)
    for name, took in times.items():
        ratio = statistics.median(base / own for base, own in zip(times["cudnn"], took, strict=True))
        rows.append({"d": d, "causal": causal, "n": n, "name": name, "tflops": flop / statistics.median(took) / 1e12,
                     "over_cudnn": ratio, "seconds": took})  # fmt: skip
    return rows


def time_forms(name: str, library: Path, *, n: int = 4096) -> list[dict[str, Any]]:
    """The plain call beside fp16, 8 query heads per key head, and (B, N, H, d) strides: times over the plain one's."""
    p, dtypes = PLANS[name]
    b, h = max(1, CELL_TOKENS // n), CELL_WIDTH // p.d
    entry = kernels.load(library)
    rows = []
    for causal in ("full", "bottom_right"):
        q, k, v = (torch.randn(b, h, n, w, device="cuda").bfloat16() for w in (p.d, p.d, p.dv))
        turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        calls = {"plain": Call(q, k, v, causal=causal), "strides": Call(*turned, causal=causal)}
        if h % 8 == 0:
            few = [x[:, : h // 8].contiguous() for x in (k, v)]
            calls["8 per key head"] = Call(q, *few, causal=causal)
        if "fp16" in dtypes:
            calls["fp16"] = Call(q.half(), k.half(), v.half(), causal=causal)
        times: dict[str, list[float]] = {title: [] for title in calls}
        for _ in range(ROUNDS):
            for title in random.sample(list(calls), len(calls)):
                times[title].append(seconds(lambda call=calls[title]: call.run(entry)))
        over = {
            title: statistics.median(one / plain for one, plain in zip(took, times["plain"], strict=True))
            for title, took in times.items()
        }
        rows.append({"plan": name, "causal": causal, "n": n, "over_plain": over})
    return rows


def host_seconds(name: str, library: Path) -> float:
    """Host time of one call through ctypes, the kernel not waited for: the median of single calls."""
    p, entry = PLANS[name][0], kernels.load(library)
    call = Call(*(torch.randn(1, 1, 64, w, device="cuda").bfloat16() for w in (p.d, p.d, p.dv)))
    took = []
    for _ in range(300):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call.run(entry)
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def print_cell(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"d={first['d']} {'causal' if first['causal'] else 'full'} N={first['n']}")
    for row in rows:
        text = "WRONG" if row.get("wrong") else f"{row['tflops']:6.1f} TFLOP/s  x{row['over_cudnn']:.3f}"
        print(f"  {row['name']:28s} {text}", flush=True)


# ---- The command


def build_all(names: list[str], folder: Path) -> dict[str, Path]:
    """Libraries by plan; what spills or waits too often is reported and left out."""

    def one(name: str) -> tuple[str, Path | None, list[kernels.Report], float]:
        start = time.monotonic()
        try:
            library, said = kernels.build(kernels.write(folder / name, *PLANS[name]))
        except RuntimeError as e:
            print(e)
            return name, None, [], 0.0
        return name, library, said, time.monotonic() - start

    built = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, library, said, took in pool.map(one, names):
            spilled, warnings = sum(r.spilled_bytes for r in said), sorted({w for r in said for w in r.warnings})
            print(f"built {name:20s} {took:5.1f} s, {spilled} bytes spilled, warnings: {warnings}", flush=True)
            if library is not None:
                built[name] = library
    return built


def run_checks(libraries: dict[str, Path]) -> list[dict[str, Any]]:
    """`check` of each plan, four processes at a time, each with a time limit."""

    def one(name: str) -> dict[str, Any]:
        line = [sys.executable, "-m", "tests.sm90a.gpu_check", "--check-one", name, str(libraries[name])]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=TIME_LIMIT_S)
            return json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            return {"plan": name, "failures": [f"no answer in {TIME_LIMIT_S} s"]}
        except (ValueError, IndexError):
            return {"plan": name, "failures": [f"exit {done.returncode}: {done.stdout[-300:]} {done.stderr[-1500:]}"]}

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, libraries))


def numbers(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text)]


def main(more: Callable[..., dict[str, Callable[[], Any]]] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--plans", default=".", help="regular expression over the names of PLANS")
    parser.add_argument("--widths", type=numbers, default=[64, 128, 256])
    parser.add_argument("--lengths", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds after which no further cell is timed")
    parser.add_argument("--check-one", nargs=2, metavar=("PLAN", "LIBRARY"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.check_one:
        print(json.dumps(check(asked.check_one[0], Path(asked.check_one[1]))))
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    libraries = build_all([name for name in PLANS if re.search(asked.plans, name)], Path("/tmp/tileproof_sm90a"))
    good, bad = libraries, 0
    if not asked.no_check:
        found = run_checks(libraries)
        (asked.out / "check.json").write_text(json.dumps(found, indent=1))
        for row in found:
            worst = f"largest error over bound {row.get('worst_o', 0):.2f} (O), {row.get('worst_lse', 0):.2f} (LSE)"
            text = "; ".join(row["failures"][:4]) or f"{row['calls']} calls, {worst}"
            print(f"{row['plan']:20s} {len(row['failures'])} failures: {text}", flush=True)
        good = {row["plan"]: libraries[row["plan"]] for row in found if not row["failures"]}
        bad = len(found) - len(good)
    if not asked.no_time:
        start, table = time.monotonic(), []
        for n in asked.lengths:
            for d in asked.widths:
                for causal in (False, True):
                    if time.monotonic() - start < asked.time_limit:
                        table.append(time_cell(d, causal, n, good, more))
                        print_cell(table[-1])
        forms = [row for name, library in good.items() if name in FORMS for row in time_forms(name, library)]
        for row in forms:
            print(row)
        host = {name: host_seconds(name, library) for name, library in good.items() if name in FORMS}
        print("host time per call, us:", {name: round(1e6 * took, 1) for name, took in host.items()})
        (asked.out / "time.json").write_text(json.dumps({"cells": table, "forms": forms, "host_seconds": host}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
