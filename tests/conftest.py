"""`pytest` without a path runs the whole suite, on two workers where pytest-xdist is installed.

One worker takes nearly twice as long. A file stays with one worker, since its tests share packages that they compile.
A path, `-n`, `-m`, `--pdb` or `--trace` on the command line is left as it is.
"""

from __future__ import annotations

import pytest

WORKERS = 2


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
