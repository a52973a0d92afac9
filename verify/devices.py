"""The devices that can be judged. A device is one class: which paths it can force, how to run one, what it is.

A *path* is one kernel that the machine can be made to run: an instruction set on the CPU (forced through
TILEPROOF_CPU_ISA, which the binding reads at every call); on a GPU the target that was compiled for it and, through
TILEPROOF_CUDA_ARCH, each kernel in code for its capability alone (sm90a) that takes the mask.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path as Folder
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from codegen import devices as targets
from codegen.errors import RequestError
from verify import machine, packages
from verify.cases import CAUSAL, Array, Case

ISA_VARIABLE = "TILEPROOF_CPU_ISA"
ARCH_VARIABLE = "TILEPROOF_CUDA_ARCH"


@dataclass(frozen=True, kw_only=True)
class Path:
    """One kernel of a package on this machine, and the facts that its error bound needs."""

    device: str
    isa: str  # what forces it: the instruction set, the CUDA target, or the unit of one of a target's kernels
    unit: str  # what calibration files call it: the instruction set, the compute capability of a GPU, the emulator
    dtype: str
    arithmetic: str
    br: int
    bc: int
    plan: dict[str, Any]
    debug: bool = False  # results are stored as they are computed, whatever the dtype of the inputs
    deterministic: bool = True  # a backward path that adds to dQ in the order in which its blocks come has False

    def __str__(self) -> str:
        return f"{self.isa}/{self.dtype}"


Given = tuple[Array, Array]  # (O, LSE)
Gradients = tuple[Array, Array, Array]  # (dQ, dK, dV)


class Device(Protocol):
    """What the judge asks of a device."""

    name: str
    asked: str  # the options of a command that ask for it
    compares_runs: bool  # `run` itself runs a case more than once and refuses results that differ in a bit

    def paths(self, attn: ModuleType, dtype: str, case: Case) -> list[Path]:
        """Every path that this machine can force for `case`, best first."""
        ...

    def run(self, attn: ModuleType, case: Case, path: Path) -> tuple[Array, Array]:
        """O (B,Hq,Nq,dv) and LSE (B,Hq,Nq) of the kernel on `path`, as float64.

        Raises: AssertionError when the run itself shows a fault, whatever its results.
        """
        ...

    def trace(self, attn: ModuleType, case: Case, path: Path) -> tuple[Array, Array, Array]:
        """(O, LSE, trace) of a debug form; trace (B,Hq,Nq,tiles,2+dv), NaN where a row met no tile."""
        ...

    def backward_paths(self, attn: ModuleType, dtype: str, case: Case) -> list[Path]:
        """The backward paths that this machine can force for `case`, best first; none without a backward pass."""
        ...

    def run_backward(self, attn: ModuleType, case: Case, path: Path, given: Given) -> Gradients:
        """dQ (B,Hq,Nq,d), dK (B,Hkv,Nk,d), dV (B,Hkv,Nk,dv) of the kernel on `path`, as float64.

        given: (O, LSE) that the kernel reads, values of their dtypes. A gradient that is not wanted is an empty array.
        Raises: AssertionError when the run itself shows a fault, whatever its results.
        """
        ...

    def runs_backward(self, attn: ModuleType, case: Case, path: Path, given: Given) -> list[Gradients]:
        """Runs for the judge to compare: two at least, or one whose bits `run_backward` itself has compared."""
        ...

    def describe(self) -> dict[str, Any]:
        """The header of a result file."""
        ...


def of_variant(attn: ModuleType, device: str, answer: dict[str, Any], dtype: str, unit: str) -> Path:
    """The path of one variant: a row of plan.json, or what `attn.path` answers."""
    return Path(
        device=device,
        isa=str(answer.get("unit", answer["isa"])),
        unit=unit,
        dtype=dtype,
        arithmetic=str(answer["arithmetic"]),
        br=int(answer["br"] if "br" in answer else answer["plan"]["br"]),
        bc=int(answer["bc"] if "bc" in answer else answer["plan"]["bc"]),
        plan=dict(answer.get("plan", {})),
        debug=_is_debug_form(attn),
    )


def _plan(attn: ModuleType) -> dict[str, Any]:
    """plan.json of the module; {} of one that is no package."""
    file = getattr(attn, "__file__", None)
    return {} if file is None else dict(json.loads((Folder(file).parent / "plan.json").read_text()))


def _is_debug_form(attn: ModuleType) -> bool:
    return bool(_plan(attn).get("request", {}).get("debug", False))


def _call(attn: ModuleType, case: Case, device: str) -> tuple[Array, Array]:
    import torch

    words = case.tensors(device)
    with torch.no_grad():
        o, lse = attn.attention(words.pop("q"), words.pop("k"), words.pop("v"), return_lse=True, **words)
    return tuple(np.asarray(x.to(torch.float64).cpu().numpy()) for x in (o, lse))  # type: ignore[return-value]


def _trace(attn: ModuleType, case: Case, device: str, bc: int) -> tuple[Array, Array, Array]:
    import torch

    words = case.tensors(device)
    tiles = -(-case.k.shape[2] // bc)
    op = getattr(torch.ops, packages.part(attn, "op").NAMESPACE).forward_trace
    causal = CAUSAL.index(case.causal)
    with torch.no_grad():
        found = op(words["q"], words["k"], words["v"], words["key_lengths"], case.scale, causal, tiles)
    return tuple(np.asarray(x.to(torch.float64).cpu().numpy()) for x in found)  # type: ignore[return-value]


def _ask(attn: ModuleType, case: Case, device: str, **more: Any) -> dict[str, Any]:
    words = case.tensors(device)
    words.pop("scale")
    return dict(attn.path(words.pop("q"), words.pop("k"), words.pop("v"), **words, **more))


def has_backward(attn: ModuleType, dtype: str, *, on_cpu: bool) -> bool:
    """Whether the package has a backward kernel for the dtype there."""
    rows = _plan(attn).get("backward", [])
    return any(row["dtype"] == dtype and (row["target"] == "cpu") == on_cpu for row in rows)


def call_backward(attn: ModuleType, case: Case, device: str, given: Given, *, deterministic: bool = True) -> Gradients:
    """(dQ, dK, dV) of the package's op `backward`.

    Raises: AssertionError when what was not wanted is not an empty tensor.
    """
    import torch

    words = case.backward_tensors(*given, device)
    op = getattr(torch.ops, packages.part(attn, "op").NAMESPACE).backward
    with torch.no_grad():
        found = op(*words.values(), deterministic)
    for name, wanted, x in zip(("dQ", "dK", "dV"), case.wanted, found, strict=True):
        assert wanted or tuple(x.shape) == (0,), f"{name} was not wanted and has the shape {tuple(x.shape)}"
    return tuple(np.asarray(x.to(torch.float64).cpu().numpy()) for x in found)  # type: ignore[return-value]


@contextmanager
def forced(variable: str, value: str) -> Iterator[None]:
    """Let an environment variable have a value while the block runs."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def forced_isa(isa: str) -> AbstractContextManager[None]:
    """Force the CPU kernels of one instruction set while the block runs."""
    return forced(ISA_VARIABLE, isa)


