"""Run a command with a time limit that holds for the processes that it starts as well.

compute-sanitizer and pytest start others, which keep the pipe open: `subprocess.run` kills the first one alone and then
waits for the end of the pipe, which is when the last of them is done. They stay in the caller's process group, so that
Ctrl-C and what stops the caller reach them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

OUT_OF_TIME = 124  # the exit code of a command that was stopped, as of timeout(1)
CLOSING_S = 10.0  # for the pipe to close after all that is known was killed


def run(
    words: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None, cwd: Path | None = None,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run `words` to its end, or stop it and all that it started after so many seconds, with exit code OUT_OF_TIME.

    What was said until then is kept. merged: stderr goes where stdout goes.

    Raises: OSError when the command cannot be started.
    """
    with subprocess.Popen(
        words, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT if merged else subprocess.PIPE
    ) as process:
        code: int | None = None
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = OUT_OF_TIME
            _stop(process.pid)
            try:
                out, err = process.communicate(timeout=CLOSING_S)
            except subprocess.TimeoutExpired as late:  # one whose parent had ended before still holds the pipe
                out, err = late.stdout or b"", late.stderr or b""
        except BaseException:
            _stop(process.pid)
            raise
    said, complained = ((x or b"").decode(errors="replace") for x in (out, err))
    return subprocess.CompletedProcess(list(words), process.returncode if code is None else code, said, complained)


def _stop(pid: int) -> None:
    """Kill a process and all that it has started.

    Each is halted first: one that starts others meanwhile would leave them behind, and they would hold the pipe.
    """
    halted: list[int] = []
    try:
        while new := [one for one in (pid, *_descendants(pid)) if one not in halted]:
            for one in new:
                _send(one, signal.SIGSTOP)
            halted += new
    finally:
        for one in halted:
            _send(one, signal.SIGKILL)


def _send(pid: int, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, which)


def _descendants(pid: int) -> list[int]:
    """The processes that `pid` has started, and theirs."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that ended meanwhile
            parent = int(file.read_bytes().rpartition(b")")[2].split()[1])  # "pid (name) state parent ..."
            children.setdefault(parent, []).append(int(file.parent.name))
    found = [pid]
    for one in found:  # grows
        found += children.get(one, [])
    return found[1:]
