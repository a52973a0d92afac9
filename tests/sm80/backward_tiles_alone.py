"""Tiles of the mma.sync backward kernels without the rest of their unit, many in one compilation.

A whole unit takes nvcc 4 s. What may spill is `key_tiles` with dQ and `query_tiles`: ten of them in one file, a
namespace each, take 0.7 s a tile for two architectures. Either kernel depends on the other's plan only by constants
that it multiplies with.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from codegen import problem
from codegen.devices import DEVICES
from codegen.plans import sm80_backward
from codegen.plans.sm80_backward import KeyTiles, QueryTiles, Sm80BackwardPlan
from verify import ptxas, ptxas_backward, ptxas_output

HEADERS = ("backward.h", "forward.h", "ptx_sm80.cuh", "backward_tiles_sm80.cuh")
ENDS = {"backward_sm80.cu": "// ---- Host", "backward_query_sm80.cuh": "}  // namespace"}  # what is not compiled here
ARCHS = ptxas.ARCHS["sm80"]
CARDS = ("sm80", "sm86", "sm90")  # the mma.sync targets have the shared memory of one of these


@dataclass(frozen=True)
class Compiled:
    """What ptxas said of one kernel, per architecture of ARCHS."""

    spilled: tuple[int, ...]  # bytes, stack included
    registers: tuple[int, ...]


def of_every_budget(d: int, dv: int) -> Iterator[KeyTiles | QueryTiles]:
    """The tiles of both kernels that some budget on some card leads to, some of them more than once.

    Steps from the largest budget to the next at which the planner's order may yield another tile.
    """
    for card in CARDS:
        device = DEVICES[card]
        all_keys, all_query = sm80_backward._ranked(d, dv, device.smem_per_sm_bytes)
        limit = device.smem_per_block_bytes
        while True:
            keys = next((tile for tile in all_keys if sm80_backward._why_not(tile, limit) is None), None)
            cheapest = next((tile for tile in all_query if sm80_backward._why_not_query(tile, limit) is None), None)
            query = sm80_backward._choose_query(all_query, limit, device.smem_per_sm_bytes)
            if keys is None or query is None or cheapest is None:
                break
            yield keys
            yield query
            limit = max(keys.bytes, query.bytes, cheapest.bytes) - 1


def compile_together(tiles: Sequence[KeyTiles | QueryTiles]) -> list[Compiled]:
    """Compile the kernel of every tile, for bf16.

    Raises: ToolError when nvcc fails; AssertionError when it reports another number of kernels.
    """
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        texts = [_text(folder, f"plan{number}_", tile) for number, tile in enumerate(tiles)]
        source = folder / "many.cu"
        source.write_text("".join(f'#include "{name}"\n' for name in HEADERS) + "".join(texts))
        limits = ptxas_output.Limits(threads=256, shared_bytes=0, plan="many")
        unit = ptxas.Unit(name="many", source=source, archs=ARCHS, limits=limits, least_kernels=len(tiles))
        said, _ = ptxas.compiled(unit, replace(ptxas.tools(), cuobjdump=None))
    found = {}
    for kernel in ptxas_output.kernels(said, limits):
        number = re.search(r"plan(\d+)_", kernel.name)
        assert number is not None, kernel.name
        spilled = kernel.stack_bytes + kernel.spill_store_bytes + kernel.spill_load_bytes
        found[int(number[1]), kernel.arch] = (spilled, kernel.registers)
    assert len(found) == len(tiles) * len(ARCHS)
    return [Compiled(*zip(*(found[number, arch] for arch in ARCHS), strict=True)) for number in range(len(tiles))]


def _text(folder: Path, name: str, tile: KeyTiles | QueryTiles) -> str:
    """One tile's kernel in a namespace; leaves the headers that all share in `folder`."""
    d, dv = tile.d, tile.dv
    if isinstance(tile, KeyTiles):
        plan = Sm80BackwardPlan(keys=tile, query=QueryTiles(d=d, dv=dv, br=64, bc=16, row_tiles=1, stages=1))
        file, kernel = "backward_sm80.cu", "key_tiles<BFloat16, true>"
    else:
        keys = KeyTiles(d=d, dv=dv, br=64, bc=32, warps=4, row_warps=2, stages=1)
        plan = Sm80BackwardPlan(keys=keys, query=tile)
        file, kernel = "backward_query_sm80.cuh", "query_tiles<BFloat16>"
    ptxas_backward.write(folder, plan, ("bf16",))
    params, code = ((folder / one).read_text() for one in ("backward_params_sm80.cuh", file))
    params, code = (text[text.index("namespace {") :] for text in (params, code))
    made = f"template __global__ void {kernel}(const __grid_constant__ Params);"
    return f"namespace {name} {{\n{params}\n{code[: code.rindex(ENDS[file])]}\n{made}\n}}  // namespace\n}}\n"


def widths() -> Iterator[tuple[int, int]]:
    """Every d and dv that a request may have."""
    for d in problem.HEAD_DIMS:
        for dv in problem.HEAD_DIMS:
            yield d, dv
