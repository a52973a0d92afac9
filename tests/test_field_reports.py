"""Every public bug report is answered by a test, or says why it cannot be yet."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("field_reports", Path(__file__).parent / "field_reports.py")
field_reports = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(field_reports)

ROWS = {r: row for section in field_reports.rows().values() for r, row in section.items() if r != "title"}


def test_every_report_has_a_test_or_an_allowed_reason():
    tests = field_reports.marked_tests()
    unanswered = [r for r, row in ROWS.items() if r not in tests and not {"later", "impossible"} & row.keys()]
    assert unanswered == []


def test_every_marker_names_a_report():
    assert sorted(set(field_reports.marked_tests()) - set(ROWS)) == []


def test_the_readme_is_what_the_markers_say():
    assert field_reports.README.read_text() == field_reports.render(), "run python tests/field_reports.py"
