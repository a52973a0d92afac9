"""Fuzzing passes what is right, finds what is broken within its budget, and draws the same examples for a seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from codegen import package as rendered
from verify import campaign, certify, devices, fuzz, mutants, packages, strategies
from verify.__main__ import main
from verify.certificate import Record


def test_the_reference_passes_over_every_mask():
    outcome = fuzz.fuzz_spec(examples=60, seed=1)
    assert outcome.failure is None and outcome.examples >= 60
    assert 0 < outcome.float64_in_balls <= 1 and len(outcome.masks) >= 8


@pytest.mark.parametrize("mutant", mutants.SPEC, ids=lambda m: m.name)
def test_a_broken_reference_is_found(mutant):
    hunt = mutants.hunt_spec(mutant, examples=campaign.WITHIN, seed=0)
    assert hunt.found, f"{mutant.what}: not found in {hunt.examples} examples"


@pytest.mark.parametrize("mutant", (*mutants.CPU, *mutants.AMX), ids=lambda m: m.name)
def test_each_mutant_changes_the_emitted_text(mutant):
    files = rendered.render_package(mutants.host("bf16" if mutant in mutants.AMX else "float32"))
    changed = mutant.apply(files)
    assert {path for path in files if files[path] != changed[path]} > {"plan.json"}
    assert rendered.content_digest(changed) == rendered.read_plan(changed["plan.json"])["digest"]


def test_a_mutant_that_changes_nothing_is_an_error():
    with pytest.raises(ValueError, match="is nowhere under"):
        mutants.Mutant("nothing", "no change", "text that no kernel has", "").apply(
            rendered.render_package(mutants.host())
        )
    with pytest.raises(ValueError, match="is nowhere under"):
        mutants.hunt_spec(
            mutants.Mutant("nothing", "no change", "text that no reference has", "", "spec/"), examples=1, seed=0
        )


def test_a_broken_kernel_is_found():
    mutant = next(m for m in mutants.CPU if m.name == "o_not_rescaled")
    hunt = mutants.hunt_cpu(mutant, devices.Cpu(), examples=campaign.WITHIN, seed=0)
    assert hunt.found and "err/bound" in (hunt.message or "")


@pytest.mark.field("R018", "R064")
def test_the_unbroken_host_of_the_mutants_passes():
    """d = 24, dv = 40, groups of 1 to 3 query heads on 1 or 2 K/V heads, both causal corners, key lengths."""
    outcome = fuzz.fuzz_package(packages.emit(mutants.host()), devices.Cpu(), examples=60, seed=2, most=80)
    assert outcome.failure is None and outcome.examples >= 60
    assert {"mask none", "mask bottom_right+lengths", "mask top_left"} <= set(outcome.counts)


DIRTY = """
from verify import devices, judge, mutants, packages, strategies
attn = packages.load(packages.emit(mutants.host()))
for nq, nk, lengths in ((1, 1, None), (33, 17, None), (5, 40, (3,)), (50, 31, (0,))):
    sizes = dict(d=24, dv=40, nq=nq, nk=nk, group=2)
    one = strategies.Description(dtype="float32", lengths=lengths, mask="bottom_right", **sizes)
    judge.check(attn, one.case())
print("right")
"""


@pytest.mark.field("R068")
def test_fresh_memory_full_of_huge_numbers_never_reaches_a_result():
    """glibc fills what malloc returns with 0x7f: as float32 that is 3.4e38, so one read of it is seen."""
    environment = {**os.environ, "MALLOC_PERTURB_": "128", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", DIRTY], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr


def test_a_package_is_fuzzed_on_every_path(small_package):
    outcome = fuzz.fuzz_package(small_package, devices.Cpu(), examples=25, seed=1, most=80)
    assert outcome.failure is None and outcome.examples >= 25
    stated = outcome.describe()
    assert {row["path"].split("/")[0] for row in stated["paths"]} >= {"baseline"}
    assert all(0 < row["o"]["max"] <= 1 for row in stated["paths"])


def test_the_same_seed_draws_the_same_examples():
    def draw(seed):
        seen = []
        fuzz.search(seen.append, strategies.descriptions(), examples=20, seed=seed)
        return seen

    assert draw(3) == draw(3) and draw(3) != draw(4)


def test_a_failure_is_shrunk_and_says_how_it_was_drawn(broken):
    wrong = broken(output=lambda o: o * 1.001)
    record = Record(0)

    def check(description):
        certify.hear_case(wrong, description.case(), devices.Cpu(), record, "again", spec=False)
        if record.violations:
            raise AssertionError(record.violations[-1])

    drawn = strategies.descriptions(d=16, dv=16, br=32, bc=16, dtypes=("float32",))
    _, first, message = fuzz.search(check, drawn, examples=50, seed=0)
    assert first is not None and message is not None
    assert "'nq': 1, 'nk': 1" in message and "err/bound" in message


def test_the_set_of_packages_is_as_varied_as_promised():
    found = fuzz.shapes(40, lambda s: campaign.legal(s, "cpu"), seed=0, dtypes=("float32", "bf16", "fp16", "float64"))
    assert len(set(found)) == 40
    assert sum(s.br != s.bc for s in found) >= 20 and any(s.br == s.bc for s in found)
    assert {s.dtype for s in found} == {"float32", "bf16", "fp16", "float64"}
    assert sum(s.d != s.dv for s in found) >= 8 and len({s.d for s in found}) >= 6


def test_the_command_fuzzes_the_reference_and_reports_json():
    done = CliRunner().invoke(main, ["fuzz", "--spec", "10", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["spec"]["examples"] >= 10 and figures["spec"]["failure"] is None and figures["machine"]["load"]


def test_the_command_wants_something_to_fuzz():
    done = CliRunner().invoke(main, ["fuzz"])
    assert done.exit_code == 2 and "name a PACKAGE" in done.output
