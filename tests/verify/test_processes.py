"""A command with a time limit: what it started ends with it, and what was said is kept."""

from __future__ import annotations

import sys
import time

from verify import processes


def test_a_command_that_ends_is_as_subprocess_has_it():
    words = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"]
    done = processes.run(words, seconds=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    assert sorted(processes.run(words, seconds=60, merged=True).stdout.split()) == ["err", "out"]


def test_a_child_that_holds_the_pipe_is_stopped_too():
    start = time.monotonic()
    done = processes.run(["sh", "-c", "echo said; sh -c 'sleep 300; true' & sleep 300; true"], seconds=1)
    assert time.monotonic() - start < processes.CLOSING_S
    assert (done.returncode, done.stdout) == (processes.OUT_OF_TIME, "said\n")


def test_a_child_that_is_started_while_the_others_are_stopped_is_stopped_too():
    forks = "import os, time\nfor _ in range(400):\n    os.fork() or time.sleep(300)\n    time.sleep(0.002)"
    start = time.monotonic()
    assert processes.run([sys.executable, "-c", forks], seconds=0.5).returncode == processes.OUT_OF_TIME
    assert time.monotonic() - start < processes.CLOSING_S  # nobody holds the pipe


def test_an_orphan_that_holds_the_pipe_does_not_hold_the_caller(monkeypatch):
    monkeypatch.setattr(processes, "CLOSING_S", 1.0)
    done = processes.run(["sh", "-c", "(sleep 20 &) ; echo said; sleep 300"], seconds=1)
    assert (done.returncode, done.stdout) == (processes.OUT_OF_TIME, "said\n")
