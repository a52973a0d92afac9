"""The judge of gradients accepts what is right, rejects what is not, and says where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spec import flash2
from spec.errors import InvariantError
from verify import certify, devices, judge_backward, output_gradients, packages, special_backward, suite, tiles_backward
from verify.cases import Case, representable
from verify.certificate import Record
from verify.devices import Path
from verify.inputs import FAMILIES
from verify.verdict import GRADIENTS

DTYPES = ("float32", "float64", "bf16", "fp16")


class StandIn(devices.Cpu):
    """Gradients by the textbook, over the pairs that exist, in float64; `steps` replace one of them by a mistake."""

    def __init__(self, arithmetic=None, *, deterministic=True, **steps):
        super().__init__()
        self.arithmetic, self.deterministic, self.steps, self.runs = arithmetic, deterministic, steps, 0

    def step(self, name, value, *more):
        return self.steps[name](value, *more) if name in self.steps else value

    def backward_paths(self, attn, dtype, case):
        name = self.arithmetic or ("fma_f64" if dtype == "float64" else "fma_f32")
        words = {"arithmetic": name, "br": 32, "bc": 16, "plan": {}, "deterministic": self.deterministic}
        return [Path(device="cpu", isa="stand_in", unit="stand_in", dtype=dtype, **words)]

    def run_backward(self, attn, case, path, given):
        self.runs += 1
        dq, dk, dv = (np.zeros_like(x) for x in (case.q, case.k, case.v))
        with np.errstate(all="ignore"):
            for b, g, heads in case.groups():
                for h in range(heads.start, heads.stop):
                    self._head(case, given, b, g, h, dq[b, h], dk[b, g], dv[b, g])
        found = [self.step(n, x, self.runs) for n, x in zip(GRADIENTS, (dq, dk, dv), strict=True)]
        return tuple(
            representable(x, case.dtype) if wanted else np.zeros(0)
            for x, wanted in zip(found, case.wanted, strict=True)
        )

    def _head(self, case, given, b, g, h, dq, dk, dv):
        q, k, v, do = case.q[b, h], case.k[b, g], case.v[b, g], case.do[b, h]
        o, lse = given[0][b, h], given[1][b, h]
        dlse = self.step("dlse", np.zeros(len(q)) if case.dlse is None else case.dlse[b, h])
        s = case.scale * (q @ k.T)
        pairs = case.visible(b) & ~np.isneginf(s) & ~np.isneginf(lse)[:, None]
        for i in np.flatnonzero(pairs.any(axis=1)):
            j = pairs[i]
            p = np.exp(s[i, j] - lse[i])
            ds = p * (v[j] @ do[i] - self.step("D", do[i] @ o[i]) + dlse[i])
            dq[i] += case.scale * (ds @ k[j])
            dk[j] += self.step("dk_scale", case.scale) * np.outer(ds, q[i])
            dv[j] += np.outer(p, do[i])


def gaussian(dtype="float32", *, gradient="normal", dlse="normal", wanted=(True, True, True), **shape) -> Case:
    words = {"nq": 7, "nk": 40, "b": 2, "hq": 4, "hkv": 2, "lengths": (1.0, 0.6), "causal": "bottom_right", **shape}
    case = suite.case(FAMILIES["gaussian"], suite.Shape(**words), "gaussian", dtype=dtype, d=16, dv=24, seed=3)
    return output_gradients.attach(case, gradient, dlse=dlse, wanted=wanted, seed=5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_input_family_and_gradient_passes_when_right(dtype, right):
    judges, gradients = set(), set()
    for case in suite.cases(dtype, d=16, dv=8, tiles=[(32, 16)], count=44, seed=5):
        for verdict in judge_backward.check(right, case, on=StandIn(), spec=True):
            assert not verdict.unclaimed and set(verdict.outputs) == {
                name for name, wanted in zip(GRADIENTS, case.wanted, strict=True) if wanted
            }
            judges |= {f.judge for f in verdict.figures}
            gradients.add(case.gradient.split(",")[0])
    assert judges == {"spec", "mpmath", "balls", "end_to_end", *(["float64"] if dtype != "float64" else [])}
    assert gradients == set(output_gradients.GRADIENTS)


@pytest.mark.parametrize("name, dtype", [("amx_bf16", "bf16"), ("mma_sm80", "bf16"), ("mma_sm80", "fp16")])
def test_only_logits_beyond_reason_are_outside_the_domain_of_a_matrix_unit(name, dtype, right):
    device, outside = StandIn(name), []
    for case in suite.cases(dtype, d=128, dv=128, tiles=[(64, 64)], seed=1):
        source = device.paths(right, dtype, case)[0]
        given = judge_backward.read_by_kernel(case, *device.run(right, case, source))
        truth = judge_backward.Truth(case, given, source=source, with_balls=False)
        (path,) = device.backward_paths(right, dtype, case)
        outside += [case.family for group in truth.groups if truth.bound(group, path)[1] is not None]
    assert set(outside) <= {"mixed_scales", "huge_logits"}  # logits to 2^19: nothing is claimed, and that is counted


MISTAKES = {
    "dLSE is forgotten": {"dlse": np.zeros_like},
    "dLSE has the other sign": {"dlse": np.negative},
    "D is missing": {"D": lambda D: 0.0 * D},
    "dK lacks the scale": {"dk_scale": lambda scale: 1.0},
    "dQ is half of it": {"dq": lambda x, _: x / 2},
    "one element of dV is off by 1e-4": {"dv": lambda x, _: x + 1e-4 * (np.arange(x.size) == 7).reshape(x.shape)},
    "the second head of a group is lost in dK": {"dk": lambda x, _: x / 2},
    "NaN in one element": {"dk": lambda x, _: np.where((np.arange(x.size) == 7).reshape(x.shape), np.nan, x)},
    "a key beyond the length has a gradient": {"dv": lambda x, _: np.where(x == 0, 1e-30, x)},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_its_element_values_and_tile(mistake, right):
    with pytest.raises(AssertionError) as caught:
        judge_backward.check(right, gaussian(), on=StandIn(**MISTAKES[mistake]))
    text = str(caught.value)
    for part in ("gaussian on stand_in/float32", "gradient=normal, dLSE normal", "got ", " says ", "err/bound", "tile"):
        assert part in text


SILENCED = {
    "nan_in_do": {"dv": lambda x, _: np.nan_to_num(x, nan=0.0)},
    "nan_in_dlse": {"dq": lambda x, _: np.nan_to_num(x, nan=0.0)},
    "nan_in_a_query": {"dk": lambda x, _: np.nan_to_num(x, nan=0.0)},
    "nan_in_a_masked_key": {"dq": lambda x, _: x * np.nan},
    "key_length_zero": {"dq": lambda x, _: x + 1},
    "no_keys": {"dq": lambda x, _: x + np.nan},
    "empty_rows_hold_nan": {"dk": lambda x, _: x * np.nan},
    "infinity_in_do": {"dq": lambda x, _: np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)},
}


@pytest.mark.parametrize("row", SILENCED)
def test_a_special_value_that_is_wrong_is_reported(row, right):
    case = next(c for c in special_backward.table("float32", d=16, dv=24, bc=16, seed=1) if c.name == f"special/{row}")
    judge_backward.check(right, case, on=StandIn(), spec=True)
    with pytest.raises(AssertionError, match=row):
        judge_backward.check(right, case, on=StandIn(**SILENCED[row]))


def test_at_least_eight_rows_and_keys_of_a_case_go_through_mpmath(right):
    (verdict,) = judge_backward.check(right, gaussian(nq=33), on=StandIn())
    assert verdict.rows_mpmath >= 8 and verdict.keys_mpmath >= 8
    assert verdict.elements_balls == sum(x.size for x in (gaussian(nq=33).q, gaussian().k, gaussian().v))


def test_gradients_that_are_not_wanted_are_not_heard(right):
    wrong = StandIn(dk=lambda x, _: x + 1)
    (verdict,) = judge_backward.check(right, gaussian(wanted=(True, False, True)), on=wrong)
    assert verdict.outputs == ("dq", "dv") and verdict.holds
    with pytest.raises(AssertionError):
        judge_backward.check(right, gaussian(wanted=(False, True, False)), on=wrong)


def test_a_wrong_output_of_the_forward_pass_shows_end_to_end_alone(right):
    case, device = gaussian("bf16", lengths=None, causal="none"), StandIn()
    source = device.paths(right, "bf16", case)[0]
    o, lse = device.run(right, case, source)
    given = judge_backward.read_by_kernel(case, 1.1 * o, lse)
    (path,) = device.backward_paths(right, "bf16", case)
    truth = judge_backward.Truth(case, given, source=source)
    (verdict,) = judge_backward.hear(case, given, [(path, device.run_backward(right, case, path, given))], truth=truth)
    wrong = {f.judge for f in verdict.figures if f.ratio > 1}
    assert wrong == {"end_to_end"}


def hear(right, device) -> Record:
    record = Record(0)
    certify.hear_case(right, gaussian(), device, record, "again")
    assert record.cases == record.backward_cases == 1
    return record


def test_gradients_that_differ_from_run_to_run_are_noticed(right):
    unsteady = {name: lambda x, run: x * (1 + 2.0**-22 * run) for name in GRADIENTS}  # inside any float32 bound
    assert not hear(right, StandIn()).violations
    (text,) = hear(right, StandIn(dv=unsteady["dv"])).violations
    assert "two runs differ\n" in text
    # Sums in no fixed order: dQ may differ by their roundings, dK and dV may not at all.
    assert not hear(right, StandIn(deterministic=False, dq=unsteady["dq"])).violations
    assert "by inf times" in hear(right, StandIn(deterministic=False, dk=unsteady["dk"])).violations[0]
    far = StandIn(deterministic=False, dq=lambda x, run: x * (1 + 2.0**-12 * run))
    assert any("times what the order of summation can do" in text for text in hear(right, far).violations)


def test_runs_of_a_path_count_as_one_case(right):
    device = StandIn(deterministic=False, dq=lambda x, run: x * (1 + 2.0**-22 * run))
    (path,) = hear(right, device).describe({})["paths"]
    assert path["backward"]["cases"] == 1 and not path["backward"]["deterministic"]
    assert path["outputs"]["dq"]["judges"]["float64"]["elements"] == 2 * gaussian().q.size


def test_a_reference_that_breaks_its_invariant_is_found():
    case = gaussian(lengths=None)
    device_given = np.zeros(case.do.shape), np.zeros(case.q.shape[:3])
    group = judge_backward.Truth(case, device_given, with_balls=False).groups[0]
    words = {"heads": group.count, "has_dlse": True, "br": 4, "bc": 16}
    tiles_backward.reference(group.stage.finite, **words)

    def broken(*arrays, **more):
        found = flash2.backward(*arrays, **more)
        return found._replace(dk=found.dk * (1 + 1e-9))

    with pytest.raises(InvariantError, match="B1"):
        tiles_backward.reference(group.stage.finite, **words, algorithm=broken)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_values_of_their_dtypes_in_the_layout_that_they_say(dtype):
    for name, made in output_gradients.GRADIENTS.items():
        for layout in ("contiguous", "bnhd", "padded", "offset", "transposed"):
            case = output_gradients.attach(gaussian(dtype), name, dlse="large", layout=layout, seed=2)
            words = case.backward_tensors(np.zeros_like(case.do), np.zeros(case.dlse.shape))
            assert np.array_equal(representable(case.do, dtype), case.do) and np.isfinite(case.do).all()
            assert np.array_equal(words["dout"].double().numpy(), case.do)
            assert np.array_equal(words["dlse"].double().numpy(), case.dlse)
            assert case.do_layout == (made.layout or layout)
            if case.do_layout in ("transposed", "scalar"):
                assert words["dout"].stride(-1) != 1
            if made.layout is not None:
                assert words["dout"].stride()[:3] == (0, 0, 0)


def test_a_layout_that_the_values_do_not_have_is_refused():
    case = gaussian()
    with pytest.raises(ValueError, match="elements differ"):
        case.__class__(**{**vars(case), "do_layout": "expanded"}).backward_tensors(case.do, case.q[..., 0])


def test_a_package_without_a_backward_pass_has_no_backward_path():
    folder = packages.emit(d=32, dtypes=("float32",), archs=("cpu",), backward=False)
    assert devices.Cpu().backward_paths(packages.load(folder), "float32", gaussian()) == []


def test_a_case_outside_the_domain_is_counted_with_its_reason(right):
    record, case = Record(0), gaussian(lengths=None, causal="none")
    far = replace(case, q=case.q * 2.0**12, k=case.k * 2.0**12)
    for _ in range(2):
        certify.hear_case(right, far, StandIn(), record, "again")
    (path,) = [p for p in record.describe({})["paths"] if "backward" in p]
    stated = path["backward"]["cases_without_a_claim"]
    assert list(stated.values()) == [2, 2] and not record.violations
    assert all(text.startswith(("stage-wise: logits reach", "end_to_end: logits reach")) for text in stated)
