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

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from codegen.errors import RequestError
from verify import calibrate as probes
from verify import gpu_commands, io, packages, sanitize
from verify.gpu_certificates import certify, certify_backward, certify_sm90a
from verify.gpu_packages import (
    BACKWARD,
    HOPPER,
    PACKAGES,
    SANITIZED_HOPPER,
    SPEED_TILES,
    request,
    sanitized,
    tile_request,
)
from verify.gpu_run import Session
from verify.gpu_speed import speed
from verify.gpu_tests import tests, tests_sm90a


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
