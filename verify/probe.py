"""One measured fact of a machine's arithmetic beside what its model assumes, and how a probe is compiled."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codegen.errors import ToolError
from verify import packages

PROBES = Path(__file__).parent / "probes"
LOWEST = 152.0  # exp2 arguments go down to -LOWEST: every result below is 0


@dataclass(frozen=True)
class Probe:
    """One thing measured, and what the model of one arithmetic assumes about it."""

    arithmetic: str
    device: str  # instruction set or compute capability
    what: str
    measured: float
    assumed: float
    constants: dict[str, float] = field(default_factory=dict)  # of the model, that the measurement may replace
    exact: bool = False  # must be equal, not only at most

    @property
    def holds(self) -> bool:
        return self.measured == self.assumed if self.exact else self.measured <= self.assumed

    def describe(self) -> dict[str, Any]:
        return {**vars(self), "holds": self.holds}


def float_bits(x: float) -> int:
    """The bit pattern of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def compile_probe(command: Sequence[str], source: str, name: str) -> ctypes.CDLL:
    """Build `probes/<source>` into a shared library with `command` and load it; kept by the hash of what made it.

    Raises: ToolError when it does not compile.
    """
    path = PROBES / source
    made_of = hashlib.sha256("\0".join(command).encode() + path.read_bytes()).hexdigest()[:16]
    folder = packages.cache() / "probes"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}-{made_of}.so"
    if not library.exists():
        beside = folder / f".{library.name}.{os.getpid()}"
        done = subprocess.run([*command, str(path), "-o", str(beside)], capture_output=True, text=True)
        if done.returncode:
            raise ToolError(f"the probe {source} does not compile: {' '.join(command)}", *done.stderr.splitlines()[:12])
        beside.replace(library)
    return ctypes.CDLL(str(library))
