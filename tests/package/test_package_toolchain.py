"""Compilers and CUDA toolkits: found where they are, refused with the bad value shown."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from codegen import devices
from codegen.plans import cpu_amx, cpu_isa

RELEASE = "Build cuda_{}.0.r{}.0/compiler.1_0"


@pytest.fixture
def gpu(packages, tmp_path):
    """A package with kernels for the CPU and for sm_80, imported; nothing is built."""
    return packages.imported(packages.emitted(tmp_path / "emitted", "attn_gpu", archs=("cpu", "sm80")))


@pytest.fixture
def toolchain(gpu):
    return gpu.build.__globals__["recipe"].toolchain


@pytest.fixture(autouse=True)
def no_toolkit(monkeypatch, tmp_path):
    """No toolkit is visible until a test makes one."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "g++", "as", "ld"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def toolkit(home: Path, library: str = "lib64", release: str | None = None) -> Path:
    """A stand-in for an installed toolkit: an nvcc that knows --version and --dryrun, and a libcudart.so."""
    release = release or str(torch.version.cuda or "13").split(".")[0]
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        f'--version) echo "nvcc: NVIDIA (R) Cuda compiler driver"; echo "{RELEASE.format(release, release)}";;\n'
        f'--dryrun) echo "#$ _HERE_={home}/bin" >&2; echo "#$ TOP={home}/bin/.." >&2;;\n'
        "esac\n"
    )
    nvcc.chmod(0o755)
    if library:
        (home / library).mkdir(parents=True)
        (home / library / "libcudart.so").touch()
    return home


