"""Run a function in forked children, so many at a time: what a broken kernel does to its process stays there.

The children share what the parent computed before (oracles, libraries) without copying it. A child that dies or does
not end gives a value that says so.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import selectors
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass
class _Child(Generic[Item]):
    item: Item
    pid: int
    pipe: int
    start: float
    said: bytes = b""


def each(
    items: Sequence[Item],
    function: Callable[[Item], Value],
    *,
    jobs: int,
    timeout_s: float,
    lost: Callable[[Item, str, float], Value],
) -> Iterator[tuple[Item, Value]]:
    """(item, function(item)) as they finish. lost(item, how, seconds) stands for a child that gave no value.

    Raises: what `function` raised, in the parent; the other children are stopped.
    """
    waiting, running = list(items), selectors.DefaultSelector()
    try:
        while waiting or running.get_map():
            while waiting and len(running.get_map()) < jobs:
                child = _start(waiting.pop(0), function)
                running.register(child.pipe, selectors.EVENT_READ, child)
            for key, _ in running.select(timeout=0.2):
                child = key.data
                part = os.read(child.pipe, 1 << 16)
                child.said += part
                if not part:
                    running.unregister(child.pipe)
                    yield child.item, _value(child, lost, "")
            for key in list(running.get_map().values()):
                child = key.data
                if time.monotonic() - child.start > timeout_s:
                    running.unregister(child.pipe)
                    os.kill(child.pid, signal.SIGKILL)
                    yield child.item, _value(child, lost, f"no end after {timeout_s:.0f} s")
    finally:
        for key in list(running.get_map().values()):
            os.kill(key.data.pid, signal.SIGKILL)
            os.waitpid(key.data.pid, 0)
            os.close(key.data.pipe)
        running.close()


def _start(item: Item, function: Callable[[Item], Value]) -> _Child[Item]:
    out, into = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads: the child starts none, takes none
        pid = os.fork()
    if pid:
        os.close(into)
        return _Child(item, pid, out, time.monotonic())
    status = 1
    try:
        try:
            faulthandler.disable()  # how it died is in the result
            _single_threaded()
            said = pickle.dumps((True, function(item)))
        except BaseException as error:  # it is raised again in the parent
            said = pickle.dumps((False, error))
        with os.fdopen(into, "wb") as pipe:
            pipe.write(said)
        status = 0
    finally:
        os._exit(status)


def _single_threaded() -> None:
    """The threads of the parent's OpenMP are not in the child, and waiting for them would have no end."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


def _value(child: _Child[Item], lost: Callable[[Item, str, float], Value], how: str) -> Value:
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    seconds = time.monotonic() - child.start
    if how:
        return lost(child.item, how, seconds)
    if os.WIFSIGNALED(status):
        return lost(child.item, f"the process died: {signal.Signals(os.WTERMSIG(status)).name}", seconds)
    good, value = pickle.loads(child.said)
    if not good:
        raise value
    return value
