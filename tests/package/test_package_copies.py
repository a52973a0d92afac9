"""Several copies of packages in one process: what shares, what coexists, what is refused."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

D = 16


def x(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_two_copies_of_one_package_share_the_op_and_the_library(packages, attn, folder, tmp_path):
    copy = packages.imported(shutil.copytree(folder, tmp_path / "attn_copy"), "attn_copy_elsewhere")
    again = packages.imported(folder, "attn_under_another_name")
    q = x(1, 2, 5, D)
    want = attn.attention(q, q, q)
    for other in (copy, again):
        assert other.op.NAMESPACE == attn.op.NAMESPACE and other.op._forward is attn.op._forward
        assert torch.equal(other.attention(q, q, q), want)
        assert other.op._process is attn.op._process and other.path(q, q, q) == attn.path(q, q, q)
        leaf = q.clone().requires_grad_()
        (dq,) = torch.autograd.grad(other.attention(leaf, q, q).sum(), leaf)
        assert torch.equal(dq, torch.autograd.grad(attn.attention(leaf, q, q).sum(), leaf)[0])


@pytest.mark.field("R092")
def test_packages_with_different_content_coexist(packages, attn, tmp_path):
    wide = packages.imported(packages.emitted(tmp_path / "wide", "attn_test", dv=24), "attn_wide")
    fewer = packages.imported(packages.emitted(tmp_path / "few", "attn_test", dtypes=("float32",)), "attn_fewer")
    names = {m.op.NAMESPACE for m in (attn, wide, fewer)}
    assert len(names) == 3
    q, v = x(1, 2, 5, D), x(1, 2, 5, 24)
    assert wide.attention(q, q, v).shape == (1, 2, 5, 24)
    assert torch.equal(wide.attention(q, q, v)[..., :D], attn.attention(q, q, v[..., :D].contiguous()))
    assert torch.equal(fewer.attention(q, q, q), attn.attention(q, q, q))
    with pytest.raises(ValueError, match=r"no cpu kernel for float64; it has float32$"):
        fewer.attention(*[q.double()] * 3)
    with pytest.raises(ValueError, match="made for dv=16; v has dv=24"):
        attn.attention(q, q, v)


def test_a_copy_edited_by_hand_is_refused_beside_the_original(packages, attn, folder, tmp_path):
    edited = shutil.copytree(folder, tmp_path / "attn_edited")
    (edited / "csrc" / "binding.h").write_text((edited / "csrc" / "binding.h").read_text() + "// mine\n")
    with pytest.raises(ImportError, match="edited by hand"):
        packages.imported(edited, "attn_edited_copy")
    q = x(1, 1, 2, D)
    attn.attention(q, q, q)


def test_a_reload_keeps_the_registration(packages, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder.parent)
    attn = packages.imported(folder)  # the one in sys.modules, whatever other tests have imported
    op = attn.op._forward
    importlib.reload(attn.op)
    assert attn.op._forward is op
    importlib.reload(attn)
    q = x(1, 1, 2, D)
    attn.attention(q, q, q)


def test_first_calls_from_many_threads_load_once(packages, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TILEPROOF_CACHE", str(tmp_path / "cache"))
    attn = packages.imported(packages.emitted(tmp_path, "attn_threads"))
    q = x(1, 1, 3, D)
    results = []
    threads = [threading.Thread(target=lambda: results.append(attn.attention(q, q, q))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(torch.equal(r, results[0]) for r in results)
    assert capfd.readouterr().err.count("building for cpu") == 1


def test_a_cold_process_needs_nothing_of_ours(folder, cache):
    """The package in a process where spec, codegen and verify cannot be imported, and only torch's needs are there."""
    script = textwrap.dedent(f"""
        import importlib.abc, sys

        class Blocked(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("spec", "codegen", "verify", "numpy", "ninja", "click", "rich", "ml_dtypes"):
                    raise ModuleNotFoundError("blocked: " + name)

        sys.meta_path.insert(0, Blocked())
        sys.path.insert(0, {str(folder.parent)!r})
        before = set(sys.modules)
        import torch
        with_torch = set(sys.modules)
        import attn_test
        import filelock
        added = {{m.split(".")[0] for m in set(sys.modules) - with_torch}}
        q = torch.ones(1, 1, 3, 16)
        assert torch.equal(attn_test.attention(q, q, q), q)
        print(sorted(added - set(sys.stdlib_module_names)))
    """)
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) in (["attn_test"], ["attn_test", "filelock"])


def test_importing_registers_and_compiles_nothing_else(packages, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    attn = packages.imported(packages.emitted(tmp_path, "attn_import_only"))
    assert not (tmp_path / "cache").exists()
    assert attn.__all__ == ["BuildError", "attention", "build", "isas", "path"]
    assert callable(attn.build) and issubclass(attn.BuildError, RuntimeError)
