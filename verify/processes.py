"""Run a command with a time limit that holds for the processes that it starts as well.

compute-sanitizer and pytest start others, which keep the pipe open: `subprocess.run` kills the first one alone and then
waits for the end of the pipe, which is when the last of them is done.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

OUT_OF_TIME = 124  # the exit code of a command that was stopped, as of timeout(1)


def run(
    words: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None, cwd: Path | None = None,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run `words` to its end, or stop it and all that it started after so many seconds, with exit code OUT_OF_TIME.

    What was said until then is kept. merged: stderr goes where stdout goes.
    """
    with subprocess.Popen(
        words, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        code: int | None = None
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = OUT_OF_TIME
            _stop(process)
            out, err = process.communicate()
        except BaseException:
            _stop(process)
            raise
    return subprocess.CompletedProcess(list(words), process.returncode if code is None else code, out, err or "")


def _stop(process: subprocess.Popen[str]) -> None:
    """Kill the whole group of a process; it may be over already."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
