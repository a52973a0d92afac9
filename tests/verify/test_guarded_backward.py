"""The backward op in memory that tells, on the CPU: what is right passes, and each fault is a sentence."""

from __future__ import annotations

import pytest
import torch

from verify import guarded_backward, guarded_problems, packages


@pytest.fixture(scope="module")
def attn(small_package):
    return packages.load(small_package)


@pytest.fixture
def watched(attn, monkeypatch):
    """Puts `change(gradient, how many calls so far)` behind the backward op; returns a list, one entry per call."""
    op = getattr(torch.ops, packages.part(attn, "op").NAMESPACE).backward

    def put(change):
        turns = []

        class Namespace:
            @staticmethod
            def backward(*words):
                turns.append(0)
                return tuple(change(x, len(turns)) for x in op(*words))

        class Ops:
            def __getattr__(self, _name):
                return Namespace

        monkeypatch.setattr(guarded_backward, "torch", type("Torch", (), {**vars(torch), "ops": Ops()}))
        return turns

    return put


def test_every_problem_passes_when_right(attn):
    for problem in guarded_problems.problems(32, 16):
        assert not list(guarded_backward.faults(attn, problem, "float32", "cpu")), problem.name


def test_the_debug_form_passes_too():
    """Its O is float32, and dtype says what the backward pass reads."""
    attn = packages.load(packages.emit(d=16, br=32, bc=32, dtypes=("bf16",), archs=("cpu",), debug=True))
    for problem in guarded_problems.problems(32, 32)[:4]:
        assert not list(guarded_backward.faults(attn, problem, "bf16", "cpu")), problem.name


@pytest.mark.parametrize("twice", [False, True])
def test_each_form_is_called_once_for_a_tool_and_twice_to_compare_bits(attn, watched, twice):
    problem, turns = guarded_problems.problems(32, 16)[2], watched(lambda x, turn: x)
    assert not list(guarded_backward.faults(attn, problem, "float32", "cpu", twice=twice))
    assert len(turns) == 2 * (1 + twice)


FAULTS = {
    "elements are NaN": lambda x, turn: x / 0 * 0,
    "two calls differ": lambda x, turn: x * turn,
    "a key beyond the length": lambda x, turn: x + 1,
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_is_a_sentence(attn, watched, text):
    problem = next(p for p in guarded_problems.problems(32, 16) if p.name == "key lengths")
    watched(FAULTS[text])
    found = list(guarded_backward.faults(attn, problem, "float32", "cpu"))
    assert any(text in sentence for sentence in found)
