"""Measure the arithmetic of this machine and hold it against the constants that the error bounds assume.

CPU: exp2 of the emitted vector kernels over every float32 argument, per instruction set; the matrix unit's dot
products bit by bit against a NumPy model. GPU: block length, fraction bits and rounding of mma.sync, exp2 over every
argument, log on [1, 2^24]; through the emitted wrappers, on the device at hand.

Each probe is a small C++ or CUDA file in `probes/`, compiled against the headers of a package that is emitted for the
purpose. What was measured goes to `calibration/<model>.<device>.json`, which the models read. A measurement that is
worse than the model assumes is a failure: no certificate of that path would mean anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from verify import arithmetic, calibrate_cpu, calibrate_cuda, machine, packages
from verify.probe import Probe
from verify.progress import Step, silent

QUICK = 4099  # a prime stride for --quick


def run(
    device: str, *, exhaustive: bool = True, step: Step = silent, into: Path = arithmetic.CALIBRATION
) -> dict[str, Any]:
    """Measure, write the calibration files of a run that is exhaustive and holds into `into`, return the figures.

    Raises: RequestError without the device, ToolError when a probe does not compile.
    """
    stride = 1 if exhaustive else QUICK
    probes = (calibrate_cpu if device == "cpu" else calibrate_cuda).measure(stride, step)
    stated = machine.describe(device)
    holds = all(p.holds for p in probes)
    if exhaustive and holds:
        write(probes, stated, into)
    return {
        "kind": "calibrate",
        "device": device,
        "machine": stated,
        "exhaustive": exhaustive,
        "holds": holds,
        "probes": [p.describe() for p in probes],
    }


def write(probes: Sequence[Probe], stated: dict[str, Any], into: Path) -> None:
    """One file per (arithmetic, device): the constants that were measured, and how."""
    for name, device in dict.fromkeys((p.arithmetic, p.device) for p in probes):
        mine = [p for p in probes if (p.arithmetic, p.device) == (name, device)]
        packages.write_json(
            into / f"{name}.{device}.json",
            {
                "arithmetic": name,
                "device": device,
                "constants": {key: value for p in mine for key, value in p.constants.items()},
                "machine": stated,
                "probes": [p.describe() for p in mine],
            },
        )


def table(figures: dict[str, Any]) -> Table:
    """One row per probe."""
    made = Table(title=f"arithmetic of {figures['device']}", title_justify="left")
    for name in ("model", "on", "what", "measured", "assumed", "holds"):
        made.add_column(name)
    for p in figures["probes"]:
        verdict = "yes" if p["holds"] else "[red]NO[/]"
        made.add_row(p["arithmetic"], p["device"], p["what"], f"{p['measured']:.4g}", f"{p['assumed']:.4g}", verdict)
    return made
