"""Probes of the CPU: exp2 of the vector kernels, and the rounding of the matrix unit's dot product."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np

from codegen.errors import ToolError
from codegen.plans.cpu_isa import VECTOR_ISAS
from verify import arithmetic, packages
from verify.formats import round_to
from verify.probe import LOWEST, Probe, compile_probe, float_bits
from verify.progress import Step

BLOCKS = 100_000  # random dot products of 32 terms
AMX_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")


class Found(ctypes.Structure):
    """`Found` of probes/exp2_cpu.cpp."""

    _fields_ = [
        (name, ctypes.c_double)
        for name in ("worst", "worst_at", "flushed_from", "at_zero", "at_minus_infinity", "nan_stays")
    ]


def measure(stride: int, step: Step) -> list[Probe]:
    """exp2 on every `stride`-th argument per instruction set of this machine; the matrix unit where there is one."""
    folder = packages.emit(d=16, dtypes=("float32", "bf16", "fp16"), archs=("cpu",), backward=False)
    attn = packages.load(folder)
    compiler = packages.part(attn, "toolchain").cxx().command
    digest = packages.plan(folder)["digest"][:12]
    headers = f"-I{folder / 'csrc'}"
    found: list[Probe] = []
    for isa in VECTOR_ISAS:
        if isa.name not in attn.isas("float32"):
            continue
        command = [*compiler, *isa.flags, "-shared", f"-DLANES={isa.vector_bytes // 4}", headers]
        library = compile_probe(command, "exp2_cpu.cpp", f"exp2_{isa.name}_{digest}")
        worst = exp2(library, stride, below=LOWEST)
        name = isa.arithmetic["float"]
        found += _about(worst, arithmetic.model(name, "float32"), isa.name, {"exp2_error": worst.worst})
        step(note=f"exp2 {isa.name}")
    if "amx" not in attn.isas("bf16"):
        return found
    for variant in (v for v in packages.plan(folder)["variants"] if v["isa"] == "amx"):
        function = _tile_exp2(folder, variant["dtype"])
        command = [*compiler, *AMX_FLAGS, "-shared", f"-DTILE_EXP2={function}", headers]
        library = compile_probe(command, "exp2_cpu.cpp", f"{function}_{digest}")
        model = arithmetic.model(variant["arithmetic"], variant["dtype"], **variant["plan"])
        # A reference may trail the maximum, so arguments above 0 occur too.
        found += _about(exp2(library, stride, below=LOWEST, above=model.lag_log2 + 1), model, "amx", {})
        step(note=function)
    found += amx(compiler)
    step(note="amx")
    return found


def _about(worst: Found, model: arithmetic.ArithmeticModel, on: str, constants: dict[str, float]) -> list[Probe]:
    """What the exp2 probe found beside what the model of the path assumes."""
    name = model.name
    at = f"exp2: largest relative error, at {worst.worst_at:.9g}"
    return [
        Probe(name, on, at, worst.worst, model.exp2_error, constants),
        Probe(name, on, "exp2: largest result that is flushed to 0", worst.flushed_from, model.exp2_flush),
        Probe(name, on, "exp2(0)", worst.at_zero, 1.0, exact=True),
        Probe(name, on, "exp2(-inf)", worst.at_minus_infinity, 0.0, exact=True),
        Probe(name, on, "exp2 keeps a NaN", worst.nan_stays, 1.0, exact=True),
    ]


def _tile_exp2(folder: Path, dtype: str) -> str:
    """The exp2 that the matrix-unit kernel of `dtype` calls, by the text of the emitted package.

    Raises: ToolError when it calls none that forward_amx.h defines.
    """
    defined = re.findall(r"__m512 (exp2\w+)\(__m512 \w+\) \{", (folder / "csrc" / "forward_amx.h").read_text())
    kernel = (folder / "csrc" / f"forward_amx_{dtype}.h").read_text()
    for name in defined:
        if f"{name}(" in kernel:
            return str(name)
    raise ToolError(f"forward_amx_{dtype}.h calls none of {', '.join(defined) or 'no exp2'}")


def exp2(library: ctypes.CDLL, stride: int, *, below: float, above: float = 0.0) -> Found:
    """Run the exp2 probe over [-below, -0] and [0, above] on all cores; the worst of its parts."""
    workers = os.cpu_count() or 1
    ranges = [
        (int(a), int(b), sign)
        for end, sign in ((below, 1 << 31), (above, 0))
        for a, b in pairwise(np.linspace(0, float_bits(end), 8 * workers + 1).astype(np.int64))
    ]
    parts = [Found() for _ in ranges]

    def part(i: int) -> None:
        begin, end, sign = (ctypes.c_uint32(x) for x in ranges[i])
        library.probe(begin, end, ctypes.c_uint32(stride), sign, ctypes.byref(parts[i]))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(part, range(len(parts))))
    worst = max(parts, key=lambda p: p.worst)
    worst.flushed_from = max(p.flushed_from for p in parts)
    return worst


def amx(compiler: Sequence[str]) -> list[Probe]:
    """tdpbf16ps against `amx_model` on random blocks, and its rounding and flushing one by one."""
    library = compile_probe([*compiler, *AMX_FLAGS, "-shared"], "amx_bf16.cpp", "amx_bf16")
    if not library.permitted():
        return []

    def dots(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        bits = [(x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
        out = np.array(c, dtype=np.float32)
        arrays: list[np.ndarray] = [*bits, out]
        library.dots(*(x.ctypes.data_as(ctypes.c_void_p) for x in arrays), ctypes.c_int64(len(out)))
        return out.astype(np.float64)

    def one(x: float, y: float, c: float) -> float:
        a, b = np.zeros((1, 32)), np.zeros((1, 32))
        a[0, 0], b[0, 0] = x, y
        return float(dots(a, b, np.array([c]))[0])

    rng = np.random.default_rng(0)
    a, b = (
        round_to(rng.standard_normal((BLOCKS, 32)) * np.exp2(rng.integers(-6, 7, (BLOCKS, 32))), "bf16") for _ in "ab"
    )
    c = round_to(rng.standard_normal(BLOCKS) * 8, "float32")
    model, sure = amx_model(a, b, c)
    differ = float((dots(a, b, c) != model)[sure].sum())
    name, on, ulp = "amx_bf16", "amx", 2.0**-23
    return [
        Probe(name, on, f"of {int(sure.sum())} dot products, unlike two nearest-even chains", differ, 0.0),
        Probe(name, on, "1 + 1.5 2^-24, units of 2^-23 above 1", (one(1.5, 2.0**-24, 1.0) - 1) / ulp, 1.0, exact=True),
        Probe(name, on, "1 + 2^-24, a tie, the same", (one(1.0, 2.0**-24, 1.0) - 1) / ulp, 0.0, exact=True),
        Probe(name, on, "2^-127 2^10, a subnormal operand", one(2.0**-127, 2.0**10, 0.0), 2.0**-117),
        Probe(name, on, "2^-100 2^-27, a subnormal result", one(2.0**-100, 2.0**-27, 0.0), 2.0**-127),
    ]


def amx_model(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(result, sure) of c + sum_t a_t b_t as the unit computes it, for rows of 32 terms.

    Even and odd terms run in two fused chains, nearest even; the chains are added, then that sum to c.
    `sure` is where float64 held every step exactly, so that each was rounded only once.
    """
    sure = np.ones(len(a), dtype=bool)
    chains = [np.zeros(len(a)), np.zeros(len(a))]
    for t in range(32):
        exact, fine = _sum(chains[t % 2], a[:, t] * b[:, t])  # a product of two bf16 is exact in float64
        chains[t % 2] = round_to(exact, "float32")
        sure &= fine
    both, fine_both = _sum(*chains)
    last, fine_last = _sum(c, round_to(both, "float32"))
    return round_to(last, "float32"), sure & fine_both & fine_last


def _sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x + y in float64, and where that is exact (two-sum)."""
    s = x + y
    back = s - x
    return s, (x - (s - back)) + (y - back) == 0
