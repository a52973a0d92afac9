# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 f4f50dd6cf0e87f1
"""Finds or makes the compiled library for a device: one for CPU tensors, one for CUDA tensors, when first needed.

A finished library is in the cache (cache.py) under a key: the hash of this package's content, the commands, the
compilers with their versions, the version and ABI of torch, the kind of machine, the GPUs. The version of Python
plays no part, because the bindings are on torch's stable C ABI.

    python -m attn_d128_sram192k build
    python -m attn_d128_sram192k build --cuda-arch sm_90
    python -m attn_d128_sram192k wheel OUT

The first builds for the devices that are here, the second for a GPU that need not be. The third writes a wheel that
carries its libraries: where it is installed, on the same kind of machine with torch 2.10 or later, no compiler is
needed.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import cache, contents, installed_torch, recipe
from .cache import BuildError


def build(*, cuda_archs: Sequence[str] | None = None) -> dict[str, Path]:
    """Compile the kernels ahead of their first use; nothing is loaded.

    Args:
        cuda_archs: GPUs to compile for, like "sm_90". None: those that torch sees; without one, the CPU only.
    Returns:
        Device type ("cpu", "cuda") -> its library.
    Raises: BuildError.
    """
    libraries = {}
    if recipe.CPU_ISAS:
        libraries["cpu"] = library("cpu")
    if recipe.CUDA_TARGETS and (cuda_archs or (cuda_archs is None and installed_torch.sees_a_gpu())):
        libraries["cuda"] = library("cuda", cuda_archs)
    return libraries


def library(kind: str, cuda_archs: Sequence[str] | None = None) -> Path:
    """The compiled library for a device type: from this package, from the cache, or from the compiler.

    Raises: BuildError.
    """
    _require_platform()
    if not (recipe.CPU_ISAS if kind == "cpu" else recipe.CUDA_TARGETS):
        raise BuildError(f"this package has no kernels for {kind}")
    capabilities = [] if kind == "cpu" else recipe.capabilities_of(cuda_archs)
    found = _shipped(kind, capabilities)
    if found is not None:
        return found
    try:
        plan = recipe.cpu() if kind == "cpu" else recipe.cuda(capabilities)
    except BuildError:
        found = _cached(kind, recipe.needs(capabilities))  # no compiler, or another one: its product may be there
        if found is None:
            raise
        return found
    found = _cached(kind, {**recipe.needs(capabilities), "compilers": plan.compilers})
    if found is not None:
        return found

    def make(folder: Path) -> None:
        print(f"{contents.NAME}: building for {plan.what} (once, into {cache.root()})", file=sys.stderr, flush=True)
        recipe.compile_into(folder, plan)

    return cache.published(_home() / f"{kind}-{plan.key}", f"{kind}.so", make)


def wheel(out: Path | str, *, cuda_archs: Sequence[str] | None = None) -> Path:
    """Write a wheel that carries the compiled libraries to the folder `out`; returns its path.

    cuda_archs: as in `build`.
    Raises: BuildError.
    """
    Path(out).mkdir(parents=True, exist_ok=True)
    extra = []
    for kind, file in build(cuda_archs=cuda_archs).items():
        label: dict[str, Any] = {"content": contents.fingerprint(), "machine": platform.machine()}
        if kind == "cuda":
            label |= {"capabilities": recipe.capabilities_of(cuda_archs), "cuda": installed_torch.facts().cuda}
        extra.append((f"{contents.LIBRARY_FOLDER}/{kind}.so", file.read_bytes()))
        extra.append((f"{contents.LIBRARY_FOLDER}/{kind}.json", json.dumps(label, indent=1).encode()))
    return contents.write_wheel(Path(out), extra, tag=f"py3-none-linux_{platform.machine()}")


def _home() -> Path:
    return cache.root() / recipe.NAMESPACE


def _cached(kind: str, needs: dict[str, Any]) -> Path | None:
    """A finished library in the cache that was built for these needs, and maybe for more GPUs."""
    wanted = json.loads(json.dumps(needs))  # as it is read back: lists for tuples
    for label in sorted(_home().glob(f"{kind}-*/build.json")):
        try:
            parts = json.loads(label.read_text())
            fits = all(parts[name] == value for name, value in wanted.items() if name != "capabilities")
            fits = fits and set(wanted["capabilities"]) <= set(parts["capabilities"])
        except (OSError, ValueError, LookupError, TypeError):
            continue  # a damaged label: that library is not known to fit
        if fits and cache.is_whole(label.parent, f"{kind}.so"):
            return label.parent / f"{kind}.so"
    return None


def _shipped(kind: str, capabilities: Sequence[int]) -> Path | None:
    """The library that an installed wheel carries, if it was made for this package on this kind of machine."""
    file = contents.FOLDER / contents.LIBRARY_FOLDER / f"{kind}.so"
    if not file.exists():
        return None
    label = json.loads(file.with_suffix(".json").read_text())
    fits = label["content"] == contents.fingerprint() and label["machine"] == platform.machine()
    if kind == "cuda":
        same_cuda = label["cuda"].split(".")[0] == (installed_torch.facts().cuda or "").split(".")[0]
        fits = fits and same_cuda and set(capabilities) <= set(label["capabilities"])
    return file if fits else None


def _require_platform() -> None:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise BuildError(f"the kernels are for Linux on x86-64 and aarch64; this is {platform.system()} on {machine}")
    version = installed_torch.facts().version
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is None or (int(release[1]), int(release[2])) < recipe.TORCH_MINIMUM:
        oldest = ".".join(map(str, recipe.TORCH_MINIMUM))
        raise BuildError(f"the kernels need torch {oldest} or later; this is {version}")
