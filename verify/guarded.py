"""Call every CUDA kernel of a package in memory that tells: what `verify.sanitize` runs under each of its tools.

    python -m verify.guarded FOLDER --launcher sm80=LIBRARY [--launcher sm90a_0=LIBRARY ...] [--tool racecheck]

Each problem runs twice on the same inputs: through the kernel's own C entry point, into outputs that were filled with
NaN and lie between guard bytes; and through the op, whose outputs are exactly as long as they are said to be and
which nobody wrote before. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an allocation of its own, so that
memcheck knows where it ends.

Holds, or the process exits 1: the guard bytes are intact, no NaN is left in an output, both runs agree bit for bit.
What a kernel must not read (keys beyond the length, gaps between rows) was never written either: initcheck tells. A
kernel that copies whole tiles of keys by TMA may read keys beyond the length and must not use them: they are NaN.

Under a tool each call takes half a second to 2.4 s (results/sanitize_cuda_h200.json), so that `--tool` leaves out what
this tool cannot see: see EXTENTS.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from codegen.devices import DEVICES
from verify import guarded_backward, packages
from verify.cases import CAUSAL, torch_dtype
from verify.devices import ARCH_VARIABLE, forced
from verify.entry_points import DTYPE_CODES, ForwardArgs
from verify.guarded_problems import Problem, covering, problems

GUARD_BYTES, GUARD = 4096, 0xA5
NAN_BYTE = 0xFF  # a float of any width made of these bytes is NaN
DONE = "guarded calls:"  # what the last line of a good run starts with


@dataclass(frozen=True)
class Extent:
    """Which calls are made. Every problem runs on every kernel in one dtype at least, backward in both forms."""

    entry: bool  # the kernel's entry point as well where the op can run the kernel: guard bytes, NaN, equal bits
    twice: bool  # each backward call twice: equal bits
    every: bool  # every problem in every dtype; else those of COVERING in all dtypes but the first

    def problems(self, br: int, bc: int, *, is_first: bool) -> list[Problem]:
        """The problems of a kernel with tiles of br rows and bc keys; `is_first`: in the first of its dtypes."""
        return problems(br, bc) if self.every or is_first else covering(br, bc)


# By tool. Bits are compared, and every problem run in every dtype, without a tool (tests/gpu/test_gpu_sanitize.py).
# memcheck does not see a write that stays within an allocation, but the guard bytes do. The others watch how the
# threads of a kernel share memory, which neither who called it nor the format of its numbers decides: the kernels of
# two dtypes are one text but for the conversion of numbers and the type in the product's instruction.
WHOLE, SPARING = Extent(entry=True, twice=True, every=True), Extent(entry=False, twice=False, every=False)
EXTENTS = {
    "": WHOLE,
    "memcheck": Extent(entry=True, twice=False, every=True),
    "racecheck": SPARING,
    "initcheck": SPARING,
    "synccheck": SPARING,
}


@dataclass(frozen=True)
class Step:
    """One problem on one kernel: of the forward pass on `variant`, or of the backward op where that is None."""

    unit: str
    dtype: str
    problem: Problem
    variant: dict[str, Any] | None
    here: bool  # the op can be made to run this kernel
    calls: int

    def __str__(self) -> str:
        return f"{'backward ' if self.variant is None else ''}{self.unit}/{self.dtype}, {self.problem.name}"


def steps(plan: dict[str, Any], chosen: str, units: Iterable[str], extent: Extent) -> Iterator[Step]:
    """What is run of a package (its plan.json) on a device with kernels `chosen`; `units` have an entry point here."""
    variants = {(unit_of(v), v["dtype"]): v for v in plan["variants"]}
    forces = any(map(is_exact, variants.values()))  # the op can then be told which kernel to run
    known, seen = set(units), set()
    for (unit, dtype), variant in variants.items():
        if unit not in known:
            continue
        here = forces or variant["target"] == chosen
        tile = variant["plan"]
        for problem in extent.problems(tile["br"], tile["bc"], is_first=unit not in seen):
            if takes(variant, problem):
                yield Step(unit, dtype, problem, variant, here, here + (extent.entry or not here))
        seen.add(unit)
    rows = [row for row in plan.get("backward", []) if row["target"] == chosen]
    for row in rows:
        tile = row["plan"]
        for problem in extent.problems(tile["br"], tile["bc"], is_first=row is rows[0]):
            yield Step(chosen, row["dtype"], problem, None, True, 4 if extent.twice else 2)


class Guarded:
    """A tensor of NaN between guard bytes, in one allocation."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.memory = torch.full((size + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device="cuda")
        inside = self.memory[GUARD_BYTES : GUARD_BYTES + size]
        inside.fill_(NAN_BYTE)
        self.values = inside.view(dtype).view(tuple(shape))

    def intact(self) -> bool:
        """Whether both guards are as they were."""
        return bool((self.memory[:GUARD_BYTES] == GUARD).all() and (self.memory[-GUARD_BYTES:] == GUARD).all())


