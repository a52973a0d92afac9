"""All that a claim about the CUDA kernels needs from a machine with a GPU, in one command with a time limit.

    python -m verify gpu-session --out results

Parts that are timings, or counters that see all of the GPU, run first and each alone: `speed`, `io`, and those of
gpu_commands.py that time something. Then at the same time the others: `certify` (every package of PACKAGES in
gpu_packages.py, both dtypes), `certify_sm90a` (of HOPPER), `certify_backward` (of BACKWARD), `tests` and `tests_sm90a`
(pytest -m gpu), `sanitize` and `sanitize_sm90a` (with planted faults), `calibrate`, `training`, `memory`. Without
--part it is those of USUAL. Each writes its file to the output folder when it ends; the certificates after every
package, the tests after every file of them, the sanitizers after every report, and what is not there yet does not hold:
a session that is cut short keeps what it has.

Holds always: `holds` of every result file is computed from its figures, and the command's exit code from them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from codegen.devices import DEVICES
from codegen.errors import RequestError
from verify import (
    bench_cuda,
    bench_report,
    gpu_commands,
    io,
    kernel_hashes,
    machine,
    packages,
    peers,
    processes,
    sanitize,
)
from verify import calibrate as probes
from verify.bench import Cell, Timing, summary
from verify.gpu_packages import (
    BACKWARD,
    DTYPES,
    HOPPER,
    PACKAGES,
    SANITIZED_HOPPER,
    SPEED_BUDGET,
    SPEED_TILES,
    request,
    sanitized,
    tile_request,
)

ROOT = Path(__file__).resolve().parents[1]
CASES, BACKWARD_CASES = 56, 44  # per dtype

SLOWEST_TESTS = ("test_gpu_autograd.py", "test_gpu_sm90a.py")
TESTS_SAID = 6000  # characters that are kept of what a file of tests said that failed

# Speed: 16384 tokens of hidden size 2048.
TOKENS, HIDDEN = 16384, 2048
SPEED_LENGTHS = (4096, 8192, 16384)
SPEED_PEERS = ("fa2", "cudnn", "efficient")
ROUNDS = 9


def identity(folder: Path) -> dict[str, Any]:
    """What a figure belongs to: the package, and its kernels by a hash of their code.

    A change elsewhere in the package changes its digest and not its kernels: see `kernel_hashes`.
    """
    return {"package": folder.name, "digest": packages.plan(folder)["digest"], "kernels": kernel_hashes.of(folder)}


@dataclass
class Session:
    """One run: where results go, when it ends, how to say what happens."""

    out: Path
    deadline: float
    jobs: int
    say: Callable[[str], None]
    held: dict[str, bool] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def keep(self, part: str, figures: dict[str, Any]) -> None:
        """Write the result file of a part."""
        self.held[part] = bool(figures["holds"])
        packages.write_json(self.out / f"{part}.json", figures)

    def command(self, words: Sequence[str], *, most: float, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one of our own commands; it is stopped when the session's time ends, with return code 124."""
        start = time.monotonic()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path, **environment}
        limit = max(1.0, min(most, self.left))
        done = processes.run([sys.executable, *words], seconds=limit, env=env, cwd=ROOT)
        if done.returncode == processes.OUT_OF_TIME:
            done.stderr += "out of time"
        self.say(f"{time.monotonic() - start:6.1f} s, exit {done.returncode}: {' '.join(words[:6])}")
        return done


