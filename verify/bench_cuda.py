"""Time emitted packages and their peers on a GPU: interleaved in random order, in one process, round by round.

A card under load changes its clock by several percent from minute to minute, so a figure here is never a time alone.
In each round every call of a cell is sampled once, in an order drawn anew; a round gives one ratio per peer, and the
figure is the median ratio with its spread. Beside it stand two readings that survive a change of clock: percent of the
8192 x 8192 x 8192 matrix product sampled in the same rounds, and tensor use, the fraction of the matrix
units' cycles that the FLOPs take at least (sm_clock.py).

A sample is what triton's do_bench takes: for WARMUP_S, then for MEASURE_S, the L2 cache is overwritten, then the call
stands between two CUDA events; the sample is the median. Inputs are N(0,1), never zeros, and every call is compared
with float64 (bench_check.py, bench_gradients.py) before it is timed. FLOPs are bench.py's.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from codegen.errors import CheckFailed, ToolError
from verify import packages, peers
from verify.bench import Cell, Timing, spread
from verify.bench_backward import BackwardPass
from verify.bench_check import Expected
from verify.cases import torch_dtype
from verify.sm_clock import SmClock, frequency, tensor_use

WARMUP_S, MEASURE_S = 0.01, 0.025  # of one sample
L2_BYTES = 256 * 1024 * 1024  # written between two calls: more than any GPU's L2 cache, as do_bench does
MATMUL = 8192  # rows, columns and depth of the product that says what the card can do
PRODUCT = (-1, "product", "")  # its key among the calls of a round
BEST = "best"  # stands in ratios for the peer that is fastest in the cell


@dataclass(frozen=True)
class Sample:
    """One call in one round. `hertz` is the multiprocessors' clock meanwhile, None where it was not read."""

    seconds: float
    hertz: float | None = None


Sampler = Callable[[Callable[[], Any]], Sample]


