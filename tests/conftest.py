"""`pytest` without a path runs the whole suite, on two workers where pytest-xdist is installed; what all tests share.

One worker takes nearly twice as long. A file stays with one worker, since its tests share packages that they compile.
A path, `-n`, `-m`, `--pdb` or `--trace` on the command line is left as it is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

WORKERS = 2
# Workers share the processors. A thread that waits by spinning, as those of OpenMP and OpenBLAS do unless told, takes a
# processor from the other worker: torch's and NumPy's parts of the tests then cost up to twice the processor time.
# Read when the libraries are loaded, so set before anything imports them; a value of the user's stands.
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Sets what `-n 2 --dist loadfile` would."""
    is_worker = hasattr(config, "workerinput")
    is_whole = config.args_source is not config.ArgsSource.ARGS
    asked = getattr(config.option, "numprocesses", 0)  # no such option without the plugin
    words = ("markexpr", "usepdb", "trace")  # `-m gpu`: one GPU for one process. `-p no:debugging`: no usepdb
    has_choice = any(getattr(config.option, word, False) for word in words)
    if is_whole and asked is None and not is_worker and not has_choice:
        config.option.numprocesses, config.option.dist = WORKERS, "loadfile"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """Copies a package of the user's cache into a folder of the test's, as it was emitted: a certificate that some
    earlier run left in the cache stays there, and what the test writes reaches nobody else."""

    def copy(package: Path, name: str = "") -> Path:
        without = shutil.ignore_patterns("certificate.json")
        return shutil.copytree(package, tmp_path / (name or package.name), ignore=without)

    return copy
