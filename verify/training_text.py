"""What the small GPT reads: the documentation strings of the Python that runs it, as bytes.

No file of text is shipped and none is fetched: every Python carries megabytes of documentation. Sources are parsed,
never imported, so no module of the standard library runs.

Only prose is kept. Tables and doctests (pages of Decimal('0')) are batches unlike all others, and a step on one of
them magnifies the rounding of a thousand steps before it.

Holds always: one Python gives one text, whatever the machine: files in the order of their names, definitions in the
order of `ast.walk`. Another version of Python gives another text; a result file names its digest.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from codegen.errors import RequestError

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def documentation(folder: Path | None = None) -> bytes:
    """The prose in the docstrings of the modules of `folder` (default: the standard library), a line per paragraph.

    Raises: RequestError when there are no sources, as in a Python that was zipped or stripped.
    """
    home = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    found = (one for file in sorted(home.glob("*.py")) for one in _docstrings(file))
    text = "\n".join(paragraph for one in found for paragraph in _prose(one))
    if not text:
        raise RequestError(f"{home} holds no documented Python sources", "run this with a Python that has its library")
    return text.encode()


def _docstrings(file: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in somebody's source is not our business
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (found := ast.get_docstring(node)):
            yield found


def _prose(docstring: str) -> Iterator[str]:
    """Its paragraphs that are at least nine tenths letters and spaces, each on one line."""
    for paragraph in docstring.split("\n\n"):
        line = " ".join(paragraph.split())
        if 10 * sum(c.isalpha() or c == " " for c in line) >= 9 * len(line) > 0:
            yield line
