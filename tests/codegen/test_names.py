"""One grammar for package names: equal requests and only those share a name, and names are read back."""

from __future__ import annotations

from itertools import combinations

import pytest

from codegen import names, problem
from codegen.errors import RequestError
from codegen.planners import TARGETS

REQUESTS = [
    dict(d=d, sram_bytes=sram, **more)
    for d, sram in ((128, 196608), (64, 101376), (8, 1000))
    for more in (
        {}, {"dv": 64}, {"dtypes": ["bf16"]}, {"dtypes": ["fp16", "bf16"]}, {"dtypes": ["float32"]},
        {"dtypes": ["float32", "float64"]}, {"archs": ["cpu"]}, {"archs": ["sm80"]}, {"archs": ["sm80", "cpu"]},
        {"archs": ["sm86", "sm80"]}, {"archs": ["cpu"], "dtypes": ["bf16"]}, {"archs": list(TARGETS)},
        {"br": 64}, {"bc": 64}, {"br": 64, "bc": 64}, {"debug": True}, {"backward": False},
        {"backward": False, "debug": True}, {"backward": False, "bc": 64, "archs": ["cpu"]},
        {"dv": 32, "dtypes": ["bf16"], "archs": ["cpu"], "br": 96, "bc": 128, "debug": True},
    )
]  # fmt: skip
PROBLEMS = sorted({problem.make(**r) for r in REQUESTS}, key=names.package_name)


@pytest.mark.parametrize("p", PROBLEMS, ids=names.package_name)
def test_a_name_is_parsed_back_to_its_request(p):
    assert names.parse(names.package_name(p)) == p


@pytest.mark.parametrize("p", PROBLEMS, ids=names.package_name)
def test_a_default_name_can_be_imported(p):
    assert names.check_name(names.package_name(p)).isidentifier()


@pytest.mark.field("R092")
def test_requests_that_differ_in_one_option_have_different_names_and_commands():
    for a, b in combinations(PROBLEMS, 2):
        assert names.package_name(a) != names.package_name(b)
        assert names.canonical_command(a) != names.canonical_command(b)


def test_the_default_request_has_the_short_name():
    p = problem.make(sram_bytes=196608, d=128)
    assert names.package_name(p) == "attn_d128_sram192k"
    assert names.canonical_command(p) == "codegen --sram 192KB --d 128"
    assert names.canonical_command(p, "attn_d128_sram192k") == "codegen --sram 192KB --d 128"
    assert names.canonical_command(p, "mine") == "codegen --sram 192KB --d 128 --name mine"


def test_a_budget_that_is_no_multiple_of_1024_keeps_its_bytes():
    p = problem.make(sram_bytes=196609, d=128)
    assert names.package_name(p) == "attn_d128_sram196609b"
    assert names.parse("attn_d128_sram196609b") == p


def test_what_another_option_implies_is_left_out():
    assert names.package_name(problem.make(sram_bytes=1024, d=8, archs=["sm80"], dtypes=["bf16", "fp16"])) == (
        "attn_d8_sram1k_sm80"
    )
    assert names.package_name(problem.make(sram_bytes=1024, d=8, archs=["cpu"], dtypes=["float32"])) == (
        "attn_d8_sram1k_float32"
    )


@pytest.mark.parametrize(
    "name", ["attn", "attn_d128", "attn_d128_sram192", "attn_d12_sram192k", "x", "attn_d128_sram192k_v9"]
)
def test_a_name_outside_the_grammar_is_refused(name):
    with pytest.raises(RequestError):
        names.parse(name)


@pytest.mark.parametrize("name", ["", "A", "1a", "a-b", "a/b", "..", "import", "a b", "x" * 101, "é"])
def test_a_chosen_name_must_be_importable(name):
    with pytest.raises(RequestError, match="not a package name"):
        names.check_name(name)
