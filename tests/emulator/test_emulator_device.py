"""The judge on the emulator: emitted sm_80 kernels hold in every schedule, and a fault is a violation with its line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from codegen.errors import RequestError
from verify import certify, devices, fuzz, judge, mutants, packages, sanitize, suite
from verify.__main__ import main
from verify.cases import Case
from verify.certificate import Record
from verify.emulator import device as emulated
from verify.emulator.device import Call, EmulatorDevice
from verify.emulator.emulator import ACCUMULATIONS, SCHEDULES, Finding, FindingError
from verify.inputs import FAMILIES


@pytest.fixture(scope="module")
def host():
    """The folder of a package with small tiles, d = dv = 64."""
    return packages.emit(sanitize.host())


@pytest.fixture(scope="module")
def odd():
    """Widths that are no multiple of 16, d != dv."""
    return packages.emit(sram="163KB", d=24, dv=40, archs=("sm80",), br=32, bc=48)


def case(family="gaussian", *, d=64, dv=64, dtype="bf16", seed=3, **shape):
    words = {"nq": 70, "nk": 75, "b": 2, "hq": 4, "hkv": 2, "causal": "bottom_right", "lengths": (1.0, 0.6), **shape}
    return suite.case(FAMILIES[family], suite.Shape(**words), family, dtype=dtype, d=d, dv=dv, seed=seed)


def test_certify_states_what_ran_on_the_emulator(host, copied):
    folder = copied(host)
    words = ["certify", str(folder), "--device", "emulator", "--arch", "sm80", "--cases", "17", "--debug-form"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    stated = json.loads((folder / "certificate.json").read_text())["devices"]["emulator sm80"]
    ran = stated["machine"]["emulator"]
    assert stated["holds"] and stated["runs"] == 17 and stated["backward_runs"] == 17 * (3 + 1)
    assert [p["path"] for p in stated["paths"]] == ["sm80/bf16", "sm80-deterministic/bf16"]
    for path in stated["paths"]:
        assert path["backward"]["cases"] == 17 and all(0 < path["outputs"][x]["max_ratio"] <= 1 for x in ("dq", "dk"))
    traced = 1  # cases of the 17 that are not special values
    assert ran["launches"] == 3 * (17 * 3 + traced * 3) and ran["findings"] == 0 and "g++" in ran["compiler"].lower()
    assert ran["schedules"] == [s.name for s in SCHEDULES] and ran["bytes_read"] > 0 and ran["bytes_written"] > 0
    assert stated["debug_form"]["states"] > 0 and not stated["debug_form"]["violations"]


def test_random_shapes_hold_in_every_schedule(host, odd):
    for folder, examples in ((host, 8), (odd, 12)):
        device = EmulatorDevice()
        outcome = fuzz.fuzz_package(folder, device, examples=examples, seed=5, most=70)
        assert outcome.failure is None and device.findings == 0 and device.launches >= 3 * examples


@pytest.mark.parametrize("family, dtype", [("gaussian", "bf16"), ("gaussian", "fp16"), ("late_max", "fp16")])
def test_every_way_to_sum_a_product_is_within_the_bound(odd, family, dtype):
    attn, one, runs = packages.load(odd), case(family, d=24, dv=40, dtype=dtype), []
    sums = [EmulatorDevice(accumulation=accumulation, schedules=SCHEDULES[:1]) for accumulation in ACCUMULATIONS]
    for device in (*sums, *sums):  # the second time after others have used the same library
        (path,) = device.paths(attn, dtype, one)
        runs.append((path, *device.run(attn, one, path)))
    assert all(verdict.holds for verdict in judge.hear(one, runs, spec=False, compare_plain=False))
    lse = [run[2] for run in runs]
    assert all(np.array_equal(lse[i], lse[i + 3]) for i in range(3))
    assert not (np.array_equal(lse[0], lse[1]) or np.array_equal(lse[0], lse[2]) or np.array_equal(lse[1], lse[2]))


def test_the_error_that_ex2_may_have_is_within_the_bound_and_is_seen(odd):
    attn, one = packages.load(odd), case(d=24, dv=40, dtype="fp16")
    found = {}
    for error in (-(2.0**-22), 0.0, 2.0**-22, 2.0**-8):
        device = EmulatorDevice(ex2_error=error, schedules=SCHEDULES[:1])
        (path,) = device.paths(attn, "fp16", one)
        found[error] = judge.hear(one, [(path, *device.run(attn, one, path))], compare_plain=False)[0].holds
    assert list(found.values()) == [True, True, True, False]


# Fault of verify.sanitize -> what its violation says.
FAULTS = {
    "row_bound_dropped": "(st.global) touches 16 bytes of global memory outside of every tensor",
    "load_bound_dropped": "(cp.async) touches 16 bytes of global memory outside of every tensor",
    "no_barrier_after_copy": "and nothing orders the two",
    "last_row_not_written": "of the output 'o' were never written",
    "length_ignored": "bytes behind the end of 'k'",
    "divergent_barrier": "no thread of the block can run",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_violation_with_its_sentence_and_the_command_to_see_it_again(name):
    (mutant,) = (f.mutant for f in sanitize.FAULTS if f.mutant.name == name)
    attn = packages.load(mutants.package(mutant, sanitize.host()))
    device, record, one = EmulatorDevice(schedules=SCHEDULES[:1]), Record(0), case(lengths=(1.0, 0.3))
    how = certify.command("package", device, certify.Options(), one)
    certify.hear_case(attn, one, device, record, how)
    (text,) = record.violations
    assert FAULTS[name] in text
    assert "--device emulator --arch sm80 --schedule ascending-late" in text and "--path sm80/bf16" in text


def test_a_result_that_depends_on_the_schedule_is_a_violation(host, monkeypatch):
    attn, one, launch = packages.load(host), case(), Call.launch
    launches = []

    def shaken(call, emulator, target):
        done = launch(call, emulator, target)
        launches.append(call)
        if len(launches) == 2:
            call.arrays["lse"][1, 2, 3] = np.nextafter(call.arrays["lse"][1, 2, 3], np.float32(np.inf))
        return done

    monkeypatch.setattr(Call, "launch", shaken)
    device = EmulatorDevice()
    (path,) = device.paths(attn, "bf16", one)
    with pytest.raises(FindingError, match=r"lse\[1, 2, 3\] is .* under ascending-late and descending-early"):
        device.run(attn, one, path)
    assert device.findings == 1


@pytest.mark.parametrize("layout", ["contiguous", "bnhd", "padded", "offset"])
def test_a_kernel_gets_what_the_binding_promises(layout):
    one = case(layout=layout)
    call = Call.of(one)
    for name, stride in (("q", call.args.q_stride), ("k", call.args.k_stride), ("v", call.args.v_stride)):
        array = call.arrays[name]
        assert array.ctypes.data % 16 == 0 and all(x % 8 == 0 for x in stride)
        assert [x * 2 for x in stride] == list(array.strides[:3])
        assert array.flags.c_contiguous == (layout in ("contiguous", "offset"))
    assert np.isnan(call.result("o")).all() and np.isnan(call.result("lse")).all()
    assert np.array_equal(call.result("q"), one.q) and np.isnan(call.result("k")[1, :, 45:]).all()
    assert call.arrays["key_lengths"].tolist() == [75, 45]


def test_a_problem_without_keys_reads_nothing(host):
    attn, device, one = packages.load(host), EmulatorDevice(), case(nk=0, causal="none", lengths=None)
    (path,) = device.paths(attn, "bf16", one)
    o, lse = device.run(attn, one, path)
    assert (o == 0).all() and np.isneginf(lse).all() and device.counted["bytes_read"] == 0


@pytest.mark.parametrize("empty", [{"nq": 0}, {"b": 0}, {"nq": 0, "nk": 0}, {"b": 0, "nk": 0}])
def test_a_problem_without_rows_calls_no_kernel(host, empty):
    b, nq, nk = (({"b": 2, "nq": 3, "nk": 5} | empty)[name] for name in ("b", "nq", "nk"))
    one = Case(
        name="empty", family="empty", dtype="bf16", q=np.zeros((b, 4, nq, 64)), k=np.zeros((b, 2, nk, 64)),
        v=np.zeros((b, 2, nk, 64)), scale=0.5, causal="bottom_right", key_lengths=(0,) * b,
    )  # fmt: skip
    attn, device = packages.load(host), EmulatorDevice()
    (path,) = device.paths(attn, "bf16", one)
    o, lse = device.run(attn, one, path)
    assert o.shape == (b, 4, nq, 64) and lse.shape == (b, 4, nq) and device.counted["bytes_read"] == 0


def test_requests_that_cannot_be_met_say_what_can(host):
    with pytest.raises(RequestError, match=r"no kernel for --arch sm90a\n  its targets: sm80"):
        EmulatorDevice("sm90a").paths(packages.load(host), "bf16", case())
    with pytest.raises(RequestError, match="--arch is for --device emulator, not for cpu"):
        devices.device("cpu", arch="sm80")
    done = CliRunner().invoke(main, ["fuzz", str(host), "--schedule", "random"])
    assert done.exit_code == 2 and "for --device emulator" in done.output


def test_fuzz_runs_the_schedules_that_are_asked_for(host, tmp_path):
    words = ["fuzz", str(host), "--device", "emulator", "--schedule", "random", "--examples", "4", "--json"]
    done = CliRunner().invoke(main, [*words, "--accumulation", "truncating"])
    assert done.exit_code == 0, done.output
    ran = json.loads(done.stdout)["machine"]["emulator"]
    assert ran["schedules"] == ["random"] and ran["accumulation"] == "truncating" and ran["launches"] >= 4


def test_a_difference_is_found_whatever_its_kind():
    a = np.array([[0.0, np.nan, 1.0]])
    assert emulated._difference(a, a.copy()) is None
    for i, other in ((0, 1e-30), (1, 2.0), (2, np.nan)):
        b = a.copy()
        b[0, i] = other
        assert emulated._difference(a, b).startswith(f"[0, {i}] is")


def test_a_package_whose_every_case_has_a_finding_loses_its_good_certificate(host, copied, monkeypatch):
    folder = copied(host)
    words = ["certify", str(folder), "--device", "emulator", "--schedule", "random", "--cases", "1"]
    file = folder / "certificate.json"
    assert CliRunner().invoke(main, words).exit_code == 0
    assert json.loads(file.read_text())["devices"]["emulator sm80"]["holds"] is True

    def faulty(*_):
        raise FindingError([Finding("race", "forward_sm80.cu:1: a race")])

    monkeypatch.setattr(EmulatorDevice, "run", faulty)
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 1 and "a race" in done.stderr and "--schedule random" in done.stderr
    assert json.loads(done.stdout)["holds"] is False
    assert json.loads(file.read_text())["devices"]["emulator sm80"]["holds"] is False


def test_an_edited_kernel_is_judged_but_not_certified(copied):
    own = packages.emit(sram="163KB", d=8, dv=16, archs=("sm80",), br=16, bc=16)  # a process takes one of each digest
    folder = copied(own, "a package")
    source = folder / "csrc" / "forward_sm80.cu"
    source.write_text(source.read_text().replace("st_global_f32(lse + row, ", "st_global_f32(lse + row + 1000000, "))
    words = ["certify", str(folder), "--device", "emulator", "--schedule", "random", "--cases", "1"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1 and "outside of every tensor" in done.stderr
    assert f"again: python -m verify certify '{folder}'" in done.stderr
    assert "no certificate is written: csrc/forward_sm80.cu" in done.stderr
    assert not (folder / "certificate.json").exists()
    done = CliRunner().invoke(main, ["fuzz", *words[1:-2], "--examples", "1"])
    assert done.exit_code == 1 and "again: " in done.stderr and "--path" not in done.stderr


def test_a_package_without_the_asked_kernels_says_what_it_has(host):
    for words in (["certify", str(host)], ["fuzz", str(host)], ["certify", str(host), "--cases", "1"]):
        done = CliRunner().invoke(main, [*words, "--device", "cpu"])
        assert done.exit_code == 2 and "has no kernel for --device cpu\n  its targets: sm80" in done.output
    done = CliRunner().invoke(main, ["certify", str(host), "--device", "emulator", "--cases", "1", "--only", "nope"])
    assert done.exit_code == 2 and "--only nope: nothing has that name" in done.output
    done = CliRunner().invoke(main, ["certify", str(host), "--device", "emulator", "--arch", ""])
    assert done.exit_code == 2 and "no kernel for --arch" in done.output
