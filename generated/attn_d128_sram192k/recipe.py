# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 5eef6da899861e2a
"""What to compile for a device, and with which commands.

The compilers are run directly. torch.utils.cpp_extension.load cannot build without loading: a build for another
machine, or a second one in a process, would register the op namespace twice, which crashes the process.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import contents, installed_torch, toolchain
from .cache import BuildError

if TYPE_CHECKING:
    import torch

NAMESPACE = "tileproof_attn_d128_sram192k_9c2beaadbf93"
# The oldest torch whose stable ABI the bindings use, as (major, minor).
TORCH_MINIMUM = (2, 10)
KERNEL_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast")
# One translation unit per instruction set: the name of the unit -> what makes the compiler use it.
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "v3": ("-march=x86-64-v3",),
    "v4": ("-march=x86-64-v4", "-mtune=icelake-server"),
    "amx": ("-march=x86-64-v4", "-mtune=icelake-server", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
# The units of this package.
CPU_ISAS: tuple[str, ...] = ("v4", "v3", "baseline", "amx")
CPU_BACKWARD_ISAS: tuple[str, ...] = ("v4", "v3", "baseline", "amx")
# CUDA target -> (least capability, bytes of shared memory of its hungriest kernel).
CUDA_TARGETS: dict[str, tuple[int, int]] = {
    "sm80": (80, 164864),
}
CUDA_BACKWARD_TARGETS: tuple[str, ...] = ("sm80",)
# Capability -> bytes of shared memory that one block may ask for (CUDA C++ Programming Guide 13, technical
# specifications per compute capability).
SHARED_MEMORY = {
    75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448,
    100: 232448, 103: 232448, 110: 232448, 120: 101376, 121: 101376,
}  # fmt: skip
# What may stand before the compiler in $CXX.
_LAUNCHERS = ("ccache", "distcc", "sccache")


class Recipe(NamedTuple):
    """How to build one library. steps: commands, the link last; {torch}, {csrc} stand for folders."""

    what: str
    steps: list[tuple[str, ...]]
    needs: dict[str, Any]
    compilers: list[toolchain.Compiler]

    @property
    def parts(self) -> dict[str, Any]:
        """All that may change the library. Where torch and this package lie plays no part."""
        return {**self.needs, "compilers": self.compilers, "steps": self.steps}

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:24]


def needs(capabilities: Sequence[int] = ()) -> dict[str, Any]:
    """What a library must have been built for to serve here, whatever compiled it."""
    installed = installed_torch.facts()
    return {
        "content": contents.fingerprint(),
        "torch": [installed.version, installed.commit, installed.cxx11_abi],
        "machine": platform.machine(),
        "capabilities": list(capabilities),
    }


def cpu() -> Recipe:
    """The library for CPU tensors: one object per pass and instruction set, and the binding.

    Raises: BuildError.
    """
    compiler = toolchain.cxx()
    isas = [isa for isa in CPU_ISAS if platform.machine() == "x86_64" or isa == "baseline"]
    sources = [("binding_cpu", _binding_flags())]
    sources += [(f"forward_cpu_{isa}", (*KERNEL_FLAGS, *ISA_FLAGS[isa])) for isa in isas]
    sources += [(f"backward_cpu_{isa}", (*KERNEL_FLAGS, *ISA_FLAGS[isa])) for isa in isas if isa in CPU_BACKWARD_ISAS]
    steps = [(*compiler.command, *flags, "-c", f"{{csrc}}/{unit}.cpp", "-o", f"{unit}.o") for unit, flags in sources]
    steps.append(_link(compiler, "cpu", [unit for unit, _ in sources], ["-ltorch_cpu", "-lc10"]))
    return Recipe(f"cpu ({', '.join(isas)}) with {compiler.version}", steps, needs(), [compiler])


def cuda(capabilities: Sequence[int]) -> Recipe:
    """The library for CUDA tensors on devices of these capabilities.

    Raises: BuildError.
    """
    installed = installed_torch.facts()
    if installed.cuda is None:
        raise BuildError(f"torch {installed.version} has no CUDA: a CUDA library would have nothing to link to")
    chosen = {capability: target_for(capability) for capability in capabilities}
    compiler, toolkit = toolchain.cxx(), toolchain.cuda_toolkit()
    release = re.search(r"cuda_(\d+)\.", toolkit.nvcc.version)
    if release is None or release[1] != installed.cuda.split(".")[0]:
        raise BuildError(
            f"torch was built for CUDA {installed.cuda}, the toolkit in {toolkit.home} is {toolkit.nvcc.version}; "
            "set CUDA_HOME to one with the same first number"
        )
    kernels = "".join(f"X({capability}, {target})" for capability, target in chosen.items())
    code = {
        target: [f"--generate-code=arch=compute_{c},code=sm_{c}" for c in capabilities if chosen[c] == target]
        for target in sorted(set(chosen.values()))
    }
    binding = (
        *_binding_flags(), "-DUSE_CUDA", f"-DTILEPROOF_CUDA_KERNELS={kernels}",
        "-isystem", str(toolkit.home / "include"),
    )  # fmt: skip
    steps = [(*compiler.command, *binding, "-c", "{csrc}/binding_cuda.cpp", "-o", "binding_cuda.o")]
    units = ["binding_cuda"]
    host = next(word for word in compiler.command if Path(word).name not in _LAUNCHERS)
    kernel_units = [(f"forward_{name}", flags) for name, flags in code.items()]
    kernel_units += [(f"backward_{name}", flags) for name, flags in code.items() if name in CUDA_BACKWARD_TARGETS]
    for unit, flags in kernel_units:
        steps.append((
            *toolkit.nvcc.command, "-ccbin", host, "-O3", "-std=c++17", *flags, "-Xcompiler=-fPIC,-fvisibility=hidden",
            "-c", f"{{csrc}}/{unit}.cu", "-o", f"{unit}.o",
        ))  # fmt: skip
        units.append(unit)
    libraries = ["-ltorch_cuda", "-ltorch_cpu", "-lc10", f"-L{toolkit.library_folder}", "-lcudart"]
    steps.append(_link(compiler, "cuda", units, libraries))
    what = f"{', '.join(f'sm_{c}' for c in capabilities)} with nvcc {toolkit.nvcc.version}"
    return Recipe(what, steps, needs(capabilities), [compiler, toolkit.nvcc])


def compile_into(folder: Path, recipe: Recipe) -> None:
    """Run the recipe in `folder`, which ends up with the library and build.json.

    Raises: BuildError.
    """
    places = {"{torch}": str(installed_torch.facts().folder), "{csrc}": str(contents.FOLDER / "csrc")}
    *compile_steps, link = [_placed(step, places) for step in recipe.steps]
    toolchain.run_all(compile_steps, folder)
    toolchain.run_all([link], folder)
    for file in folder.glob("*.o"):
        file.unlink()
    (folder / "build.json").write_text(json.dumps(recipe.parts, indent=1) + "\n")


def capabilities_of(cuda_archs: Sequence[str] | None) -> list[int]:
    """10 * major + minor of the GPUs to compile for, sorted. None: those that torch sees.

    Raises: BuildError.
    """
    if cuda_archs is None:
        import torch  # not above: a build that asks no GPU does not wait for it

        if not torch.cuda.is_available():
            raise BuildError("torch sees no GPU; to compile for one that is elsewhere, say build(cuda_archs=['sm_90'])")
        return sorted({capability_of(torch.device("cuda", i)) for i in range(torch.cuda.device_count())})
    found = set()
    for arch in cuda_archs:
        number = re.fullmatch(r"(?:sm_?|compute_)?(\d+)(?:\.(\d))?", str(arch))
        capability = int("".join(filter(None, number.groups()))) if number else 0
        if capability not in SHARED_MEMORY:
            raise BuildError(f"cuda_archs: {arch!r} is not one of {', '.join(f'sm_{c}' for c in SHARED_MEMORY)}")
        found.add(capability)
    return sorted(found)


def capability_of(device: torch.device) -> int:
    """10 * major + minor."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def target_for(capability: int) -> str:
    """The CUDA target ("sm80") whose kernels serve a device of this capability.

    The one that was planned for the most shared memory that the device has; of equals, the newest.
    Raises: BuildError when no kernel of this package runs there.
    """
    has = SHARED_MEMORY.get(capability, 0)
    fitting = [(size, least, t) for t, (least, size) in CUDA_TARGETS.items() if least <= capability and size <= has]
    if fitting:
        return max(fitting)[2]
    offered = "; ".join(f"{t} needs sm_{least} or later and {size} bytes" for t, (least, size) in CUDA_TARGETS.items())
    raise BuildError(
        f"no kernel of this package runs on sm_{capability}, which has {has} bytes of shared memory per block; "
        f"{offered or 'it has none for CUDA'}"
    )


