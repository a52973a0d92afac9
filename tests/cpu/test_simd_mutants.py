"""Kernels broken on purpose: a sample of the bugs that `verify mutate` seeds into the vector kernels is noticed.

The bugs are in verify/mutate/catalogue_cpu.py, the problems on which they show in verify/mutate/probes.py.
"""

import pytest

from verify.mutate import run, targets

SAMPLE = run.select(targets.vector().mutants, (), 7)


@pytest.fixture(scope="module")
def target():
    made = targets.vector()
    made.prepare(SAMPLE)  # raises when the kernel does not pass the probes as it is
    return made


def test_the_kernel_itself_passes(target):
    assert target.hosts["float32"].judge.cases


@pytest.mark.field("R032")
@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda m: m.name)
def test_a_broken_kernel_is_noticed(target, mutant):
    result = target.examine(mutant)
    assert result.holds, result
    assert result.kill is not None and result.kill.check != "error"


def test_an_equivalent_mutant_passes_every_probe(target):
    mutant = next(m for m in target.mutants if m.equivalent)
    result = target.examine(mutant)
    assert result.kill is None and result.probes == 2 * len(target.hosts["float32"].judge.cases)
