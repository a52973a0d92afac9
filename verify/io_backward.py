"""Slow-memory traffic of the emitted backward kernels, exactly: what the emulator counts, and the closed formula.

The backward half of `python -m verify io`. Both forms are counted on the grid of the forward kernels: the default one,
whose dQ is summed in memory, and the deterministic one, with a gradient of LSE. The check is equality, per tensor,
with `spec.io_backward`. Beside it stand what every algorithm must move, and what Algorithms 3 and 4 of FlashAttention
and Algorithm 2 of FlashAttention-2 would move for the same call with the kernel's own tile.

O and LSE are drawn like the inputs, LSE large enough that no weight overflows: traffic does not depend on values. The
kernels are launched even where the binding would call none, with no key or no row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from codegen.problem import ITEMSIZE
from spec import io_backward
from spec.io_backward import GRADIENTS, TENSORS, BackwardKernel, Form
from spec.io_kernels import Bytes, Call
from verify import io_calls, packages
from verify.cases import CAUSAL
from verify.emulator.device_backward import library
from verify.emulator.emulator import SCHEDULES, Emulator, guarded
from verify.entry_points import DTYPE_CODES, BackwardArgs
from verify.guarded_problems import Problem
from verify.progress import Step, silent

FORMS = {"default": Form(), "deterministic, gradient of LSE": Form(deterministic=True, dlse=True)}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The backward kernels of one package for one target: they differ in dtype only."""

    folder: Path
    target: str
    dtypes: tuple[str, ...]
    d: int
    dv: int
    traffic: BackwardKernel

    def formula(self, call: Call, form: Form) -> Bytes:
        """What the kernels move, in closed form."""
        return io_backward.backward(call, self.traffic, form)


def kernel_of(folder: Path, target: str = "sm80") -> Kernel | None:
    """The backward kernels of a package for a target; None where it has none (`--no-backward`, or a CPU's)."""
    facts = packages.plan(folder)
    rows = [row for row in facts.get("backward", ()) if row["target"] == target]
    if not rows:
        return None
    plan, asked = rows[0]["plan"], facts["request"]
    itemsize = ITEMSIZE[rows[0]["dtype"]]
    return Kernel(
        folder=folder, target=target, dtypes=tuple(row["dtype"] for row in rows), d=asked["d"], dv=asked["dv"],
        traffic=BackwardKernel(
            br=plan["br"], bc=plan["bc"], threads=plan["threads"], d_padded=plan["d_padded"],
            tile_sums=plan["tile_sums"], dq_column_warps=plan["dq_column_warps"], query_br=plan["query_br"],
            query_bc=plan["query_bc"], query_threads=32 * plan["query_warps"], itemsize=itemsize,
            gradient_itemsize=4 if asked["debug"] else itemsize,
        ),
    )  # fmt: skip


