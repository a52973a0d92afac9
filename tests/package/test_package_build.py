"""The build and its cache: one compile however many ask, nothing half-built, a key of content, clear errors."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
import torch

D = 16
OBJECTS = 5  # two units per pass, and the binding


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    place = tmp_path / "own cache"  # with a space: paths are never split
    monkeypatch.setenv("TILEPROOF_CACHE", str(place))
    return place


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """A stand-in for the compiler that writes stand-in files and a log; counts the calls that compile."""
    log, script = tmp_path / "compiler.log", tmp_path / "stand-in g++"
    script.write_text(
        f"""#!/bin/sh
case "$*" in *--version*) echo "stand-in 1.0"; exit;; esac
echo "$*" >> "{log}"
sleep ${{STAND_IN_SECONDS:-0}}
while [ "$1" != -o ]; do shift; done
echo "stand-in" > "$2"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{script}'")
    return lambda: sum(" -c " in line for line in log.read_text().splitlines()) if log.exists() else 0


def in_child(action, *args) -> int:
    """Run `action` in a forked process; its exit code (negative: the signal that killed it)."""
    process = multiprocessing.get_context("fork").Process(target=action, args=args)
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def finished(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/cpu-*/cpu.so"))


def leftovers(cache: Path) -> list[Path]:
    return [p for p in cache.glob("*/.*") if p.is_dir()]


@pytest.mark.field("R091")
def test_eight_processes_with_a_cold_cache_do_one_compile(packages, folder, own_cache, compiles, monkeypatch):
    attn = packages.imported(folder, "attn_eight")
    monkeypatch.setattr(attn.op._process, "libraries", {})
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=attn.build) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 8
    assert compiles() == OBJECTS
    assert len(finished(own_cache)) == 1 and not leftovers(own_cache)


KILL_POINTS = [
    "before compiling",
    "after one object",
    "before linking",
    "after linking",
    "before renaming",
    "after renaming",
]


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_build_killed_at_any_step_never_blocks_the_next(packages, folder, own_cache, compiles, point):
    attn = packages.imported(folder, "attn_killed")
    import attn_killed.cache as cache
    import attn_killed.recipe as recipe
    import attn_killed.toolchain as toolchain

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def killed():
        run_all, rename = toolchain.run_all, Path.rename
        rounds = []

        def watched(commands, where):
            rounds.append(commands)
            if point == "before compiling" or (point == "before linking" and len(rounds) == 2):
                die()
            if point == "after one object":
                run_all(commands[:1], where)
                die()
            run_all(commands, where)
            if point == "after linking" and len(rounds) == 2:
                die()

        def watched_rename(self, to):
            if point == "before renaming":
                die()
            rename(self, to)
            die()

        recipe.toolchain.run_all = watched
        if "renaming" in point:
            Path.rename = watched_rename
        attn.build()

    assert in_child(killed) == -signal.SIGKILL
    assert len(finished(own_cache)) == (point == "after renaming")
    start = time.monotonic()
    assert in_child(attn.build) == 0
    assert time.monotonic() - start < 60
    assert len(finished(own_cache)) == 1 and not leftovers(own_cache)
    assert cache.root() == own_cache


def test_a_build_killed_while_its_compilers_run_on(packages, folder, own_cache, compiles, monkeypatch):
    """The orphaned compiler of a killed build writes into a folder that nobody reads."""
    attn = packages.imported(folder, "attn_orphans")
    monkeypatch.setenv("STAND_IN_SECONDS", "0.5")
    process = multiprocessing.get_context("fork").Process(target=attn.build)
    process.start()
    while not compiles():
        time.sleep(0.02)
    process.kill()
    process.join()
    assert in_child(attn.build) == 0
    assert len(finished(own_cache)) == 1 and not leftovers(own_cache)


@pytest.mark.parametrize("harm", ["emptied", "removed"])
def test_a_library_lost_from_the_cache_is_built_again(packages, folder, own_cache, compiles, harm):
    """Cleaners of temporary folders take files one by one."""
    attn = packages.imported(folder)
    built = attn.build()["cpu"]
    before = compiles()
    built.write_bytes(b"") if harm == "emptied" else built.unlink()
    assert attn.build()["cpu"] == built and built.stat().st_size > 0
    assert compiles() == 2 * before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"compilers": 5'])
def test_a_damaged_label_in_the_cache_is_passed_over(packages, folder, own_cache, compiles, monkeypatch, text):
    attn = packages.imported(folder)
    label = attn.build()["cpu"].parent / "build.json"
    label.write_text(text)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(attn.BuildError, match="no-such-compiler"):
        attn.build()