class Cpu:
    """The CPU of this machine: one path per instruction set that it has and the package has a kernel for."""

    name = "cpu"
    asked = "--device cpu"
    compares_runs = False

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, bool], tuple[ModuleType, list[Path]]] = {}  # no case changes a CPU path

    def paths(self, attn: ModuleType, dtype: str, case: Case) -> list[Path]:
        return self._paths(attn, dtype, case, is_backward=False)

    def _paths(self, attn: ModuleType, dtype: str, case: Case, *, is_backward: bool) -> list[Path]:
        key = (id(attn), dtype, is_backward)
        if key not in self._known:
            found: dict[str, Path] = {}
            for isa in attn.isas(dtype):
                with forced_isa(isa):  # one without a backward kernel for the dtype gives way to the next
                    answer = _ask(attn, case, "cpu", **({"backward": True} if is_backward else {}))
                path = of_variant(attn, "cpu", answer, dtype, isa)
                found.setdefault(path.isa, replace(path, unit=path.isa))
            self._known[key] = attn, list(found.values())
        return list(self._known[key][1])

    def run(self, attn: ModuleType, case: Case, path: Path) -> tuple[Array, Array]:
        with forced_isa(path.isa):
            return _call(attn, case, "cpu")

    def trace(self, attn: ModuleType, case: Case, path: Path) -> tuple[Array, Array, Array]:
        with forced_isa(path.isa):
            return _trace(attn, case, "cpu", path.bc)

    def backward_paths(self, attn: ModuleType, dtype: str, case: Case) -> list[Path]:
        if not has_backward(attn, dtype, on_cpu=True):
            return []
        return self._paths(attn, dtype, case, is_backward=True)

    def run_backward(self, attn: ModuleType, case: Case, path: Path, given: Given) -> Gradients:
        with forced_isa(path.isa):
            return call_backward(attn, case, "cpu", given)

    def runs_backward(self, attn: ModuleType, case: Case, path: Path, given: Given) -> list[Gradients]:
        return [self.run_backward(attn, case, path, given) for _ in range(2)]

    def describe(self) -> dict[str, Any]:
        return machine.describe("cpu")


def takes(variant: dict[str, Any], case: Case) -> bool:
    """Whether the kernel of a row of plan.json takes the case's mask. At any length: a class is a choice of speed."""
    return variant["causal"] in ("any", "full" if case.causal == "none" else "causal")


DETERMINISTIC = "-deterministic"  # ends the name of that form of a path


