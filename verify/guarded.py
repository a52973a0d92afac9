"""Call every CUDA kernel of a package in memory that tells: what `verify.sanitize` runs under each of its tools.

    python -m verify.guarded FOLDER --launcher forward_sm80=LIBRARY [--launcher backward_sm80=LIBRARY ...]

Each problem runs through the kernel's own C entry point, into outputs that were filled with NaN and lie between guard
bytes; and, on the same inputs, through the op, whose outputs are exactly as long as they are said to be and which
nobody wrote before. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an allocation of its own, so that memcheck
knows where it ends. The backward kernels are those of `guarded_backward.py`.

Holds, or the process exits 1: the guard bytes are intact, no NaN is left in an output, both runs agree bit for bit.
What a kernel must not read (keys beyond the length, gaps between rows) was never written either: initcheck tells. A
kernel that copies whole tiles of keys by TMA may read keys beyond the length and must not use them: they are NaN.

Under a tool each call takes half a second to 2.4 s (results/sanitize_cuda_h200.json), so that `--tool` leaves out what
this tool cannot see: see EXTENTS.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from codegen.devices import DEVICES
from codegen.errors import RequestError
from verify import guarded_backward, packages
from verify.cases import CAUSAL, torch_dtype
from verify.devices import ARCH_VARIABLE, forced
from verify.entry_points import DTYPE_CODES, ForwardArgs
from verify.guarded_memory import Guarded, drawn, scattered, unwritten
from verify.guarded_problems import Problem, covering, problems

DONE = "guarded calls:"  # what the last line of a good run starts with


@dataclass(frozen=True)
class Extent:
    """Which calls are made. Every problem runs through every kernel's entry point in one dtype at least."""

    op: bool  # through the op as well where it can run the kernel: equal bits
    every: bool  # every problem in every dtype; else those of COVERING in all dtypes but the first

    def problems(self, br: int, bc: int, *, is_first: bool) -> list[Problem]:
        """The problems of a kernel with tiles of br rows and bc keys; `is_first`: in the first of its dtypes."""
        return problems(br, bc) if self.every or is_first else covering(br, bc)


# By tool; "" is none: tests/gpu/test_gpu_sanitize.py. Where an allocation ends, and what in it nobody wrote, differs
# between the op's outputs and guarded ones, so memcheck and initcheck watch both. racecheck and synccheck watch how
# the threads of a kernel share memory, which is the same whoever called it. All but memcheck leave out some problems in
# all dtypes but the first: the kernels of two dtypes are one text but for the conversion of numbers and the type in
# the product's instruction.
EXTENTS = {
    "": Extent(op=True, every=True),
    "memcheck": Extent(op=True, every=True),
    "racecheck": Extent(op=False, every=False),
    "initcheck": Extent(op=True, every=False),
    "synccheck": Extent(op=False, every=False),
}


@dataclass(frozen=True)
class Step:
    """One problem on one kernel: of the forward pass on `variant`, or of the backward op where that is None."""

    unit: str
    dtype: str
    problem: Problem
    variant: dict[str, Any] | None
    op_too: bool
    calls: int

    @property
    def entry(self) -> str:
        """The launcher that has the kernel: the name of its unit of translation."""
        return f"{'backward' if self.variant is None else 'forward'}_{self.unit}"

    def __str__(self) -> str:
        return f"{'backward ' if self.variant is None else ''}{self.unit}/{self.dtype}, {self.problem.name}"


def steps(plan: dict[str, Any], chosen: str, units: Iterable[str], extent: Extent) -> Iterator[Step]:
    """What is run of a package (its plan.json) on a device with kernels `chosen`.

    units: those that have a launcher, such as "forward_sm80".
    Raises: RequestError for a unit that the package does not have: nothing would be run of it, and nothing found.
    """
    variants = {(unit_of(v), v["dtype"]): v for v in plan["variants"]}
    backward = plan.get("backward", [])
    forces = any(map(is_exact, variants.values()))  # the op can then be told which kernel to run
    known, seen = set(units), set()
    unknown = known - {f"forward_{unit}" for unit, _ in variants} - {f"backward_{row['target']}" for row in backward}
    if unknown:
        raise RequestError(f"--launcher {min(unknown)}: {plan['name']} has no such unit")
    for (unit, dtype), variant in variants.items():
        if f"forward_{unit}" not in known:
            continue
        op_too = extent.op and (forces or variant["target"] == chosen)
        tile = variant["plan"]
        for problem in extent.problems(tile["br"], tile["bc"], is_first=unit not in seen):
            if takes(variant, problem):
                yield Step(unit, dtype, problem, variant, op_too, 1 + op_too)
        seen.add(unit)
    rows = [row for row in backward if f"backward_{row['target']}" in known]
    for row in rows:
        tile, op_too = row["plan"], extent.op and row["target"] == chosen
        for problem in extent.problems(tile["br"], tile["bc"], is_first=row is rows[0]):
            yield Step(row["target"], row["dtype"], problem, None, op_too, 2 * (1 + op_too))