@pytest.mark.parametrize("cxx", ["true", "'unbalanced"])
def test_a_compiler_that_makes_nothing_publishes_nothing(packages, folder, own_cache, monkeypatch, cxx):
    monkeypatch.setenv("CXX", cxx)
    attn = packages.imported(folder)
    with pytest.raises(attn.BuildError):
        attn.build()
    assert finished(own_cache) == []


def test_a_finished_library_needs_no_lock_and_no_compiler(packages, folder, own_cache, compiles, monkeypatch):
    attn = packages.imported(folder, "attn_no_compiler")
    library = attn.build()["cpu"]
    assert not leftovers(own_cache)
    with monkeypatch.context() as patch:
        patch.setattr(attn.build.__globals__["cache"], "FileLock", None)
        assert attn.build() == {"cpu": library}
        patch.setenv("CXX", "no-such-compiler")
        assert attn.build() == {"cpu": library}
    assert compiles() == OBJECTS


@pytest.mark.field("R090")
def test_the_key_is_the_content_not_a_time_stamp(packages, folder, own_cache, compiles, tmp_path):
    first = shutil.copytree(folder, tmp_path / "one" / folder.name)
    attn = packages.imported(first, "attn_content_1")
    attn.build()
    assert compiles() == OBJECTS
    for file in first.rglob("*"):
        os.utime(file, (2**31 - 1, 2**31 - 1))
    attn.build()
    assert compiles() == OBJECTS
    source = first / "csrc" / "forward_cpu_v3.cpp"
    source.write_text(source.read_text().replace("l == 0 ? 0 :", "l == 0 ? 7 :"))
    os.utime(source, (1, 1))
    attn.build()
    assert compiles() == 2 * OBJECTS and len(finished(own_cache)) == 2


@pytest.mark.field("R092", "R102")
def test_everything_that_may_change_the_library_is_in_the_key(packages, folder, own_cache, compiles, monkeypatch):
    attn = packages.imported(folder, "attn_key")
    import attn_key.recipe as recipe

    keys = {"as it is": recipe.cpu().key}

    def changed(name, target, attribute, value):
        with monkeypatch.context() as patch:
            patch.setattr(target, attribute, value)
            keys[name] = recipe.cpu().key

    changed("torch version", torch, "__version__", "2.99.0")
    changed("torch commit", torch.version, "git_version", "0" * 40)
    changed("C++ ABI", torch, "compiled_with_cxx11_abi", lambda: False)
    changed("flags", recipe, "KERNEL_FLAGS", ("-O2",))
    changed("flags of one unit", recipe, "ISA_FLAGS", {**recipe.ISA_FLAGS, "v3": ("-mavx2",)})
    changed("content", recipe.contents, "fingerprint", lambda: "another")
    changed("machine", recipe.platform, "machine", lambda: "aarch64")
    compiler = recipe.toolchain.cxx()
    changed("compiler version", recipe.toolchain, "cxx", lambda: compiler._replace(version="g++ 99"))
    changed("compiler path", recipe.toolchain, "cxx", lambda: compiler._replace(command=("/elsewhere/g++",)))
    assert len(set(keys.values())) == len(keys)
    assert attn.build()["cpu"].parent.name == f"cpu-{keys['as it is']}"


@pytest.mark.field("R102")
def test_another_torch_builds_again(packages, folder, own_cache, compiles, monkeypatch):
    attn = packages.imported(folder, "attn_torch")
    old = attn.build()
    monkeypatch.setattr(torch.version, "git_version", "0" * 40)
    assert attn.build() != old and compiles() == 2 * OBJECTS


@pytest.mark.parametrize("variable, inside", [("TORCH_EXTENSIONS_DIR", ""), ("XDG_CACHE_HOME", "tileproof")])
def test_where_the_cache_is(packages, folder, tmp_path, monkeypatch, variable, inside):
    packages.imported(folder, "attn_where")
    import attn_where.cache as cache

    for name in ("TILEPROOF_CACHE", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.root() == tmp_path / ".cache" / "tileproof"
    monkeypatch.setenv(variable, str(tmp_path / "place"))
    assert cache.root() == tmp_path / "place" / inside
    monkeypatch.setenv("TILEPROOF_CACHE", "~/mine")
    assert cache.root() == tmp_path / "mine"
    monkeypatch.setenv("TILEPROOF_CACHE", " ")
    assert cache.root() == tmp_path / "place" / inside


def test_a_cache_that_cannot_be_written_says_so(packages, folder, tmp_path, monkeypatch):
    attn = packages.imported(folder, "attn_unwritable")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEPROOF_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        attn.BuildError, match=r"cannot write to the cache .*; set TILEPROOF_CACHE to a folder that can"
    ):
        attn.build()


