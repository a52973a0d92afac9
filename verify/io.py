"""Slow-memory traffic, exactly: bytes that the emitted kernel moves, the closed formula, and the lower bound.

    python -m verify io                                   # every tile of PACKAGES on the grid of shapes
    python -m verify io generated/attn_d128_sram192k --n 512,1000 --causal none,top_left

The emulator runs the emitted text and counts the bytes of each load and store by tensor. The check is equality, per
tensor, with `spec.io_kernels` (algorithms as in the papers, plus the kernel's own terms, each with its reason); one
byte of difference fails. Beside it stand

  * the lower bound (`spec.io_bounds`): compulsory traffic, or the explicit constant of Saha and Ye's bound, whichever
    is larger, for M = all that a block has to hold data in: the plan's shared memory and its registers;
  * what Algorithms 0 and 1 of FlashAttention and Algorithm 1 of FlashAttention-2 would move for the same call with
    the tile that fits the same M.

The backward kernels of a package are counted in the same way (`io_backward`).
On a machine with a GPU, `--device cuda` adds what the hardware's counters saw (`io_ncu`), explained and not asserted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from codegen.errors import RequestError
from codegen.problem import ITEMSIZE
from spec import io_bounds, io_kernels, tile_rule
from spec.io_kernels import TENSORS, Bytes, Call
from verify import gpu_packages, io_backward, io_calls, machine, packages
from verify.emulator import build
from verify.emulator.device import Call as Launch
from verify.emulator.emulator import SCHEDULES, Emulator
from verify.guarded_problems import Problem
from verify.progress import Step, silent

REGISTER_BYTES = 4
# The tiles that are counted when no package is named: names of `gpu_packages.PACKAGES`, where each is certified.
PACKAGES = (
    "the default command's", "the paper's tile at d=64", "fast tile at d=128", "fast tile at d=64",
    "d no multiple of 16, Br=32, Bc=16", "d=72, one warp", "widest", "dv smaller than d",
    "dv larger than d, neither a multiple of 16",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The kernels of one package for one target: they differ in dtype only."""

    folder: Path
    target: str
    dtypes: tuple[str, ...]
    d: int
    dv: int
    br: int
    bc: int
    threads: int
    itemsize: int
    o_itemsize: int
    fast_memory_bytes: int  # shared memory of a block, and its registers

    @property
    def m(self) -> int:
        """The papers' M: elements of Q, K and V that fit in all the fast memory of a block."""
        return tile_rule.elements(self.fast_memory_bytes, self.itemsize)

    def formula(self, call: Call) -> Bytes:
        """What the kernel moves, in closed form."""
        return io_kernels.forward(
            call, br=self.br, bc=self.bc, threads=self.threads, itemsize=self.itemsize, o_itemsize=self.o_itemsize
        )


def kernel_of(folder: Path, target: str = "sm80") -> Kernel:
    """The kernels of a package for a target.

    Raises: RequestError when it has none.
    """
    plan = packages.plan(folder)
    rows = [variant for variant in plan["variants"] if variant["target"] == target]
    if not rows:
        raise RequestError(f"{plan['name']} has no kernel for --arch {target}", "what io counts are CUDA kernels")
    tile, asked = rows[0]["plan"], plan["request"]
    itemsize = ITEMSIZE[rows[0]["dtype"]]
    return Kernel(
        folder=folder, target=target, dtypes=tuple(row["dtype"] for row in rows), d=asked["d"], dv=asked["dv"],
        br=tile["br"], bc=tile["bc"], threads=tile["threads"], itemsize=itemsize,
        o_itemsize=4 if asked["debug"] else itemsize,
        fast_memory_bytes=rows[0]["fast_memory_bytes"] + REGISTER_BYTES * tile["threads"] * tile["registers"],
    )  # fmt: skip


def measure(kernel: Kernel, problem: Problem, dtype: str) -> Bytes:
    """What the emulator counts for one call of the kernel.

    Raises: FindingError when the kernel has a fault; ToolError when it does not compile.
    """
    emulator = Emulator(build.package(kernel.folder, kernel.target))
    emulator.configure(SCHEDULES[0], check=False)  # counts do not depend on the checker or on the schedule
    launch = Launch.of(
        io_calls.case(problem, dtype, d=kernel.d, dv=kernel.dv), debug=kernel.o_itemsize != kernel.itemsize
    )
    done = launch.launch(emulator, kernel.target).check(f"{kernel.folder.name}, {problem.name}:")
    counted = {name: done.bytes(name) for name in TENSORS}
    return Bytes(read={n: r for n, (r, _) in counted.items()}, written={n: w for n, (_, w) in counted.items()})


def costs(kernel: Kernel, call: Call) -> dict[str, Any]:
    """Formula, lower bound and the papers' algorithms for one call; all in bytes."""
    tile = tile_rule.fitting_tile(kernel.m, kernel.d, kernel.dv)
    widths = {"itemsize": kernel.itemsize}
    formula, bound = kernel.formula(call), io_bounds.lower_bound_of_call(call, kernel.m) * kernel.itemsize
    own = io_kernels.own_terms(
        call, br=kernel.br, bc=kernel.bc, threads=kernel.threads, o_itemsize=kernel.o_itemsize, **widths
    )
    return {
        "formula": {"read": _some(formula.read), "written": _some(formula.written), "total": formula.total},
        "paper_f2f": io_kernels.flash2(call, br=kernel.br, bc=kernel.bc, **widths),
        "own_terms": {why: n for why, n in own.items() if n},
        "lower_bound": math.ceil(bound),
        "ratio": float(formula.total / bound) if bound else None,
        "beside": {
            "A0": io_kernels.standard(call, **widths),
            "A1": io_kernels.flash1(call, br=tile.br, bc=tile.bc, **widths),
            "F2f": io_kernels.flash2(call, br=tile.br, bc=tile.bc, **widths),
        },
    }


