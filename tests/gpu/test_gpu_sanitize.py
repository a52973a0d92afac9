"""The kernels in guarded memory, and under memcheck; all four tools on all packages are `python -m verify sanitize`."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch

from verify import gpu_packages, guarded, guarded_problems, mutants, packages, sanitize

pytestmark = pytest.mark.gpu


@pytest.mark.field("R066", "R106")
@pytest.mark.parametrize("name", [*gpu_packages.SANITIZED, "the debug form"])
def test_nothing_beside_the_outputs_is_written_and_all_of_them_is(gpu, name):
    folder = gpu_packages.request(gpu_packages.PACKAGES.get(name, gpu_packages.DEBUG))
    libraries = {unit: ctypes.CDLL(str(file)) for unit, file in sanitize.launchers(folder).items()}
    with torch.no_grad():
        calls = guarded.run(folder, libraries)
    # Two dtypes, the entry points and the op: the forward pass, and the backward pass in both forms.
    assert calls == 2 * 2 * (1 + 2) * len(guarded_problems.problems(64, 64))


@pytest.mark.field("R107")
def test_memcheck_is_clean_and_finds_a_planted_fault(gpu):
    folder = packages.emit(sanitize.host())
    home = packages.part(packages.load(folder), "toolchain").cuda_toolkit().home
    if not (shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(home / "bin"))):
        pytest.skip("needs compute-sanitizer, which comes with the CUDA toolkit")
    clean = sanitize.examine(folder, "memcheck")
    assert clean.holds, clean.text
    fault = sanitize.FAULTS[0]
    found = sanitize.examine(mutants.package(fault.mutant, sanitize.host()), fault.tool, fault=fault.mutant.name)
    assert found.holds, found.text
