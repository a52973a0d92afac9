"""The backward pass is timed alone, is checked first, and stands beside the right calls; no test asks for a time."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.nn.functional import scaled_dot_product_attention

from codegen.errors import CheckFailed, RequestError
from verify import (
    arithmetic,
    bench,
    bench_backward,
    bench_cuda,
    bench_gradients,
    bench_grid,
    bench_options,
    bench_plot,
    bench_table,
    bounds,
    packages,
    peers,
    report,
    simulator,
)
from verify.__main__ import main
from verify.bench_check import Expected, model_of
from verify.bench_cuda import Sample
from verify.bench_grid import Grid
from verify.cases import torch_dtype
from verify.formats import round_to
from verify.oracle import float64

CELL = bench.Cell(dtype="bf16", d=32, n=64, causal=True, batch=2, heads=4, gqa=2, backward=True)


def sdpa(q, k, v, causal):
    """torch's attention, heads of K and V repeated before it: its output is the node that keeps the LSE."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def torch_package(hook=None):
    """A package whose kernels are torch's; `hook` changes dQ. `calls` lists the words of every forward call.

    Its LSE is that of float64: what torch keeps for 16 bits on a CPU is less accurate than what we return.
    """
    calls = []

    def attention(q, k, v, *, causal, return_lse, deterministic):
        assert return_lse
        calls.append({"deterministic": deterministic, "grad": q.requires_grad})
        if hook is not None:
            q.register_hook(hook)
        wide, keys = q.detach().double(), k.detach().double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        s = wide @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -torch.inf)
        return sdpa(q, k, v, causal), torch.logsumexp(s, dim=-1).float()

    def path(q, k, v, *, causal, backward=False):
        return {"target": "cpu", "backward": backward}

    return SimpleNamespace(attention=attention, path=path, calls=calls)


def torch_peer(name="good", forward=sdpa):
    return peers.Peer(name, name, "torch", lambda q, k, v, causal: peers.Call(lambda: forward(q, k, v, causal)))


# ---- The check before timing


def gradients(cell):
    """(q, k, v, do, o, lse, (dq, dk, dv)) of torch."""
    leaves = [x.requires_grad_() for x in bench_cuda.inputs(cell, "cpu")]
    do = bench_cuda.output_gradient(cell, "cpu")
    o = sdpa(*leaves, cell.causal)
    lse = bench_backward.saved_lse(o)
    got = torch.autograd.grad(o, leaves, do)
    return *(x.detach() for x in leaves), do, o.detach(), lse, got


