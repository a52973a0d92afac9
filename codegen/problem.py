"""What is asked for: one frozen request, with every default filled in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from . import planners
from .devices import ARCHS
from .errors import RequestError
from .sizes import LARGEST_BYTES, format_bytes, whole_number

DTYPES = ("float32", "float64", "bf16", "fp16")
ITEMSIZE = {"float32": 4, "float64": 8, "bf16": 2, "fp16": 2}
HEAD_DIMS = tuple(range(8, 257, 8))
HEAD_DIMS_TEXT = "every multiple of 8 from 8 to 256"
TILINGS = ("paper", "tuned")

# The default targets and dtypes decide the bytes of a default package, so the set carries a version:
# a release that adds a target raises it, and packages made before say which set they meant.
DEFAULT_SET = 1
DEFAULT_ARCHS = ("cpu", "sm80")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One request. `sram_bytes` counts bytes; d and dv count elements.

    d: width of a query or key row; dv: width of a value row. dtypes and archs are sorted in the order
    of DTYPES and of devices.ARCHS. br and bc are None unless the user overrides the tile.

    Holds always: every field is a plain int, str, bool or tuple of str, whatever was passed in (a NumPy
    integer or a 0-dim tensor would give equal requests different keys), each target has a kernel for at
    least one of the dtypes, and a target that needs a companion (`planners.Target`) has it beside it.
    """

    sram_bytes: int
    d: int
    dv: int
    dtypes: tuple[str, ...] = DTYPES
    archs: tuple[str, ...] = DEFAULT_ARCHS
    tiling: str = "paper"
    br: int | None = None
    bc: int | None = None
    backward: bool = True  # False: no gradient kernels; a call that needs a gradient is refused
    # The debug form stores O in float32 (float64 for float64) and a trace of (m, l, O) per tile. Only
    # the judge compiles it; its package has its own name and digest.
    debug: bool = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "sram_bytes", _positive(self.sram_bytes, "--sram"))
        if self.sram_bytes > LARGEST_BYTES:
            raise RequestError(
                f"--sram {self.sram_bytes}: no fast memory is that large", f"at most {format_bytes(LARGEST_BYTES)}"
            )
        put(self, "d", _head_dim(self.d, "--d"))
        put(self, "dv", _head_dim(self.dv, "--dv"))
        for name in ("br", "bc"):
            if getattr(self, name) is not None:
                put(self, name, _positive(getattr(self, name), f"--{name}"))
        put(self, "dtypes", _sorted_subset(self.dtypes, DTYPES, "--dtype"))
        for arch in self.archs:
            planners.require(arch)
        put(self, "archs", _sorted_subset((*self.archs, *planners.companions(self.archs)), ARCHS, "--arch"))
        put(self, "backward", bool(self.backward))
        put(self, "debug", bool(self.debug))
        if self.tiling not in TILINGS:
            raise RequestError(f"--tiling {self.tiling}: unknown", f"known: {', '.join(TILINGS)}")
        if self.tiling == "tuned" and not any(planners.TARGETS[arch].reads_tables for arch in self.archs):
            having = ", ".join(arch for arch, target in planners.TARGETS.items() if target.reads_tables)
            archs = ", ".join(self.archs)
            raise RequestError(f"--tiling tuned has no effect on {archs}", f"{having} has measured plans")
        for arch in self.archs:
            if not self.dtypes_of(arch) and arch not in planners.companions(self.archs):
                raise RequestError(
                    f"--arch {arch} has no kernel for {', '.join(self.dtypes)}",
                    f"{arch} takes {', '.join(planners.TARGETS[arch].dtypes)}",
                )

    def dtypes_of(self, arch: str) -> tuple[str, ...]:
        """The asked-for dtypes that `arch` has kernels for."""
        return tuple(t for t in self.dtypes if t in planners.TARGETS[arch].dtypes)

    def as_dict(self) -> dict[str, Any]:
        """The request as plan.json keeps it; `from_dict` reads it back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def from_dict(values: dict[str, Any]) -> Problem:
    """The inverse of Problem.as_dict.

    Raises: RequestError when a field is missing, unknown or out of range.
    """
    known = {f.name for f in fields(Problem)}
    if not isinstance(values, dict) or set(values) != known:
        given = set(values) if isinstance(values, dict) else set()
        raise RequestError(f"not a request: fields {sorted(given ^ known)} are missing or unknown")
    for name in ("dtypes", "archs"):  # a damaged plan.json may hold anything
        if not isinstance(values[name], list | tuple) or not all(isinstance(one, str) for one in values[name]):
            raise RequestError(f"not a request: {name} is {values[name]!r}, not a list of names")
    fields_as_made: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Problem(**fields_as_made)


def make(
    *,
    sram_bytes: int,
    d: int,
    dv: int | None = None,
    dtypes: Iterable[str] | None = None,
    archs: Iterable[str] | None = None,
    **more: Any,
) -> Problem:
    """A request with the defaults that the command gives it: dv = d, every target, every dtype they take.

    A default narrows to what the other option leaves possible: `--dtype float32` alone means the targets
    that have float32, `--arch sm80` alone the dtypes that sm80 has. What is asked for by name never narrows.
    `--arch sm90a` is `--arch sm80,sm90a`: Problem adds the companion.
    """
    chosen_archs = tuple(archs) if archs is not None else None
    chosen_dtypes = tuple(dtypes) if dtypes is not None else None
    for arch in chosen_archs or ():
        planners.require(arch)
    if chosen_dtypes is None:
        among = chosen_archs or DEFAULT_ARCHS
        chosen_dtypes = tuple(t for t in DTYPES if any(t in planners.TARGETS[a].dtypes for a in among))
    if chosen_archs is None:
        _sorted_subset(chosen_dtypes, DTYPES, "--dtype")
        chosen_archs = tuple(a for a in DEFAULT_ARCHS if set(chosen_dtypes) & set(planners.TARGETS[a].dtypes))
    return Problem(
        sram_bytes=sram_bytes, d=d, dv=d if dv is None else dv, dtypes=chosen_dtypes, archs=chosen_archs, **more
    )


def _positive(value: Any, option: str) -> int:
    number = whole_number(value, option)
    if number <= 0:
        raise RequestError(f"{option} {number}: must be at least 1")
    return number


def _head_dim(value: Any, option: str) -> int:
    number = whole_number(value, option)
    if number not in HEAD_DIMS:
        near = min(HEAD_DIMS, key=lambda x: (abs(x - number), -x))
        raise RequestError(
            f"{option} {number}: no kernel for this head size",
            f"supported: {HEAD_DIMS_TEXT} ({', '.join(map(str, HEAD_DIMS))})",
            f"try {option} {near}" + (", and pad with zeros" if near > number else ""),
        )
    return number


def _sorted_subset(values: Iterable[str], order: tuple[str, ...], option: str) -> tuple[str, ...]:
    asked = tuple(values)
    for value in asked:
        if value not in order:
            raise RequestError(f"{option} {value}: unknown", f"known: {', '.join(order)}")
    if not asked:
        raise RequestError(f"{option}: nothing is left to generate")
    return tuple(x for x in order if x in asked)