def _binding_flags() -> tuple[str, ...]:
    # -O1: it only checks and allocates, and compiles a second faster.
    version = TORCH_MINIMUM[0] << 56 | TORCH_MINIMUM[1] << 48
    return (
        "-O1", "-std=c++17", "-fPIC", "-fvisibility=hidden", f"-DTILEPROOF_NAMESPACE={NAMESPACE}",
        f"-DTORCH_TARGET_VERSION={version:#x}ULL", f"-D_GLIBCXX_USE_CXX11_ABI={int(installed_torch.facts().cxx11_abi)}",
        "-isystem", "{torch}/include",
    )  # fmt: skip


def _link(compiler: toolchain.Compiler, kind: str, units: list[str], libraries: list[str]) -> tuple[str, ...]:
    # The C++ library first: torch's libraries export parts of it too, and no promise of theirs covers those.
    return (
        *compiler.command, "-shared", "-Wl,--no-undefined", *(f"{unit}.o" for unit in units), "-o", f"{kind}.so",
        "-lstdc++", "-L{torch}/lib", *libraries, "-pthread",
    )  # fmt: skip


def _placed(step: tuple[str, ...], places: dict[str, str]) -> list[str]:
    words = []
    for word in step:
        for mark, place in places.items():
            word = word.replace(mark, place)
        words.append(word)
    return words
