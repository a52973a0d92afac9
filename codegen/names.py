"""Package names: one grammar, written and read back.

    attn_d128_sram192k[_dv64][_float32|_bf16|...][_cpu|_sm80|...][_tuned][_br64][_bc128][_forward][_debug]

A part appears only where the request differs from the default, so two requests have one name exactly when they are
equal; `_forward` is --no-backward. The budget is `192k` (times 1024 bytes) or `1000b`. Dtypes and targets are left out
when the other parts imply them (see `problem.make`), a target also when another one of the name brings it (sm90a
brings sm80).
"""

from __future__ import annotations

import keyword
import re
import sys
from itertools import product

from . import planners
from . import problem as problems
from .devices import ARCHS
from .errors import RequestError
from .problem import DTYPES, Problem
from .sizes import format_bytes

IMPORTED = ("filelock", "numpy", "torch")  # beside the standard library
_WORDS = "|".join((*DTYPES, *ARCHS))
_NAME = re.compile(
    r"attn_d(?P<d>[0-9]+)_sram(?P<sram>[0-9]+)(?P<unit>[kb])(?:_dv(?P<dv>[0-9]+))?"
    rf"(?P<words>(?:_(?:{_WORDS}))*)(?P<tuned>_tuned)?(?:_br(?P<br>[0-9]+))?(?:_bc(?P<bc>[0-9]+))?(?P<forward>_forward)?"
    r"(?P<debug>_debug)?"
)


def stated(problem: Problem) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """(dtypes, archs) that a request must name; None where `problem.make` fills them in.

    The fewest names that lead back to `problem`.
    """
    brought = planners.companions(problem.archs)
    named = tuple(arch for arch in problem.archs if arch not in brought)
    for dtypes, archs in product((None, problem.dtypes), (None, named)):
        filled = problems.make(sram_bytes=problem.sram_bytes, d=problem.d, dtypes=dtypes, archs=archs)
        if (filled.dtypes, filled.archs) == (problem.dtypes, problem.archs):
            return dtypes, archs
    raise AssertionError("naming everything always leads back")


def package_name(problem: Problem) -> str:
    """The default name of the package for `problem`."""
    kb, rest = divmod(problem.sram_bytes, 1024)
    parts = ["attn", f"d{problem.d}", f"sram{problem.sram_bytes}b" if rest else f"sram{kb}k"]
    if problem.dv != problem.d:
        parts.append(f"dv{problem.dv}")
    dtypes, archs = stated(problem)
    parts += [*(dtypes or ()), *(archs or ()), *([problem.tiling] if problem.tiling != "paper" else [])]
    parts += [f"{side}{size}" for side, size in (("br", problem.br), ("bc", problem.bc)) if size is not None]
    if not problem.backward:
        parts.append("forward")
    if problem.debug:
        parts.append("debug")
    return "_".join(parts)


def parse(name: str) -> Problem:
    """The request that `package_name` gave this name.

    Raises: RequestError for a name outside the grammar.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise RequestError(f"{name}: not a name of the grammar", "attn_d128_sram192k, attn_d64_sram99k_dv32_bf16_sm80")
    words = match["words"].split("_")[1:]
    size = {side: int(match[side]) for side in ("br", "bc") if match[side]}
    return problems.make(
        sram_bytes=int(match["sram"]) * (1024 if match["unit"] == "k" else 1),
        d=int(match["d"]),
        dv=int(match["dv"]) if match["dv"] else None,
        dtypes=[w for w in words if w in DTYPES] or None,
        archs=[w for w in words if w in ARCHS] or None,
        tiling="tuned" if match["tuned"] else "paper",
        backward=not match["forward"],
        debug=bool(match["debug"]),
        **size,
    )


def canonical_command(problem: Problem, name: str | None = None) -> str:
    """The shortest command that gives this package: what file headers hold, whatever was typed."""
    words = ["codegen", "--sram", format_bytes(problem.sram_bytes), "--d", str(problem.d)]
    if problem.dv != problem.d:
        words += ["--dv", str(problem.dv)]
    dtypes, archs = stated(problem)
    if dtypes:
        words += ["--dtype", ",".join(dtypes)]
    if archs:
        words += ["--arch", ",".join(archs)]
    if problem.tiling != "paper":
        words += ["--tiling", problem.tiling]
    for side, size in (("--br", problem.br), ("--bc", problem.bc)):
        if size is not None:
            words += [side, str(size)]
    if not problem.backward:
        words.append("--no-backward")
    if problem.debug:
        words.append("--debug")
    if name is not None and name != package_name(problem):
        words += ["--name", name]
    return " ".join(words)


def check_name(name: str) -> str:
    """`name` if Python can import it, nothing that a package imports has it, and no file system mistakes it.

    Raises: RequestError.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,99}", name) or keyword.iskeyword(name):
        raise RequestError(
            f"--name {name}: not a package name", "lower-case letters, digits and _, starting with a letter"
        )
    if name in sys.stdlib_module_names or name in IMPORTED:
        raise RequestError(f"--name {name}: would hide the module {name}, which the package itself may need")
    return name
