"""A package with kernels for sm_90a alone: what it compiles, which kernel a call gets and why, without a GPU.

The emitted binding runs on CPU tensors against a CUDA runtime and kernels that only note what they were asked
(fake_cuda.cpp). The targets' planner is the tests' own: sm90a has a kernel for short calls without a mask, one for
other calls without a mask, and one for causal calls.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from verify.entry_points import BackwardArgs

HERE = Path(__file__).parent
D = 16
TOOLKIT = Path("/toolkit")
NOT_SUPPORTED, INVALID_VALUE = 801, 1


@pytest.fixture(scope="module")
def hopper(packages, tmp_path_factory) -> ModuleType:
    """A package for --arch sm90a, imported; nothing is built."""
    return packages.imported(packages.emitted(tmp_path_factory.mktemp("emitted"), "attn_hopper", archs=("sm90a",)))


def folder_of(attn: ModuleType) -> Path:
    return Path(attn.__path__[0])


# ---- What is emitted and compiled


def test_the_package_carries_the_companion_and_one_file_per_unit(hopper):
    plan = json.loads((folder_of(hopper) / "plan.json").read_text())
    assert plan["request"]["archs"] == ["sm80", "sm90a"]
    keys = [(v["target"], v["dtype"], v["causal"], v["length_class"]) for v in plan["variants"]]
    assert len(set(keys)) == len(keys) == 2 + 2 * 4
    assert keys[2] == ("sm90a", "bf16", "full", "short")
    units = sorted(p.stem for p in (folder_of(hopper) / "csrc").glob("*.cu"))
    assert units == ["backward_sm80", "forward_sm80", *(f"forward_sm90a_{i}" for i in range(4))]


def test_variants_are_the_rows_of_plan_json(hopper):
    rows = json.loads((folder_of(hopper) / "plan.json").read_text())["variants"]
    assert [v._asdict() for v in hopper.op.VARIANTS] == [
        {**{k: row[k] for k in ("target", "isa", "dtype", "arithmetic", "causal", "length_class")},
         "unit": row.get("unit", row["isa"]),
         "br": row["plan"]["br"], "bc": row["plan"]["bc"]}
        for row in rows
    ]  # fmt: skip


@pytest.fixture
def toolkit(hopper, monkeypatch):
    """A CUDA toolkit that is not asked anything."""
    toolchain = hopper.op.library.__globals__["recipe"].toolchain
    major = (torch.version.cuda or "13.0").split(".")[0]
    nvcc = toolchain.Compiler(("/toolkit/bin/nvcc",), f"Build cuda_{major}.0.r{major}.0/compiler.1")
    monkeypatch.setattr(toolchain, "cuda_toolkit", lambda: toolchain.CudaToolkit(TOOLKIT, TOOLKIT / "lib64", nvcc))
    monkeypatch.setattr(torch.version, "cuda", f"{major}.0")
    return hopper.op.library.__globals__["recipe"]


def codes(recipe, capabilities):
    """Forward unit -> what its nvcc generates code for; and the macros of the binding."""
    steps = recipe.cuda(capabilities).steps
    units = {
        word.removeprefix("{csrc}/").removesuffix(".cu"): [w for w in step if "generate-code" in w]
        for step in steps
        for word in step
        if word.endswith(".cu")
    }
    linked = [word for word in steps[-1] if word.endswith(".o")]
    assert linked == ["binding_cuda.o", *(f"{unit}.o" for unit in units)]
    assert units.pop("backward_sm80") == units["forward_sm80"]
    units = {unit.removeprefix("forward_"): code for unit, code in units.items()}
    return units, [word for word in steps[0] if word.startswith("-DTILEPROOF_") and "NAMESPACE" not in word]


def test_only_its_own_units_are_compiled_for_sm_90a_and_only_for_such_devices(toolkit):
    for_90a = ["--generate-code=arch=compute_90a,code=sm_90a"]
    exact = dict.fromkeys((f"sm90a_{i}" for i in range(4)), for_90a)
    units, macros = codes(toolkit, [90])
    assert units == {"sm80": ["--generate-code=arch=compute_90,code=sm_90"], **exact}
    assert macros == ["-DTILEPROOF_CUDA_KERNELS=X(90, sm80)", "-DTILEPROOF_HAS_SM90A"]
    for other in (80, 100, 120):
        units, macros = codes(toolkit, [other])
        assert units == {"sm80": [f"--generate-code=arch=compute_{other},code=sm_{other}"]}
        assert macros == [f"-DTILEPROOF_CUDA_KERNELS=X({other}, sm80)"]
    units, macros = codes(toolkit, [80, 90])
    assert units["sm80"] == [f"--generate-code=arch=compute_{c},code=sm_{c}" for c in (80, 90)]
    assert units["sm90a_2"] == for_90a and macros[-1] == "-DTILEPROOF_HAS_SM90A"


def test_sm_90a_names_the_gpu_to_build_for(toolkit):
    assert toolkit.capabilities_of(["sm_90a"]) == toolkit.capabilities_of(["sm_90"]) == [90]
    with pytest.raises(toolkit.BuildError, match="sm_77a"):
        toolkit.capabilities_of(["sm_77a"])


def test_nvcc_compiles_every_unit(packages, tmp_path):
    attn = packages.imported(packages.emitted(tmp_path, "attn_hopper_built", archs=("sm90a",), dtypes=("bf16",)))
    toolchain = attn.op.library.__globals__["recipe"].toolchain
    try:
        toolchain.cuda_toolkit()
    except attn.BuildError as error:
        pytest.skip(str(error))
    library = attn.build(cuda_archs=["sm_90a"])["cuda"]
    names = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    assert "attention_forward" not in names and "attention_backward" not in names


# ---- Dispatch


class Fake:
    """The binding of a package over the fake runtime, and what the kernels saw."""

    def __init__(self, attn: ModuleType, library: Path) -> None:
        torch.ops.load_library(library)
        self.library = ctypes.CDLL(str(library))
        self.library.fake_unit.restype = ctypes.c_char_p
        self.library.fake_scratch.restype = ctypes.c_void_p
        self.ops = getattr(torch.ops, attn.op.NAMESPACE)
        self.variants = attn.op.VARIANTS

    def set(self, capability: int = 90, answer: int = 0) -> None:
        self.library.fake_set(capability, answer)

    def run(self, q, k, v, causal: int = 0, lengths=None) -> str:
        """The unit that ran."""
        self.ops.forward.default(q, k, v, lengths, 0.25, causal)
        return self.library.fake_unit().decode()

    def chosen(self, q, k, v, causal: int = 0) -> tuple[str, str]:
        """The unit that `path` announces, and why."""
        row, why = self.ops.choice.default(q, k, v, causal)
        if row < 0:
            return "sm80", why
        return self.variants[row].unit, why


@pytest.fixture(scope="module")
def fakes(packages, tmp_path_factory):
    """Builds the fake of a package that was compiled for the given macros."""
    out = tmp_path_factory.mktemp("fakes")

    def make(name: str, *macros: str) -> Fake:
        attn = packages.imported(packages.emitted(out, name, archs=("sm90a",)))
        csrc, recipe = folder_of(attn) / "csrc", attn.op.library.__globals__["recipe"]
        text = (csrc / "binding_cuda.cpp").read_text()
        assert text.count("(TILEPROOF_NAMESPACE, CUDA, m)") == 1
        (csrc / "binding_fake.cpp").write_text(text.replace("NAMESPACE, CUDA, m)", "NAMESPACE, CPU, m)"))
        home = _cuda_headers()
        torch_home = Path(torch.__file__).parent
        flags = [w.replace("{torch}", str(torch_home)) for w in recipe._binding_flags()]
        library = out / f"{name}.so"
        done = subprocess.run(
            ["g++", *flags, "-DUSE_CUDA", *macros, "-Wall", "-Wextra", "-Werror", "-isystem", home, f"-I{csrc}",
             csrc / "binding_fake.cpp", HERE / "fake_cuda.cpp", "-shared", "-Wl,-Bsymbolic", "-o", library,
             f"-L{torch_home / 'lib'}", "-ltorch_cpu", "-lc10"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return Fake(attn, library)

    return make


def _cuda_headers() -> str:
    for home in (Path("/usr/local/cuda/include"), *Path(torch.__file__).parents[1].glob("nvidia/*/include")):
        if (home / "cuda_runtime_api.h").exists():
            return str(home)
    pytest.skip("no CUDA headers here")


@pytest.fixture(scope="module")
def built(fakes):
    return fakes("attn_fake", "-DTILEPROOF_CUDA_KERNELS=X(80, sm80)X(90, sm80)", "-DTILEPROOF_HAS_SM90A")


@pytest.fixture
def fake(built, monkeypatch):
    monkeypatch.delenv("TILEPROOF_CUDA_ARCH", raising=False)
    built.set()
    return built


def tensors(b=2, hq=4, hkv=2, nq=1100, nk=50, dtype=torch.bfloat16):
    return [torch.zeros(b, h, n, D, dtype=dtype) for h, n in ((hq, nq), (hkv, nk), (hkv, nk))]


def both(fake: Fake, *args: Any) -> tuple[str, str]:
    """What ran, after checking that `path` would have said so; and why."""
    unit, why = fake.chosen(*args)
    assert fake.run(*args) == unit
    return unit, why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mask_and_length_choose_the_kernel(fake, dtype):
    for nq, causal, unit in (
        (1, 0, "sm90a_0"), (1024, 0, "sm90a_0"), (1025, 0, "sm90a_1"), (3000, 0, "sm90a_1"),
        (1, 1, "sm90a_2"), (1025, 1, "sm90a_2"), (1024, 2, "sm90a_2"), (4096, 1, "sm90a_2"), (4097, 1, "sm90a_3"),
        (4096, 0, "sm90a_1"), (4096, 2, "sm90a_2"), (4097, 2, "sm90a_3"),
    ):  # fmt: skip
        assert both(fake, *tensors(nq=nq, dtype=dtype), causal) == (unit, "the kernel for sm_90 takes the call")


def test_a_kernel_gets_scratch_memory_of_its_own(fake):
    fake.run(*tensors())
    assert fake.library.fake_scratch() is not None
    fake.set(capability=80)
    fake.run(*tensors())
    assert fake.library.fake_scratch() is None


def test_a_device_of_another_capability_runs_the_companion(fake):
    fake.set(capability=80)
    assert both(fake, *tensors()) == ("sm80", "this build has no kernel for sm_80 alone")


def test_a_build_without_it_runs_the_companion(fakes):
    fake = fakes("attn_fake_without", "-DTILEPROOF_CUDA_KERNELS=X(90, sm80)")
    fake.set()
    assert both(fake, *tensors()) == ("sm80", "this build has no kernel for sm_90 alone")


NO_MAP = "a stride of q, k or v is 0 (an expanded dimension) or 2^40 bytes: no tensor map has it"


def test_what_no_tensor_map_expresses_runs_the_companion(fake):
    q, k, v = tensors()
    for i, one in enumerate((q, k, v)):
        for dim in range(3):
            given = [q, k, v]
            given[i] = one.narrow(dim, 0, 1).expand(one.shape)
            assert both(fake, *given) == ("sm80", NO_MAP), (i, dim)
    one_head = k[:, :1]
    assert both(fake, q, one_head.expand(k.shape), v)[0] == "sm80"
    alone = [t[:1].as_strided(t[:1].shape, (0, *t.stride()[1:])) for t in (q, k, v)]
    assert both(fake, *alone)[0] == "sm90a_1"  # a dimension of size 1 has no stride that matters


def test_strides_of_2_to_the_40_bytes_run_the_companion(fake, tmp_path):
    _, k, v = tensors(hq=1, hkv=1)
    memory = np.memmap(tmp_path / "sparse", dtype=np.int16, mode="w+", shape=(2**39 + 1100 * D,))
    home = torch.from_numpy(memory).view(torch.bfloat16)
    for stride, unit in ((2**39 - 8, "sm90a_1"), (2**39, "sm80")):
        assert both(fake, home.as_strided((2, 1, 1100, D), (stride, D, D, 1)), k, v)[0] == unit


def test_a_layout_that_is_copied_first_takes_the_copy(fake):
    wide = torch.zeros(2, 4, 1100, D + 1, dtype=torch.bfloat16)
    _, k, v = tensors()
    assert both(fake, wide[..., :D], k, v)[0] == "sm90a_1"
    turned = torch.zeros(2, 1100, 4, D, dtype=torch.bfloat16).transpose(1, 2)
    assert both(fake, turned, k, v)[0] == "sm90a_1"
    expanded = torch.zeros(2, 1, 1100, D + 1, dtype=torch.bfloat16)[..., 1:].expand(2, 4, 1100, D)
    assert both(fake, expanded, k, v)[0] == "sm90a_1"


def test_without_keys_their_strides_do_not_matter(fake):
    q, k, v = tensors(nk=0)
    assert both(fake, q, k[:, :1].expand(k.shape), v)[0] == "sm90a_1"


def test_a_driver_without_tensor_maps_is_asked_once(fakes):
    fake = fakes("attn_fake_driver", "-DTILEPROOF_CUDA_KERNELS=X(90, sm80)", "-DTILEPROOF_HAS_SM90A")
    fake.set(answer=NOT_SUPPORTED)
    args = tensors()
    assert fake.run(*args) == "sm80" and fake.library.fake_calls() == 2
    assert fake.run(*args) == "sm80" and fake.library.fake_calls() == 3
    assert fake.chosen(*args) == ("sm80", "the driver makes no tensor map")


def test_an_error_of_the_kernel_is_raised_and_not_hidden_by_the_companion(fake):
    fake.set(answer=INVALID_VALUE)
    with pytest.raises(RuntimeError, match="the attention kernel was not launched: invalid argument"):
        fake.run(*tensors())
    assert fake.library.fake_calls() == 1


def test_an_empty_call_runs_nothing(fake):
    for args in (tensors(b=0), tensors(nq=0), tensors(hq=0, hkv=0)):
        assert fake.run(*args) == ""


def test_the_variable_forces_a_target(fake, monkeypatch):
    monkeypatch.setenv("TILEPROOF_CUDA_ARCH", "sm80")
    assert both(fake, *tensors()) == ("sm80", "TILEPROOF_CUDA_ARCH=sm80")
    monkeypatch.setenv("TILEPROOF_CUDA_ARCH", "sm90a")
    assert both(fake, *tensors()) == ("sm90a_1", "TILEPROOF_CUDA_ARCH=sm90a")
    monkeypatch.setenv("TILEPROOF_CUDA_ARCH", "")
    assert both(fake, *tensors())[0] == "sm90a_1"


def test_the_variable_forces_one_kernel_at_every_length(fake, monkeypatch):
    for unit in ("sm90a_0", "sm90a_1", "sm90a_2", "sm90a_3"):
        monkeypatch.setenv("TILEPROOF_CUDA_ARCH", unit)
        for nq in (1, 1024, 1025, 4097):
            ran = both(fake, *tensors(nq=nq), int(unit in ("sm90a_2", "sm90a_3")))
            assert ran == (unit, f"TILEPROOF_CUDA_ARCH={unit}")


def refused(fake: Fake, args: Any, sentence: str) -> None:
    """The call and the question for its path are refused with the same sentence, and nothing runs."""
    fake.library.fake_set(90, 0)
    for ask in (fake.run, fake.chosen):
        with pytest.raises(ValueError) as error:
            ask(*args)
        assert sentence in str(error.value)
    assert fake.library.fake_calls() == 0


def test_a_forced_target_never_runs_another(fake, monkeypatch):
    monkeypatch.setenv("TILEPROOF_CUDA_ARCH", "sm90a")
    q, k, v = tensors()
    refused(fake, (q, k[:, :1].expand(k.shape), v), f"TILEPROOF_CUDA_ARCH=sm90a cannot take this call: {NO_MAP}")
    for unit, causal in (("sm90a_1", 1), ("sm90a_0", 2), ("sm90a_2", 0)):
        monkeypatch.setenv("TILEPROOF_CUDA_ARCH", unit)
        refused(fake, (q, k, v, causal), f"TILEPROOF_CUDA_ARCH={unit} cannot take this call: it is for another mask")
    for name in ("sm8", "sm9", "gpu", "sm90a, sm80", "SM80", "sm90a_9"):
        monkeypatch.setenv("TILEPROOF_CUDA_ARCH", name)
        units = "sm80, sm90a, sm90a_0, sm90a_1, sm90a_2, sm90a_3"
        known = f"not a target of this build on sm_90; there are {units}"
        refused(fake, (q, k, v), f"TILEPROOF_CUDA_ARCH={name}: {known}")


# ---- Gradients


def backward(fake: Fake, q, k, v, o, dout, wanted=(True, True, True), deterministic=False, dlse=None):
    """(gradients, the arguments that the kernel got, or None if none ran)."""
    before = fake.library.fake_backward_calls()
    lse = torch.zeros(q.shape[:3])
    made = fake.ops.backward.default(dout, dlse, q, k, v, o, lse, None, 0.25, 1, list(wanted), deterministic)
    args = BackwardArgs()
    fake.library.fake_backward_args(ctypes.byref(args))
    return made, args if fake.library.fake_backward_calls() > before else None


def test_gradients_are_the_companions_whatever_the_forward_kernel_was(fake):
    q, k, v = tensors()
    for flag in (False, True):
        (dq, dk, dv), args = backward(fake, q, k, v, q, q, deterministic=flag)
        assert (args.dq, args.dk, args.dv) == tuple(x.data_ptr() for x in (dq, dk, dv)) and args.deterministic == flag
        assert (args.q, args.o, args.dout) == (q.data_ptr(),) * 3 and args.dlse is None
        assert (args.B, args.Hq, args.Hkv, args.Nq, args.Nk, args.causal) == (2, 4, 2, 1100, 50, 1)
    assert fake.library.fake_scratch() is not None
    (dq, dk, dv), args = backward(fake, q, k, v, q, q, (False, True, False), dlse=torch.zeros(2, 4, 1100).mT.mT)
    assert dq.shape == dv.shape == (0,) and (args.dq, args.dv) == (None, None) and args.dk == dk.data_ptr()
    assert list(args.dlse_stride) == [4400, 1100, 1]


def test_gradient_kernels_get_rows_in_one_piece_and_aligned(fake):
    q, k, v = tensors()
    row = torch.zeros(2, 4, 1100, 1, dtype=torch.bfloat16)
    turned = torch.zeros(2, 4, D, 1100, dtype=torch.bfloat16).mT
    shifted = torch.zeros(q.numel() + 1, dtype=torch.bfloat16)[1:].view(q.shape)
    for dout in (row.expand(q.shape), turned, shifted, torch.zeros((), dtype=torch.bfloat16).expand(q.shape)):
        _, args = backward(fake, q, k, v, shifted, dout)
        assert args.dout != dout.data_ptr() and args.o != shifted.data_ptr()
        assert args.dout % 16 == args.o % 16 == 0
        assert list(args.dout_stride) == [*dout.contiguous().stride()] and list(args.o_stride) == [*q.stride()[:3]]
    heads = torch.zeros(2, 1100, 4, D, dtype=torch.bfloat16).transpose(1, 2)
    _, args = backward(fake, q, k, v, heads, heads)
    assert args.dout == args.o == heads.data_ptr() and list(args.dout_stride) == [*heads.stride()]


def test_gradients_without_a_pair_are_zero_and_run_nothing(fake):
    for sizes in ({"nq": 0}, {"nk": 0}, {"b": 0}, {"hq": 0}, {"hq": 0, "hkv": 0}):
        q, k, v = tensors(**sizes)
        made, args = backward(fake, q, k, v, q, q)
        assert args is None and [x.shape for x in made] == [q.shape, k.shape, v.shape]
        assert not any(x.any() for x in made)


def test_an_error_of_the_gradient_kernel_is_raised(fake):
    fake.set(answer=INVALID_VALUE)
    q, k, v = tensors()
    with pytest.raises(RuntimeError, match="the backward attention kernel was not launched: invalid argument"):
        backward(fake, q, k, v, q, q)


def test_path_back_names_the_companions_kernel(hopper, monkeypatch):
    q = torch.empty(1, 2, 100, D, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(hopper.op, "capability_of", lambda device: 90)
    told = hopper.path(q, q, q, backward=True)
    assert (told["target"], told["unit"], told["dtype"]) == ("sm80", "sm80", "bf16")


def test_path_gives_the_row_its_plan_and_the_reason(hopper, monkeypatch):
    q = torch.empty(1, 2, 100, D, dtype=torch.bfloat16, device="meta")
    answer = [(-1, "because")]
    monkeypatch.setattr(hopper.op, "_load", lambda kind: None)
    monkeypatch.setattr(hopper.op, "capability_of", lambda device: 90)
    library = torch.library.Library(hopper.op.NAMESPACE, "IMPL")
    library.impl("choice", lambda q, k, v, causal: answer[0], "Meta")
    assert hopper.path(q, q, q) == {
        "target": "sm80", "isa": "sm80", "dtype": "bf16", "arithmetic": "reference", "unit": "sm80",
        "causal": "any", "length_class": "any", "br": 16, "bc": 16, "plan": {"br": 16, "bc": 16}, "why": "because",
    }  # fmt: skip
    answer[0] = (2, "it can")
    got = hopper.path(q, q, q)
    assert [got[name] for name in ("target", "unit", "causal", "length_class", "br")] == [
        "sm90a", "sm90a_0", "full", "short", 8,
    ]  # fmt: skip
    assert got["why"] == "it can"
