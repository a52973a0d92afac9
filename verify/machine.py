"""Which machine, versions, command and load a figure belongs to: the header of every result file.

Holds always: nothing here identifies a person, a host name or a path of the machine's owner.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

# Every distribution whose version can move a figure that we publish.
DISTRIBUTIONS = (
    "torch", "numpy", "mpmath", "python-flint", "hypothesis", "transformers", "ml_dtypes", "triton", "flash_attn_3",
    "flash-attn-4", "nvidia-cutlass-dsl",
)  # fmt: skip
# The instruction sets that decide which CPU paths exist, by their names in /proc/cpuinfo.
CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_fp16",
    "asimd",
)


def cpu() -> dict[str, Any]:
    """Model, usable cores, and the flags that matter here."""
    info: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    present = set((info.get("flags") or info.get("Features") or "").split())
    return {
        "architecture": platform.machine(),
        "model": info.get("model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "flags": [flag for flag in CPU_FLAGS if flag in present],
    }


def gpu() -> dict[str, Any] | None:
    """The current CUDA device, or None where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    found: dict[str, Any] = {
        "model": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "memory_bytes": facts.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found["driver"] = (
            subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0].strip()
        )
    except (OSError, subprocess.TimeoutExpired):
        found["driver"] = "unknown"
    return found


def compiler() -> str:
    """First line of the C++ compiler's own version."""
    try:
        out = subprocess.run([os.environ.get("CXX", "c++"), "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "none found"
    return out.stdout.split("\n")[0].strip()


def versions() -> dict[str, str]:
    """Python and each distribution of DISTRIBUTIONS that is installed."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """The command line as a reader would type it: `python -m verify ...`, without the paths of this machine."""
    arguments = []
    for one in sys.argv[1:]:
        path = Path(one)
        arguments.append(path.name if path.is_absolute() else one)
    head = "python -m verify" if Path(sys.argv[0]).name == "__main__.py" else Path(sys.argv[0]).name
    return " ".join([head, *arguments])


def load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes: a timing taken under load compares nothing."""
    return [round(one, 2) for one in os.getloadavg()]


def describe(device: str = "cpu") -> dict[str, Any]:
    """The header of a result file. `device` is "cpu" or "cuda"."""
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": command(),
        "cpu": cpu(),
        "compiler": compiler(),
        "versions": versions(),
        "load": load(),
    }
    if device == "cuda":
        found["gpu"] = gpu()
    return found
