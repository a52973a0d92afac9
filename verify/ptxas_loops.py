"""The loops over key tiles in the machine code of a wgmma kernel: how many instructions a step takes, and of what.

Read from the text of `cuobjdump -sass`. A loop is what lies between a backward branch and its target; one over key
tiles has as many matrix products as a step, S = Q Kj^T and O += P Vj, is made of. Counted is the shortest way through
it that has them all: no waiting again, no negative maximum, no rescaling that a lazy maximum saves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PRODUCT = "HGMMA"
# Moves from a register to a uniform register, which a product's descriptor needs: in a loop they cost some per cent.
UNIFORM = "R2UR"
# What else a step is made of: exponentials, multiplications, conversions, selects, maxima, exchanges, moves, stores.
COUNTED = (
    PRODUCT, UNIFORM, "MUFU", "FFMA", "FMUL", "FADD", "F2FP", "FSEL", "VIMNMX", "VIMNMX3", "SHFL", "MOV", "STSM",
)  # fmt: skip

_INSTRUCTION = re.compile(r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<text>[^;]*);", re.MULTILINE)
_MNEMONIC = re.compile(r"(?:@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9]*)")
_BRANCH = re.compile(r"(?P<if>@\S+\s+)?BRA\S*(?P<also>\s+!?U?P\w+,)?\s.*?(?P<to>0x[0-9a-f]+)$")
_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One loop over key tiles."""

    counts: Mapping[str, int]  # by mnemonic, on the shortest way
    length: int  # instructions from its first to its last address

    @property
    def instructions(self) -> int:
        return sum(self.counts.values())

    def describe(self) -> dict[str, Any]:
        """JSON types. R2UR is always named: 0 is what it should be."""
        named = {name: self.counts.get(name, 0) for name in COUNTED if self.counts.get(name) or name == UNIFORM}
        return {"instructions": self.instructions, "length": self.length, **named}


@dataclass(frozen=True)
class _Line:
    at: int
    name: str
    to: int | None = None  # target of a branch
    always: bool = False  # the branch is always taken


def functions(sass: str) -> dict[str, str]:
    """Mangled name -> its part of the text."""
    marks = list(_FUNCTION.finditer(sass))
    ends = [*(m.start() for m in marks[1:]), len(sass)]
    return {mark[1]: sass[mark.end() : end] for mark, end in zip(marks, ends, strict=True)}


def products(code: str) -> int:
    """Matrix products in the code of one function."""
    return sum(line.name == PRODUCT for line in _lines(code))


def over_key_tiles(code: str, of_a_step: int) -> list[Loop]:
    """The loops with `of_a_step` products in the code of one function, in the order of addresses."""
    lines = _lines(code)
    spans = sorted((line.to, line.at) for line in lines if line.to is not None and line.to <= line.at)
    found = []
    for start, end in spans:
        body = [line for line in lines if start <= line.at <= end]
        if sum(line.name == PRODUCT for line in body) == of_a_step:
            found.append(Loop(counts=Counter(line.name for line in _shortest(body)), length=len(body)))
    return found


def _shortest(body: Sequence[_Line]) -> list[_Line]:
    """The lines of the shortest way from the first to the last line that has the most products."""
    index = {line.at: i for i, line in enumerate(body)}
    best: list[tuple[int, int] | None] = [None] * len(body)  # (minus the products, lines) before a line
    came: list[int] = [0] * len(body)
    best[0] = (0, 0)
    for i, line in enumerate(body[:-1]):
        here = best[i]
        if here is None:  # nothing leads there
            continue
        cost = (here[0] - (line.name == PRODUCT), here[1] + 1)
        following = [] if line.always else [i + 1]
        following += [index[line.to]] if line.to in index and line.to > line.at else []
        for j in following:
            known = best[j]
            if known is None or cost < known:
                best[j], came[j] = cost, i
    way, i = [body[-1]], len(body) - 1
    while i:
        i = came[i]
        way.append(body[i])
    return way


def _lines(code: str) -> list[_Line]:
    found = []
    for match in _INSTRUCTION.finditer(code):
        text = match["text"].strip()
        name, branch = _MNEMONIC.match(text), _BRANCH.match(text)
        found.append(
            _Line(
                at=int(match["at"], 16),
                name=name["name"] if name else "",
                to=int(branch["to"], 16) if branch else None,
                always=branch is not None and not branch["if"] and not branch["also"],
            )
        )
    return found
