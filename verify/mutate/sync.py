"""One mutant per synchronisation statement of an emitted CUDA text, found by reading the text.

    for mutant in statements("csrc/forward_sm80.cu", text): ...

A statement is a call of one of PRIMITIVES (names of the PTX headers), or of a function of the text that does nothing
but synchronise, such as `wait(bar, parity)`. It is left out, and where it has a number, the number is made wrong:
a wait lets one more group be unfinished, a parity is flipped, the expected bytes are halved, a count is one too large.
So a new template is covered as soon as it is emitted.

Holds always: each mutant changes one place, whose text with what stands before it occurs once in the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from verify.mutate.mutant import Mutant


@dataclass(frozen=True)
class Call:
    """name<template>(arguments) at text[start:end]; `end` is behind the closing parenthesis."""

    name: str
    template: str
    arguments: tuple[str, ...]
    start: int
    end: int

    def text(self, *, template: str | None = None, arguments: tuple[str, ...] | None = None) -> str:
        """The call as C++, with something replaced."""
        shown = self.template if template is None else template
        return f"{self.name}{f'<{shown}>' if shown else ''}({', '.join(arguments or self.arguments)})"


@dataclass(frozen=True)
class Edit:
    """A way to break a call: what it is called, and the C++ in its place."""

    how: str
    of: Callable[[Call], str]


def _argument(number: int, change: str) -> Callable[[Call], str]:
    """The call with one argument changed: {0} stands for what it was."""

    def changed(call: Call) -> str:
        arguments = list(call.arguments)
        arguments[number] = change.replace("{0}", f"({arguments[number]})")
        return call.text(arguments=tuple(arguments))

    return changed


REMOVED = Edit("is left out", lambda call: "")
LOOSENED = Edit("lets one more group be unfinished", lambda call: call.text(template=f"{call.template} + 1"))
DIVERGENT = Edit("is missed by half of each warp", lambda call: f"if (threadIdx.x % 32 < 16) {call.text()}")
TWICE = Edit("happens twice", lambda call: f"{call.text()}, {call.text()}")
HALVED = Edit("expects half of the bytes", _argument(1, "{0} / 2"))
DOUBLED = Edit("expects twice the bytes", _argument(1, "{0} * 2"))
ONE_MORE = Edit("counts one too many", _argument(1, "{0} + 1"))
FLIPPED = Edit("has the other parity", _argument(1, "{0} ^ 1"))
UNWAITED = Edit("is not waited for", lambda call: "true")
FEWER_THREADS = Edit("counts one warp less", _argument(1, "{0} - 32"))
OTHER_BARRIER = Edit("names another barrier", _argument(0, "{0} + 7"))

# Names of codegen/templates/*/ptx_*.cuh and CUDA's own.
PRIMITIVES: dict[str, tuple[Edit, ...]] = {
    "__syncthreads": (REMOVED, DIVERGENT),
    "__syncwarp": (REMOVED,),
    "cp_async_commit": (REMOVED,),
    "cp_async_wait": (REMOVED, LOOSENED),
    "mbarrier_init": (REMOVED, ONE_MORE),
    "fence_mbarrier_init": (REMOVED,),
    "mbarrier_arrive": (REMOVED, TWICE),
    "mbarrier_arrive_expect_tx": (REMOVED, HALVED, DOUBLED),
    "mbarrier_try_wait_parity": (UNWAITED, FLIPPED),
    "fence_proxy_async": (REMOVED,),
    "wgmma_fence": (REMOVED,),
    "wgmma_commit": (REMOVED,),
    "wgmma_wait": (REMOVED, LOOSENED),
    "bulk_commit": (REMOVED,),
    "bulk_wait": (REMOVED, LOOSENED),
    "bulk_wait_read": (REMOVED, LOOSENED),
    "bar_sync": (REMOVED, FEWER_THREADS, OTHER_BARRIER),
    "bar_arrive": (REMOVED, FEWER_THREADS, OTHER_BARRIER),
    "setmaxnreg_inc": (REMOVED,),
    "setmaxnreg_dec": (REMOVED,),
}

_KEYWORDS = ("if", "while", "for", "switch", "return", "sizeof", "static_cast")
_CALL = re.compile(r"(?<![\w.>:])([A-Za-z_]\w*)(?:<([^<>();{}]*)>)?\(")
# Functions stand at the margin, lambdas are variables.
_FUNCTION = re.compile(r"^[A-Za-z_][^;{}()\n]*?\b(\w+)\(", re.MULTILINE)
_LAMBDA = re.compile(r"\bauto (\w+) = \[&\](?:\s*\([^()]*\))?\s*\{")


def statements(path: str, text: str) -> list[Mutant]:
    """All mutants of the text in `path`, in its order."""
    code = _blanked(text)
    edits = {**PRIMITIVES, **_wrappers(code)}
    counted: Counter[str] = Counter()
    found = []
    for call in calls(code):
        if call.name not in edits or _is_definition(code, call):
            continue
        place = f"{_enclosing(code, call.start)}: {call.name}"
        counted[place] += 1
        where = f"{place} {counted[place]}"
        line = text.count("\n", 0, call.start) + 1
        for edit in edits[call.name]:
            old, before = _unique(text, call.start, call.end)
            found.append(
                Mutant(f"{where} {edit.how}", f"line {line}: `{call.text()}` {edit.how}", old,
                       before + edit.of(call), path, number="sync")
            )  # fmt: skip
    return found


def calls(code: str) -> Iterator[Call]:
    """Every call in a text without comments, nested ones too."""
    for match in _CALL.finditer(code):
        if match[1] in _KEYWORDS:
            continue
        end = _closing(code, match.end() - 1) + 1
        inside = code[match.end() : end - 1]
        yield Call(match[1], (match[2] or "").strip(), _arguments(inside), match.start(), end)


def _wrappers(code: str) -> dict[str, tuple[Edit, ...]]:
    """Functions and lambdas of the text that do nothing but synchronise, with the ways to break a call of them."""
    bodies = dict(_bodies(code))
    known: dict[str, tuple[Edit, ...]] = {}
    while True:
        fresh = {}
        for name, (parameters, body) in bodies.items():
            inner = {call.name for call in calls(body)}
            if name in known or name in PRIMITIVES or not inner or not inner <= {*PRIMITIVES, *known}:
                continue
            waits = rf"mbarrier_try_wait_parity\([^()]*\b{parameters[1]}\)" if len(parameters) == 2 else r"(?!)"
            fresh[name] = (REMOVED, FLIPPED) if re.search(waits, body) else (REMOVED,)
        if not fresh:
            return known
        known |= fresh


def _bodies(code: str) -> Iterator[tuple[str, tuple[tuple[str, ...], str]]]:
    """(name, (names of parameters, body)) of each function and lambda."""
    for match in _FUNCTION.finditer(code):
        close = _closing(code, match.end() - 1)
        rest = re.match(r"\s*\{", code[close + 1 :])
        if rest:
            names = tuple((re.findall(r"\w+", part) or [""])[-1] for part in _arguments(code[match.end() : close]))
            start = close + rest.end()
            yield match[1], (names, code[start + 1 : _closing(code, start, "{}")])
    for match in _LAMBDA.finditer(code):
        yield match[1], ((), code[match.end() : _closing(code, match.end() - 1, "{}")])


def _is_definition(code: str, call: Call) -> bool:
    """Whether what looks like a call is the head of a function."""
    line = code[code.rfind("\n", 0, call.start) + 1 : call.start]
    return bool(re.match(r"(__device__|__global__|inline|static|void|template|struct|extern)\b", line))


def _enclosing(code: str, position: int) -> str:
    """The name of the function, or of the lambda in it, that a position lies in."""
    named = ""
    for match in _FUNCTION.finditer(code, 0, position):
        named = "kernel" if match[1] == "__launch_bounds__" else match[1]
    for match in _LAMBDA.finditer(code, 0, position):
        if _closing(code, match.end() - 1, "{}") > position:
            named = f"{named}.{match[1]}"
    return named


def _unique(text: str, start: int, end: int) -> tuple[str, str]:
    """text[at:end] with the largest `at` <= start, at a line's start or at `start`, that makes it unique; and what of
    it stands before `start`."""
    at = start
    while text.count(text[at:end]) > 1:
        at = text.rfind("\n", 0, at - 1) + 1 if at > 0 else 0
        if at == 0 and text.count(text[at:end]) > 1:
            raise ValueError(f"{text[start:end]!r}: no context makes it unique")
    return text[at:end], text[at:start]


def _closing(code: str, opening: int, marks: str = "()") -> int:
    """Where the bracket at `opening` closes."""
    depth = 0
    for i in range(opening, len(code)):
        depth += (code[i] == marks[0]) - (code[i] == marks[1])
        if depth == 0:
            return i
    return len(code)


def _arguments(inside: str) -> tuple[str, ...]:
    """The arguments of a call, split at the commas of its own level."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(inside):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(inside[start:i].strip())
            start = i + 1
    last = inside[start:].strip()
    return tuple([*parts, last] if last or parts else [])


def _blanked(text: str) -> str:
    """The text with comments, strings and preprocessor lines as spaces: every position stays what it was."""
    marks = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|^[ \t]*#[^\n]*", re.DOTALL | re.MULTILINE)
    return marks.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