@dataclass(frozen=True)
class GpuTiming(Timing):
    """A Timing of one package, with what else the run knows. `hertz` has one entry per round, as `ours`."""

    package: str = ""
    hertz: list[float | None] = field(default_factory=list)
    peer_hertz: dict[str, list[float | None]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  # peers that refused this cell: why
    path: dict[str, Any] = field(default_factory=dict)  # which kernel served the call
    plain: list[float] | None = None  # seconds of the same package on the plain form of the cell
    matmul_flops: float | None = None  # FLOP/s of the matrix product, as measured beside this cell
    multiprocessors: int = 0
    capability: tuple[int, int] = (0, 0)

    @property
    def best(self) -> str | None:
        """The peer with the smallest median ratio to ours."""
        return min(self.peers, key=lambda peer: statistics.median(self.ratio(peer)), default=None)

    def use(self, seconds: Sequence[float], hertz: Sequence[float | None]) -> float | None:
        """Median tensor use over the rounds."""
        rounds = [
            tensor_use(self.cell.flops, s, f, self.multiprocessors, self.capability)
            for s, f in zip(seconds, hertz, strict=True)
        ]
        known = [x for x in rounds if x is not None]
        return statistics.median(known) if known else None

    def describe(self) -> dict[str, Any]:
        found = super().describe()
        found["package"] = self.package
        found["path"] = self.path
        found["tensor_use"] = self.use(self.ours, self.hertz)
        found["peer_tensor_use"] = {name: self.use(s, self.peer_hertz[name]) for name, s in self.peers.items()}
        clocks = [f for f in self.hertz if f is not None]
        found["clock_ghz"] = statistics.median(clocks) / 1e9 if clocks else None
        if self.matmul_flops is not None:
            found["matmul_gflops"] = self.matmul_flops / 1e9
        if self.best is not None:
            found["best_peer"], found[f"vs_{BEST}"] = self.best, spread(self.ratio(self.best))
        if self.plain is not None:
            found["vs_plain"] = spread([a / b for a, b in zip(self.plain, self.ours, strict=True)])
        if self.absent:
            found["absent"] = self.absent
        found["seconds"] = {"ours": self.ours, **self.peers}
        return found


class Gpu:
    """The current device: samples calls. `nvcc` builds the clock probe; without one there is no tensor use."""

    def __init__(self, nvcc: Sequence[str] | None) -> None:
        import torch

        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.multiprocessors, self.capability = facts.multi_processor_count, (facts.major, facts.minor)
        self._clock, self.no_clock = _clock(nvcc)
        self._l2 = torch.empty(L2_BYTES // 4, dtype=torch.int32, device="cuda")
        made = torch.Generator(device="cuda").manual_seed(MATMUL)
        self._factors = [
            torch.randn(MATMUL, MATMUL, generator=made, device="cuda").to(torch.bfloat16) for _ in range(2)
        ]

    def sample(self, call: Callable[[], Any], *, warmup: float = WARMUP_S, measure: float = MEASURE_S) -> Sample:
        """Median of single calls between CUDA events, each after the L2 cache was overwritten."""
        import torch

        def timed(count: int) -> list[float]:
            marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
            for start, stop in marks:
                self._l2.zero_()
                start.record()
                call()
                stop.record()
            torch.cuda.synchronize()
            return [start.elapsed_time(stop) / 1e3 for start, stop in marks]

        whole = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        whole[0].record()
        timed(2)
        whole[1].record()
        torch.cuda.synchronize()
        each = max(whole[0].elapsed_time(whole[1]) / 2e3, 1e-6)
        timed(max(1, round(warmup / each)))
        before = self._clock.read() if self._clock else None
        seconds = statistics.median(timed(max(3, round(measure / each))))
        after = self._clock.read() if self._clock else None
        torch.cuda.synchronize()
        hertz = None if before is None or after is None else frequency(before.tolist(), after.tolist())
        return Sample(seconds, hertz)

    def product(self) -> Any:
        """The matrix product, on random data: a call to sample beside the others."""
        one, two = self._factors
        return one @ two


def _clock(nvcc: Sequence[str] | None) -> tuple[SmClock | None, str]:
    """The clock, or why there is none: times and ratios do without."""
    if nvcc is None:
        return None, "no nvcc to build the clock probe with"
    try:
        clock = SmClock(nvcc)
        clock.read()
    except ToolError as error:
        return None, str(error)
    return clock, ""


def nvcc_of(attn: ModuleType) -> list[str] | None:
    """The compiler that the package's own build finds, None without a CUDA toolkit."""
    try:
        return list(packages.part(attn, "toolchain").cuda_toolkit().nvcc.command)
    except RuntimeError:  # each package has a BuildError of its own
        return None


def interleave(
    calls: Mapping[Any, Callable[[], Any]], *, rounds: int, sample: Sampler, choose: random.Random
) -> dict[Any, list[Sample]]:
    """Sample every call once per round, in an order drawn anew for each round."""
    found: dict[Any, list[Sample]] = {key: [] for key in calls}
    for _ in range(rounds):
        order = list(calls)
        choose.shuffle(order)
        for key in order:
            found[key].append(sample(calls[key]))
    return found


def inputs(cell: Cell, device: str = "cuda") -> tuple[Any, Any, Any]:
    """q, k, v of N(0,1), seen as (B,H,N,d); the layout "bnhd" stores (B,N,H,d)."""
    groups = cell.heads // cell.gqa
    one = _normal(cell, device, seed=cell.n)
    return one(cell.heads, cell.d), one(groups, cell.d), one(groups, cell.width_of_values)


def output_gradient(cell: Cell, device: str = "cuda") -> Any:
    """dO, in the same way."""
    return _normal(cell, device, seed=cell.n + 1)(cell.heads, cell.width_of_values)


def _normal(cell: Cell, device: str, *, seed: int) -> Callable[[int, int], Any]:
    """Draws one tensor after the other for so many heads of such a width."""
    import torch

    made = torch.Generator(device=device).manual_seed(seed)

    def one(heads: int, width: int) -> Any:
        rows_first = cell.layout == "bnhd"
        shape = (cell.batch, cell.n, heads, width) if rows_first else (cell.batch, heads, cell.n, width)
        x = torch.randn(shape, generator=made, device=device).to(torch_dtype(cell.dtype))
        return x.transpose(1, 2) if rows_first else x

    return one


class ForwardPass:
    """One call of attention, and what its output must be on these inputs."""

    def __init__(self, q: Any, k: Any, v: Any, *, causal: bool, dtype: str) -> None:
        self._inputs, self._causal = (q, k, v), causal
        self._expected = Expected(q, k, v, causal=causal, dtype=dtype)

    def of_package(self, attn: ModuleType) -> tuple[Callable[[], Any], str | None]:
        """The call of an emitted package, and what is wrong with its output."""
        return self._checked(ours(attn, *self._inputs, self._causal))

    def of_peer(self, peer: peers.Peer) -> tuple[Callable[[], Any], str | None]:
        """The same of a peer, which may raise anything."""
        return self._checked(peer.prepare(*self._inputs, self._causal))

    def _checked(self, call: peers.Call) -> tuple[Callable[[], Any], str | None]:
        return call.run, self._expected.difference(call.result(call.run()))


def ours(attn: ModuleType, q: Any, k: Any, v: Any, causal: bool) -> peers.Call:
    """A package as a Call."""
    return peers.Call(lambda: attn.attention(q, k, v, causal=causal))


def time_group(
    cells: Sequence[Cell],
    serving: Mapping[str, ModuleType],
    found: Mapping[str, peers.Peer],
    *,
    gpu: Gpu,
    rounds: int = 7,
    seed: int = 0,
    device: str = "cuda",
) -> list[GpuTiming]:
    """Time the forms of one shape (dtype, layout, heads per K/V head) in the same rounds; the first is the plain one.

    The plain one of a deterministic backward pass is the same cell without that demand, which must be among `cells`.
    Raises: CheckFailed when one of our packages computes something else than attention.
    """
    import torch

    calls: dict[tuple[int, str, str], Callable[[], Any]] = {}  # (cell, "ours" or "peer", name) -> timed call
    refused: list[dict[str, str]] = [{} for _ in cells]
    paths: dict[tuple[int, str], dict[str, Any]] = {}
    with torch.no_grad():
        for index, cell in enumerate(cells):
            q, k, v = inputs(cell, device)
            work = pass_of(cell, q, k, v)
            for label, attn in serving.items():
                run, wrong = work.of_package(attn)
                if wrong is not None:
                    raise CheckFailed(f"{label} on {cell}: {wrong}", "nothing is timed that is not attention")
                calls[index, "ours", label] = run
                backward: dict[str, Any] = {"backward": True} if cell.backward else {}
                paths[index, label] = {**attn.path(q, k, v, causal=cell.causal, **backward)}
            for name, peer in () if cell.deterministic else found.items():
                taken = _prepared(peer, work)
                if isinstance(taken, str):
                    refused[index][name] = taken
                else:
                    calls[index, "peer", name] = taken
        samples = interleave(
            {PRODUCT: gpu.product, **calls}, rounds=rounds, sample=gpu.sample, choose=random.Random(seed)
        )
    matmul = 2.0 * MATMUL**3 / statistics.median(s.seconds for s in samples[PRODUCT])
    seconds = {key: [s.seconds for s in taken] for key, taken in samples.items()}
    hertz = {key: [s.hertz for s in taken] for key, taken in samples.items()}
    timings = []
    for index, cell in enumerate(cells):
        theirs = [name for at, kind, name in calls if (at, kind) == (index, "peer")]
        plain = cells.index(replace(cell, deterministic=False)) if cell.deterministic else 0
        for label in [name for at, kind, name in calls if (at, kind) == (index, "ours")]:
            timings.append(GpuTiming(
                cell, seconds[index, "ours", label], {name: seconds[index, "peer", name] for name in theirs},
                package=label, hertz=hertz[index, "ours", label],
                peer_hertz={name: hertz[index, "peer", name] for name in theirs}, absent=refused[index],
                path=paths[index, label], plain=seconds[plain, "ours", label] if index != plain else None,
                matmul_flops=matmul, multiprocessors=gpu.multiprocessors, capability=gpu.capability,
            ))  # fmt: skip
    return timings


def pass_of(cell: Cell, q: Any, k: Any, v: Any) -> ForwardPass | BackwardPass:
    """What is timed of a cell with these inputs."""
    words: dict[str, Any] = {"causal": cell.causal, "dtype": cell.dtype}
    if not cell.backward:
        return ForwardPass(q, k, v, **words)
    return BackwardPass(q, k, v, output_gradient(cell, q.device.type), deterministic=cell.deterministic, **words)


def _prepared(peer: peers.Peer, work: ForwardPass | BackwardPass) -> Callable[[], Any] | str:
    """The peer's call once it has given attention, or why it is not timed, in one line."""
    try:
        run, wrong = work.of_peer(peer)
    except Exception as error:  # of any kind: each peer has its own, and the run goes on without it
        return peers.refusal(error)
    return run if wrong is None else f"not attention: {wrong}"
