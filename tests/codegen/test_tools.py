"""Building, packing and certifying run as processes, and their failures are messages."""

from __future__ import annotations

import os
import sys

import pytest

from codegen import tools
from codegen.errors import ToolError

MAIN = """
import sys, pathlib
print("ran", *sys.argv[1:], flush=True)
if sys.argv[1] == "wheel":
    pathlib.Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    (pathlib.Path(sys.argv[2]) / "fake-1.whl").write_text("wheel")
sys.exit({code})
"""


@pytest.fixture
def package(tmp_path):
    def make(code):
        folder = tmp_path / "out" / "fake_package"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "__main__.py").write_text(MAIN.format(code=code))
        return folder

    return make


def test_a_build_runs_the_packages_own_command(package, capfd):
    tools.build(package(0), ["sm_80"])
    assert capfd.readouterr().out == "ran build --cuda-arch sm_80\n"


def test_with_json_the_output_of_a_tool_goes_to_stderr(package, capfd):
    tools.build(package(0), quiet=True)
    assert capfd.readouterr() == ("", "ran build\n")


def test_a_wheel_is_found_and_a_second_one_too_and_its_path_is_the_callers_to_print(package, tmp_path, capfd):
    folder = package(0)
    for _ in range(2):
        assert tools.wheel(folder, tmp_path / "dist") == tmp_path / "dist" / "fake-1.whl"
    assert capfd.readouterr() == ("", "")


def test_a_failing_tool_is_an_error_with_its_exit_code(package):
    with pytest.raises(ToolError, match=r"building fake_package failed \(exit 3\)"):
        tools.build(package(3))


def test_a_killed_tool_is_an_error_with_its_signal(package):
    folder = package(0)
    (folder / "__main__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ToolError, match="signal 9"):
        tools.build(folder)


def test_a_wheel_that_does_not_come_is_an_error(package, tmp_path):
    folder = package(0)
    (folder / "__main__.py").write_text("")
    with pytest.raises(ToolError, match="ended without one"):
        tools.wheel(folder, tmp_path / "dist")


def test_the_packages_folder_comes_before_what_pythonpath_had(package, monkeypatch, capfd):
    folder = package(0)
    (folder / "__main__.py").write_text("import sys; print(sys.path)")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    tools.build(folder)
    printed = capfd.readouterr().out
    assert printed.index(str(folder.parent)) < printed.index("/elsewhere")
    assert os.environ["PYTHONPATH"] == "/elsewhere"


def test_verify_hands_the_package_to_the_judge(package, monkeypatch):
    calls = []
    monkeypatch.setattr(tools, "_run", lambda command, *rest: calls.append(command))
    folder = package(0)
    tools.verify(folder, "cpu")
    assert calls == [[sys.executable, "-m", "verify", "certify", str(folder), "--device", "cpu"]]


def test_every_device_that_is_here_is_judged(tmp_path):
    assert tools.judged_devices(("cpu", "sm80"), tmp_path) == ["cpu"]
    assert tools.judged_devices(("sm80",), tmp_path) == ["cuda"]
    (tmp_path / "nvidia0").touch()
    assert tools.judged_devices(("cpu", "sm80"), tmp_path) == ["cpu", "cuda"]
    assert tools.judged_devices(("cpu",), tmp_path) == ["cpu"]