@pytest.mark.parametrize("dtype", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_right_gradients_pass_the_check_and_wrong_ones_do_not(dtype, causal):
    cell = bench.Cell(dtype=dtype, d=64, n=256, causal=causal, batch=2, heads=4, gqa=2, backward=True)
    q, k, v, do, o, lse, (dq, dk, dv) = gradients(cell)

    def difference(*got):
        return bench_gradients.difference(q, k, v, do, o, lse, got, causal=causal, dtype=dtype)

    assert difference(dq, dk, dv) is None
    root = cell.d**0.5
    wrong = [
        ("dq, batch", (root * dq, dk, dv)),  # without the scale
        ("dk, batch", (dq, root * dk, dv)),
        ("dv, batch", (dq, dk, dk)),
        ("dq, batch", (dq.flip(1), dk, dv)),  # heads or batch entries in another order
        ("dk, batch", (dq, dk.flip(1), dv)),
        ("dv, batch", (dq, dk, dv.flip(0))),
        ("dk has shape None", (dq, None, dv)),
        ("dq has shape", (dq.transpose(1, 2), dk, dv)),
    ]
    for bad in (torch.nan, 0.0):
        wrong += [
            ("dq, batch", (torch.full_like(dq, bad), dk, dv)),
            ("dk, batch", (dq, torch.full_like(dk, bad), dv)),
            ("dv, batch", (dq, dk, torch.full_like(dv, bad))),
        ]
    for what, got in wrong:
        said = difference(*got)
        assert said is not None and said.startswith(what)


def test_gradients_of_the_other_mask_or_without_the_shared_heads_are_noticed():
    q, k, v, do, o, lse, _ = gradients(CELL)
    full = bench.Cell(**{**vars(CELL), "causal": False})
    *_, others = gradients(full)
    assert bench_gradients.difference(q, k, v, do, o, lse, others, causal=True, dtype="bf16") is not None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    last = sdpa(*leaves, True)
    one_head = torch.zeros_like(do)
    one_head[:, ::2] = do[:, ::2]  # of each pair of query heads the first only
    lost = torch.autograd.grad(last, leaves, one_head)
    dq = torch.autograd.grad(sdpa(*leaves, True), leaves, do)[0]
    said = bench_gradients.difference(q, k, v, do, o, lse, (dq, *lost[1:]), causal=True, dtype="bf16")
    assert said is not None and said.startswith(("dk", "dv"))


def test_an_lse_that_the_forward_pass_got_wrong_is_noticed():
    q, k, v, do, *_ = gradients(CELL)
    work = bench_backward.BackwardPass(q, k, v, do, causal=True, dtype="bf16")
    attn = torch_package()
    right = attn.attention
    attn.attention = lambda *x, **words: (lambda o, lse: (o, lse + 1e-3))(*right(*x, **words))
    assert work.of_package(torch_package())[1] is None
    assert work.of_package(attn)[1].startswith("LSE, batch ")
    assert work.of_torch(lambda *x: sdpa(*x, True))[1] is None
    assert work.of_torch(lambda *x: sdpa(*x, False))[1] is not None


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float32", "bf16", "fp16"])
def test_torchs_own_kernel_is_allowed_its_roundings_and_no_other_output(dtype, causal):
    """At d=128, N=512 its bf16 row of two keys lies outside the bound of ours, which divides by rounded weights."""
    cell = bench.Cell(dtype=dtype, d=128, n=512, causal=causal, backward=True)
    made = torch.Generator().manual_seed(cell.n)  # as bench.time_cell draws them
    q, k, v = (
        torch.randn(1, cell.heads, cell.n, cell.d, generator=made).to(torch_dtype(dtype)).requires_grad_()
        for _ in range(3)
    )
    o = sdpa(q, k, v, causal)
    lse, o = bench_backward.saved_lse(o), o.detach()
    q, k, v = (x.detach() for x in (q, k, v))
    expected = Expected(q, k, v, causal=causal, dtype=dtype, torch_on_cpu=True)
    assert expected.difference(o, lse) is None
    wrong = {
        "mask": sdpa(q, k, v, not causal),
        "scale": scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.01 * cell.d**-0.5),
        "heads": o.flip(1),
        "unwritten": torch.full_like(o, torch.nan),
        "a bit in the middle of the mantissa": o * 1.03125,
    }
    for name, output in wrong.items():
        assert expected.difference(output) is not None, name
    assert expected.difference(o, lse + 1e-3).startswith("LSE, ")


def test_a_kernel_that_sums_weights_before_it_rounds_them_needs_an_allowance_that_ours_has_not():
    """Of a hundred pairs of keys, as float64 sees them: the model of torch covers each, that of ours does not."""
    theirs, ours = arithmetic.model("torch_16", "bf16"), model_of("bf16", "cpu")
    rng = np.random.default_rng(0)
    q, v = rng.standard_normal((100, 8)), round_to(rng.standard_normal((100, 2, 8)), "bf16")
    q = round_to(q, "bf16")
    found = {"theirs": [], "ours": []}
    for row, values in zip(q, v, strict=True):
        x = row[None], round_to(rng.standard_normal((2, 8)), "bf16"), values
        words = {"scale": 8**-0.5, "visible": np.ones((1, 2), bool)}
        o, _ = simulator.forward(*x, **words, model=theirs, bc=512)
        want = float64.attention(*x, **words)
        for name, model in (("theirs", theirs), ("ours", ours)):
            bound = bounds.forward(*x, **words, model=model, bc=512).o_probabilistic
            found[name].append(float((np.abs(o - want.o) / bound).max()))
    assert max(found["theirs"]) <= 1 < max(found["ours"])


def test_nodes_of_torchs_attention_keep_the_lse_under_a_name_that_we_know():
    for name in ("Flash", "Efficient", "Cudnn"):
        node = getattr(torch._C._functions, f"ScaledDotProduct{name}AttentionBackward0")
        assert any(hasattr(node, attribute) for attribute in bench_backward.SAVED_LSE)
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    with pytest.raises(CheckFailed, match="MulBackward0 keeps no LSE"):
        bench_backward.saved_lse(2 * q)


