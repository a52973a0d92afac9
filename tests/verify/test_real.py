"""A real encoder runs on a generated package: every layer within its bound, padding excluded, no hub needed."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from verify import devices, packages, real
from verify.__main__ import main

FEW = ("A leaking tap wastes water.", "Why?", "Prime numbers thin out slowly, and nobody minds.")


@pytest.fixture(scope="module")
def model():
    return real.load_model()


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to leave this machine is an error."""

    def refuse(*_):
        raise OSError("the network was asked for")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_every_layer_is_within_its_bound_and_the_embeddings_agree(small_package, no_network):
    report = real.run(packages.load(small_package), devices.Cpu(), sentences=FEW, model=real.load_model())
    assert report.holds and report.calls == 6  # one batched call per layer
    assert [v.rows_mpmath >= 8 for v in report.layers] == [True] * 6
    found = report.embeddings.describe()
    assert found["nearest_sentences_agree"] and found["least_cosine_with_eager"] > 0.999
    assert len(set(report.tokens)) == 3


def test_the_report_names_what_it_measured(small_package, model):
    report = real.run(packages.load(small_package), devices.Cpu(), sentences=FEW, model=model)
    stated = json.loads(json.dumps(report.describe()))
    assert len(stated["layers"]) == 6
    for layer in stated["layers"]:
        assert {"o/float64", "o/mpmath", "lse/float64", "lse/mpmath"} == set(layer["max_ratio"])
        assert all(0 < ratio <= 1 for ratio in layer["max_ratio"].values())
        assert layer["worst_error"]["o"] > 0 and layer["eager_worst_error"]["o"] > 0
    assert len(real.tables(stated)) == 2


def test_a_mask_interface_that_is_missing_is_noticed(small_package, model):
    """Without a mask function transformers passes no mask, and padding is attended to: the bound must break."""
    from transformers.masking_utils import AttentionMaskInterface

    attn, seen = packages.load(small_package), []
    tokens, lengths = model.batch(FEW)
    with real.plugged_in(attn, seen):
        AttentionMaskInterface._global_mapping.pop(real.NAME)
        wrong = model.embed(tokens, real.NAME)
    assert seen[0].lengths is None
    case = real.as_case(seen[0], 0, "float32", lengths)
    path = devices.Cpu().paths(attn, "float32", case)[0]
    (verdict,) = real.judge.hear(case, [(path, seen[0].o, seen[0].lse)], spec=False)
    assert not verdict.holds and verdict.worst.ratio > 1e3
    assert np.abs(wrong - model.embed(tokens, "eager")).max() > 1e-2


def test_a_sentence_alone_gives_what_it_gives_in_a_padded_batch(small_package, model):
    attn = packages.load(small_package)
    with real.plugged_in(attn):
        together = model.embed(model.batch(FEW)[0], real.NAME)
        alone = np.concatenate([model.embed(model.batch([one])[0], real.NAME) for one in FEW])
    eager = np.concatenate([model.embed(model.batch([one])[0], "eager") for one in FEW])
    spread = np.abs(eager - model.embed(model.batch(FEW)[0], "eager")).max()  # what batching does to the eager model
    assert np.abs(together - alone).max() <= 4 * spread + np.finfo(np.float32).eps


def test_padding_that_is_not_at_the_end_is_refused():
    mask = torch.tensor([[False, True, True]])
    with pytest.raises(ValueError, match="padding must follow"):
        real.key_lengths(1, 3, 3, attention_mask=mask)
    assert real.key_lengths(1, 3, 3, attention_mask=mask.flip(1)).tolist() == [2]
    assert real.key_lengths(2, 3, 3, attention_mask=None) is None
    with pytest.raises(ValueError, match="only padding masks"):
        real.key_lengths(1, 3, 3, attention_mask=mask, use_vmap=True)


def test_dropout_is_refused(small_package, model):
    with real.plugged_in(packages.load(small_package)):
        from transformers import AttentionInterface

        q = torch.zeros(1, 12, 3, 32)
        with pytest.raises(ValueError, match="dropout"):
            AttentionInterface()[real.NAME](None, q, q, q, None, dropout=0.1)
    assert real.NAME not in AttentionInterface()


def test_the_command_prints_both_tables(small_package, monkeypatch):
    monkeypatch.setattr(real.run, "__kwdefaults__", {**real.run.__kwdefaults__, "sentences": FEW})
    done = CliRunner().invoke(main, ["real"])
    assert done.exit_code == 0, done.output
    assert "MiniLM, 3 sentences" in done.output and "sentence embeddings" in done.output
