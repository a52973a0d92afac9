"""The package `spec` with one bug in its source, imported beside the real one.

All modules of `spec` are compiled again under a name of their own, so that a bug in `masks.py` or `head.py` reaches
every algorithm, and the real package stays what it is: the judge uses it at the same time.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import spec
from verify.mutate.mutant import Mutant

_FOLDER = Path(next(iter(spec.__path__)))


def sources() -> dict[str, bytes]:
    """Path -> text of every module of `spec`."""
    return {f"spec/{file.name}": file.read_bytes() for file in sorted(_FOLDER.glob("*.py"))}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Serves the modules of one changed copy."""

    def __init__(self, alias: str, files: Mapping[str, bytes]) -> None:
        self.alias = alias
        renamed = re.compile(r"^(from|import) spec\b", re.MULTILINE)
        self.texts = {
            path.removeprefix("spec/").removesuffix(".py"): renamed.sub(rf"\1 {alias}", data.decode())
            for path, data in files.items()
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == self.alias:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        name = fullname.removeprefix(f"{self.alias}.")
        return importlib.machinery.ModuleSpec(fullname, self) if name != fullname and name in self.texts else None

    def get_source(self, fullname: str) -> str:
        return self.texts["__init__" if fullname == self.alias else fullname.removeprefix(f"{self.alias}.")]

    def is_package(self, fullname: str) -> bool:
        return fullname == self.alias


class Copy:
    """The modules of one copy of `spec`: `copy.flash2`, `copy.masks`, ..."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"{self._alias}.{name}")


@contextmanager
def copy_of_spec(mutant: Mutant | None = None) -> Iterator[Copy]:
    """`spec` with the mutant's change made (none: as it is), while the block runs.

    Raises: ValueError when the change does not fit the source.
    """
    files = sources() if mutant is None else mutant.changed(sources())
    alias = f"mutated_spec_{'none' if mutant is None else mutant.name}"
    finder = _Finder(alias, files)
    sys.meta_path.insert(0, finder)
    try:
        yield Copy(alias)
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n == alias or n.startswith(f"{alias}.")]:
            del sys.modules[name]