def row(kernel: Kernel, problem: Problem) -> dict[str, Any]:
    """One shape: what every dtype's kernel moved, and whether that is the formula, tensor by tensor."""
    call = io_calls.call(problem, d=kernel.d, dv=kernel.dv)
    want, differences = kernel.formula(call), []
    for dtype in kernel.dtypes:
        got = measure(kernel, problem, dtype)
        for what in ("read", "written"):
            for name in TENSORS:
                counted, stated = getattr(got, what)[name], getattr(want, what)[name]
                if counted != stated:
                    differences.append(f"{dtype}: {counted} bytes of {name} {what}, the formula has {stated}")
    figures = {"shape": io_calls.describe(problem), "equal": not differences, **costs(kernel, call)}
    return figures | ({"differences": differences} if differences else {})


def _some(by_name: dict[str, int]) -> dict[str, int]:
    return {name: n for name, n in by_name.items() if n}


def chosen(
    names: Sequence[str], *, sram: str = "192KB", d: int | None = None, br: int | None = None, bc: int | None = None,
    target: str = "sm80",
) -> list[Path]:  # fmt: skip
    """The packages that a command asks for: those it names, the one of its tile, else PACKAGES.

    Raises: RequestError, PlanError for what cannot be.
    """
    if d is not None:
        dtypes = ("bf16", "fp16")
        return [packages.find(name) for name in names] + [
            packages.emit(sram=sram, d=d, br=br, bc=bc, dtypes=dtypes, archs=(target,))
        ]
    if br is not None or bc is not None:
        raise RequestError("--br and --bc need --d", "try --d 64 --br 128 --bc 64")
    return [packages.find(name) for name in names] or [gpu_packages.request(gpu_packages.PACKAGES[n]) for n in PACKAGES]


def run(
    folders: Sequence[Path],
    *,
    device: str = "emulator",
    target: str = "sm80",
    shapes: Sequence[Problem] | None = None,
    step: Step = silent,
) -> dict[str, Any]:
    """Count every package on `shapes` (default: its grid and `shown`), compare, and on "cuda" read the counters.

    Raises: FindingError, ToolError, RequestError.
    """
    figures: dict[str, Any] = {
        "kind": "io",
        "device": device,
        "machine": machine.describe("cuda" if device == "cuda" else "cpu"),
        "arch": target,
        "algorithm": "F2f",
        "packages": [],
    }
    for folder in folders:
        kernel = kernel_of(folder, target)
        rows = []
        for problem in shapes if shapes is not None else [*io_calls.grid(kernel.br, kernel.bc), *io_calls.shown()]:
            rows.append(row(kernel, problem))
            step(note=f"{folder.name}: {problem.name}")
        gradients = io_backward.kernel_of(folder, target)
        figures["packages"].append({
            "package": folder.name,
            "digest": packages.plan(folder)["digest"][:12],
            "dtypes": list(kernel.dtypes),
            "tile": [kernel.br, kernel.bc],
            "m_elements": kernel.m,
            "fitting_tile": list(vars(tile_rule.fitting_tile(kernel.m, kernel.d, kernel.dv)).values()),
            "rows": rows,
            "far": [
                {"shape": io_calls.describe(problem), **costs(kernel, io_calls.call(problem, d=kernel.d, dv=kernel.dv))}
                for problem in io_calls.squares([io_calls.FAR], ["none", "bottom_right"])
            ],
            "backward": None if gradients is None else io_backward.package(gradients, shapes, step=step),
        })  # fmt: skip
    every = [(p["package"], r) for p in figures["packages"] for r in p["rows"]]
    every += [
        (f"{p['package']}, backward", r) for p in figures["packages"] if p["backward"] for r in p["backward"]["rows"]
    ]
    figures["differences"] = [
        f"{name}, {r['shape']['name']}: {text}" for name, r in every for text in r.get("differences", ())
    ]
    figures["holds"] = bool(every) and not figures["differences"]
    if device == "cuda":
        from verify import io_ncu

        figures["counters"] = io_ncu.counters([kernel_of(folder, target) for folder in folders], step=step)
    return figures


HEAD = ("shape", "moved", "formula", "paper's F2f", "own terms", "lower bound", "ratio", "A0", "A1", "F2f, tile for M")


def tables(figures: dict[str, Any]) -> list[Any]:
    """One table per package and pass: bytes of every shape, and at FAR rows and keys by formula."""
    made: list[Any] = []
    for package in figures["packages"]:
        br, bc = package["tile"]
        title = f"{package['package']}, {br} x {bc}, {', '.join(package['dtypes'])}; M = {package['m_elements']:,}"
        table = Table(title=title, title_justify="left")
        for i, name in enumerate(HEAD):
            table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
        for one in [*package["rows"], *package["far"]]:
            moved = "not run" if "equal" not in one else "equal" if one["equal"] else "DIFFERS"
            ratio = "-" if one["ratio"] is None else f"{one['ratio']:.2f}"
            table.add_row(
                one["shape"]["name"], moved, f"{one['formula']['total']:,}", f"{one['paper_f2f']:,}",
                f"{sum(one['own_terms'].values()):+,}" if one["own_terms"] else "0", f"{one['lower_bound']:,}", ratio,
                *(f"{one['beside'][name]:,}" for name in ("A0", "A1", "F2f")),
            )  # fmt: skip
        made.append(table)
        if package["backward"]:
            made.append(io_backward.table(package["package"], package["backward"]))
    if "counters" in figures:
        from verify import io_ncu

        made += io_ncu.tables(figures["counters"])
    return made
