"""The parts of a GPU session that are commands: their options exist, their bars are computed, silence meets none."""

from __future__ import annotations

import json
import subprocess

import pytest

from codegen import package as rendered
from codegen import tuned
from verify import gpu_certificates, gpu_commands, gpu_packages, gpu_run, gpu_session, packages
from verify.__main__ import main


def done(code=0, said=""):
    return subprocess.CompletedProcess([], code, "", said)


def spread(x):
    return {"median": x, "low": x, "high": x}


def speed_figures(best=1.05, cudnn=1.15, use=0.95, above=7.0):
    cells = [
        {"d": d, "causal": causal, "n": n, "tensor_use": use, "vs_best": spread(best), "vs_cudnn": spread(cudnn)}
        for d in (64, 128, 256)
        for causal in (False, True)
        for n in (512, 1024, 2048, 4096, 8192, 16384)
    ]
    return {"cells": cells, "peers": {"cudnn": "", "fa3": ""}, "host_overhead": {"d=64": {"above_us": above}}}


def missed(bars):
    return [one["bar"] for one in bars if not one["holds"]]


@pytest.mark.parametrize("part", gpu_commands.COMMANDS)
def test_the_words_of_a_command_are_options_that_it_has(part, tmp_path):
    name, *words = gpu_commands.COMMANDS[part].words
    more = ["--seconds", "5"] if name == "bench" else []
    context = main.commands[name].make_context(name, [*words, *more, "--out", str(tmp_path / "out.json")])
    assert context.params["device"] == "cuda"


def test_every_package_of_the_wgmma_parts_is_legal():
    for words in (*gpu_packages.SANITIZED_HOPPER, *gpu_packages.HOPPER.values()):
        (plan, *_) = [v.plan for v in rendered.decide(packages.request(**words)).variants if v.target == "sm90a"]
        assert (words.get("br", plan.br), words.get("bc", plan.bc)) == (plan.br, plan.bc)
    for words in gpu_packages.BACKWARD.values():
        assert rendered.decide(packages.request(**words))
    assert 2 * gpu_certificates.CASES * len(gpu_packages.HOPPER) >= 500
    assert 2 * gpu_certificates.BACKWARD_CASES * len(gpu_packages.BACKWARD) >= 500


def test_the_parts_have_their_place():
    parts = set(gpu_session.PARTS)
    for group in (gpu_session.ALONE, gpu_session.USUAL, gpu_session.ON_HOPPER, gpu_session.WITHOUT_GPU):
        assert set(group) <= parts
    order = list(gpu_session.PARTS)
    assert order.index("tune") < order.index("bench") and set(gpu_commands.COMMANDS) <= parts


def test_speed_meets_its_bars_or_says_which_it_misses():
    assert missed(gpu_commands.speed_bars(speed_figures())) == []
    assert missed(gpu_commands.speed_bars(speed_figures(use=0.9))) == ["tensor use at d=256 full N=8192"]
    assert missed(gpu_commands.speed_bars(speed_figures(above=12.5))) == ["host us of a call above an empty one"]
    assert missed(gpu_commands.speed_bars(speed_figures(best=1.02))) == ["over the best peer, geometric mean"]
    slow = speed_figures()
    slow["cells"][7]["vs_cudnn"] = spread(0.97)
    assert missed(gpu_commands.speed_bars(slow)) == ["over cudnn, worst cell"]
    alone = speed_figures()
    alone["peers"] = {"cudnn": ""}
    assert missed(gpu_commands.speed_bars(alone)) == ["peers of fa3, fa4"]


def test_a_figure_that_is_not_there_meets_no_bar():
    short = speed_figures()
    del short["cells"][-1]
    assert missed(gpu_commands.speed_bars(short)) == ["cells"]
    without = speed_figures()
    without["cells"][3].pop("vs_cudnn")
    assert missed(gpu_commands.speed_bars(without)) == ["over cudnn, geometric mean", "over cudnn, worst cell"]
    nothing = {"cells": [], "peers": {}, "host_overhead": {}}
    for bars in (gpu_commands.speed_bars, gpu_commands.form_bars, gpu_commands.backward_bars):
        assert len(missed(bars(nothing))) == len(bars(nothing)) > 0


def test_forms_and_gradients_are_held_to_the_form_beside_them():
    cells = [{"vs_plain": None}, {"vs_plain": spread(0.97)}, {"vs_plain": spread(0.95)}]
    assert missed(gpu_commands.form_bars({"cells": cells[:2]})) == []
    assert missed(gpu_commands.form_bars({"cells": cells})) == ["worst form over the plain one"]
    twice = [{"vs_fa2": spread(0.9)}, {"vs_plain": spread(0.74)}]
    assert missed(gpu_commands.backward_bars({"cells": twice})) == ["deterministic over default, worst cell"]


def test_a_command_that_failed_does_not_hold_and_says_what_it_said():
    good = gpu_commands.judged({"holds": True}, lambda figures: [], done())
    assert good == {"holds": True}
    late = gpu_commands.judged({"holds": True, "kind": "x"}, lambda figures: [], done(124, "out of time"))
    assert not late["holds"] and (late["exit"], late["said"]) == (124, "out of time")
    low = gpu_commands.judged({}, lambda figures: [gpu_commands.bar("a", 1.0, least=2.0)], done())
    assert not low["holds"] and low["bars"] == [{"bar": "a", "value": 1.0, "least": 2.0, "holds": False}]


@pytest.mark.parametrize("missing", [0, 1])
def test_tuning_wants_every_width_mask_and_length_class(missing, tmp_path, monkeypatch):
    table = json.loads((tuned.TABLES / "h200.json").read_text())
    wanted = 4 * len(tuned.CAUSAL_FORMS) * len(tuned.LENGTH_CLASSES)
    table["cases"] = (table["cases"] * wanted)[: wanted - missing]
    (tmp_path / "h200.json").write_text(json.dumps(table))
    monkeypatch.setattr(tuned, "TABLES", tmp_path)
    monkeypatch.setattr(gpu_commands.machine, "describe", lambda device: {"gpu": {"model": table["card"]}})
    session = gpu_run.Session(tmp_path, float("inf"), 1, lambda text: None)
    monkeypatch.setattr(session, "command", lambda words, *, most: done())
    gpu_session.PARTS["tune"](session)
    assert session.held == {"tune": not missing}


def test_a_part_keeps_what_its_command_wrote_before_it_was_stopped(tmp_path, monkeypatch):
    session = gpu_run.Session(tmp_path, float("inf"), 1, lambda text: None)

    def stopped(words, *, most, **environment):
        (tmp_path / "memory.json").write_text('{"kind": "memory", "holds": true, "rows": [1]}')
        assert words[:3] == ["-m", "verify", "memory"] and most == gpu_commands.COMMANDS["memory"].most
        return done(124, "out of time")

    monkeypatch.setattr(session, "command", stopped)
    gpu_session.PARTS["memory"](session)
    assert session.held == {"memory": False} and '"rows": [1]' in (tmp_path / "memory.json").read_text()
