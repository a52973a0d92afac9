"""The parts of a GPU session that run pytest: each file in a process of its own, side by side."""

from __future__ import annotations

import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from codegen.errors import RequestError
from verify import gpu_run, machine
from verify.gpu_run import Session

SLOWEST_TESTS = ("test_gpu_autograd.py", "test_gpu_sm90a.py")
TESTS_SAID = 6000  # characters that are kept of what a file of tests said that failed


def tests(session: Session) -> None:
    """`pytest -m gpu`: what each test said, and what it measured."""
    _tests(session, "tests", Path("tests/gpu"))


def tests_sm90a(session: Session) -> None:
    """The tests of the wgmma kernels alone: dispatch, strides, graphs, and the same bits a thousand times."""
    _tests(session, "tests_sm90a", Path("tests/gpu/test_gpu_sm90a.py"))


def files_of_tests(where: Path) -> list[Path]:
    """The test files in a folder, or the one that `where` is; those of SLOWEST_TESTS first."""
    found = [where] if where.suffix == ".py" else sorted(where.glob("test_*.py"))
    return sorted(found, key=lambda file: (file.name not in SLOWEST_TESTS, file.name))


def _tests(session: Session, part: str, where: Path) -> None:
    """Run each file in a process of its own, side by side; the figures so far are kept whenever one ends."""
    if not (gpu_run.ROOT / where).exists():
        raise RequestError("gpu-session: the tests are not installed", "run it from a checkout")
    files = files_of_tests(gpu_run.ROOT / where)
    figures: dict[str, Any] = {
        "kind": "tests",
        "device": "cuda",
        "machine": machine.describe("cuda"),
        "command": f"python -m pytest -m gpu {where}",
        "holds": False,
    }
    ended: dict[Path, tuple[list[dict[str, Any]], str]] = {}  # its tests, and the end of what it said if it failed

    def one(file: Path) -> tuple[list[dict[str, Any]], str]:
        start, name = time.monotonic(), file.relative_to(gpu_run.ROOT).as_posix()
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "junit.xml"
            # -v: each test is a line of the output as soon as it ends, for a file whose time runs out.
            words = ["-m", "pytest", "-m", "gpu", "-v", name, f"--junitxml={report}", "-p", "no:cacheprovider"]
            done = session.command(words, most=session.left, OMP_NUM_THREADS="2", PYTHONUNBUFFERED="1")
            rows = junit(report) if report.exists() else []
        if done.returncode == 0 and rows:
            return rows, ""
        if all(row["state"] != "failed" for row in rows):  # stopped, or nothing to run: no test says so
            rows.append({"test": name, "state": "failed", "seconds": round(time.monotonic() - start, 3)})
        said = done.stdout[-TESTS_SAID:].rstrip()
        return rows, f"{name}: exit {done.returncode}\n{said}\n{done.stderr[-2000:]}".rstrip()

    with ThreadPoolExecutor(max(1, min(session.jobs, len(files)))) as pool:
        running = {pool.submit(one, file): file for file in files}
        for future in as_completed(running):
            ended[running[future]] = future.result()
            rows = [row for file in sorted(ended) for row in ended[file][0]]
            count = {state: sum(row["state"] == state for row in rows) for state in ("passed", "failed", "skipped")}
            failed = [ended[file][1] for file in sorted(ended) if ended[file][1]]
            missing = [file.relative_to(gpu_run.ROOT).as_posix() for file in sorted(files) if file not in ended]
            figures |= {
                "holds": not missing and not failed and count["passed"] > 0,
                **count,
                "tests": rows,
                "output": "\n\n".join(failed).replace(str(gpu_run.ROOT), "."),
            }
            session.keep(part, figures | ({"missing": missing} if missing else {}))


def junit(file: Path) -> list[dict[str, Any]]:
    """Name, state, seconds and recorded properties of every test in a JUnit file."""
    found = []
    for case in ElementTree.parse(file).iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        state = "failed" if bad is not None else "skipped" if case.find("skipped") is not None else "passed"
        found.append({
            "test": f"{case.get('classname')}::{case.get('name')}",
            "state": state,
            "seconds": float(case.get("time", "0")),
            **{p.get("name", ""): p.get("value") for p in case.iter("property")},
        })  # fmt: skip
    return found
