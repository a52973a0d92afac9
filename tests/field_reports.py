"""Which test answers which public bug report: reads the markers, writes tests/README.md.

Run `python tests/field_reports.py` after adding or moving a test that carries `@pytest.mark.field(...)`.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

TESTS = Path(__file__).parent
README = TESTS / "README.md"

HEAD = """# Tests

The folders mirror the project: `spec/`, `codegen/`, `package/` (the emitted Python and its build), `cpu/`, `sm80/`,
`sm90a/` (kernels), `kernels/` (emitted packages with the real kernels, every path of the machine), `generated/` (what
is checked in), `gpu/`, `verify/`, `emulator/`; `data/` are vectors recorded on an H200.
A test's name is the claim that it checks; its tolerance is a derived bound or exact equality.
`pytest` runs all of them, on two workers (`conftest.py`); those that need a GPU say so and are run on one by
`python -m pytest -m gpu tests/gpu`.

The tables below are written by `python tests/field_reports.py` from the markers on the tests: each row is a bug that
users of another attention library met, and the test that shows it cannot happen here. `field_reports.toml` says which
thread it was. The only other entries allowed are a feature that comes later, or a line of code that rules it out.
"""


def rows() -> dict[str, dict[str, dict[str, str]]]:
    """Section letter -> {"title": ..., "R001": {...}, ...}, as in field_reports.toml."""
    return tomllib.loads((TESTS / "field_reports.toml").read_text())


def marked_tests() -> dict[str, list[str]]:
    """Report id -> the tests marked with it, as "folder/file.py::name", in order of appearance."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for mark in node.decorator_list:
                    for report in _field_ids(mark):
                        found.setdefault(report, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def _field_ids(decorator: ast.expr) -> list[str]:
    if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.field"):
        return []
    return [ast.literal_eval(arg) for arg in decorator.args]


def render() -> str:
    """The text of tests/README.md."""
    tests = marked_tests()
    out = [HEAD]
    for letter, section in rows().items():
        out += [f"\n## {letter}. {section['title']}\n", "| report | what must hold | test |", "|---|---|---|"]
        for report, row in section.items():
            if report == "title":
                continue
            where = "<br>".join(f"`{t}`" for t in tests.get(report, []))
            later = f"feature due later: {row['later']}" if "later" in row else ""
            never = f"cannot occur because {row['impossible']}" if "impossible" in row else ""
            answer = "<br>".join(x for x in (where, later, never) if x)
            out.append(f"| {report} {row['thread']} | {row['right']} | {answer} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    README.write_text(render())
