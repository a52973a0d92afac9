"""Prints one sm_90a kernel, builds it with nvcc and reads what ptxas says: shared by the tests and the GPU check."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from codegen import lint, problem, render
from codegen.plans import sm90a
from codegen.plans.sm90a import Sm90aPlan

TARGET = "-gencode=arch=compute_90a,code=sm_90a"  # wgmma and setmaxnreg exist in sm_90a alone
DTYPE_CODES = {"bf16": 2, "fp16": 3}
CAUSAL_CODES = {"full": 0, "bottom_right": 1, "top_left": 2}
NOT_SUPPORTED = 801  # cudaErrorNotSupported: no tensor map can express a stride


class ForwardArgs(ctypes.Structure):
    """The argument block of forward.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse")),
        *((name, ctypes.c_int64) for name in ("B", "Hq", "Hkv", "Nq", "Nk")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in "qkvo"),
        ("key_lengths", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("causal", ctypes.c_int),
    )


@dataclass(frozen=True)
class Report:
    """What ptxas says of one kernel. `spilled_bytes` counts stack, stores and loads."""

    kernel: str
    spilled_bytes: int
    registers: int
    warnings: tuple[str, ...]  # C75xx: a wgmma that waits where it need not


def nvcc() -> str | None:
    """The nvcc of PATH or of the usual folder; None without one."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def write(folder: Path, plan: Sm90aPlan, dtypes: tuple[str, ...] = ("bf16",)) -> Path:
    """The kernel of `plan` and its headers, written to `folder`; lint has passed."""
    asked = problem.make(sram_bytes=2**20, d=plan.d, dv=plan.dv, dtypes=dtypes, archs=["sm80"])
    own = sm90a.context(asked, plan, dtypes, "attention_forward_sm90a")
    header = ["A kernel of the test suite."]
    context = {**own, "wgmma": sm90a.products((plan,), dtypes), "problem": asked, "header": header, "exact": True}
    names = {"forward_sm90a.cu": "sm90a/forward_sm90a.cu.j2", "forward.h": "package/csrc/forward.h.j2", **sm90a.HEADERS}
    texts = {path: render.render(template, context).decode() for path, template in names.items()}
    lint.require_clean({path: text for path, text in texts.items() if lint.covers(path)})
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        (folder / path).write_text(text)
    return folder / "forward_sm90a.cu"


def build(source: Path, *more: str) -> tuple[Path, list[Report]]:
    """A shared library of the kernel, beside it, and what ptxas says of each kernel inside.

    Raises: RuntimeError with nvcc's output when it fails.
    """
    command = nvcc()
    assert command is not None
    library = source.with_suffix(".so")
    line = [command, "-std=c++17", "-O3", TARGET, "-Xptxas", "-v", "-shared", "-Xcompiler", "-fPIC", *more]
    done = subprocess.run([*line, str(source), "-o", str(library)], capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed on {source}:\n{said}")
    return library, reports(said)


def reports(said: str) -> list[Report]:
    """The reports in the output of `ptxas -v`."""
    warnings = tuple(sorted(set(re.findall(r"\(?\bC75\d\d\b.*", said))))
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        said,
        re.DOTALL,
    )
    assert found, said
    return [Report(name, sum(map(int, spills)), int(registers), warnings) for name, *spills, registers in found]


def load(library: Path):
    """The entry point of a built kernel: f(ForwardArgs, dtype code, scratch, stream) -> cudaError_t."""
    entry = ctypes.CDLL(str(library)).attention_forward_sm90a
    entry.argtypes = [ctypes.POINTER(ForwardArgs), ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    entry.restype = ctypes.c_int
    return entry
