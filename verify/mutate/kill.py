"""How a mutant died, or that it did not: what every target answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verify.mutate.mutant import Mutant

# The checks, in the words of the report.
BOUND = "err/bound"
SPECIAL = "special value"
INVARIANT = "invariant of spec"
BITS = "bits of a rounding"
FINDING = "finding of the emulator"
ERROR = "error"  # an exception, a crash, a compiler's refusal or no end
CHECKS = (BOUND, SPECIAL, INVARIANT, BITS, FINDING, ERROR)


@dataclass(frozen=True)
class Kill:
    """The first check that failed, on which probe."""

    check: str
    probe: str
    ratio: float | None  # err/bound, where that is the check; inf for NaN or an infinity in place of a number
    message: str


@dataclass(frozen=True)
class Result:
    """What became of one mutant."""

    target: str
    mutant: Mutant
    kill: Kill | None
    probes: int  # how many were run
    seconds: float
    form: str = ""  # of the kernel: "" for the one that is shipped, "debug" for float32 outputs
    wants: str | None = None  # the check that has to notice; None: any

    @property
    def noticed(self) -> bool:
        """Whether a check that counts has noticed it."""
        return self.kill is not None and self.wants in (None, self.kill.check)

    @property
    def holds(self) -> bool:
        """Noticed; or not, as an equivalent one has to be."""
        return self.noticed == (self.mutant.equivalent is None)

    def describe(self) -> dict[str, Any]:
        kill = self.kill
        ratio = None if kill is None or kill.ratio is None else float(f"{kill.ratio:.3g}")
        return {
            "number": self.mutant.number,
            "name": self.mutant.name,
            "what": self.mutant.what,
            "file": self.mutant.file,
            "killed_by": kill.check if kill else None,
            "probe": kill.probe if kill else None,
            "err_over_bound": ratio if ratio is None or ratio != float("inf") else "inf",
            "message": kill.message[:200] if kill else None,
            "form": self.form,
            "probes": self.probes,
            "seconds": round(self.seconds, 2),
            "equivalent": self.mutant.equivalent,
            "holds": self.holds,
        }
