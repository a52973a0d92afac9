"""The contract between emitted CUDA text and the CPU emulator, checked on every emission.

The emulator compiles the very text that nvcc compiles, with g++ and a prelude that replaces the PTX headers.
That works only while the text keeps these rules, so a template that breaks one fails at emission:

  1  Inline PTX only in `ptx_*.cuh`; such a header is guarded by `#ifndef TILEPROOF_PTX_..._CUH`, never by
     `#pragma once` (the prelude defines the guard, and the include is then skipped).
  2  Shared memory is an integer address from `dynamic_smem()`: no `__shared__` outside `ptx_*.cuh`, and inside
     only one `extern __shared__`, so that every access goes through a primitive and is seen.
  3  Global memory only through `ld_global_*`, `st_global_*`, `red_add_*`, `cp_async_*`: device code never
     dereferences, indexes or assigns through a pointer into it.
  4  No vendor types (`__nv_bfloat16`, `__half`, ...) nor their headers: 16-bit storage is `uint16_t`.
  5  Launch by `cudaLaunchKernelEx`, never `<<<>>>`.
  6  An accumulator passed to wgmma is not copied before the wait that completes it.
  7  `__CUDA_ARCH__` is not tested.

Rules 1, 2, 4, 5, 7 are exact over the text without comments and strings. Rules 3 and 6 are checked by
the forms in which they are broken (a pointer that is dereferenced or indexed; an assignment between a
wgmma and its wait): text that hides a pointer behind a struct of its own is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .errors import TileproofError

RULES = {
    1: "inline PTX only in ptx_*.cuh, guarded by #ifndef TILEPROOF_PTX_..._CUH",
    2: "shared memory is an integer address from dynamic_smem()",
    3: "global memory only through primitives",
    4: "no vendor types in device code",
    5: "launch by cudaLaunchKernelEx",
    6: "a wgmma accumulator stays unmoved until its wait",
    7: "__CUDA_ARCH__ is not tested",
}


@dataclass(frozen=True)
class Violation:
    """One breach: `rule` is a key of RULES, `line` counts from 1."""

    path: str
    line: int
    rule: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: rule {self.rule} ({RULES[self.rule]}): {self.text}"


class LintError(TileproofError):
    """A template of ours breaks the emulator's contract: nothing is written."""

    exit_code = 1


def covers(path: str) -> bool:
    """Whether the contract applies to the file: CUDA sources and headers."""
    return path.endswith((".cu", ".cuh"))


def require_clean(files: Mapping[str, str]) -> None:
    """Raise LintError with every violation in `files` (path -> text)."""
    found = [v for path, text in files.items() for v in violations(path, text)]
    if found:
        raise LintError("emitted CUDA breaks the emulator's contract (a bug in a template)", *map(str, found))


def violations(path: str, text: str) -> list[Violation]:
    """Every breach in one file, in the order of its lines."""
    code = strip_comments(text)
    is_ptx = path.rsplit("/", 1)[-1].startswith("ptx_")
    lines = text.split("\n")
    found = [
        Violation(path, number, rule, lines[number - 1].strip())
        for rule, number in (*_line_rules(code, is_ptx), *_guard(code, is_ptx), *_pointers(code, is_ptx),
                                   *_moved_accumulators(code))
    ]  # fmt: skip
    return sorted(found, key=lambda v: (v.line, v.rule))


