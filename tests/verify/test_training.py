"""The training run: it accepts attention that is right, and notices a gradient that is wrong by a thousandth."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention import SDPBackend, sdpa_kernel

from codegen.errors import CheckFailed, RequestError
from verify import packages, training, training_plot, training_text
from verify.__main__ import main
from verify.training_model import Gpt, Size

SMALL = training.Setting(
    size=Size(layers=1, heads=1, head_dim=32, context=64), steps=20, compared=20, seeds=3, held_out=8, warmup=20
)


@pytest.fixture(scope="module")
def text() -> bytes:
    return training_text.documentation()


@pytest.fixture
def text_is_read_once(text, monkeypatch):
    """The command gets the text that is here already: parsing the library takes seconds, and gives the same again."""
    monkeypatch.setattr(training_text, "documentation", lambda: text)


def one(attn, text, setting=SMALL):
    return training.run(attn, text, device="cpu", dtypes=("float32",), setting=setting)["conditions"][0]


def scaled_gradient(factor):
    """For the stand-in's output: the value stays, the gradient is multiplied."""
    return lambda o: o * factor + o.detach() * (1 - factor)


@pytest.fixture
def torch_trains_once(monkeypatch):
    """What torch's own attention gave is given again to whoever trains it from the same seed later in the test.

    A CPU repeats itself, bit for bit: the test below asks that of "default" and "repeat", which are both trained.
    """
    wanted = {training.torch_default: 2, training.torch_math: 1}
    given, train = defaultdict(list), training.train

    def once(attend, text, setting, **words):
        runs = given[attend, words["seed"]]
        if len(runs) == wanted.get(attend):
            return runs[0]
        runs.append(train(attend, text, setting, **words))
        return runs[-1]

    monkeypatch.setattr(training, "train", once)


def test_right_attention_and_ours_are_told_from_a_wrong_gradient_and_a_wrong_mask(
    text, small_package, right, broken, torch_trains_once
):
    good, ours = one(right, text), one(packages.load(small_package), text)
    gradient = one(broken(output=scaled_gradient(0.999)), text)
    unmasked = one(broken(seen=lambda seen, *_: torch.ones_like(seen)), text)
    for fine in (good, ours):
        assert fine["close"]["void"] is None and fine["torch_default_backend"] == "FLASH_ATTENTION"
        assert fine["final"]["holds"] and fine["learned"]
        assert fine["close"]["default_against_itself"] == [0.0] * SMALL.seeds  # a CPU repeats itself
        assert all(x > 0 for x in fine["close"]["default_against_math"])
        for wrong in (gradient, unmasked):
            assert not wrong["holds"] and not wrong["close"]["holds"]
            assert wrong["close"]["ratio"] > 10 * max(fine["close"]["ratio"], training.RATIO)
    path = ours["path"]
    assert path["dtype"] == path["backward"]["dtype"] == "float32" and path["isa"] in ("v4", "v3", "baseline")


def made_up(ours, default, math_, final=None, backend="FLASH_ATTENTION"):
    """A condition from one number per seed: how far each arm is off at its second step."""
    arms = {"ours": ours, "default": default, "math": math_, "repeat": default}
    losses = {name: [[5.0, 4.0 + x, 3.0 + 1e3 * x] for x in seeds] for name, seeds in arms.items()}
    ends = final or {name: [3.0, 3.1, 3.2] for name in ("ours", "default", "math")}
    return training.Condition("float32", backend, {"isa": "v4"}, 2, losses, ends)


def test_the_median_over_the_seeds_decides_and_later_steps_do_not():
    close = made_up([0.0, 1.4, 9.0], [0.0, 0.0, 0.0], [0.1, 1.0, 1.0])
    assert close.apart("ours", "default") == pytest.approx([0.0, 1.4, 9.0])
    assert close.ratio == pytest.approx(1.4) and close.close and close.holds
    apart = made_up([0.0, 1.6, 9.0], [0.0, 0.0, 0.0], [0.1, 1.0, 1.0])
    assert apart.ratio == pytest.approx(1.6) and not apart.close and not apart.holds


@pytest.mark.parametrize("words", [{"math_": [0.0] * 3}, {"backend": "MATH"}], ids=["same bits", "same back end"])
def test_a_void_comparison_holds_nothing(words):
    void = made_up(**{"ours": [0.0] * 3, "default": [0.0] * 3, "math_": [1.0] * 3, **words})
    assert void.void is not None and math.isnan(void.ratio)
    assert not void.close and not void.holds


def test_the_back_end_is_the_one_that_torch_takes(right):
    assert training.chosen(right, SMALL, "float32", "cpu")[0] == SDPBackend.FLASH_ATTENTION.name
    with sdpa_kernel(SDPBackend.MATH):
        assert training.chosen(right, SMALL, "float32", "cpu")[0] == SDPBackend.MATH.name


