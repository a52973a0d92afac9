"""Run a case in the emulator: the probe's text compiled by g++, its arrays registered, checked as any kernel."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from verify.conformance import suite
from verify.conformance.case import Array, Case, Host, Input, Output
from verify.emulator import build
from verify.emulator.emulator import Emulator, Run, Schedule, guarded_copy


@lru_cache(maxsize=16)
def emulator(source: str) -> Emulator:
    """The emulator of one probe file.

    Raises: ToolError when it does not compile.
    """
    return Emulator(build.library(suite.PROBES / source, includes=[suite.include_folder()]))


def run(case: Case, schedule: Schedule) -> tuple[Run, dict[str, Array]]:
    """What the emulator found and counted, and the outputs."""
    machine = emulator(case.source)
    machine.clear()
    machine.configure(schedule)
    words: list[object] = []
    outputs: dict[str, Array] = {}
    for number, argument in enumerate(case.arguments):
        if isinstance(argument, Input | Output):
            array = guarded_copy(argument.array if isinstance(argument, Input) else argument.before)
            if isinstance(argument, Output):
                outputs[argument.name] = array
            machine.register(f"argument {number}", array, writable=isinstance(argument, Output))
            words.append(array)
        else:
            words.append(ctypes.byref(argument.structure) if isinstance(argument, Host) else argument)
    return machine.launch(case.function, *words), outputs
