"""The devices that can be judged. A device is one class: which paths it can force, how to run one, what it is.

A *path* is one kernel that the machine can be made to run: an instruction set on the CPU (forced through
TILEPROOF_CPU_ISA, which the binding reads at every call), the compiled architecture on a GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as Folder
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from codegen.errors import RequestError
from verify import machine
from verify.cases import Array, Case

ISA_VARIABLE = "TILEPROOF_CPU_ISA"


@dataclass(frozen=True, kw_only=True)
class Path:
    """One kernel of a package on this machine, and the facts that its error bound needs."""

    device: str
    isa: str
    unit: str  # what calibration files call it: the instruction set, or the compute capability of a GPU
    dtype: str
    arithmetic: str
    br: int
    bc: int
    plan: dict[str, Any]
    debug: bool = False  # O is stored as it is computed, whatever the dtype of the inputs

    def __str__(self) -> str:
        return f"{self.isa}/{self.dtype}"


class Device(Protocol):
    """What the judge asks of a device."""

    name: str

    def paths(self, attn: ModuleType, dtype: str, case: Case) -> list[Path]:
        """Every path that this machine can force for `case`, best first."""
        ...

    def run(self, attn: ModuleType, case: Case, path: Path) -> tuple[Array, Array]:
        """O (B,Hq,Nq,dv) and LSE (B,Hq,Nq) of the kernel on `path`, as float64."""
        ...

    def describe(self) -> dict[str, Any]:
        """The header of a result file."""
        ...


def _path(attn: ModuleType, device: str, answer: dict[str, Any], dtype: str, unit: str) -> Path:
    return Path(
        device=device,
        isa=str(answer["isa"]),
        unit=unit,
        dtype=dtype,
        arithmetic=str(answer["arithmetic"]),
        br=int(answer["br"]),
        bc=int(answer["bc"]),
        plan=dict(answer.get("plan", {})),
        debug=_is_debug_form(attn),
    )


def _is_debug_form(attn: ModuleType) -> bool:
    file = getattr(attn, "__file__", None)
    if file is None:
        return False
    return bool(json.loads((Folder(file).parent / "plan.json").read_text())["request"]["debug"])


def _call(attn: ModuleType, case: Case, device: str) -> tuple[Array, Array]:
    import torch

    words = case.tensors(device)
    with torch.no_grad():
        o, lse = attn.attention(words.pop("q"), words.pop("k"), words.pop("v"), return_lse=True, **words)
    return tuple(np.asarray(x.to(torch.float64).cpu().numpy()) for x in (o, lse))  # type: ignore[return-value]


def _ask(attn: ModuleType, case: Case, device: str) -> dict[str, Any]:
    words = case.tensors(device)
    words.pop("scale")
    return dict(attn.path(words.pop("q"), words.pop("k"), words.pop("v"), **words))


@contextmanager
def forced_isa(isa: str) -> Iterator[None]:
    """Force the CPU kernels of one instruction set while the block runs."""
    before = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = isa
    try:
        yield
    finally:
        if before is None:
            del os.environ[ISA_VARIABLE]
        else:
            os.environ[ISA_VARIABLE] = before


class Cpu:
    """The CPU of this machine: one path per instruction set that it has and the package has a kernel for."""

    name = "cpu"

    def paths(self, attn: ModuleType, dtype: str, case: Case) -> list[Path]:
        found = []
        for isa in attn.isas(dtype):
            with forced_isa(isa):
                found.append(_path(attn, "cpu", _ask(attn, case, "cpu"), dtype, isa))
        return found

    def run(self, attn: ModuleType, case: Case, path: Path) -> tuple[Array, Array]:
        with forced_isa(path.isa):
            return _call(attn, case, "cpu")

    def describe(self) -> dict[str, Any]:
        return machine.describe("cpu")


class Cuda:
    """The current CUDA device: one path, the architecture that the package was built for."""

    name = "cuda"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RequestError("--device cuda: torch sees no CUDA device here", "try --device cpu")
        self.unit = "sm_{}{}".format(*torch.cuda.get_device_capability())

    def paths(self, attn: ModuleType, dtype: str, case: Case) -> list[Path]:
        return [_path(attn, "cuda", _ask(attn, case, "cuda"), dtype, self.unit)]

    def run(self, attn: ModuleType, case: Case, path: Path) -> tuple[Array, Array]:
        return _call(attn, case, "cuda")

    def describe(self) -> dict[str, Any]:
        return machine.describe("cuda")


DEVICES: dict[str, Callable[[], Device]] = {"cpu": Cpu, "cuda": Cuda}


def device(name: str) -> Device:
    """The device called `name`.

    Raises: RequestError for an unknown name, or a device that this machine lacks.
    """
    if name not in DEVICES:
        raise RequestError(f"--device {name}: unknown", f"known: {', '.join(DEVICES)}")
    return DEVICES[name]()


def dtypes_of(plan: dict[str, Any], device_name: str) -> list[str]:
    """The dtypes that a package (its plan.json) has kernels for on a device, in the order of the plan."""
    on_cpu = device_name == "cpu"
    return list(dict.fromkeys(v["dtype"] for v in plan["variants"] if (v["target"] == "cpu") == on_cpu))
