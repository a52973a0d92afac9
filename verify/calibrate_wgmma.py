"""Probes of the sm_90a kernels' arithmetic: how wgmma sums, and the errors of 1 / l and ln l.

wgmma is asked the questions that mma.sync is asked: block length, fraction bits and rounding.
One launch of the conformance probe (`probes/primitives/wgmma_sm90a.cu`) is one wgmma of 64 x n x 16; a question needs
one row of A, one column of B and one element of D. A comes from shared memory (as in Q K^T), at the narrowest and the
widest n, and from registers (as in P V).
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from codegen.errors import ToolError
from verify import calibrate_cuda, packages, record
from verify.arithmetic import model
from verify.conformance import suite
from verify.conformance.case import Array, Case, Input, Output
from verify.conformance.wgmma import PLAIN
from verify.emulator import isa
from verify.probe import Probe, compile_probe, float_bits

NAME = "wgmma_sm90a"
SOURCE, FUNCTION = "wgmma_sm90a.cu", "probe_wgmma"
ROWS, TERMS, THREADS = 64, 16, 128
FORMS = ((False, 8), (False, 256), (True, 64))  # whether A comes from registers, n
LEAST_SUM, MOST_SUM = 2.0**-9, 2.0**32  # of the weights of a row
Launch = Callable[[Case], Array]  # the output "d" of a case: (128, n / 2) float32


def measure(on: str, stride: int) -> list[Probe]:
    """All of it on the device at hand, which must be of compute capability 9.0; every `stride`-th float of a range.

    Raises: ToolError when a probe does not compile or run.
    """
    return [*_matrix_unit(on), *_special_functions(on, stride)]


def _special_functions(on: str, stride: int) -> list[Probe]:
    import torch

    nvcc = packages.part(packages.load(packages.emit(d=64, archs=("sm80",))), "toolchain").cuda_toolkit().nvcc.command
    include = suite.include_folder()
    library = compile_probe([*nvcc, *record.FLAGS, f"-I{include}"], "special_sm90a.cu", f"special_{include.name}")
    worst = torch.zeros(2, dtype=torch.int64, device="cuda")
    ends = (ctypes.c_uint32(float_bits(x)) for x in (LEAST_SUM, MOST_SUM))
    code = library.reciprocal_and_log_errors(*ends, ctypes.c_uint32(stride), ctypes.c_void_p(worst.data_ptr()))
    if code:
        raise ToolError(f"the probe special_sm90a.cu failed on the device: CUDA error {code}")
    reciprocal, logarithm = (float(x) for x in worst.cpu().numpy().view(np.float64))
    assumed = model(NAME, "bf16")
    most = (assumed.final_roundings - 1) * assumed.unit  # the last rounding is that of the product with O
    return [
        Probe(NAME, on, "1 / l on [2^-9, 2^32]: relative error", reciprocal, most),
        Probe(NAME, on, "ln l there: error over max(|ln l|, 1)", logarithm, min(assumed.log_tiny, assumed.log_error)),
    ]


def _matrix_unit(on: str) -> list[Probe]:
    with tempfile.TemporaryDirectory() as work:
        library = ctypes.CDLL(str(record.compile_probes(Path(work))[0][SOURCE]))

        def launch(case: Case) -> Array:
            code, outputs = record.run(library, case)
            if code:
                raise ToolError(f"the probe {FUNCTION} failed on the device: CUDA error {code}")
            return outputs["d"]

        return ask(launch, on)


def ask(launch: Launch, on: str) -> list[Probe]:
    """Every format, form and width, through whatever runs a case."""
    found: list[Probe] = []
    for dtype in ("bf16", "fp16"):
        for from_registers, n in FORMS:
            what = f"{dtype} {'rs' if from_registers else 'ss'} n={n}"
            dots = _dots(launch, n, dtype, from_registers)
            found += calibrate_cuda.matrix_unit(dots, on, what, model(NAME, dtype), name=NAME)
    return found


def _dots(launch: Launch, n: int, dtype: str, from_registers: bool) -> calibrate_cuda.Dots:
    def dots(a: Array, b: Array, c: Array) -> Array:
        rows = zip(a, b, c, strict=True)
        return np.array([launch(_case(x, y, z, n, dtype, from_registers))[0, 0] for x, y, z in rows], dtype=np.float64)

    return dots


def _case(a: Array, b: Array, c: float, n: int, dtype: str, from_registers: bool) -> Case:
    """One wgmma whose element (0, 0), register 0 of thread 0, is c + a . b; a and b (16,), c a whole number."""
    name = "bf16" if dtype == "bf16" else "f16"
    left, right = np.zeros((ROWS, TERMS), np.uint16), np.zeros((n, TERMS), np.uint16)
    left[0], right[0] = isa.cvt_rn(a, name), isa.cvt_rn(b, name)
    bytes_b = PLAIN.size(n)
    descriptors = [isa.matrix_descriptor(at, PLAIN.leading, PLAIN.stride, PLAIN.span) for at in (bytes_b, 0)]
    image = np.zeros(bytes_b + PLAIN.size(ROWS), np.uint8)
    for descriptor, matrix in zip(descriptors, (left, right), strict=True):
        image = isa.write_operand(image, descriptor, matrix, k_major=True)
    if float(c) != int(c):
        raise ValueError(f"the probe starts from a whole number, not from {c}")
    registers = isa.pack(isa.gather(left, isa.wgmma_a()))
    words = (len(image), n, 0, 0, name == "bf16", from_registers, int(c), 1)
    arguments = (
        Input(image), Input(registers), Output("d", np.zeros((THREADS, n // 2), np.float32)),
        *(ctypes.c_uint64(descriptor) for descriptor in descriptors), *(ctypes.c_int(word) for word in words),
    )  # fmt: skip
    return Case(f"{dtype}_n{n}", SOURCE, FUNCTION, (), arguments, lambda relative: {})
