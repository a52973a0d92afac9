"""Mutation testing of the backward pass: the catalogue is complete, fits the texts, and every bug in it is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from verify import arithmetic, cases
from verify.bounds.backward_model import backward_model
from verify.mutate import probes_backward, reference, run, targets_backward, units
from verify.mutate.judge_backward import BackwardJudge
from verify.mutate.probes_spec_backward import hear, probes

BACKWARD = {f"B{n}" for n in range(1, 16)}  # of the catalogue's bugs
KERNELS = ("cpu-backward", "cpu-amx-backward", "sm80-backward")
needs_amx = pytest.mark.skipif(not units.runs_here("amx"), reason="the machine has no AMX")


@pytest.mark.parametrize("name", ("spec-backward", *KERNELS))
def test_every_backward_bug_of_the_catalogue_is_seeded_or_has_a_reason(name):
    target = run.TARGETS[name]()
    seeded = {m.number.rstrip("bcdefghijk") for m in target.mutants if m.number}
    assert seeded | {one.number for one in target.inapplicable} == BACKWARD
    assert not seeded & {one.number for one in target.inapplicable}
    assert len({m.name for m in target.mutants}) == len(target.mutants)
    assert all(one.reason for one in target.inapplicable)


def test_every_backward_mutant_of_spec_fits_the_source():
    for mutant in targets_backward.SpecBackward.mutants:
        assert mutant.changed(reference.sources()) != reference.sources()


@pytest.mark.parametrize("name", KERNELS)
def test_every_backward_mutant_fits_the_emitted_text(name):
    target = run.TARGETS[name]()
    for dtype in {m.dtype or target.dtype for m in target.mutants}:
        files = target.host(dtype).files[""]
        for mutant in target.mutants:
            if (mutant.dtype or target.dtype) == dtype:
                assert mutant.changed(files) != files


@pytest.mark.parametrize("name", ("spec-backward", *KERNELS))
def test_every_backward_mutant_names_a_probe(name):
    target = run.TARGETS[name]()
    if name == "spec-backward":
        known = {p.name for p in probes()}
    else:
        known = {p.name for p in target.host(target.dtype).judge.cases}
    assert {m.probe for m in target.mutants} <= known


def test_every_backward_bug_in_spec_is_noticed():
    spec = targets_backward.SpecBackward()
    spec.prepare(spec.mutants)
    for mutant in spec.mutants:
        result = spec.examine(mutant)
        assert result.holds, mutant
        assert result.kill is None or result.kill.check != "error"  # a bug that raises proves nothing about the judge


def test_backward_bugs_in_the_vector_kernels_are_noticed():
    assert run.run(["cpu-backward"], sample=3)["holds"]


@needs_amx
def test_backward_bugs_in_the_matrix_units_kernel_are_noticed():
    assert run.run(["cpu-amx-backward"], sample=2)["holds"]


def zeros(probe):
    return {f"d{name}": np.zeros_like(getattr(probe.case, name)) for name in "qkv"}


def test_backward_bugs_in_the_emulated_kernels_are_noticed():
    assert run.run(["sm80-backward"], sample=3)["holds"]


def test_a_missing_synchronisation_of_the_backward_kernels_is_reported_by_a_finding():
    figures = run.run(["sm80-backward-sync"], sample=3)["targets"][0]
    assert figures["holds"], figures["results"]
    assert set(figures["by_check"]) <= {"finding of the emulator"}


def test_every_synchronisation_of_the_backward_kernels_is_reported_at_some_plan():
    """What is explained at one plan is a mutant of another, where nothing is explained."""
    target = run.TARGETS["sm80-backward-sync"]()
    everywhere = {m.name.removeprefix(f"{host.label} ") for host in target.hosts for m in target.mutants
                  if m.name.startswith(f"{host.label} ") and m.equivalent is None}  # fmt: skip
    assert {m.name.split("x64 ", 1)[1] for m in target.mutants if m.equivalent} <= everywhere
    explained = {name.removeprefix("sm80 ") for name in target.explained}
    assert explained == {m.name for m in target.mutants if m.equivalent}


@pytest.fixture(scope="module")
def judged():
    """A judge of two probes, with gradients that it accepts."""
    model = backward_model(arithmetic.model("fma_f32", "float32"))
    wanted = ("causal square", "NaN in dO")
    found = [p for p in probes_backward.probes("float32", d=8, dv=8, br=16, bc=16) if p.name in wanted]
    judge = BackwardJudge({"": model}, 16, 16, found)
    judge.prepare({"": zeros})
    answers = {}
    for probe in found:
        answer = answers[probe.name] = zeros(probe)
        for head in judge.truths[probe.name]:
            b, g = head.at
            answer["dq"][b, head.heads] = head.exact.dq.reshape(answer["dq"][b, head.heads].shape)
            answer["dk"][b, g], answer["dv"][b, g] = head.exact.dk, head.exact.dv
    return judge, {p.name: p for p in found}, answers


def test_exact_gradients_pass(judged):
    judge, by_name, answers = judged
    assert all(judge.hear(by_name[name], "", answer) is None for name, answer in answers.items())


@pytest.mark.parametrize("output", cases.GRADIENTS)
def test_a_gradient_outside_its_bound_is_noticed(judged, output):
    judge, by_name, answers = judged
    answer = {name: x.copy() for name, x in answers["causal square"].items()}
    head = judge.truths["causal square"][0]
    room = getattr(head.bounds[""], output)[0, 0]
    answer[output][0, 0, 0, 0] += 2 * room
    kill = judge.hear(by_name["causal square"], "", answer)
    assert kill is not None and kill.check == "err/bound" and 1 < kill.ratio < 4
    answer[output][0, 0, 0, 0] = np.nan
    kill = judge.hear(by_name["causal square"], "", answer)
    assert kill is not None and kill.ratio == np.inf


def test_a_number_in_place_of_nan_is_noticed(judged):
    judge, by_name, answers = judged
    answer = {name: np.nan_to_num(x) for name, x in answers["NaN in dO"].items()}
    kill = judge.hear(by_name["NaN in dO"], "", answer)
    assert kill is not None and kill.check == "special value"


def test_a_probe_outside_the_domain_of_the_bound_is_refused():
    model = backward_model(arithmetic.model("fma_f32", "float32"))
    probe = probes_backward.probes("float32", d=8, dv=8, br=16, bc=16)[0]
    huge = replace(probe, case=replace(probe.case, do=probe.do * 2.0**125))
    with pytest.raises(ValueError, match="one key: "):
        BackwardJudge({"": model}, 16, 16, [huge]).prepare({})


def test_spec_as_it_is_passes_every_backward_probe():
    assert all(hear(None, probe) is None for probe in probes())
