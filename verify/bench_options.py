"""The options of `verify bench`, read: lists of words, numbers and tiles, for a CPU or for the grid of a GPU.

An option that the chosen device has no use for is refused, so that nobody believes it had an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from codegen.errors import RequestError
from verify import peers
from verify.bench_grid import BACKWARD, Grid, Width
from verify.bench_report import GRID, Tile

CPU_ONLY = ("batch", "heads", "threads")
GPU_ONLY = (
    "masks", "layouts", "groups", "peers", "tokens", "columns", "seed", "seconds", "archs", "tiling", "overhead",
)  # fmt: skip
FLAGS = {
    "masks": "--mask", "layouts": "--layout", "groups": "--gqa", "archs": "--arch", "columns": "--hidden",
    "widths": "--d", "lengths": "--n", "dtypes": "--dtype",
}  # fmt: skip


def cpu(named: tuple[str, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `bench_report.run`.

    Raises: RequestError.
    """
    given = _given(options)
    _refuse(given, GPU_ONLY, "--device cpu")
    if given.get("backward"):
        _refuse(given, ("tiles",), "--backward: the backward pass takes its own tile")
    if len(named) > 1:
        raise RequestError(f"{len(named)} packages: a CPU times one at a time", "--device cuda times several together")
    readers = {"widths": numbers, "lengths": numbers, "dtypes": words, "tiles": tiles}
    return {"package": named[0] if named else None, **_read(given, readers)}


def grid(named: tuple[str, ...], options: Mapping[str, Any]) -> Grid:
    """The request of `bench_grid.run`.

    Raises: RequestError.
    """
    given = _given(options)
    _refuse(given, CPU_ONLY, "--device cuda")
    if given.get("backward"):
        _refuse(given, ("tiles", "overhead"), "--backward")
    if named:
        _refuse(given, ("sram", "archs", "tiling", "tiles", "widths"), "a named package")
    if given.get("tiles") == "grid":
        raise RequestError("--tiles grid: of a CPU", "name tiles: --tiles 128x64,64x128")
    readers: dict[str, Reader] = {
        "widths": widths, "lengths": numbers, "groups": numbers, "dtypes": words, "masks": words, "layouts": words,
        "archs": words, "tiles": tiles, "peers": lambda text, option: peers.names(text),
    }  # fmt: skip
    read = _read(given, readers)
    if read.get("backward"):
        read = {**(BACKWARD if not named else {"lengths": BACKWARD["lengths"]}), **read}
    return Grid(packages=named, **read)


Reader = Callable[[str, str], tuple[Any, ...]]


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _flag(name: str) -> str:
    return FLAGS.get(name, f"--{name}")


def _refuse(given: Mapping[str, Any], names: tuple[str, ...], why: str) -> None:
    for name in names:
        if name in given:
            raise RequestError(f"{_flag(name)} has no effect with {why}")


def _read(given: Mapping[str, Any], readers: Mapping[str, Reader]) -> dict[str, Any]:
    return {name: readers[name](value, _flag(name)) if name in readers else value for name, value in given.items()}


def words(text: str, option: str = "") -> tuple[str, ...]:
    """ "a, b" as ("a", "b").

    Raises: RequestError for an empty list.
    """
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise RequestError(f"{option} {text!r}: nothing is named")
    return found


def numbers(text: str, option: str = "") -> tuple[int, ...]:
    """ "64,128" as (64, 128).

    Raises: RequestError.
    """
    try:
        return tuple(int(word) for word in words(text, option))
    except ValueError:
        raise RequestError(f"{option} {text}: not a list of whole numbers", f"try {option} 64,128") from None


def widths(text: str, option: str = "--d") -> tuple[Width, ...]:
    """ "64,192/128" as pairs (d, dv): dv is d where it is not named.

    Raises: RequestError.
    """
    found = []
    for word in words(text, option):
        d, slash, dv = word.partition("/")
        if not d.isdecimal() or (slash and not dv.isdecimal()):
            raise RequestError(f"{option} {text}: not a list of widths", f"try {option} 64,128 or {option} 192/128")
        found.append((int(d), int(dv or d)))
    return tuple(found)


def tiles(text: str, option: str = "--tiles") -> tuple[Tile, ...]:
    """ "96x64,192x128" as pairs (Br, Bc); "grid" for what a CPU tries.

    Raises: RequestError.
    """
    if text == "grid":
        return GRID
    try:
        return tuple((int(br), int(bc)) for br, bc in (word.lower().split("x") for word in words(text, option)))
    except ValueError:
        raise RequestError(f"{option} {text}: not a list of BRxBC", f"try {option} 96x64,192x128") from None