def refused(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@pytest.mark.field("R100")
@pytest.mark.parametrize("value", ["{}", ":{}", "  {} ", "{}/", ":/nowhere:{}:"])
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_cuda_home_with_stray_colons_and_spaces(toolchain, tmp_path, monkeypatch, variable, value):
    home = toolkit(tmp_path / "cuda toolkit")
    monkeypatch.setenv(variable, value.format(home))
    found = toolchain.cuda_toolkit()
    assert (found.home, found.library_folder) == (home, home / "lib64")
    assert found.nvcc.command == (str(home / "bin" / "nvcc"),)


@pytest.mark.field("R100")
@pytest.mark.parametrize("value", ["/nowhere", ":", ":/nowhere", " /no where "])
def test_a_wrong_cuda_home_is_shown(gpu, toolchain, tmp_path, monkeypatch, value):
    toolkit(tmp_path / "cuda")  # on no path: the variable was meant, so nothing else is tried
    monkeypatch.setenv("CUDA_HOME", value)
    want = f"CUDA_HOME={value!r} holds no bin/nvcc: set it to a CUDA toolkit's root, or unset it"
    assert refused(gpu.BuildError, toolchain.cuda_toolkit) == want


@pytest.mark.field("R100")
@pytest.mark.parametrize("library", ["lib64", "lib", "targets/x86_64-linux/lib"])
def test_the_toolkit_behind_an_nvcc_that_is_a_script(toolchain, tmp_path, monkeypatch, library):
    home = toolkit(tmp_path / "cuda-13", library)
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec "{home}/bin/nvcc" "$@"\n')
    wrapper.chmod(0o755)
    found = toolchain.cuda_toolkit()
    assert (found.home, found.library_folder) == (home, home / library)


def test_an_empty_variable_is_unset(toolchain, tmp_path, monkeypatch):
    home = toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", " ")
    monkeypatch.setenv("PATH", f"{home}/bin{os.pathsep}{os.environ['PATH']}")
    assert toolchain.cuda_toolkit().home == home


def test_a_toolkit_without_a_runtime_library(gpu, toolchain, tmp_path, monkeypatch):
    home = toolkit(tmp_path / "cuda", library="")
    monkeypatch.setenv("CUDA_HOME", str(home))
    want = f"the CUDA toolkit {home} has no libcudart.so in lib64, lib or targets/*/lib"
    assert refused(gpu.BuildError, toolchain.cuda_toolkit) == want


@pytest.mark.field("R101")
def test_without_nvcc_only_the_cuda_build_fails(gpu, toolchain, monkeypatch):
    monkeypatch.setattr(toolchain, "_nvcc_in", lambda home: False)
    if torch.version.cuda is None:
        want = f"torch {torch.__version__} has no CUDA: a CUDA library would have nothing to link to"
    else:
        want = ("no CUDA toolkit: CUDA_HOME is not set, nvcc is not on PATH and /usr/local/cuda has none; "
                "kernels for the GPU need one, kernels for the CPU do not")  # fmt: skip
    assert refused(gpu.BuildError, lambda: gpu.build(cuda_archs=["sm_90"])) == want
    q = torch.ones(1, 1, 3, 16)
    assert torch.equal(gpu.attention(q, q, q), q)
    assert list(gpu.build(cuda_archs=[])) == ["cpu"]


def test_a_toolkit_of_another_generation(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    home = toolkit(tmp_path / "cuda", release="12")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert refused(gpu.BuildError, lambda: gpu.build(cuda_archs=["sm_90"])) == (
        f"torch was built for CUDA 13.0, the toolkit in {home} is {RELEASE.format(12, 12)}; "
        "set CUDA_HOME to one with the same first number"
    )


def test_gpus_are_named_in_several_ways(gpu):
    capabilities_of = gpu.build.__globals__["recipe"].capabilities_of
    assert capabilities_of(["sm_90", "8.0", "sm80", "compute_86", "90"]) == [80, 86, 90]
    for bad in ("sm_99", "hopper", "sm_90a", "", "9.0.1"):
        assert refused(gpu.BuildError, lambda bad=bad: capabilities_of([bad])).startswith(f"cuda_archs: {bad!r} is not")
    if not torch.cuda.is_available():
        assert refused(gpu.BuildError, lambda: capabilities_of(None)).startswith("torch sees no GPU")


@pytest.mark.field("R040")
def test_the_target_for_a_device_has_the_shared_memory_that_it_needs(gpu, monkeypatch):
    recipe = gpu.build.__globals__["recipe"]
    monkeypatch.setattr(recipe, "CUDA_TARGETS", {"sm80": (80, 160 * 1024), "sm86": (86, 90 * 1024)})
    chosen = {c: recipe.target_for(c) for c in recipe.SHARED_MEMORY if c != 75}
    assert chosen == {80: "sm80", 86: "sm86", 87: "sm80", 89: "sm86", 90: "sm80", 100: "sm80", 103: "sm80",
                      110: "sm80", 120: "sm86", 121: "sm86"}  # fmt: skip
    for capability in (75, 130):
        assert refused(gpu.BuildError, lambda c=capability: recipe.target_for(c)).startswith(
            f"no kernel of this package runs on sm_{capability}, which has "
        )


def test_the_tables_agree_with_the_planners(gpu):
    recipe = gpu.build.__globals__["recipe"]
    rows = {10 * d.capability[0] + d.capability[1]: d.smem_per_block_bytes for d in devices.DEVICES.values()}
    assert rows == recipe.SHARED_MEMORY
    flags = {isa.name: isa.flags for isa in cpu_isa.VECTOR_ISAS} | {"amx": cpu_amx.UNIT_FLAGS}
    assert flags == {name: (*recipe.KERNEL_FLAGS, *recipe.ISA_FLAGS[name]) for name in flags}


def test_a_compiler_with_a_launcher_and_flags(gpu, toolchain, tmp_path, monkeypatch):
    launcher = tmp_path / "bin" / "ccache"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", "ccache g++ -g0")
    compiler = toolchain.cxx()
    assert compiler.command == (str(launcher), "g++", "-g0") and "g++" in compiler.version
    if torch.version.cuda:
        monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda")))
        steps = gpu.build.__globals__["recipe"].cuda([90]).steps
        kernels = [step for step in steps if any(word.endswith(".cu") for word in step)]
        assert kernels and all(kernel[kernel.index("-ccbin") + 1] == "g++" for kernel in kernels)


def real_toolkit() -> str | None:
    """The root of a CUDA toolkit of this machine, if torch can be built against it."""
    found = shutil.which("nvcc", path="/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin")
    return found if found and torch.version.cuda else None


@pytest.mark.skipif(real_toolkit() is None, reason="needs nvcc and a torch with CUDA")
def test_a_cuda_library_compiles_and_links_without_a_gpu(gpu, monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin")
    libraries = gpu.build(cuda_archs=["sm_90", "8.0"])
    assert set(libraries) == {"cpu", "cuda"}
    torch.ops.load_library(libraries["cuda"])  # every symbol is there; it registers the CUDA kernel
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{gpu.op.NAMESPACE}::forward", "CUDA")
    assert gpu.build(cuda_archs=["sm_90"])["cuda"] == libraries["cuda"]  # a library for more GPUs serves