@pytest.mark.field("R101")
@pytest.mark.parametrize("value, sentence", [
    ("no-such-compiler -m64", "CXX='no-such-compiler -m64' is not a command; the kernels need a C++17 compiler"),
    (None, "no C++ compiler: neither g++ nor c++ is on PATH; install g++"),
])  # fmt: skip
def test_without_a_compiler(packages, folder, own_cache, tmp_path, monkeypatch, value, sentence):
    attn = packages.imported(folder, "attn_no_cxx")
    if value is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CXX", value)
    with pytest.raises(attn.BuildError) as caught:
        attn.build()
    assert str(caught.value).startswith(sentence)
    assert not finished(own_cache) and not leftovers(own_cache)


def test_a_compiler_that_fails_shows_its_command_and_output(packages, own_cache, tmp_path):
    broken = packages.emitted(tmp_path, "attn_broken")
    source = broken / "csrc" / "forward_cpu_v3.cpp"
    source.write_text(source.read_text() + "#error out of tea\n")
    attn = packages.imported(broken)
    with pytest.raises(attn.BuildError) as caught:
        attn.build()
    assert "forward_cpu_v3.cpp" in str(caught.value) and "out of tea" in str(caught.value)
    assert not finished(own_cache) and not leftovers(own_cache)


@pytest.mark.parametrize("system, machine", [("darwin", "arm64"), ("linux", "riscv64"), ("win32", "AMD64")])
def test_other_platforms_get_one_sentence(packages, folder, monkeypatch, system, machine):
    attn = packages.imported(folder, "attn_elsewhere")
    module = attn.build.__globals__
    monkeypatch.setattr(module["sys"], "platform", system)
    monkeypatch.setattr(module["platform"], "machine", lambda: machine)
    want = f"^the kernels are for Linux on x86-64 and aarch64; this is .* on {machine}$"
    with pytest.raises(attn.BuildError, match=want):
        attn.build()


def test_an_old_torch_gets_one_sentence(packages, folder, monkeypatch):
    attn = packages.imported(folder, "attn_old_torch")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(attn.BuildError, match=r"^the kernels need torch 2\.10 or later; this is 2\.9\.1\+cpu$"):
        attn.build()


def test_what_was_built_is_on_record(packages, folder, own_cache, compiles, capfd):
    attn = packages.imported(folder, "attn_record")
    library = attn.build()["cpu"]
    assert capfd.readouterr().err.splitlines() == [
        f"attn_test: building for cpu (v3, baseline) with {attn.build.__globals__['recipe'].toolchain.cxx().version} "
        f"(once, into {own_cache})"
    ]
    assert sorted(p.name for p in library.parent.iterdir()) == ["build.json", "cpu.so"]
    record = json.loads((library.parent / "build.json").read_text())
    assert record["torch"][0] == str(torch.__version__) and record["content"] == attn.op.contents.fingerprint()