def measure(kernel: Kernel, problem: Problem, dtype: str, form: Form) -> Bytes:
    """What the emulator counts for one call of the kernels.

    Raises: FindingError when a kernel has a fault; ToolError when it does not compile.
    """
    emulator = Emulator(library(kernel.folder, kernel.target))
    emulator.configure(SCHEDULES[0], check=False)  # counts do not depend on the checker or on the schedule
    arrays = _drawn(kernel, problem, form)
    args = BackwardArgs(
        B=problem.b, Hq=problem.hq, Hkv=problem.hkv, Nq=problem.nq, Nk=problem.nk, scale=kernel.d**-0.5,
        causal=CAUSAL.index(problem.causal), deterministic=form.deterministic,
    )  # fmt: skip
    for name, array in arrays.items():
        field = "dout" if name == "do" else name
        setattr(args, field, array.ctypes.data)
        if name != "key_lengths":
            steps = [step // array.itemsize for step in array.strides]
            stride = getattr(args, f"{field}_stride")
            stride[:] = steps[: len(stride)]
    emulator.clear()
    for name, array in arrays.items():
        if problem.lengths is not None and name in ("k", "v"):  # the keys beyond must not be read
            for entry, length in zip(array, problem.lengths, strict=True):
                for head in entry[:, : max(length, 0)]:
                    emulator.register(name, head)
        else:
            emulator.register(name, array, once=name in GRADIENTS)
    scratch = _scratch(emulator, kernel, problem, args, DTYPE_CODES[dtype])
    function = f"attention_backward_{kernel.target}"
    done = emulator.launch(function, ctypes.byref(args), DTYPE_CODES[dtype], scratch, None)
    done.check(f"{kernel.folder.name}, {problem.name}:")
    counted = {name: done.bytes(name) for name in TENSORS}
    return Bytes(read={n: r for n, (r, _) in counted.items()}, written={n: w for n, (_, w) in counted.items()})


def _drawn(kernel: Kernel, problem: Problem, form: Form) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a call by the names of the spec; 16-bit values as uint16."""
    rng = np.random.default_rng(0)
    rows, keys = (problem.b, problem.hq, problem.nq), (problem.b, problem.hkv, problem.nk)
    widths = {"q": (rows, kernel.d), "k": (keys, kernel.d), "v": (keys, kernel.dv), "o": (rows, kernel.dv)}
    widths["do"] = rows, kernel.dv
    made: dict[str, npt.NDArray[Any]] = {}
    for name, (shape, width) in widths.items():
        made[name] = _placed((*shape, width), problem.layout, np.uint16)
        made[name][...] = rng.integers(0x3000, 0x3400, (*shape, width))  # small and positive in bf16 and in fp16
    for name in ("lse", "dlse") if form.dlse else ("lse",):
        made[name] = guarded(rows, np.float32)
        made[name][...] = 8.0 + rng.random(rows)
    kind = np.float32 if kernel.traffic.gradient_itemsize == 4 else np.uint16
    for name in form.wanted:
        made[name] = guarded(made[name[1:]].shape, kind)
    if problem.lengths is not None:
        made["key_lengths"] = guarded((problem.b,), np.int64)
        made["key_lengths"][:] = problem.lengths
    return made


def _placed(shape: tuple[int, ...], layout: str, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """(B,H,N,d), contiguous, or with the heads of a row side by side, or with gaps between rows."""
    b, h, n, width = shape
    if layout == "bnhd":
        return guarded((b, n, h, width), kind).swapaxes(1, 2)
    if layout == "padded":
        return guarded((b, h, n, width + 8), kind)[..., :width]
    return guarded(shape, kind)


def _scratch(emulator: Emulator, kernel: Kernel, problem: Problem, args: BackwardArgs, code: int) -> npt.NDArray[Any]:
    """The memory that the call needs, its two parts registered under their own names, which the judge does not do."""
    size_of = getattr(emulator.library, f"attention_backward_{kernel.target}_scratch")
    size_of.restype = ctypes.c_int64
    scratch = guarded((int(size_of(ctypes.byref(args), code)),), np.uint8)
    row_tiles = -(-problem.nq // kernel.traffic.br)
    split = io_backward.ROWS_BYTES * problem.b * problem.hq * row_tiles * kernel.traffic.br
    emulator.register("rows", scratch[:split], writable=True)
    emulator.register("sums", scratch[split:], writable=True)
    return scratch


def costs(kernel: Kernel, call: Call, form: Form) -> dict[str, Any]:
    """Formula, compulsory traffic and the papers' algorithms for one call; all in bytes."""
    formula, itemsize = kernel.formula(call, form), kernel.traffic.itemsize
    least = io_backward.compulsory(call, itemsize=itemsize)
    tile = {"br": kernel.traffic.br, "bc": kernel.traffic.bc, "itemsize": itemsize}
    return {
        "formula": {
            "read": {name: n for name, n in formula.read.items() if n},
            "written": {name: n for name, n in formula.written.items() if n},
            "total": formula.total,
        },
        "compulsory": least,
        "ratio": formula.total / least if least else None,
        "beside": {
            "A3": io_backward.standard(call, itemsize=itemsize),
            "A4": io_backward.flash1(call, **tile),
            "F2b": io_backward.flash2(call, **tile),
        },
    }


def row(kernel: Kernel, problem: Problem, name: str, form: Form) -> dict[str, Any]:
    """One shape in one form: what every dtype's kernels moved, and whether that is the formula, tensor by tensor."""
    call = io_calls.call(problem, d=kernel.d, dv=kernel.dv)
    want, differences = kernel.formula(call, form), []
    for dtype in kernel.dtypes:
        got = measure(kernel, problem, dtype, form)
        for what in ("read", "written"):
            for tensor in TENSORS:
                counted, stated = getattr(got, what)[tensor], getattr(want, what)[tensor]
                if counted != stated:
                    differences.append(f"{name}, {dtype}: {counted} bytes of {tensor} {what}, the formula has {stated}")
    figures = {"shape": io_calls.describe(problem), "form": name, "equal": not differences}
    return figures | costs(kernel, call, form) | ({"differences": differences} if differences else {})


def package(kernel: Kernel, shapes: Sequence[Problem] | None = None, *, step: Step = silent) -> dict[str, Any]:
    """Both forms on `shapes` (default: its grid and `shown`), and at FAR rows and keys by formula."""
    tile, rows = kernel.traffic, []
    for problem in shapes if shapes is not None else [*io_calls.grid(tile.br, tile.bc), *io_calls.shown()]:
        rows += [row(kernel, problem, name, form) for name, form in FORMS.items()]
        step(note=f"{kernel.folder.name}, backward: {problem.name}")
    far = [
        {"shape": io_calls.describe(problem), "form": name}
        | costs(kernel, io_calls.call(problem, d=kernel.d, dv=kernel.dv), form)
        for problem in io_calls.squares([io_calls.FAR], ["none", "bottom_right"])
        for name, form in FORMS.items()
    ]
    return {"dtypes": list(kernel.dtypes), "tile": [tile.br, tile.bc], "rows": rows, "far": far}


HEAD = ("shape", "form", "moved", "formula", "compulsory", "ratio", "A3", "A4", "F2b")


def table(name: str, figures: dict[str, Any]) -> Table:
    """Bytes of every shape and form of one package, and at FAR rows and keys by formula."""
    br, bc = figures["tile"]
    made = Table(title=f"{name}, backward, {br} x {bc}, {', '.join(figures['dtypes'])}", title_justify="left")
    for i, column in enumerate(HEAD):
        made.add_column(column, justify="left" if i < 2 else "right", overflow="fold")
    for one in [*figures["rows"], *figures["far"]]:
        moved = "not run" if "equal" not in one else "equal" if one["equal"] else "DIFFERS"
        ratio = "-" if one["ratio"] is None else f"{one['ratio']:.2f}"
        made.add_row(
            one["shape"]["name"], one["form"], moved, f"{one['formula']['total']:,}", f"{one['compulsory']:,}", ratio,
            *(f"{one['beside'][beside]:,}" for beside in ("A3", "A4", "F2b")),
        )  # fmt: skip
    return made


SUMMARY = (
    "package", "Br x Bc", "form", "calls whose bytes equal the formula", "bytes counted per dtype",
    f"one head at N={io_calls.FAR}", "/ compulsory", "/ compulsory, causal", "F2b / ours", "A4 / ours", "A3 / ours",
)  # fmt: skip


def summary(packages_: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row of SUMMARY per package and form, from the "packages" of the result file."""
    rows = []
    for one in packages_:
        figures = one.get("backward")
        if not figures:
            continue
        for name in FORMS:
            counted = [r for r in figures["rows"] if r["form"] == name]
            full, causal = (r for r in figures["far"] if r["form"] == name)
            moved = full["formula"]["total"]
            rows.append([
                f"`{one['package']}`", "{} x {}".format(*figures["tile"]), name,
                f"{sum(r['equal'] for r in counted)} of {len(counted)} x {len(figures['dtypes'])} dtypes",
                f"{sum(r['formula']['total'] for r in counted):,}", f"{moved / 1e6:.2f} MB", f"{full['ratio']:.2f}",
                f"{causal['ratio']:.2f}", *(f"{full['beside'][beside] / moved:.2f}" for beside in ("F2b", "A4", "A3")),
            ])  # fmt: skip
    return rows