def strip_comments(text: str) -> str:
    """`text` with comments and the contents of string literals blanked; line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        token = match.group(0)
        if token.startswith("/"):
            return "\n" * token.count("\n") or " "
        return token[0] + " " * (len(token) - 2) + token[-1]

    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', blank, text, flags=re.DOTALL)


_VENDOR = re.compile(
    r"\b(?:__nv_bfloat16\w*|nv_bfloat16\w*|__nv_fp8\w*|__half\w*|half2?|cuda_bf16|cuda_fp16|cuda_fp8|"
    r"__(?:float|half|bfloat16)\w*2(?:float|half|bfloat16)\w*)\b"
)


def _line_rules(code: str, is_ptx: bool) -> Iterator[tuple[int, int]]:
    """Rules that one line alone decides."""
    externs = 0
    for number, line in enumerate(code.split("\n"), 1):
        if re.search(r"\basm\b|\b__asm__\b|\b__asm\b", line) and not is_ptx:
            yield 1, number
        if re.search(r"\b__shared__\b", line):
            externs += 1
            if not is_ptx or externs > 1 or not re.search(r"\bextern\s+__shared__", line):
                yield 2, number
        if re.search(r"\b__cvta_generic_to_shared\b", line) and not is_ptx:
            yield 2, number
        if _VENDOR.search(line):
            yield 4, number
        if "<<<" in line:
            yield 5, number
        if "__CUDA_ARCH__" in line:
            yield 7, number


def _guard(code: str, is_ptx: bool) -> Iterator[tuple[int, int]]:
    """Rule 1, second half: the guard of a PTX header opens it."""
    if not is_ptx:
        return
    lines = code.split("\n")
    for number, line in enumerate(lines, 1):
        if re.search(r"#\s*pragma\s+once", line):
            yield 1, number
    directives = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    first = directives[0] if directives else (1, "")
    guard = re.fullmatch(r"\s*#\s*ifndef\s+(TILEPROOF_PTX_\w+_CUH)\s*", first[1])
    if guard is None or not re.search(rf"#\s*define\s+{guard[1]}\b", code):
        yield 1, first[0]


# One declaration of pointers at the start of a statement, or one pointer parameter. `a * b;` is no statement
# that anybody writes, so a star after the first word declares, unless the product goes on: f(a * p.b), f(a * b + c).
_QUALIFIER = r"(?:(?:const|volatile|static|constexpr|unsigned|signed|__restrict__)\s+)*"
_DECLARED = re.compile(
    rf"(?P<head>(?:^|[;{{}}(,])\s*){_QUALIFIER}[A-Za-z_][\w:]*(?:\s+const)?\s*"
    r"(?P<names>\*\s*(?:const\s+|__restrict__\s+)*\w+\b(?!\s*[-+*/%<>?&|.])[^;=(){}]*?)(?=[;=)]|,\s*(?:const\s+)?\w+\s+\w|$)",
    re.MULTILINE,
)
_CASTS = (r"\*\s*\(?\s*(?:reinterpret_cast|static_cast)\s*<[^>]*\*\s*>", r"\*\s*\(\s*(?:const\s+)?\w+\s*\*\s*\)\s*\w")


def _pointers(code: str, is_ptx: bool) -> Iterator[tuple[int, int]]:
    """Rule 3: in a function that runs on the device, a pointer is passed on or offset, never followed."""
    if is_ptx:
        return
    fields = {name for m in re.finditer(r"\bstruct\s+\w+[^;{]*\{([^{}]*)\}", code) for name in _declared(m[1])}
    for start, body in _device_functions(code):
        forms = list(_CASTS)
        for names, prefix in ((_declared(body), ""), (fields, r"\w+(?:\.|->)")):
            if names:
                one = rf"{prefix}(?:{'|'.join(sorted(names))})\b"
                forms += [rf"(?<![\w.>]){one}\s*(?:\[|->)", rf"\*\s*\(*\s*{one}"]  # p[i], p->x; *p, *(p + i)
        used = _DECLARED.sub(lambda m: m["head"] + " " * (len(m[0]) - len(m["head"])), body)
        for offset, line in enumerate(used.split("\n")):
            if any(re.search(form, line) for form in forms):
                yield 3, start + offset


def _declared(text: str) -> set[str]:
    """The names that `text` declares as pointers."""
    one = r"\*\s*(?:const\s+)?(?:__restrict__\s+)?(\w+)"
    return {name for m in _DECLARED.finditer(text) for name in re.findall(one, m["names"])}


def _device_functions(code: str) -> Iterator[tuple[int, str]]:
    """(first line, text from the qualifier to the closing brace) of each __global__ or __device__ function."""
    for head in re.finditer(r"\b__(?:global|device)__\b", code):
        opening = code.find("{", head.end())
        semicolon = code.find(";", head.end())
        if opening < 0 or 0 <= semicolon < opening:
            continue  # a declaration, or a constant
        depth, at = 0, opening
        while at < len(code):
            depth += {"{": 1, "}": -1}.get(code[at], 0)
            at += 1
            if depth == 0:
                break
        yield code.count("\n", 0, head.end()) + 1, code[head.end() : at]


def _moved_accumulators(code: str) -> Iterator[tuple[int, int]]:
    """Rule 6: between a wgmma and its wait, its accumulator (first argument) is neither copied nor assigned."""
    in_flight: set[str] = set()
    for number, line in enumerate(code.split("\n"), 1):
        if re.search(r"\bwgmma_wait\w*", line):
            in_flight.clear()
        launched = re.search(r"\bwgmma_m64n\w+(?:<[^>]*>)?\s*\(\s*(\w+)", line)
        for name in in_flight:
            if launched is None and re.search(rf"\b{name}\b", line):
                yield 6, number
        if launched is not None and not re.search(r"\b__device__\b", line):
            in_flight.add(launched[1])
