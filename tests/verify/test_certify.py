"""The judge accepts what is right, rejects what is not with a message that helps, and writes it all down."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from codegen import check
from verify import certificate, certify, devices, judge, packages, special, suite
from verify.__main__ import main
from verify.cases import Case, representable, visible
from verify.certificate import Record
from verify.inputs import FAMILIES

DTYPES = ("float32", "float64", "bf16", "fp16")


def gaussian(dtype="float32", **shape) -> Case:
    words = {"nq": 5, "nk": 40, "b": 2, "hq": 2, "lengths": (1.0, 0.6), **shape}
    return suite.case(FAMILIES["gaussian"], suite.Shape(**words), "gaussian", dtype=dtype, d=16, dv=24, seed=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_of_the_special_value_table_passes_when_right(dtype, right):
    for case in special.table(dtype, d=16, dv=24, bc=16, seed=1):
        for verdict in judge.check(right, case, spec=True):
            assert verdict.holds and {f.judge for f in verdict.figures} >= {"spec", "mpmath", "balls"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_input_family_passes_when_right(dtype, right):
    for case in suite.cases(dtype, d=16, dv=8, tiles=[(32, 16)], count=40, seed=5):
        judge.check(right, case, spec=True)


MISTAKES = {
    "a masked key is seen": ("seen", lambda seen, causal, lengths: torch.ones_like(seen)),
    "the last key is lost": ("seen", lambda seen, *_: seen & (torch.arange(seen.shape[-1]) < seen.shape[-1] - 1)),
    "scores are rounded to bf16": ("scores", lambda s: s.bfloat16().double()),
    "LSE is in base 2": ("lse", lambda lse: lse / np.log(2)),
    "O is half of it": ("output", lambda o: o / 2),
    "one element of O is off by 1e-4": ("output", lambda o: o + 1e-4 * (torch.arange(o.numel()) == 7).view(o.shape)),
    "NaN in one element": ("output", lambda o: torch.where((torch.arange(o.numel()) == 7).view(o.shape), torch.nan, o)),
}


@pytest.mark.field("R031", "R032")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_its_element_values_and_tile(mistake, broken):
    step, change = MISTAKES[mistake]
    with pytest.raises(AssertionError) as caught:
        judge.check(broken(**{step: change}), gaussian(causal="bottom_right"))
    text = str(caught.value)
    for part in ("gaussian on stand_in/float32", "fma_f32, Br=32 Bc=16", "got ", " says ", "err/bound", "query tile"):
        assert part in text


SILENCED = {
    "NaN is hidden": ("nan_in_a_key", "output", lambda o: torch.nan_to_num(o)),
    "NaN of LSE is hidden": ("nan_in_a_query", "lse", lambda lse: torch.nan_to_num(lse)),
    "an empty row is the mean": ("key_length_zero", "output", lambda o: o + 1),
    "an empty row has LSE 0": ("no_keys", "lse", lambda lse: torch.where(torch.isneginf(lse), 0.0, lse)),
    "an infinity is clipped": ("infinity_in_a_value", "output", lambda o: o.clamp(max=1e30)),
    "a masked NaN leaks": ("nan_in_a_masked_key", "output", lambda o: o * torch.nan),
}


@pytest.mark.parametrize("mistake", SILENCED)
def test_a_special_value_that_is_wrong_is_reported(mistake, broken):
    row, step, change = SILENCED[mistake]
    case = next(c for c in special.table("float32", d=16, dv=24, bc=16, seed=1) if c.name == f"special/{row}")
    with pytest.raises(AssertionError, match=row):
        judge.check(broken(**{step: change}), case)


def test_keys_beyond_the_length_reach_the_kernel_as_nan():
    tensors = gaussian().tensors()
    assert torch.isnan(tensors["k"][1, :, 24:]).all() and torch.isnan(tensors["v"][1, :, 24:]).all()
    assert not torch.isnan(tensors["k"][1, :, :24]).any() and not torch.isnan(tensors["k"][0]).any()


@pytest.mark.parametrize("layout", ["contiguous", "bnhd", "padded", "offset"])
def test_a_layout_changes_strides_and_no_value(layout):
    case = gaussian(layout=layout, lengths=None)
    q = case.tensors()["q"]
    assert np.array_equal(q.double().numpy(), case.q) and q.stride(-1) == 1
    assert (q.is_contiguous() and q.storage_offset() == 0) == (layout == "contiguous")


def test_masks_of_the_public_api_on_small_shapes():
    assert visible(2, 3, causal="bottom_right").tolist() == [[True, True, False], [True, True, True]]
    assert visible(2, 3, causal="top_left").tolist() == [[True, False, False], [True, True, False]]
    assert visible(3, 1, causal="bottom_right").tolist() == [[False], [False], [True]]
    assert visible(2, 3, causal="bottom_right", length=1).tolist() == [[True, False, False]] * 2


def test_the_default_suite_has_the_promised_breadth():
    cases = [c for dtype in DTYPES for c in suite.cases(dtype, d=128, dv=128, tiles=[(96, 72), (128, 64)], seed=0)]
    assert len(cases) >= 200 and len({c.name for c in cases if c.family != "special"}) >= 150
    assert {c.causal for c in cases} == {"none", "bottom_right", "top_left"}
    assert {c.family for c in cases} == {"special", *FAMILIES} - {*suite.WITHOUT_KERNEL, *suite.PACKED_BY_MASK}
    assert {"bnhd", "padded", "offset"} <= {c.layout for c in cases} and any(c.key_lengths for c in cases)
    for case in cases:
        assert case.sizes["B"] * case.sizes["Hq"] * case.sizes["Nq"] >= judge.ROWS
        for x in (case.q, case.k, case.v):
            assert np.array_equal(representable(x, case.dtype), x, equal_nan=True)


def test_a_copied_package_comes_without_the_certificate_of_an_earlier_run(copied, tmp_path):
    package = tmp_path / "cache" / "attn"
    package.mkdir(parents=True)
    for name in ("plan.json", certificate.FILE):
        (package / name).write_text("{}")
    assert [one.name for one in copied(package).iterdir()] == ["plan.json"]


def test_a_package_is_certified_on_every_path(small_package, copied):
    folder = copied(small_package)
    record = certify.certify(folder, devices.Cpu(), certify.Options(per_dtype=30, seed=2))
    assert not record.violations and record.cases == 30
    attn = packages.load(folder)
    assert {p.path.isa for p in record.paths.values()} == set(attn.isas("float32"))
    for path in record.paths.values():
        assert sum(path.cases.values()) == 30 and set(path.outputs) == {"o", "lse", "dq", "dk", "dv"}
        stated = path.describe()["backward"]
        assert stated["cases"] == 30 and stated["deterministic"] and stated["keys_mpmath"] > 8 * 15
        for output in path.outputs.values():
            assert set(output.judges) - {"end_to_end"} == {"spec", "mpmath", "float64", "balls"}
            assert 0 < output.worst <= 1
    file = certificate.write(folder, "cpu", record.describe(devices.Cpu().describe()))
    stated = json.loads(file.read_text())
    assert stated["digest"] == packages.plan(folder)["digest"] and stated["devices"]["cpu"]["holds"]
    assert check.check_package(folder).certified


def test_at_least_eight_rows_of_a_case_go_through_mpmath(right):
    case = gaussian(nq=33)
    device = devices.Cpu()
    path = device.paths(right, "float32", case)[0]
    (verdict,) = judge.hear(case, [(path, *device.run(right, case, path))])
    assert verdict.rows_mpmath >= 8
    small = suite.smallest("float32", d=16, dv=16)
    (verdict,) = judge.hear(small, [(path, *device.run(right, small, path))])
    assert verdict.rows_mpmath == 1  # all rows there are


def test_figures_for_other_content_are_dropped_and_other_devices_kept(small_package, copied):
    folder = copied(small_package)
    certificate.write(folder, "cpu", {"cases": 1})
    certificate.write(folder, "cuda", {"cases": 2})
    file = folder / certificate.FILE
    assert set(json.loads(file.read_text())["devices"]) == {"cpu", "cuda"}
    stale = json.loads(file.read_text()) | {"digest": "0" * 64}
    file.write_text(json.dumps(stale))
    certificate.write(folder, "cpu", {"cases": 3})
    assert json.loads(file.read_text())["devices"] == {"cpu": {"cases": 3}}


def test_each_target_that_the_emulator_runs_has_an_entry_of_its_own(small_package, copied):
    folder = copied(small_package)
    for arch in ("sm80", "sm90a"):
        device = SimpleNamespace(name="emulator", arch=arch)
        certificate.write(folder, certificate.key(device), {"cases": len(arch)})
    certificate.write(folder, certificate.key(devices.Cpu()), {"cases": 1})
    stated = json.loads((folder / certificate.FILE).read_text())["devices"]
    assert stated == {"cpu": {"cases": 1}, "emulator sm80": {"cases": 4}, "emulator sm90a": {"cases": 5}}


def test_the_command_prints_a_table_and_writes_the_certificate(small_package, copied):
    folder = copied(small_package)
    done = CliRunner().invoke(main, ["certify", str(folder), "--cases", "16", "--seed", "4"])
    assert done.exit_code == 0, done.output
    assert "0 violations" in done.output and "16 cases" in done.output and "gradients" in done.output
    assert json.loads((folder / certificate.FILE).read_text())["devices"]["cpu"]["seed"] == 4


DEBUG_FORM = {"states": 9, "violations": [], "paths": []}
KEPT = {
    "fewer cases": (
        {"cases": 100, "holds": True},
        "keeps its figures on cpu, of 100 cases: these are of 1 case; --replace writes these instead",
    ),
    "no debug form": (
        {"cases": 1, "holds": True, "debug_form": DEBUG_FORM},
        "keeps its figures on cpu, of 1 case and the debug form: these are of 1 case; "
        "--debug-form judges that too, --replace writes these instead",
    ),
    "both": (
        {"cases": 2, "holds": True, "debug_form": DEBUG_FORM},
        "keeps its figures on cpu, of 2 cases and the debug form: these are of 1 case; --replace writes these instead",
    ),
}


@pytest.mark.parametrize("what", KEPT)
def test_a_poorer_run_leaves_the_fuller_figures_unless_told_to_replace_them(small_package, copied, what):
    fuller, words = KEPT[what]
    folder = copied(small_package)
    others = {"cuda": {"cases": 7}}
    certificate.write(folder, "cuda", others["cuda"])
    certificate.write(folder, "cpu", fuller)
    few = ["certify", str(folder), "--cases", "1", "--no-balls"]
    done = CliRunner().invoke(main, few)
    assert done.exit_code == 0 and words in done.stderr
    assert certificate.stated_devices(folder) == {"cpu": fuller, **others}
    assert CliRunner().invoke(main, [*few, "--replace"]).exit_code == 0
    found = certificate.stated_devices(folder)
    assert found.pop("cpu")["cases"] == 1 and found == others


@pytest.mark.parametrize("figures", [{}, None, [1], {"cases": "many"}])
def test_damaged_figures_of_a_device_are_replaced_and_the_others_kept(small_package, copied, figures):
    folder = copied(small_package)
    certificate.write(folder, "cuda", {"cases": 2})
    certificate.write(folder, "cpu", figures)
    assert certificate.stated_devices(folder) == {"cuda": {"cases": 2}}
    done = CliRunner().invoke(main, ["certify", str(folder), "--cases", "1", "--no-balls"])
    assert done.exit_code == 0
    assert {name: x["cases"] for name, x in certificate.stated_devices(folder).items()} == {"cpu": 1, "cuda": 2}


@pytest.mark.parametrize(("holds", "cases", "poorer"), [(True, 9, True), (True, 10, False), (False, 9, False)])
def test_a_violation_is_written_however_few_the_cases(holds, cases, poorer):
    assert certificate.is_poorer({"holds": holds, "cases": cases}, {"holds": True, "cases": 10}) is poorer


@pytest.mark.parametrize(
    ("holds", "traced", "poorer"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_figures_without_the_debug_form_do_not_replace_figures_with_it(holds, traced, poorer):
    before = {"holds": True, "cases": 10, "debug_form": DEBUG_FORM}
    stated = {"holds": holds, "cases": 99, **({"debug_form": DEBUG_FORM} if traced else {})}
    assert certificate.is_poorer(stated, before) is poorer


def test_a_violation_exits_1_and_says_how_to_see_it_again(small_package, copied, monkeypatch):
    folder = copied(small_package)
    run = devices.Cpu.run

    def wrong(self, attn, case, path):
        o, lse = run(self, attn, case, path)
        return (o * 1.001 if case.name == "gaussian/float32/0" else o), lse

    monkeypatch.setattr(devices.Cpu, "run", wrong)
    done = CliRunner().invoke(main, ["certify", str(folder), "--cases", "17", "--json", "--no-balls"])
    assert done.exit_code == 1
    again = next(line for line in done.stderr.splitlines() if "again: " in line).split("again: ")[1].split()
    assert again[:4] == ["python", "-m", "verify", "certify"] and "--only" in again and "--path" in again
    narrow = CliRunner().invoke(main, [*again[3:], "--json", "--no-balls"])
    assert narrow.exit_code == 1 and json.loads(narrow.stdout)["runs"] == 1


def test_a_kernel_that_is_not_deterministic_is_noticed(broken):
    calls = iter(range(100))
    unsteady = broken(output=lambda o: o * (1 + 2.0**-26 * next(calls)))  # far inside any float32 bound
    record = Record(0)
    certify.hear_case(unsteady, gaussian(), devices.Cpu(), record, "again")
    assert len(record.violations) == 1 and "two runs differ" in record.violations[0]


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["certify", "no_such_package"], "no tileproof package there"),
        (["certify", "PACKAGE", "--only", "no_such_case"], "nothing ran"),
        (["certify", "PACKAGE", "--path", "v3/float32", "--replace"], "one case or one path writes no certificate"),
        (["certify", "PACKAGE", "--device", "cuda"], "--device emulator --arch sm80"),
    ],
)
def test_a_request_that_cannot_be_met_exits_2(arguments, part, small_package, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(main, [str(small_package) if a == "PACKAGE" else a for a in arguments])
    assert done.exit_code == 2 and part in done.output


def test_quantiles_of_the_distribution_are_known_to_a_bin():
    rng = np.random.default_rng(0)
    ratios = np.exp(rng.normal(-4, 2, 10_000)).clip(max=1.0)
    spread = certificate.Distribution()
    spread.add(ratios[:4000])
    spread.add(np.zeros(0))
    other = certificate.Distribution()
    other.add(ratios[4000:])
    both = spread.merged(other)
    for q in certificate.QUANTILES:
        exact = np.quantile(ratios, q, method="inverted_cdf")
        assert exact <= both.quantile(q) <= exact * 10 ** (1 / 64) * 1.0001
    assert both.elements == 10_000 and both.largest == ratios.max()
    assert sum(both.bars()) == 10_000


def test_a_nan_outlives_an_infinity_in_the_same_column():
    q, k, v = np.ones((1, 4)), np.ones((2, 4)), np.array([[np.nan], [np.inf]])
    for order in ([0, 1], [1, 0]):
        found = special.expect(q, k, v[order], visible=np.ones((1, 2), bool))
        assert found.o.tolist() == [[special.NAN]]