def run(out: Path, *, parts: Sequence[str] = (), seconds: float, jobs: int | None, say: Callable[[str], None]) -> bool:
    """Run the parts; returns whether all holds.

    Raises: RequestError for an unknown part, or without a GPU.
    """
    import torch

    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise RequestError(f"--part {unknown[0]}: unknown", f"known: {', '.join(PARTS)}")
    if not torch.cuda.is_available() and not (parts and set(parts) <= WITHOUT_GPU):
        raise RequestError("gpu-session: torch sees no CUDA device here", "run it on a machine with an NVIDIA GPU")
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    hopper = [part for part in parts if part in ON_HOPPER]
    if hopper and not is_hopper:
        raise RequestError(f"--part {hopper[0]}: this GPU is not of compute capability 9.0")
    usual = [part for part in USUAL if is_hopper or part not in ON_HOPPER]
    wanted = [part for part in PARTS if part in (parts or usual)]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--out {out}: no folder can be made there: {error.strerror}", "try out") from None
    session = Session(out, time.monotonic() + seconds, jobs or len(os.sched_getaffinity(0)), say)
    build_all(session, wanted)
    for alone, group in ((True, ALONE), (False, [part for part in PARTS if part not in ALONE])):
        chosen = [part for part in group if part in wanted]
        with ThreadPoolExecutor(1 if alone else max(1, len(chosen))) as pool:
            for part, done in [(part, pool.submit(PARTS[part], session)) for part in chosen]:
                try:
                    done.result()
                except Exception as error:  # the other parts go on; this one does not hold
                    session.held[part] = False
                    say(f"{part}: {type(error).__name__}: {error}")
    say("; ".join(f"{part} {'holds' if session.held.get(part) else 'DOES NOT HOLD'}" for part in wanted))
    return all(session.held.get(part, False) for part in wanted)


def build_all(session: Session, wanted: Sequence[str]) -> None:
    """Emit and compile everything that the parts need, all cores at once: they find it in the cache."""
    requests = []
    if "speed" in wanted:
        requests += [tile_request(d, tile) for d, tiles in SPEED_TILES.items() for tile in tiles]
    if {"certify", "tests", "io"} & set(wanted):
        requests += list(PACKAGES.values())
    if {"certify_sm90a", "tests_sm90a"} & set(wanted):
        requests += list(HOPPER.values())
    if "certify_backward" in wanted:
        requests += list(BACKWARD.values())
    folders = [request(words) for words in requests]
    watched: list[Path] = []
    if "sanitize" in wanted:
        watched += sanitized() + [fault.package() for fault in sanitize.FAULTS]
    if "sanitize_sm90a" in wanted:
        watched += [*map(request, SANITIZED_HOPPER), *(fault.package() for fault in sanitize.WGMMA_FAULTS)]
    start = time.monotonic()
    modules = {folder: packages.load(folder) for folder in dict.fromkeys((*folders, *watched))}
    with ThreadPoolExecutor(session.jobs) as pool:
        jobs = [pool.submit(packages.part(m, "build").library, "cuda") for m in modules.values()]
        jobs += [pool.submit(sanitize.launchers, folder) for folder in dict.fromkeys(watched)]
        for job in jobs:
            job.result()
    session.say(f"{time.monotonic() - start:6.1f} s: built {len(modules)} packages")


def certify(session: Session) -> None:
    """Certify every package of PACKAGES."""
    _certify(session, "certify", PACKAGES)


def certify_sm90a(session: Session) -> None:
    """Certify every package of HOPPER: each of their kernels must have been heard."""
    _certify(session, "certify_sm90a", HOPPER)


def certify_backward(session: Session) -> None:
    """Certify every package of BACKWARD, gradients included."""
    _certify(session, "certify_backward", BACKWARD, BACKWARD_CASES)


def unheard(folder: Path, stated: dict[str, Any]) -> list[str]:
    """The kernels in code for one capability that a package has and its certificate says nothing of."""
    rows = [v for v in packages.plan(folder)["variants"] if v["target"] in DEVICES and DEVICES[v["target"]].is_exact]
    wanted = dict.fromkeys(f"{v['unit']}/{v['dtype']}" for v in rows)
    heard = {row["path"] for row in stated["paths"]}
    return [path for path in wanted if path not in heard]


