"""Mutation testing: the catalogue is complete and fits the texts, and every bug in it is noticed."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from click.testing import CliRunner

from codegen import package as rendered
from codegen.errors import CheckFailed
from verify import report
from verify.__main__ import main
from verify.mutate import isolate, reference, run, sync, synchronisation, targets, units
from verify.mutate.kill import Kill, Result
from verify.mutate.mutant import Mutant

FORWARD = {str(n) for n in range(1, 79)}  # of the catalogue's bugs; the others are of the backward pass
ARITHMETIC = ("spec", "cpu", "cpu-amx", "sm80", "sm90a")
SYNC = [f"{arch}{synchronisation.SUFFIX}" for arch in synchronisation.archs()]
needs_amx = pytest.mark.skipif(not units.runs_here("amx"), reason="the machine has no AMX")


@pytest.mark.parametrize("name", ARITHMETIC)
def test_every_bug_of_the_catalogue_is_seeded_or_has_a_reason(name):
    target = run.TARGETS[name]()
    seeded = {m.number.rstrip("bcde") for m in target.mutants if m.number}
    assert seeded | {one.number for one in target.inapplicable} == FORWARD
    assert not seeded & {one.number for one in target.inapplicable}
    assert len({m.name for m in target.mutants}) == len(target.mutants)
    assert all(one.reason for one in target.inapplicable)


def test_every_mutant_of_spec_fits_the_source():
    for mutant in targets.Spec.mutants:
        assert mutant.changed(reference.sources()) != reference.sources()


@pytest.mark.parametrize("name", ARITHMETIC[1:])
def test_every_mutant_fits_the_emitted_text(name):
    target = run.TARGETS[name]()
    for dtype in {m.dtype or target.dtype for m in target.mutants}:
        files = rendered.render_package(target.problem(dtype, debug=False))
        for mutant in target.mutants:
            if (mutant.dtype or target.dtype) == dtype:
                assert mutant.changed(files) != files


def test_a_change_that_does_not_fit_is_an_error():
    files = {"csrc/kernel.cu": b"a; b; b;"}
    for old, new, says in (("c;", "", "nowhere under csrc/"), ("b;", "", "in 2 places"), ("a;", "a;", "by itself")):
        with pytest.raises(ValueError, match=says):
            Mutant("wrong", "does not fit", old, new).changed(files)


def test_a_mutant_changes_all_that_it_names():
    mutant = Mutant("two", "", "b;", "x;", places=2, more=(("a;", "y;"),))
    assert mutant.changed({"csrc/kernel.cu": b"a; b; b;", "op.py": b"a; b;"}) == {
        "csrc/kernel.cu": b"y; x; x;",
        "op.py": b"a; b;",
    }


def test_a_copy_of_spec_is_broken_and_spec_is_not():
    from spec import masks

    mutant = next(m for m in targets.Spec.mutants if m.name == "causal_strict")
    with reference.copy_of_spec(mutant) as copy:
        assert copy.masks.Causal("top_left").limits()[1] == -1 and masks.Causal("top_left").limits()[1] == 0
        assert copy.flash2.Mask is copy.masks.Mask is not masks.Mask


def test_every_bug_in_spec_is_noticed():
    spec = targets.Spec()
    spec.prepare(spec.mutants)
    for mutant in spec.mutants:
        result = spec.examine(mutant)
        assert result.holds, mutant
        assert result.kill is None or result.kill.check != "error"  # a bug that raises proves nothing about the judge


@needs_amx
def test_bugs_in_the_matrix_units_kernels_are_noticed():
    assert run.run(["cpu-amx"], sample=3)["holds"]


@pytest.mark.parametrize("name", ["sm80", "sm90a"])
def test_bugs_in_the_emulated_kernel_are_noticed(name):
    assert run.run([name], sample=3)["holds"]


@pytest.mark.parametrize("name", SYNC)
def test_a_missing_synchronisation_is_reported_by_a_finding(name):
    figures = run.run([name], sample=4)["targets"][0]
    assert figures["holds"], figures["results"]
    assert set(figures["by_check"]) == {"finding of the emulator"}


def test_a_wrong_value_is_no_finding():
    mutant = Mutant("barrier", "", "a", "b")
    wrong = Kill("err/bound", "one key", 3.0, "lse[0]")
    assert not Result("sm80-sync", mutant, wrong, 1, 0.1, wants="finding of the emulator").holds
    assert Result("sm80", mutant, wrong, 1, 0.1).holds


def test_what_does_not_pass_unbroken_is_refused(monkeypatch):
    monkeypatch.setattr(targets.probes_spec, "hear", lambda copy, probe: Kill("err/bound", probe.name, 2.0, "off"))
    with pytest.raises(CheckFailed, match="does not pass the probes as it is"):
        run.run(["spec"], sample=1)


TEXT = """
__device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) {
  while (!mbarrier_try_wait_parity(bar, parity)) {
  }
}
__global__ void __launch_bounds__(128) kernel(int n) {  // __syncthreads() in a comment
  auto arrive = [&] { if (n) mbarrier_arrive(n); };
  auto other = [&] { load(n); mbarrier_arrive(n); };
  mbarrier_arrive_expect_tx(n, 2 * size(n));
  wait(n, f(n));
  arrive();
  cp_async_wait<1>();
  __syncthreads();
  __syncthreads();
}
"""


def test_synchronisation_is_found_in_a_text():
    found = {m.name: m for m in sync.statements("kernel.cu", TEXT)}
    assert set(found) == {
        "wait: mbarrier_try_wait_parity 1 is not waited for", "wait: mbarrier_try_wait_parity 1 has the other parity",
        "kernel.arrive: mbarrier_arrive 1 is left out", "kernel.arrive: mbarrier_arrive 1 happens twice",
        "kernel.other: mbarrier_arrive 1 is left out", "kernel.other: mbarrier_arrive 1 happens twice",
        "kernel: mbarrier_arrive_expect_tx 1 is left out",
        "kernel: mbarrier_arrive_expect_tx 1 expects half of the bytes",
        "kernel: mbarrier_arrive_expect_tx 1 expects twice the bytes",
        "kernel: wait 1 is left out", "kernel: wait 1 has the other parity", "kernel: arrive 1 is left out",
        "kernel: cp_async_wait 1 is left out", "kernel: cp_async_wait 1 lets one more group be unfinished",
        "kernel: __syncthreads 1 is left out", "kernel: __syncthreads 1 is missed by half of each warp",
        "kernel: __syncthreads 2 is left out", "kernel: __syncthreads 2 is missed by half of each warp",
    }  # fmt: skip
    files = {"kernel.cu": TEXT.encode()}
    changed = {name: m.changed(files)["kernel.cu"].decode() for name, m in found.items()}
    assert len(set(changed.values())) == len(changed)
    assert "wait(n, (f(n)) ^ 1);" in changed["kernel: wait 1 has the other parity"]
    assert "(n, (2 * size(n)) / 2);" in changed["kernel: mbarrier_arrive_expect_tx 1 expects half of the bytes"]
    assert "cp_async_wait<1 + 1>();" in changed["kernel: cp_async_wait 1 lets one more group be unfinished"]
    assert changed["kernel: __syncthreads 2 is left out"].endswith("__syncthreads();\n  ;\n}\n")


def test_what_a_broken_kernel_does_stays_in_its_process():
    def work(item):
        if item == "dies":
            os.kill(os.getpid(), signal.SIGABRT)
        if item == "stays":
            time.sleep(60)
        return item

    found = dict(
        isolate.each(["good", "dies", "stays"], work, jobs=2, timeout_s=1.0, lost=lambda item, how, seconds: how)
    )
    assert found == {"good": "good", "dies": "the process died: SIGABRT", "stays": "no end after 1 s"}


def test_an_invalid_mutant_ends_the_run():
    def work(item):
        raise ValueError(f"{item} is nowhere")

    with pytest.raises(ValueError, match="this is nowhere"):
        list(isolate.each(["this"], work, jobs=1, timeout_s=5.0, lost=lambda item, how, seconds: how))


def test_the_command_states_each_mutant_and_what_killed_it(tmp_path):
    out = tmp_path / "mutate_cpu.json"
    done = CliRunner().invoke(main, ["mutate", "--of", "spec", "--name", "l_not_rescaled", "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures == json.loads(out.read_text()) and figures["kind"] == "mutate" and figures["machine"]["versions"]
    row = figures["targets"][0]["results"][0]
    assert row["number"] == "5" and row["killed_by"] == "err/bound" and row["err_over_bound"] > 1 and row["probe"]
    assert "| spec |" in report.markdown("mutate cpu", [{"file": str(out), **figures}])


def test_the_command_refuses_what_it_does_not_know():
    for words, says in {"--of gpu": "known: spec", "--of spec --name nobody": "no mutant is called"}.items():
        done = CliRunner().invoke(main, ["mutate", *words.split()])
        assert done.exit_code == 2 and says in done.output


def test_a_sample_is_the_same_every_time():
    chosen = run.select(targets.Spec.mutants, (), 5)
    assert len(chosen) == 5 and chosen == run.select(targets.Spec.mutants, (), 5)
    assert [m.name for m in run.select(targets.Spec.mutants, ("5",), None)] == ["l_not_rescaled", "fa1_l_not_rescaled"]
