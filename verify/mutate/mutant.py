"""What a mutant is: a bug as data, exact text in place of exact text, applied to sources or to an emitted package.

Holds always: a mutant states in how many places its text stands, and a count that differs is an error. So is a change
that leaves every file as it was: a mutant that equals the original proves nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass

from codegen import package as rendered


@dataclass(frozen=True)
class Mutant:
    """`old` -> `new`, and each pair of `more` likewise, in the files whose path starts with `file`.

    number: of the catalogue of seeded bugs; "" for one that it does not list.
    probe: name of the probe that should show it first; the others follow in their order.
    equivalent: why no result can differ, or why no bound can tell. Such a mutant is run too, and has to survive.
    """

    name: str
    what: str
    old: str
    new: str
    file: str = "csrc/"
    _: KW_ONLY
    number: str = ""
    places: int = 1
    more: tuple[tuple[str, str], ...] = ()
    dtype: str | None = None  # of the kernel; None: the target's own choice
    probe: str | None = None
    equivalent: str | None = None

    def changed(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """The mutated files.

        Raises: ValueError when a text is not there, or not in as many places as stated.
        """
        found = dict(files)
        for turn, (old, new) in enumerate(((self.old, self.new), *self.more)):
            self._count(found, old, self.places if turn == 0 else 1)
            for path, data in found.items():
                if path.startswith(self.file):
                    found[path] = data.replace(old.encode(), new.encode())
        if found == dict(files):
            raise ValueError(f"mutant {self.name}: {self.old!r} is replaced by itself")
        return found

    def apply(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """The mutated package, sealed again. Raises: as `changed`."""
        return seal(self.changed(files))

    def _count(self, files: Mapping[str, bytes], text: str, wanted: int) -> None:
        there = sum(data.count(text.encode()) for path, data in files.items() if path.startswith(self.file))
        if there == 0:
            raise ValueError(f"mutant {self.name}: {text!r} is nowhere under {self.file}")
        if there != wanted:
            raise ValueError(f"mutant {self.name}: {text!r} is in {there} places under {self.file}, not in {wanted}")


@dataclass(frozen=True)
class Inapplicable:
    """A bug of the catalogue that a target cannot have, and why."""

    number: str
    what: str
    reason: str


def named(mutants: Iterable[Mutant], *names: str) -> tuple[Mutant, ...]:
    """The mutants of these names, in this order. Raises: KeyError for a name that none has."""
    by_name = {m.name: m for m in mutants}
    return tuple(by_name[name] for name in names)


def seal(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """`files` of a package with the digests of their own content in place of the stated ones, everywhere."""
    stated = rendered.read_plan(files[rendered.PLAN_FILE])["digest"]
    new = rendered.content_digest(files)
    short = stated[: rendered.DIGEST_CHARS].encode()
    sealed = {
        path: data.replace(stated.encode(), new.encode()).replace(short, new[: rendered.DIGEST_CHARS].encode())
        for path, data in files.items()
    }
    plan = json.loads(sealed[rendered.PLAN_FILE])
    plan["files"] = {path: hashlib.sha256(sealed[path]).hexdigest() for path in plan["files"]}
    sealed[rendered.PLAN_FILE] = (json.dumps(plan, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    return sealed


_NO_DROPOUT = "the kernels have no dropout yet"
# Bugs of the catalogue in what no kernel has.
NOT_YET = (
    Inapplicable("27", "window one key too wide", "the kernels have no window yet"),
    Inapplicable("67", "dropout applied to l as well", _NO_DROPOUT),
    Inapplicable("68", "dropout scale missing or wrong", _NO_DROPOUT),
    Inapplicable("69", "dropout mask repeated or transposed", _NO_DROPOUT),
    Inapplicable("75", "varlen offset", "the kernels have no packed sequences yet"),
    Inapplicable("76", "two pages swapped in V", "the kernels have no pages yet"),
    Inapplicable("77", "split merge: weights", "the kernels do not split keys yet; spec does"),
    Inapplicable("78", "split merge: LSE", "the kernels do not split keys yet; spec does"),
)