def scattered(
    shape: tuple[int, ...], rows: Iterable[int], layout: str, dtype: torch.dtype, seed: int, *, fill: bool = False
) -> torch.Tensor:
    """(B,H,N,d) on the GPU: N(0, 1) in the first rows[b] rows of batch entry b; gaps between rows were never written.

    fill: later rows are NaN; else they were never written either.
    """
    b, h, n, d = shape
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if layout == "bnhd":
        home = torch.empty((b, n, h, d), dtype=dtype, device="cuda").permute(0, 2, 1, 3)
    elif layout == "padded":
        home = torch.empty((b, h, n, d + 8), dtype=dtype, device="cuda")[..., :d]
    else:
        home = torch.empty(shape, dtype=dtype, device="cuda")
    for i, count in enumerate(rows):
        if count:
            home[i, :, :count] = values[i, :, :count].cuda()
        if fill and count < n:
            home[i, :, count:] = math.nan
    return home


def launch(
    library: ctypes.CDLL, unit: str, dtype: str, q: Any, k: Any, v: Any, lengths: Any, causal: str, *, debug: bool,
    scratch_bytes: int | None = None,
) -> tuple[Guarded, Guarded]:  # fmt: skip
    """Run the entry point of `unit` in guarded memory; returns O and LSE. `scratch_bytes`: None, it takes no scratch.

    Raises: RuntimeError when it returns an error.
    """
    (b, hq, nq, d), (_, hkv, nk, dv) = q.shape, v.shape
    o = Guarded((b, hq, nq, dv), torch.float32 if debug else q.dtype)
    lse = Guarded((b, hq, nq), torch.float32)
    args = ForwardArgs(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), o=o.values.data_ptr(), lse=lse.values.data_ptr(),
        B=b, Hq=hq, Hkv=hkv, Nq=nq, Nk=nk, key_lengths=None if lengths is None else lengths.data_ptr(),
        scale=d**-0.5, causal=CAUSAL.index(causal), trace=None, trace_tiles=0,
    )  # fmt: skip
    for name, tensor in (("q", q), ("k", k), ("v", v), ("o", o.values)):
        setattr(args, f"{name}_stride", (ctypes.c_int64 * 3)(*tensor.stride()[:3]))
    scratch = Guarded((scratch_bytes or 0,), torch.uint8)
    more = [] if scratch_bytes is None else [ctypes.c_void_p(scratch.values.data_ptr()) if scratch_bytes else None]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = getattr(library, f"attention_forward_{unit}")(ctypes.byref(args), DTYPE_CODES[dtype], *more, stream)
    if error:
        raise RuntimeError(f"attention_forward_{unit} returned CUDA error {error}")
    if not scratch.intact():
        raise RuntimeError(f"attention_forward_{unit} wrote beside its scratch memory")
    return o, lse