def launch(
    library: Any, unit: str, dtype: str, q: Any, k: Any, v: Any, lengths: Any, causal: str, *, debug: bool,
    scratch_bytes: int | None = None, device: str = "cuda",
) -> tuple[Guarded, Guarded]:  # fmt: skip
    """Run the entry point of `unit` in guarded memory; returns O and LSE. `scratch_bytes`: None, it takes no scratch.

    Raises: RuntimeError when it returns an error, or wrote beside its scratch memory.
    """
    (b, hq, nq, d), (_, hkv, nk, dv) = q.shape, v.shape
    o = Guarded((b, hq, nq, dv), torch.float32 if debug else q.dtype, device)
    lse = Guarded((b, hq, nq), torch.float32, device)
    args = ForwardArgs(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), o=o.values.data_ptr(), lse=lse.values.data_ptr(),
        B=b, Hq=hq, Hkv=hkv, Nq=nq, Nk=nk, key_lengths=None if lengths is None else lengths.data_ptr(),
        scale=d**-0.5, causal=CAUSAL.index(causal), trace=None, trace_tiles=0,
    )  # fmt: skip
    for name, tensor in (("q", q), ("k", k), ("v", v), ("o", o.values)):
        setattr(args, f"{name}_stride", (ctypes.c_int64 * 3)(*tensor.stride()[:3]))
    scratch = Guarded((scratch_bytes or 0,), torch.uint8, device)
    more = [] if scratch_bytes is None else [ctypes.c_void_p(scratch.values.data_ptr()) if scratch_bytes else None]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if device == "cuda" else None)
    error = getattr(library, f"attention_forward_{unit}")(ctypes.byref(args), DTYPE_CODES[dtype], *more, stream)
    if error:
        raise RuntimeError(f"attention_forward_{unit} returned CUDA error {error}")
    for text in scratch.faults("scratch memory"):
        raise RuntimeError(f"attention_forward_{unit}: {text}")
    return o, lse


def faults(attn: ModuleType, step: Step, library: Any, *, debug: bool, device: str = "cuda") -> Iterator[str]:
    """Run one problem of the forward pass; yields what does not hold. debug: O is float32."""
    checks, problem, variant = packages.part(attn, "checks"), step.problem, step.variant
    assert variant is not None
    dtype, exact = torch_dtype(step.dtype), is_exact(variant)
    queries = (problem.nq,) * problem.b
    keys = (problem.nk,) * problem.b if problem.lengths is None else problem.lengths
    of_rows, of_keys = (problem.b, problem.hq, problem.nq), (problem.b, problem.hkv, problem.nk)
    q = scattered(drawn((*of_rows, checks.D), dtype, 1), queries, problem.layout, device)
    k = scattered(drawn((*of_keys, checks.D), dtype, 2), keys, problem.layout, device, fill=exact)
    v = scattered(drawn((*of_keys, checks.DV), dtype, 3), keys, problem.layout, device, fill=exact)
    lengths = None if problem.lengths is None else torch.tensor(problem.lengths, device=device)
    scratch = variant["plan"].get("scratch_bytes", 4) if exact else None
    guarded = launch(
        library, step.unit, step.dtype, q, k, v, lengths, problem.causal, debug=debug, scratch_bytes=scratch,
        device=device,
    )  # fmt: skip
    results = dict(zip(("O", "LSE"), guarded, strict=True))
    for name, one in results.items():
        yield from one.faults(name)
        yield from unwritten(name, one.read())
    if step.op_too:
        words = {"causal": False if problem.causal == "none" else problem.causal, "key_lengths": lengths}
        of_op = attn.attention(q, k, v, return_lse=True, **words)
        for (name, one), got in zip(results.items(), of_op, strict=True):
            yield from unwritten(name, got)
            if not torch.equal(got, one.values):
                yield f"{name}: the op and the kernel's entry point differ"


def is_exact(variant: dict[str, Any]) -> bool:
    """Whether the variant is in code for one capability alone: it may ask for scratch memory, and copies by TMA."""
    return variant["target"] in DEVICES and DEVICES[variant["target"]].is_exact


def unit_of(variant: dict[str, Any]) -> str:
    """What its entry point is called after."""
    return str(variant.get("unit", variant["target"]))


def takes(variant: dict[str, Any], problem: Problem) -> bool:
    """Whether the variant is for the problem's mask."""
    return variant.get("causal", "any") in ("any", "full" if problem.causal == "none" else "causal")


def run(folder: Path, launchers: dict[str, ctypes.CDLL], tool: str = "") -> int:
    """Run what EXTENTS has for `tool` on every kernel that has a launcher.

    Returns the number of calls. What does not hold is printed.

    Raises: SystemExit when something does not hold; what `steps` raises.
    """
    attn, plan = packages.load(folder), packages.plan(folder)
    recipe, debug = packages.part(attn, "recipe"), bool(plan["request"].get("debug"))
    chosen = recipe.target_for(recipe.capability_of(torch.device("cuda")))
    forces = any(map(is_exact, plan["variants"]))
    calls, wrong = 0, []
    for step in steps(plan, chosen, launchers, EXTENTS[tool]):
        library = launchers[step.entry]
        if step.variant is None:
            found = list(
                guarded_backward.faults(
                    attn, step.problem, step.dtype, library, step.unit, op_too=step.op_too, debug=debug
                )
            )
        else:
            with forced(ARCH_VARIABLE, step.unit if forces else ""):
                found = list(faults(attn, step, library, debug=debug))
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
    parser.add_argument("--launcher", action="append", required=True, metavar="UNIT=LIBRARY")
    parser.add_argument("--tool", choices=list(EXTENTS), default="", help="The tool that watches; default: none.")
    asked = parser.parse_args()
    launchers = {}
    for word in asked.launcher:
        unit, _, file = word.partition("=")
        launchers[unit] = ctypes.CDLL(file)
    try:
        with torch.no_grad():
            print(DONE, run(asked.folder, launchers, asked.tool))
    except RequestError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
