"""The emulator has a twin for every function of the emitted PTX headers: same name, template and parameter types.

Read from the texts, so that a change of one that forgets the other fails here and not in a kernel's compilation.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from codegen import render
from verify.emulator import build

WIDTHS = range(8, 257, 8)
ALL_PRODUCTS = [SimpleNamespace(n=n, dtype=t, form=f) for n in WIDTHS for t in ("bf16", "f16") for f in ("ss", "rs")]
HEADERS = {
    "sm80": ("emu_ptx.h", "sm80/ptx_sm80.cuh", {}),
    "sm90a": ("emu_ptx_sm90a.h", "sm90a/ptx_sm90a.cuh.j2", {"wgmma": ALL_PRODUCTS}),
}

# Some of each, so that a header read as empty does not pass.
NAMED = {
    "sm80": ["cp_async_16_zfill", "cp_async_wait", "mma_m16n8k16_bf16", "st_global_b128"],
    "sm90a": ["tma_load_5d", "wgmma_m64n256k16_f16_rs", "wgmma_wait", "setmaxnreg_inc", "pin", "bar_sync"],
}

_FUNCTION = re.compile(
    r"^(?P<template>template\s*<[^>]*>\s*)?"
    r"(?:__device__\s+__forceinline__\s+|inline\s+)*"
    r"(?P<type>[A-Za-z_][\w:]*\s*\*?)\s+(?P<name>[a-z]\w*)\((?P<parameters>(?:[^()]|\([^()]*\))*)\)\s*\{",
    re.MULTILINE,
)


def signatures(text: str) -> set[tuple[str, str, int, tuple[str, ...]]]:
    """(name, result, number of template parameters, types of the parameters) of each outermost function."""
    found = set()
    text = re.sub(r"//[^\n]*", "", text)
    for match in _FUNCTION.finditer(outermost(text)):
        template = match["template"] or ""
        size = re.search(r"<\s*int\s+(k(?:Count|Newest|Registers))\s*>", template)
        types = tuple(
            type_of(one, size[1] if size else "") for one in split(match["parameters"]) if one and one != "EMU_SITE"
        )
        found.add((match["name"], match["type"].replace(" ", ""), template.count("int "), types))
    return found


def outermost(text: str) -> str:
    """The text without namespaces (the emulator declares its runtime in one)."""
    return re.sub(r"^namespace emu \{.*?^\}  // namespace emu$", "", text, flags=re.MULTILINE | re.DOTALL)


def split(parameters: str) -> list[str]:
    """Parameters, at the commas outside of brackets."""
    parts = re.split(r",(?![^()\[\]]*[)\]])", parameters)
    return [" ".join(part.split()) for part in parts]


def type_of(parameter: str, size: str) -> str:
    """A parameter without its name; an array bound that is arithmetic is computed, a template parameter stays."""
    without = re.sub(r"(\(&)\w*(\))", r"\1\2", parameter) if "(&" in parameter else re.sub(r"\s*\b\w+$", "", parameter)
    bound = re.search(r"\[(\w+)\s*/\s*(\w+)\]", without)
    if bound:
        without = without.replace(bound[0], f"[{int(bound[1]) // int(bound[2])}]")
    without = without.replace(" *", "*").replace(" (&", "(&")
    return without.replace(size, "N") if size else without


def expanded(text: str) -> str:
    """The text with the wgmma macros of the twins written out, by the macro's own body."""
    body = re.search(r"#define EMU_WGMMA\(N, DTYPE, F16\)(?P<body>(?:[^\n]*\\\n)*[^\n]*\n)", text)
    if not body:
        return text
    template = body["body"].replace("\\\n", "\n")
    uses = [int(n) for n in re.findall(r"\bEMU_WGMMA_TYPES\((\d+)\)", text)]
    types = re.findall(r"EMU_WGMMA\(N, (\w+), (?:true|false)\)", text)
    assert sorted(set(types)) == ["bf16", "f16"]
    copies = []
    for n in uses:
        for dtype in types:
            one = template.replace("##DTYPE##", dtype).replace("##N##", str(n))
            copies.append(re.sub(r"\bN\b", str(n), re.sub(r"^ +", "", one, flags=re.MULTILINE)))
    return text.replace(body[0], "") + "\n".join(copies)


@pytest.mark.parametrize("target", HEADERS)
def test_every_function_of_the_header_has_its_twin_and_no_twin_is_alone(target):
    twins, header, context = HEADERS[target]
    real = signatures(render.render(header, context).decode())
    emulated = signatures(expanded((build.INCLUDE / twins).read_text()))
    assert len(real) > 10 and {name for name, *_ in real} >= set(NAMED[target])
    assert real == emulated


def test_the_reading_of_signatures_sees_what_differs():
    one = signatures("__device__ __forceinline__ void f(float (&d)[4], uint32_t a) {\n}\n")
    assert one == {("f", "void", 0, ("float(&)[4]", "uint32_t"))}
    assert one == signatures("inline void f(float (&x)[8 / 2], uint32_t address, EMU_SITE) {}\n")
    for other in (
        "inline void g(float (&d)[4], uint32_t a) {}",
        "inline int f(float (&d)[4], uint32_t a) {}",
        "inline void f(float (&d)[2], uint32_t a) {}",
        "inline void f(float (&d)[4], int a) {}",
        "inline void f(float (&d)[4]) {}",
        "template <int kN>\nvoid f(float (&d)[4], uint32_t a) {}",
    ):
        assert signatures(other + "\n") != one


def test_the_guards_of_the_headers_are_defined_by_the_prelude():
    for twins, header, context in HEADERS.values():
        guard = re.search(r"^#ifndef (\w+)", render.render(header, context).decode(), re.MULTILINE)
        assert guard and f"#define {guard[1]}\n" in (build.INCLUDE / twins).read_text()
