"""The emitted text itself: clean under ruff and mypy, clean C++, one exported symbol per unit, stable ABI only."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from codegen import emit, package, problem

ROOT = Path(__file__).parents[2]
VARIANTS = {
    "cpu": {"archs": ("cpu",)},
    "gpu": {"archs": ("sm80",)},
    "both": {"archs": ("cpu", "sm80", "sm86"), "dv": 24},
    "one_dtype": {"archs": ("cpu",), "dtypes": ("float64",)},
    "hopper": {"archs": ("cpu", "sm90a"), "dv": 24},
    "hopper_only": {"archs": ("sm90a",), "dtypes": ("fp16",)},
    "debug": {"archs": ("cpu", "sm80"), "debug": True},
    "whose_name_is_rather_long_0123456": {"archs": ("cpu", "sm80")},
}


@pytest.fixture(scope="module")
def emitted(packages, tmp_path_factory) -> Path:
    """A folder with one package per variant."""
    out = tmp_path_factory.mktemp("text")
    for name, request in VARIANTS.items():
        packages.emitted(out, f"attn_{name}", **request)
    return out


def run(*command, cwd=None):
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ruff_finds_nothing_to_say(emitted, tmp_path):
    # Of the planner's own packages the one whose rows name every length class.
    words = {"sram_bytes": 227 * 1024, "d": 128, "archs": ("sm90a",), "tiling": "tuned"}
    measured = emit.write_files(package.render_package(problem.make(**words), "attn_measured"), tmp_path)
    packages = [*sorted(emitted.glob("attn_*")), measured]
    run(sys.executable, "-m", "ruff", "check", "--no-cache", "--config", ROOT / "pyproject.toml", *packages)
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "--config", ROOT / "pyproject.toml", *packages)


def test_mypy_finds_nothing_to_say(emitted):
    config = emitted / "mypy.ini"  # without torch's own files, which take half a minute
    config.write_text("[mypy]\ncheck_untyped_defs = true\n[mypy-torch.*]\nfollow_imports = skip\n")
    run(sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", emitted / "mypy",
        *(x for name in VARIANTS for x in ("-p", f"attn_{name}")), cwd=emitted)  # fmt: skip


def test_every_line_is_readable(emitted):
    for file in [*emitted.glob("attn_*/*.py"), *emitted.glob("attn_*/csrc/*")]:
        text = file.read_text()
        if "Emitted by" not in text:
            continue  # of the tests' own kernels
        assert not re.search(r"[ \t]+$|\n\n\n\n", text, re.MULTILINE), file
        assert "{{" not in text.replace("{{csrc}}", "") or file.suffix != ".py", file


CXX_FLAGS = [
    "-std=c++17",
    "-fvisibility=hidden",
    "-fsyntax-only",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-DTILEPROOF_NAMESPACE=tileproof_test",
    "-DTORCH_TARGET_VERSION=0x20a000000000000ULL",
    "-isystem",
    Path(torch.__file__).parent / "include",
]


@pytest.mark.field("R104")
@pytest.mark.parametrize("sign", ["-funsigned-char", "-fsigned-char"])
@pytest.mark.parametrize("name", ["cpu", "debug"])
def test_the_binding_compiles_without_warnings(emitted, sign, name):
    run("g++", *CXX_FLAGS, sign, emitted / f"attn_{name}" / "csrc" / "binding_cpu.cpp")


@pytest.mark.field("R104")
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="needs a cross compiler for aarch64")
def test_the_binding_compiles_for_aarch64(emitted):
    run("aarch64-linux-gnu-g++", *CXX_FLAGS, emitted / "attn_cpu" / "csrc" / "binding_cpu.cpp")


def test_aarch64_builds_the_baseline_unit_only(packages, emitted, monkeypatch):
    attn = packages.imported(emitted / "attn_cpu", "attn_text_aarch64")
    recipe = attn.build.__globals__["recipe"]
    monkeypatch.setattr(recipe.platform, "machine", lambda: "aarch64")
    units = [word for step in recipe.cpu().steps for word in step if word.endswith(".cpp")]
    assert units == [f"{{csrc}}/{name}_cpu{isa}.cpp" for name, isa in
                     (("binding", ""), ("forward", "_baseline"), ("backward", "_baseline"))]  # fmt: skip


def test_the_library_uses_the_stable_c_interface_of_torch_only(attn):
    """Undefined symbols from torch are C functions; nothing is exported but what op.py calls."""
    library = attn.build()["cpu"]
    symbols = [line.split()[-2:] for line in run("nm", "-D", library).splitlines()]
    undefined = [name for kind, name in symbols if kind == "U" and "@" not in name]  # "@": of the C and C++ libraries
    assert undefined and all(re.fullmatch(r"(aoti_)?torch_\w+", name) for name in undefined), undefined
    defined = {name for kind, name in symbols if kind == "T"}
    assert {"attention_isa", "attention_isas", "attention_backward_isa"} <= defined
    assert not any("forward" in name or "attention_backward_v" in name for name in defined)


def test_debug_packages_trace_each_key_tile(packages, emitted):
    """trace: (m, l, O before the division) after each key tile of bc = 16 keys; NaN where no tile touched the row."""
    attn = packages.imported(emitted / "attn_debug")
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, generator=make, dtype=torch.float64) for h, n in ((4, 5), (2, 40), (2, 40)))
    trace_op = getattr(torch.ops, attn.op.NAMESPACE).forward_trace.default
    lengths = torch.tensor([40, 17])
    o, lse, trace = trace_op(q, k, v, lengths, 0.25, 0, 4)
    assert trace.shape == (2, 4, 5, 4, 18) and trace.dtype == torch.float64
    tiles = torch.tensor([3, 2])  # of 40 and 17 keys
    touched = torch.arange(4) < tiles[:, None]
    assert torch.equal(trace[..., 0].isnan(), ~touched[:, None, None, :].expand(2, 4, 5, 4))
    for b in range(2):
        m, l, acc = trace[b, :, :, tiles[b] - 1].split([1, 1, 16], dim=-1)
        assert torch.equal(acc / l, o[b]) and torch.equal((m + l.log())[..., 0].float(), lse[b].float())
    low = [x.bfloat16() for x in (q, k, v)]
    o, lse, trace = trace_op(*low, None, 0.25, 1, 0)
    assert o.dtype == lse.dtype == trace.dtype == torch.float32 and trace.shape == (2, 4, 5, 0, 18)
    assert torch.equal(attn.attention(*low, causal=True), o)
    assert torch.library.opcheck(trace_op, (q, k, v, lengths, 0.25, 0, 2), raise_exception=True)
    with pytest.raises(NotImplementedError):
        trace_op(q.requires_grad_(), k, v, None, 0.25, 0, 1)
    with pytest.raises(ValueError, match=r"^trace_tiles must be >= 0; got -1$"):
        trace_op(q.detach(), k, v, None, 0.25, 0, -1)