def command(folder, *flags, parent=""):
    """`python -m PACKAGE build` in a process of its own. parent: "project." if the folder lies in a package."""
    line = [sys.executable, *flags, "-m", parent + folder.name, "build"]
    where = folder.parents[parent.count(".")]
    return subprocess.run(line, cwd=where, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_builds_without_importing_torch(folder, own_cache, compiles):
    done = command(folder, "-X", "importtime")
    assert done.returncode == 0 and compiles() == OBJECTS
    modules = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "attn_test.recipe" in modules and "attn_test.op" not in modules
    assert not {name for name in modules if name.split(".")[0] == "torch"}


def test_a_first_call_finds_what_the_command_has_built(packages, folder, own_cache, compiles):
    """The key that is made without torch is the key that is made with it."""
    kind, file = command(folder).stdout.strip().split(" ", 1)
    assert kind == "cpu" and packages.imported(folder).build() == {"cpu": Path(file)}
    assert compiles() == OBJECTS


def test_the_command_runs_where_a_parent_package_takes_names_from_this_one(folder, own_cache, tmp_path):
    """A vendored copy: Python imports the parent before this package, which is then imported as by its own command."""
    vendored = shutil.copytree(folder, tmp_path / "project" / folder.name)
    (tmp_path / "project" / "__init__.py").write_text(f"from .{folder.name} import attention, path; print(path)\n")
    done = command(vendored, parent="project.")
    assert done.returncode == 0 and done.stdout.startswith("<function path"), done.stderr
    assert done.stdout.splitlines()[1].startswith("cpu ")
    (tmp_path / "project" / "__init__.py").write_text(f"from .{folder.name} import no_such_name\n")
    assert "ImportError: cannot import name 'no_such_name'" in command(vendored, parent="project.").stderr


@pytest.mark.parametrize("version_file", [None, "__version__ = '2.10.0'\n"])
def test_a_torch_that_is_not_laid_out_as_a_release_is_imported(folder, tmp_path, version_file):
    """Such as an editable one, whose version.py lies elsewhere."""
    torch_folder = tmp_path / "torch"
    torch_folder.mkdir()
    (torch_folder / "__init__.py").write_text(
        "from types import SimpleNamespace\n"
        "__version__, version = '2.10.0', SimpleNamespace(git_version='abc', cuda='13.0', hip=None)\n"
        "def compiled_with_cxx11_abi(): return True\n"
    )
    if version_file is not None:
        (torch_folder / "version.py").write_text(version_file)
    script = "import sys; sys.path.insert(0, sys.argv[1]); import installed_torch; print(*installed_torch.facts()[1:])"
    line = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "2.10.0 abc True 13.0 None\n", done.stderr


def test_the_facts_of_torch_do_not_depend_on_its_import(packages, folder, monkeypatch):
    packages.imported(folder, "attn_facts")
    import attn_facts.installed_torch as installed_torch

    imported = installed_torch.facts()
    monkeypatch.delitem(sys.modules, "torch")
    assert installed_torch.facts() == imported and "torch" not in sys.modules
    assert (imported.folder / "include" / "torch" / "csrc" / "stable").is_dir()


@pytest.mark.parametrize("driver", [False, True])
def test_torch_is_asked_for_gpus_where_there_is_a_driver(folder, driver):
    script = f"""if True:
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("installed_torch", {str(folder / "installed_torch.py")!r})
        installed_torch = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(installed_torch)
        installed_torch._has_nvidia_driver = lambda: {driver}
        print(installed_torch.facts().hip is None, installed_torch.sees_a_gpu(), "torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd="/", capture_output=True, text=True,
                          check=False, timeout=120)  # fmt: skip
    not_hip, sees, imported = done.stdout.split()
    assert imported == str(driver or not_hip == "False")
    assert sees == str(imported == "True" and torch.cuda.is_available())


def test_the_driver_is_looked_for_as_the_cuda_runtime_does(packages, folder, monkeypatch):
    packages.imported(folder, "attn_driver")
    import attn_driver.installed_torch as installed_torch

    names = []
    with monkeypatch.context() as patch:
        patch.setattr(installed_torch.ctypes, "CDLL", names.append)
        assert installed_torch._has_nvidia_driver() and names == ["libcuda.so.1"]
    if torch.cuda.is_available():
        assert installed_torch._has_nvidia_driver()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "asked")
    assert installed_torch.sees_a_gpu() == "asked"  # torch is imported: what it says holds


def test_without_torch_the_command_says_what_an_import_says(folder, own_cache, tmp_path):
    """filelock alone on the path: an environment that torch was never installed in."""
    site = tmp_path / "site"
    shutil.copytree(Path(filelock.__file__).parent, site / "filelock")
    (site / folder.name).symlink_to(folder)
    line = [sys.executable, "-S", "-m", folder.name, "build"]
    done = subprocess.run(line, cwd=site, capture_output=True, text=True, check=False, timeout=120,
                          env={**os.environ, "PYTHONPATH": ""})  # fmt: skip
    assert done.returncode == 1 and done.stderr.endswith("ModuleNotFoundError: No module named 'torch'\n")


@pytest.mark.parametrize("module", ["app", "app.train"])
def test_a_program_started_with_m_gets_the_whole_package(folder, tmp_path, module):
    """Python is still looking for its module when the package is imported, as it is for the package's own command."""
    app = tmp_path / "app"
    app.mkdir()
    (app / "__init__.py").write_text("from attn_test import attention\n")
    for name in ("__main__", "train"):
        (app / f"{name}.py").write_text("import attn_test; print(callable(attn_test.attention))\n")
    line = [sys.executable, "-m", module, "attn_test", "build"]
    environment = {**os.environ, "PYTHONPATH": f"{folder.parent}{os.pathsep}{tmp_path}"}
    done = subprocess.run(line, cwd="/", env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "True\n", done.stderr