def _certify(session: Session, part: str, table: dict[str, dict[str, Any]], cases: int = CASES) -> None:
    """Certify packages in processes of their own; the figures of all in one file."""
    figures: dict[str, Any] = {
        "kind": "certificates",
        "device": "cuda",
        "machine": machine.describe("cuda"),
        "command": f"python -m verify certify PACKAGE --device cuda --cases {cases}",
        "holds": False,
        "cases": 0,
        "violations": 0,
        "packages": {},
    }

    def one(name: str) -> tuple[str, Path, dict[str, Any] | None, str]:
        folder = request(table[name])
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "certificate.json"
            words = ["-m", "verify", "certify", str(folder), "--device", "cuda", "--cases", str(cases)]
            done = session.command(
                [*words, "--out", str(file)], most=400.0, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"
            )
            stated = json.loads(file.read_text()) if file.exists() else None
        return name, folder, stated, done.stderr

    with ThreadPoolExecutor(min(session.jobs, len(table))) as pool:
        for job in [pool.submit(one, name) for name in table]:
            name, folder, stated, said = job.result()
            entry: dict[str, Any] = identity(folder)
            if stated is None:
                entry |= {"holds": False, "error": said[-2000:]}
            else:
                stated.pop("machine")
                entry |= stated | ({"messages": said[-4000:]} if stated["violations"] else {})
                silent = unheard(folder, stated)
                if silent:
                    entry |= {"holds": False, "unheard": silent}
            figures["packages"][name] = entry
            done = list(figures["packages"].values())
            figures |= {
                "cases": sum(e.get("cases", 0) for e in done),
                "violations": sum(e.get("violations", 0) for e in done),
                "holds": len(done) == len(table) and all(e["holds"] for e in done),
            }
            session.keep(part, figures)


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
    if not (ROOT / where).exists():
        raise RequestError("gpu-session: the tests are not installed", "run it from a checkout")
    files = files_of_tests(ROOT / where)
    figures: dict[str, Any] = {
        "kind": "tests",
        "device": "cuda",
        "machine": machine.describe("cuda"),
        "command": f"python -m pytest -m gpu {where}",
        "holds": False,
    }
    ended: dict[Path, tuple[list[dict[str, Any]], str]] = {}  # its tests, and the end of what it said if it failed

    def one(file: Path) -> tuple[list[dict[str, Any]], str]:
        start, name = time.monotonic(), file.relative_to(ROOT).as_posix()
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
            missing = [file.relative_to(ROOT).as_posix() for file in sorted(files) if file not in ended]
            figures |= {
                "holds": not missing and not failed and count["passed"] > 0,
                **count,
                "tests": rows,
                "output": "\n\n".join(failed).replace(str(ROOT), "."),
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


def sanitizers(session: Session) -> None:
    """The four tools on every package of SANITIZED, and on the planted faults."""
    _sanitizers(session, "sanitize", sanitized(), sanitize.FAULTS)


def sanitizers_sm90a(session: Session) -> None:
    """The same for SANITIZED_HOPPER, with the faults of the wgmma kernel."""
    _sanitizers(session, "sanitize_sm90a", [request(words) for words in SANITIZED_HOPPER], sanitize.WGMMA_FAULTS)


def _sanitizers(session: Session, part: str, folders: Sequence[Path], faults: Sequence[sanitize.Fault]) -> None:
    """Keep the figures so far after every report; they do not hold before the last one."""
    figures = sanitize.run(
        folders, plant=True, faults=faults, jobs=session.jobs, seconds=session.left,
        keep=lambda figures: session.keep(part, figures),
    )  # fmt: skip
    session.keep(part, figures)


def calibrate(session: Session) -> None:
    """`verify calibrate`: what the matrix unit and the special functions of this GPU do.

    The models' own file is written beside the figures, not into verify/calibration: the certificates of this session
    rest on what is checked in.
    """
    session.keep("calibrate", probes.run("cuda", into=session.out))


def traffic(session: Session) -> None:
    """`verify io`: bytes of every tile in the emulator against the formula, and what the GPU's counters saw."""
    folders = [request(PACKAGES[name]) for name in io.PACKAGES[:4]]  # d = 64 and 128: the counters are what is new here
    session.keep("io", io.run(folders, device="cuda"))


def speed(session: Session) -> None:
    """Time the best tile within 163 KB against torch's own backends, alternately, alone on the machine."""
    figures: dict[str, Any] = {
        "kind": "bench",
        "device": "cuda",
        "machine": machine.describe("cuda"),
        "package": f"--sram {SPEED_BUDGET} per d, sm80",
        "shapes": f"{TOKENS} tokens, {HIDDEN} columns in all heads; no GQA",
        "rounds": ROUNDS,
        "threads": 1,
        "tiles": {},
        "cells": [],
        "holds": False,
    }
    found, figures["absent"] = peers.available(SPEED_PEERS)
    some = packages.load(request(tile_request(64, SPEED_TILES[64][0])))
    gpu = bench_cuda.Gpu(bench_cuda.nvcc_of(some))

    def timer(attn: ModuleType, cell: Cell, *, rounds: int) -> Timing:
        return bench_cuda.time_group([cell], {"sm80": attn}, found, gpu=gpu, rounds=rounds)[0]

    timings = []
    for dtype in DTYPES:
        for d, tiles in SPEED_TILES.items():
            wanted = [
                Cell(dtype=dtype, d=d, n=n, causal=causal, batch=TOKENS // n, heads=HIDDEN // d)
                for n in SPEED_LENGTHS
                for causal in (False, True)
            ]

            def make(tile: bench_report.Tile | None, d: int = d) -> ModuleType:
                assert tile is not None
                return packages.load(request(tile_request(d, tile)))

            tile, means = bench_report.best_tile(make, tiles, wanted, timer=timer)
            attn = make(tile)
            figures["tiles"][f"{dtype} d={d}"] = {
                "tile": list(tile or ()),
                "tried": {f"{br}x{bc}": mean for (br, bc), mean in means.items()},
                **identity(request(tile_request(d, tile or (0, 0)))),
            }
            for cell in wanted:
                timings.append(timer(attn, cell, rounds=ROUNDS))
                row = timings[-1].describe()
                figures["cells"].append(row)
                session.say(f"{cell}, tile {tile}: {row['ours_gflops'] / 1e3:.0f} TFLOP/s, "
                            + ", ".join(f"{p} {row[f'vs_{p}']['median']:.3f}" for p in timings[-1].peers))  # fmt: skip
            names = list(dict.fromkeys(name for t in timings for name in t.peers))
            figures["summary"] = {name: summary(timings, name) for name in names}
            figures["load_at_the_end"] = machine.load()
            figures["holds"] = len(timings) == len(DTYPES) * len(SPEED_TILES) * len(wanted)
            session.keep("speed", figures)


def command(part: str) -> Callable[[Session], None]:
    """A part of gpu_commands.COMMANDS."""
    return lambda session: gpu_commands.run(session, part)


PARTS: dict[str, Callable[[Session], None]] = {
    "first_call": gpu_commands.first_call,
    "speed": speed,
    "io": traffic,
    "tune": gpu_commands.tune,
    **{part: command(part) for part in gpu_commands.COMMANDS},
    "certify": certify,
    "certify_sm90a": certify_sm90a,
    "certify_backward": certify_backward,
    "tests": tests,
    "tests_sm90a": tests_sm90a,
    "sanitize": sanitizers,
    "sanitize_sm90a": sanitizers_sm90a,
    "calibrate": calibrate,
}
# Parts that share the machine with no other: a timing, or a counter that sees all of the GPU, would be another's too.
ALONE = ("first_call", "speed", "io", "tune", "bench", "bench_paper", "forms", "bench_backward")
USUAL = ("speed", "io", "certify", "certify_sm90a", "tests", "sanitize", "calibrate")  # what a session is by default
ON_HOPPER = ("certify_sm90a", "tests_sm90a", "sanitize_sm90a", "tune", "bench", "bench_paper", "forms")
WITHOUT_GPU = frozenset({"first_call"})
