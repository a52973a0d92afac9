"""The GPU session without a GPU: files of tests side by side, and what a session that is cut short keeps."""

from __future__ import annotations

import json
import time

import pytest

from verify import gpu_packages, gpu_run, gpu_session, gpu_tests, sanitize

PASSING = "import pytest\npytestmark = pytest.mark.gpu\ndef test_first():\n    pass\n"
FILES = {
    "passes": PASSING + "def test_second(record_property):\n    record_property('err_over_bound', '0.5')\n",
    "skips": PASSING + "def test_second():\n    pytest.skip('no')\n",
    "fails": PASSING + "def test_second():\n    assert 'wanted' == 'got'\n",
    "hangs": PASSING + "def test_second():\n    import time\n    time.sleep(300)\n",
    "dies": PASSING + "def test_second():\n    import os\n    os._exit(9)\n",
    "unmarked": "def test_first():\n    pass\n",
}


@pytest.fixture
def session_of(tmp_path, monkeypatch):
    """Makes a session in a checkout with these files in tests/gpu; its `kept` are all figures that it kept."""
    monkeypatch.setattr(gpu_tests.machine, "describe", lambda device: {"gpu": {"model": "none"}})
    monkeypatch.setattr(gpu_run, "ROOT", tmp_path)
    (tmp_path / "tests" / "gpu").mkdir(parents=True)

    class Kept(gpu_run.Session):
        kept: list

        def keep(self, part, figures):
            super().keep(part, figures)
            self.kept.append(json.loads((self.out / f"{part}.json").read_text()))

    def make(*files, seconds=120.0):
        for name in files:
            (tmp_path / "tests" / "gpu" / f"test_{name}.py").write_text(FILES[name])
        session = Kept(tmp_path, time.monotonic() + seconds, 2, lambda text: None)
        session.kept = []
        return session

    return make


def states(figures):
    return {row["test"].removeprefix("tests.gpu."): row["state"] for row in figures["tests"]}


def test_the_rows_of_all_files_are_in_one_result(session_of):
    session = session_of("passes", "skips")
    gpu_tests.tests(session)
    first, last = session.kept
    assert last["holds"] and (last["passed"], last["failed"], last["skipped"], last["output"]) == (3, 0, 1, "")
    assert list(states(last)) == [f"test_{x}::test_{y}" for x in ("passes", "skips") for y in ("first", "second")]
    assert next(row for row in last["tests"] if row["test"].endswith("passes::test_second"))["err_over_bound"] == "0.5"
    assert last["command"] == "python -m pytest -m gpu tests/gpu" and "missing" not in last
    assert not first["holds"] and len(first["missing"]) == 1 and first["passed"] and session.held["tests"]


@pytest.mark.parametrize("bad", ["fails", "dies", "unmarked"])
def test_a_file_that_does_not_end_well_is_a_failure_with_the_end_of_its_output(session_of, bad):
    session = session_of("passes", bad)
    gpu_tests.tests(session)
    last = session.kept[-1]
    assert not last["holds"] and last["failed"] == 1 and last["passed"] == (3 if bad == "fails" else 2)
    where = "tests/gpu/test_" + bad + ".py"
    assert last["output"].startswith(f"{where}: exit ") and "test_passes" not in last["output"]
    assert states(last)["test_fails::test_second" if bad == "fails" else where] == "failed"
    assert bad != "dies" or "test_first PASSED" in last["output"]


def test_a_file_that_runs_out_of_time_says_which_tests_had_ended(session_of):
    for seconds in (5.0, 60.0):  # to start pytest takes one second, on a machine with much else to do many
        session = session_of("hangs", seconds=seconds)
        gpu_tests.tests(session)
        last = session.kept[-1]
        if "test_first PASSED" in last["output"]:
            break
    assert not last["holds"] and states(last) == {"tests/gpu/test_hangs.py": "failed"}
    assert "test_first PASSED" in last["output"] and "test_second PASSED" not in last["output"]
    assert "exit 124" in last["output"] and last["output"].endswith("out of time")


def test_the_slow_files_start_first():
    names = [file.name for file in gpu_tests.files_of_tests(gpu_run.ROOT / "tests" / "gpu")]
    assert set(gpu_tests.SLOWEST_TESTS) == set(names[:2]) and names[2:] == sorted(names[2:])
    alone = gpu_run.ROOT / "tests" / "gpu" / "test_gpu_sm90a.py"
    assert gpu_tests.files_of_tests(alone) == [alone]


def test_the_sanitizers_keep_every_report_and_have_all_the_jobs(session_of, monkeypatch):
    session, asked = session_of(), {}

    def run(folders, *, keep, **words):
        asked.update(words)
        keep({"holds": False, "clean": [1]})
        return {"holds": True, "clean": [1, 2]}

    monkeypatch.setattr(sanitize, "run", run)
    monkeypatch.setattr(gpu_session, "sanitized", list)
    gpu_session.sanitizers(session)
    assert [figures["holds"] for figures in session.kept] == [False, True]
    assert asked["jobs"] == session.jobs and 0 < asked["seconds"] <= 120 and asked["plant"]
    assert asked["faults"] == sanitize.FAULTS and gpu_packages.SANITIZED