def faults(attn: ModuleType, step: Step, library: ctypes.CDLL, *, entry: bool) -> Iterator[str]:
    """Run one problem of the forward pass; yields what does not hold.

    entry: through the kernel's entry point even where the op can be made to run it.
    """
    checks, problem, variant = packages.part(attn, "checks"), step.problem, step.variant
    assert variant is not None
    dtype = torch_dtype(step.dtype)
    rows = (problem.nk,) * problem.b if problem.lengths is None else problem.lengths
    q = scattered((problem.b, problem.hq, problem.nq, checks.D), (problem.nq,) * problem.b, problem.layout, dtype, 1)
    exact = is_exact(variant)
    k = scattered((problem.b, problem.hkv, problem.nk, checks.D), rows, problem.layout, dtype, 2, fill=exact)
    v = scattered((problem.b, problem.hkv, problem.nk, checks.DV), rows, problem.layout, dtype, 3, fill=exact)
    lengths = None if problem.lengths is None else torch.tensor(problem.lengths, device="cuda")
    wanted: list[torch.Tensor] = []
    if entry or not step.here:
        debug = bool(attn_plan(attn)["request"].get("debug"))
        scratch = variant["plan"].get("scratch_bytes", 4) if exact else None
        guarded = launch(
            library, step.unit, step.dtype, q, k, v, lengths, problem.causal, debug=debug, scratch_bytes=scratch
        )
        for name, one in zip(("O", "LSE"), guarded, strict=True):
            if not one.intact():
                yield f"{name}: a guard byte was overwritten"
        wanted = [one.values for one in guarded]
        yield from unwritten(wanted)
    if step.here:
        words = {"causal": False if problem.causal == "none" else problem.causal, "key_lengths": lengths}
        of_op = attn.attention(q, k, v, return_lse=True, **words)
        if not wanted:
            yield from unwritten(of_op)  # reads every element: initcheck tells what nobody wrote
        for name, got, want in zip(("O", "LSE"), of_op, wanted, strict=False):
            if not torch.equal(got, want):
                yield f"{name}: the op and the kernel's entry point differ"


def unwritten(outputs: Iterable[torch.Tensor]) -> Iterator[str]:
    """A sentence for O and for LSE if it holds NaN."""
    for name, x in zip(("O", "LSE"), outputs, strict=True):
        left = int(x.isnan().sum())
        if left:
            yield f"{name}: {left} elements are NaN: not written, or wrong"


def is_exact(variant: dict[str, Any]) -> bool:
    """Whether the variant is in code for one capability alone: it may ask for scratch memory, and copies by TMA."""
    return variant["target"] in DEVICES and DEVICES[variant["target"]].is_exact


def unit_of(variant: dict[str, Any]) -> str:
    """What its entry point is called after."""
    return str(variant.get("unit", variant["target"]))


def takes(variant: dict[str, Any], problem: Problem) -> bool:
    """Whether the variant is for the problem's mask."""
    return variant.get("causal", "any") in ("any", "full" if problem.causal == "none" else "causal")


def attn_plan(attn: ModuleType) -> dict[str, Any]:
    """plan.json of an imported package."""
    assert attn.__file__ is not None
    return packages.plan(Path(attn.__file__).parent)


def run(folder: Path, launchers: dict[str, ctypes.CDLL], tool: str = "") -> int:
    """Run what EXTENTS has for `tool` on every variant that has a launcher, and on the backward op.

    Returns the number of calls. What does not hold is printed.

    Raises: SystemExit when something does not hold.
    """
    attn, plan, extent = packages.load(folder), packages.plan(folder), EXTENTS[tool]
    recipe = packages.part(attn, "recipe")
    chosen = recipe.target_for(recipe.capability_of(torch.device("cuda")))
    forces = any(map(is_exact, plan["variants"]))
    calls, wrong = 0, []
    for step in steps(plan, chosen, launchers, extent):
        if step.variant is None:
            found = list(guarded_backward.faults(attn, step.problem, step.dtype, twice=extent.twice))
        else:
            with forced(ARCH_VARIABLE, step.unit if forces else ""):
                found = list(faults(attn, step, launchers[step.unit], entry=extent.entry))
        torch.cuda.synchronize()
        calls += step.calls
        wrong += [f"{step}: {text}" for text in found]
    for text in wrong:
        print(text)
    if wrong:
        sys.exit(1)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--launcher", action="append", required=True, metavar="TARGET=LIBRARY")
    parser.add_argument("--tool", choices=list(EXTENTS), default="", help="The tool that watches; default: none.")
    asked = parser.parse_args()
    launchers = {}
    for word in asked.launcher:
        target, _, file = word.partition("=")
        launchers[target] = ctypes.CDLL(file)
    with torch.no_grad():
        print(DONE, run(asked.folder, launchers, asked.tool))


if __name__ == "__main__":
    main()
