"""Probes of a GPU: how mma.sync and wgmma sum, and the errors of exp2 and log, through the emitted wrappers.

Source: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores" (PeerJ CS 7:e330, 2021).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from codegen.errors import RequestError, ToolError
from verify import arithmetic, packages
from verify.probe import LOWEST, Probe, compile_probe, float_bits
from verify.progress import Step

NAME = "mma_sm80"
Dots = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def measure(stride: int, step: Step) -> list[Probe]:
    """The matrix units in both formats, then exp2 and log on every `stride`-th argument. wgmma: where there is one.

    Raises: RequestError without a GPU, ToolError when the probe does not compile or run.
    """
    import torch

    if not torch.cuda.is_available():
        raise RequestError("--device cuda: torch sees no CUDA device here", "try --device cpu")
    folder = packages.emit(d=64, sram="96KB", dtypes=("bf16", "fp16"), archs=("sm80",))
    nvcc = packages.part(packages.load(folder), "toolchain").cuda_toolkit().nvcc.command
    major, minor = torch.cuda.get_device_capability()
    on = f"sm_{major}{minor}"
    command = [*nvcc, "-O3", "-std=c++17", f"-arch={on}", "-Xcompiler", "-fPIC", "-shared", f"-I{folder / 'csrc'}"]
    library = compile_probe(command, "mma_sm80.cu", f"mma_{on}_{packages.plan(folder)['digest'][:12]}")

    def call(function: str, *arguments: Any) -> None:
        error = getattr(library, function)(*arguments)
        if error:
            raise ToolError(f"the probe {function} failed on the device: CUDA error {error}")

    def pointer(x: torch.Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(x.data_ptr())

    def dots_in(dtype: str) -> Dots:
        kind = torch.bfloat16 if dtype == "bf16" else torch.float16

        def dots(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
            one, two = (torch.from_numpy(x).to(kind).cuda() for x in (a, b))
            out = torch.from_numpy(c).to(torch.float32).cuda()
            call("dots", pointer(one), pointer(two), pointer(out), ctypes.c_int64(len(c)), int(dtype == "bf16"))
            return np.asarray(out.double().cpu().numpy())

        return dots

    def errors(function: str, low: float, high: float, results: int) -> list[float]:
        worst = torch.zeros(results, dtype=torch.int64, device="cuda")
        ends = (ctypes.c_uint32(float_bits(x)) for x in (low, high))
        call(function, *ends, ctypes.c_uint32(stride), pointer(worst))
        return [float(x) for x in worst.cpu().numpy().view(np.float64)]

    found: list[Probe] = []
    assumed = arithmetic.model(NAME, "bf16")
    for dtype in ("bf16", "fp16"):
        found += matrix_unit(dots_in(dtype), on, dtype, assumed)
        step(note=f"mma {dtype}")
    names = [NAME]
    if (major, minor) == (9, 0):
        from verify import calibrate_wgmma

        found += calibrate_wgmma.measure(on, stride)
        names.append(calibrate_wgmma.NAME)
        step(note="wgmma")
    error, flushed = errors("exp2_errors", 0.0, LOWEST, 2)
    (log_error,) = errors("log_errors", 1.0, 2.0**24, 1)
    step(note="exp2, log")
    special = torch.zeros(4, device="cuda")
    call("specials", pointer(special))
    zero, minus_zero, infinity, nan = (float(x) for x in special.cpu())
    found.append(Probe(NAME, on, "log on [1, 2^24]: error over max(ln x, 1)", log_error, assumed.log_tiny))
    for name in names:  # both kernels compute exp2 by the same instruction
        assumed = arithmetic.model(name, "bf16")
        found += [
            Probe(name, on, "exp2: largest relative error", error, assumed.exp2_error, {"exp2_error": error}),
            Probe(name, on, "exp2: largest result that is flushed to 0", flushed, assumed.exp2_flush),
            Probe(name, on, "exp2(0)", zero if zero == minus_zero else -1.0, 1.0, exact=True),
            Probe(name, on, "exp2(-inf)", infinity, 0.0, exact=True),
            Probe(name, on, "exp2 keeps a NaN", float(np.isnan(nan)), 1.0, exact=True),
        ]
    return found


def matrix_unit(
    dots: Dots, on: str, what: str, assumed: arithmetic.ArithmeticModel, *, name: str = NAME
) -> list[Probe]:
    """Block length, fraction bits and rounding of a unit that computes c + sum_t a_t b_t over 16 terms."""

    def one(terms: dict[int, tuple[float, float]], c: float) -> float:
        a, b = np.zeros((1, 16)), np.zeros((1, 16))
        for slot, (x, y) in terms.items():
            a[0, slot], b[0, slot] = x, y
        return float(dots(a, b, np.array([c]))[0])

    def survives(j: int) -> bool:
        """Whether a 1 in slot j outlives +2^30 - 2^30 in slots 0 and 1: it does in another block than theirs."""
        return one({0: (2.0**15, 2.0**15), 1: (2.0**15, -(2.0**15)), j: (1.0, 1.0)}, 0.0) != 0

    def trace(k: int) -> bool:
        """Whether 16 products 2^-k leave a trace beside c = 1: they do while k is at most the fraction bits."""
        return one(dict.fromkeys(range(16), (2.0 ** -(k // 2), 2.0 ** -(k - k // 2))), 1.0) > 1

    fraction = max(k for k in range(20, 28) if trace(k))
    block = 1 + max(j for j in range(2, 16) if not survives(j))
    x, y = 1.5 * 2.0**-12, 2.0**-12
    up, down = (one({0: (x, y)}, 1.0) - 1) * 2.0**23, (one({0: (-x, y)}, -1.0) + 1) * 2.0**23
    measured: dict[str, float] = {"block": block, "fraction_bits": fraction}
    step_error = assumed.block * 2.0**-assumed.fraction_bits
    return [
        Probe(name, on, f"{what}: K 2^-F, K={block}, F={fraction}", block * 2.0**-fraction, step_error, measured),
        Probe(name, on, f"{what}: 1 + 1.5 2^-24 in units of 2^-23 above 1", up, 1.0),
        Probe(name, on, f"{what}: -1 - 1.5 2^-24, the same (0: toward zero)", -down, up, exact=True),
    ]