def both_forms(path: Path) -> list[Path]:
    """A CUDA backward path as torch runs it by default, and as it does under `use_deterministic_algorithms`."""
    return [replace(path, deterministic=False), replace(path, isa=path.isa + DETERMINISTIC)]


class Cuda:
    """The current CUDA device: the target that the package was built for, and the kernels for its capability alone."""

    name = "cuda"
    asked = "--device cuda"
    compares_runs = False

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RequestError(
                "no GPU: torch sees no CUDA device here",
                "try a machine with one; here certify and fuzz judge CUDA text by --device emulator --arch sm80",
            )
        self.unit = "sm_{}{}".format(*torch.cuda.get_device_capability())

    def paths(self, attn: ModuleType, dtype: str, case: Case) -> list[Path]:
        rows = [v for v in _plan(attn).get("variants", []) if v["dtype"] == dtype and v["target"] in targets.DEVICES]
        exact = [v for v in rows if targets.DEVICES[v["target"]].is_exact]
        if not exact:
            return [of_variant(attn, "cuda", _ask(attn, case, "cuda"), dtype, self.unit)]
        names = [v["unit"] for v in exact if takes(v, case)]
        found = []
        for name in dict.fromkeys([*names, *(v["target"] for v in rows if v not in exact)]):
            with forced(ARCH_VARIABLE, name):
                try:
                    found.append(of_variant(attn, "cuda", _ask(attn, case, "cuda"), dtype, self.unit))
                except ValueError as refusal:  # a kernel for other devices, or strides that it cannot take
                    if not str(refusal).startswith(f"{ARCH_VARIABLE}={name}"):
                        raise
        return found

    def run(self, attn: ModuleType, case: Case, path: Path) -> tuple[Array, Array]:
        with forced(ARCH_VARIABLE, path.isa):
            return _call(attn, case, "cuda")

    def trace(self, attn: ModuleType, case: Case, path: Path) -> tuple[Array, Array, Array]:
        return _trace(attn, case, "cuda", path.bc)

    def backward_paths(self, attn: ModuleType, dtype: str, case: Case) -> list[Path]:
        if not has_backward(attn, dtype, on_cpu=False):
            return []
        return both_forms(of_variant(attn, "cuda", _ask(attn, case, "cuda", backward=True), dtype, self.unit))

    def run_backward(self, attn: ModuleType, case: Case, path: Path, given: Given) -> Gradients:
        return call_backward(attn, case, "cuda", given, deterministic=path.deterministic)

    def runs_backward(self, attn: ModuleType, case: Case, path: Path, given: Given) -> list[Gradients]:
        return [self.run_backward(attn, case, path, given) for _ in range(2)]

    def describe(self) -> dict[str, Any]:
        return machine.describe("cuda")


def _emulator(arch: str | None = None, **words: Any) -> Device:
    from verify.emulator.device import EmulatorDevice

    return EmulatorDevice("sm80" if arch is None else arch, **words)


DEVICES: dict[str, Callable[..., Device]] = {"cpu": Cpu, "cuda": Cuda, "emulator": _emulator}


def device(name: str, **words: Any) -> Device:
    """The device called `name`.

    words: for the emulator, those of EmulatorDevice; None stands for its default.
    Raises: RequestError for an unknown name, for words that the device does not take, or when this machine lacks it.
    """
    if name not in DEVICES:
        raise RequestError(f"--device {name}: unknown", f"known: {', '.join(DEVICES)}")
    asked = {word: value for word, value in words.items() if value is not None}
    if asked and name != "emulator":
        raise RequestError(f"--{next(iter(asked))} is for --device emulator, not for {name}")
    return DEVICES[name](**asked)


def torch_device(name: str) -> str:
    """Where torch computes for what runs on the device `name`."""
    return "cuda" if name == "cuda" else "cpu"


def dtypes_of(plan: dict[str, Any], device_name: str) -> list[str]:
    """The dtypes that a package (its plan.json) has kernels for on a device, in the order of the plan.

    Raises: RequestError when it has none.
    """
    on_cpu = device_name == "cpu"
    found = list(dict.fromkeys(v["dtype"] for v in plan["variants"] if (v["target"] == "cpu") == on_cpu))
    if not found:
        targets = ", ".join(dict.fromkeys(v["target"] for v in plan["variants"]))
        raise RequestError(f"{plan['name']} has no kernel for --device {device_name}", f"its targets: {targets}")
    return found


def require_dtypes(plan: dict[str, Any], device_name: str, dtypes: Iterable[str]) -> None:
    """Refuse dtypes that a package (its plan.json) has no kernel for on a device.

    Raises: RequestError.
    """
    known = dtypes_of(plan, device_name)
    for dtype in dtypes:
        if dtype not in known:
            raise RequestError(
                f"--dtype {dtype}: {plan['name']} has no such kernel for --device {device_name}",
                f"its dtypes: {', '.join(known)}",
            )