def test_an_end_that_is_further_apart_than_the_seeds_are_does_not_hold():
    level = [0.0] * 3
    final = {"ours": [3.0, 3.1, 3.41], "default": [3.0, 3.1, 3.2], "math": [3.0, 3.1, 3.2]}
    late = made_up(level, level, [1.0] * 3, final)
    assert late.close and not late.ends_together and not late.holds
    assert late.final_difference == pytest.approx(0.21) and late.spread == pytest.approx(0.2)


def test_a_network_that_learned_nothing_does_not_hold():
    level, final = [0.0] * 3, {name: [5.1, 5.2, 5.3] for name in ("ours", "default", "math")}
    idle = made_up(level, level, [1.0] * 3, final)
    assert idle.close and idle.ends_together and not idle.learned and not idle.holds


def test_a_seed_decides_weights_and_batches(text):
    weights = [list(Gpt(SMALL.size, training.torch_default, seed).parameters()) for seed in (1, 1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(*weights[:2], strict=True))
    assert not torch.equal(weights[0][0], weights[2][0])
    tokens = training.Text.of(text, SMALL, "cpu")
    again = [
        training.train(training.torch_default, tokens, SMALL, dtype="float32", seed=seed, steps=2) for seed in (1, 1, 2)
    ]
    assert again[0] == again[1] != again[2]


def test_16_bits_train_with_float32_weights(text):
    tokens = training.Text.of(text, SMALL, "cpu")
    seen = []

    def attend(q, k, v):
        seen.append(q.dtype)
        return training.torch_default(q, k, v)

    for dtype, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        losses, _ = training.train(attend, tokens, SMALL, dtype=dtype, seed=0, steps=8)
        assert losses[-1] < losses[0] and seen[-1] == kind


def test_the_text_is_prose_of_sources_that_never_run(tmp_path):
    (tmp_path / "b.py").write_text(
        '"""Second module."""\ndef f():\n    """Of   two\n    lines.\n\n    >>> f()\n    1\n    """\n'
    )
    (tmp_path / "a.py").write_text('"""First module."""\nraise SystemExit("this was imported")\n')
    (tmp_path / "c.py").write_text('"""Never heard of."""\ndef:\n')
    assert training_text.documentation(tmp_path) == b"First module.\nSecond module.\nOf two lines."
    with pytest.raises(RequestError, match="no documented Python sources"):
        training_text.documentation(tmp_path / "empty")


def test_the_text_is_long_enough_and_the_same_again(text):
    assert text == training_text.documentation()
    held_out = training.Text.of(text, training.Setting(), "cpu").held_out
    trained = len(text) - held_out.numel()
    assert trained > 200 * 4 * 256  # the standard run need not see a byte twice
    with pytest.raises(CheckFailed, match="too few"):
        training.Text.of(b"short", training.Setting(), "cpu")


@pytest.mark.usefixtures("text_is_read_once")
def test_a_dtype_that_no_network_is_trained_in_exits_2():
    done = CliRunner().invoke(main, ["real", "--training", "--dtype", "float64"])
    assert done.exit_code == 2 and "try --dtype float32, bf16 or fp16" in done.output


def test_seeds_without_training_are_refused():
    done = CliRunner().invoke(main, ["real", "--seed", "3"])
    assert done.exit_code == 2 and "only --training draws from seeds" in done.output


@pytest.mark.usefixtures("text_is_read_once")
def test_the_command_writes_what_the_decisions_were_made_from(small_package, monkeypatch, tmp_path):
    tiny = training.Setting(size=SMALL.size, steps=12, compared=5, seeds=2, held_out=4)
    monkeypatch.setattr(training, "Setting", lambda **words: replace(tiny, **words))
    out = tmp_path / "training.json"
    done = CliRunner().invoke(main, ["real", "--training", "--dtype", "float32", "--seed", "3", "--out", str(out)])
    stated = json.loads(out.read_text())
    assert stated["setting"]["first_seed"] == 3
    assert done.exit_code == (0 if stated["holds"] else 1), done.output
    assert "2 seeds" in done.output and stated["kind"] == "training" and stated["machine"]["versions"]["torch"]
    (found,) = stated["conditions"]
    steps = {arm: training_plot.steps_of(found, arm) for arm in training.ARMS}
    assert [len(steps["ours"][0]), len(steps["repeat"][0])] == [12, 5]
    pairs = zip(steps["ours"], steps["default"], strict=True)
    again = [max(abs(a - b) for a, b in zip(x[:5], y[:5], strict=True)) for x, y in pairs]
    assert found["close"]["ours_against_default"] == pytest.approx(again, rel=1e-2)
    pytest.importorskip("matplotlib")
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