def test_padded_rows_of_an_lse_are_left_out():
    padded = torch.arange(2.0 * 4 * 32).reshape(2, 4, 32)
    o = SimpleNamespace(grad_fn=SimpleNamespace(_saved_log_sumexp=padded), shape=(2, 4, 20, 8))
    assert torch.equal(bench_backward.saved_lse(o), padded[..., :20])
    o = SimpleNamespace(grad_fn=SimpleNamespace(_saved_logsumexp=padded[..., None]), shape=(2, 4, 32, 8))
    assert torch.equal(bench_backward.saved_lse(o), padded)


# ---- What is timed


def test_only_the_backward_pass_runs_while_it_is_timed(monkeypatch):
    monkeypatch.setattr(bench, "SAMPLE_S", 1e-6)
    attn = torch_package()
    timing = bench.time_cell(attn, bench.Cell(dtype="float32", d=32, n=48, causal=True, backward=True), rounds=3)
    assert attn.calls == [{"deterministic": False, "grad": True}]  # once, whatever the number of rounds
    assert len(timing.ours) == len(timing.peers["torch"]) == 3 and timing.describe()["backward"] is True


def test_the_command_times_the_backward_pass_of_a_package(small_package, tmp_path):
    file = tmp_path / "bench.json"
    words = ["bench", str(small_package), "--backward", "--n", "32", "--rounds", "2", "--out", str(file)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    figures = json.loads(file.read_text())
    assert figures["kind"] == "bench_backward" and figures["summary"]["torch"]["float32"]["cells"] == 2
    assert all(cell["backward"] for cell in figures["cells"]) and "speed of the backward pass" in done.output
    (block,) = [report.markdown("bench_backward cpu", [{"file": "bench.json", **figures}])]
    assert block.startswith("Speed of the backward pass / torch") and "| float32 | 32 |" in block


def test_wrong_gradients_are_not_timed_on_a_cpu():
    with pytest.raises(CheckFailed, match="ours on float32 d=32 N=48 full backward: dq, batch 0"):
        bench.time_cell(
            torch_package(lambda g: 1.001 * g), bench.Cell(dtype="float32", d=32, n=48, causal=False, backward=True)
        )


def test_operations_of_a_backward_pass_are_its_five_products():
    def flops(**words):
        return bench.Cell(dtype="bf16", n=8, causal=False, heads=2, **words).flops

    assert flops(d=64, backward=True) == 2.5 * flops(d=64)
    assert flops(d=192, dv=128, backward=True) == 2 * 2 * 64 * (3 * 192 + 2 * 128)
    assert str(CELL) == "bf16 d=32 N=64 causal gqa=2 backward"


def group(attn, found, cells):
    class Gpu:
        multiprocessors, capability = 132, (9, 0)
        product = staticmethod(lambda: "product")

        @staticmethod
        def sample(call):
            return Sample({"tuple": 1.0, "str": 2.0}[type(call()).__name__], 1.5e9)

    return bench_cuda.time_group(cells, {"ours": attn}, found, gpu=Gpu(), rounds=3, device="cpu")


def forms(**words):
    return Grid(tokens=128, columns=128, lengths=(64,), masks=("causal",), backward=True, **words).shapes([(32, 32)])[0]


def test_the_deterministic_form_stands_beside_the_default_one_and_without_peers():
    attn = torch_package()
    found = {"good": torch_peer(), "mask": torch_peer("mask", lambda q, k, v, causal: sdpa(q, k, v, not causal))}
    cells = forms()
    default, equal_bits = group(attn, found, cells)
    assert [str(c) for c in cells] == [
        "bf16 d=32 N=64 causal backward", "bf16 d=32 N=64 causal backward deterministic",
    ]  # fmt: skip
    assert [c["deterministic"] for c in attn.calls] == [False, True]
    assert list(default.peers) == ["good"] and default.absent["mask"].startswith("not attention: ")
    assert equal_bits.peers == {} and equal_bits.absent == {}
    assert default.plain is None and equal_bits.plain == default.ours and default.path["backward"] is True
    means = bench_table.summary([default, equal_bits])["ours"]
    assert means["bf16 bhnd gqa=1"]["good"]["geometric_mean"] == 1.0
    assert list(means["bf16 bhnd gqa=1 deterministic"]) == ["plain"]


def test_the_result_file_its_table_and_its_report_are_of_the_backward_pass(monkeypatch):
    monkeypatch.setattr(bench_grid, "_digest", lambda attn: "0" * 64)
    monkeypatch.setattr(bench_grid.packages, "part", lambda attn, name: SimpleNamespace(NAME="attn_d32"))
    grid = Grid(tokens=128, columns=128, lengths=(64,), masks=("causal",), backward=True)
    attn = torch_package()
    timings = group(attn, {"fa2": torch_peer("fa2")}, grid.shapes([(32, 32)])[0])
    header = {
        "gpu": {"model": "a card", "driver": "1", "cuda": "13.0"}, "versions": {"torch": "2.11"}, "date": "2026-01-02",
        "command": "python -m verify bench", "load": [0.0],
    }  # fmt: skip
    stated = bench_grid.figures(
        grid, timings, {(32, 32): {"ours": attn}}, absent={"flex": "its backward pass is not timed"}, header=header,
        built={},
    )  # fmt: skip
    assert stated["kind"] == "speed_backward" and stated["holds"]
    assert stated["summary"]["ours"]["bf16 bhnd gqa=1"]["fa2"]["cells"] == 1
    head, (default, equal_bits) = bench_table.rows(stated)
    plain = head.index("vs plain")
    assert default[plain] == "-" and equal_bits[plain] == "1.00±0.00"
    assert equal_bits[head.index("form")] == "bf16 bhnd 1 deterministic" and equal_bits[head.index("vs fa2")] == "-"
    assert bench_table.table(stated).title.startswith("speed of the backward pass on a card")
    lines = bench_plot.series(stated, 32, 32, True)
    assert {name: len(points) for name, points in lines.items()} == {"ours": 1, "fa2": 1}
    text = report.markdown("speed_backward cuda", [{"file": "speed.json", **stated}])
    assert "bf16 bhnd 1 deterministic" in text and "/ plain 1.000" in text


def test_a_deterministic_form_is_compared_with_the_same_form():
    cells = forms(layouts=("bhnd", "bnhd"))
    timings = group(torch_package(), {}, cells)
    assert [t.cell.layout for t in timings] == ["bhnd", "bhnd", "bnhd", "bnhd"]
    assert [t.plain is None for t in timings] == [True, False, False, False]


def test_wrong_gradients_are_not_timed_on_a_gpu():
    with pytest.raises(CheckFailed, match="ours on bf16 d=32 N=64 causal backward: dq, batch"):
        group(torch_package(lambda g: 1.25 * g), {}, forms())


# ---- What is asked for


def test_peers_whose_backward_pass_is_not_timed_are_named():
    found, absent = peers.available(("fa2", "flex"), backward=True)
    assert list(found) == ["fa2"] and absent == {"flex": "its backward pass is not timed"}
    assert [name for name, peer in peers.PEERS.items() if peer.backward] == ["cudnn", "fa2", "efficient"]


def test_a_package_without_backward_kernels_is_refused():
    forward_only = packages.emit(d=32, dtypes=("float32",), archs=("cpu",), backward=False)
    done = CliRunner().invoke(main, ["bench", str(forward_only), "--backward", "--n", "32"])
    assert done.exit_code == 2 and "has no backward kernels for cpu" in done.output
    cpu_only = packages.emit(d=32, dtypes=("float32",), archs=("cpu",))
    with pytest.raises(RequestError, match="has no backward kernels for cuda"):
        bench_grid.load(Grid(packages=(str(cpu_only),), backward=True))


def test_the_default_grid_of_the_backward_pass():
    grid = bench_options.grid((), {"backward": True})
    shapes = grid.shapes(grid.widths)
    assert {(c.d, c.n) for shape in shapes for c in shape} == {(d, n) for d in (64, 128) for n in (4096, 8192, 16384)}
    assert {c.causal for shape in shapes for c in shape} == {False, True} and grid.archs == ("sm80",)
    assert all([c.deterministic for c in shape] == [False, True] and shape[0].backward for shape in shapes)
    chosen = bench_options.grid(("a package",), {"backward": True, "lengths": "512"})
    assert chosen.lengths == (512,) and chosen.widths is None and chosen.archs == ()
    assert bench_grid.BACKWARD["lengths"] == bench_options.grid(("a package",), {"backward": True}).lengths


@pytest.mark.parametrize(
    "options, says",
    [
        ({"tiles": "grid"}, "--tiles has no effect with --backward"),
        ({"tiles": "128x64", "device": "cuda"}, "--tiles has no effect with --backward"),
        ({"overhead": True, "device": "cuda"}, "--overhead has no effect with --backward"),
    ],
)
def test_options_without_an_effect_on_the_backward_pass_are_refused(options, says):
    read = bench_options.grid if options.pop("device", "cpu") == "cuda" else bench_options.cpu
    with pytest.raises(RequestError, match=says):
        read((), {**options, "backward": True})
