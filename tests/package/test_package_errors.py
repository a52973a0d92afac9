"""Bad requests: one sentence, the same from the function, from torch.ops, on fake tensors and before any build."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

D = 16


def t(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


Q, KV = (2, 4, 5, D), (2, 2, 7, D)
RANK = "q, k and v must have 4 dimensions (batch, heads, length, width); got"
DTYPE = "q, k and v must share one dtype; got"
CAST = "(autocast leaves float64 as it is: cast them)"
# name -> (q, k, v, options of the op, the sentence). `fake` cases cannot look at values.
BAD = {
    "rank": (t(4, 5, D), t(*KV), t(*KV), {},
             f"{RANK} q (4, 5, 16), k (2, 2, 7, 16), v (2, 2, 7, 16)"),
    "rank 1": (t(D), t(*KV), t(*KV), {},
               f"{RANK} q (16,), k (2, 2, 7, 16), v (2, 2, 7, 16)"),
    "mixed dtypes": (t(*Q), t(*KV), t(*KV, dtype=torch.bfloat16), {},
                     f"{DTYPE} q float32, k float32, v bfloat16 {CAST}"),
    "integers": (t(*Q, dtype=torch.int32), t(*KV, dtype=torch.int32), t(*KV, dtype=torch.int32), {},
                 "this package has no cpu kernel for int32; it has float32, float64, bfloat16, float16"),
    "d of q": (t(2, 4, 5, 32), t(*KV), t(*KV), {}, "this package is made for d=16; q has d=32 and k has d=16"),
    "d of both": (t(2, 4, 5, 128), t(2, 2, 7, 128), t(*KV), {},
                  "this package is made for d=16; q has d=128 and k has d=128"),
    "d = 0": (t(2, 4, 5, 0), t(2, 2, 7, 0), t(*KV), {}, "this package is made for d=16; q has d=0 and k has d=0"),
    "dv": (t(*Q), t(*KV), t(2, 2, 7, 8), {}, "this package is made for dv=16; v has dv=8"),
    "lengths of k and v": (t(*Q), t(*KV), t(2, 2, 6, D), {},
                           "k and v must agree in batch, heads and length; got k (2, 2, 7, 16), v (2, 2, 6, 16)"),
    "batch": (t(*Q), t(3, 2, 7, D), t(3, 2, 7, D), {}, "q has batch 2, k and v have batch 3"),
    "heads": (t(2, 6, 5, D), t(2, 4, 7, D), t(2, 4, 7, D), {},
              "Hq=6 query heads cannot share Hkv=4 key/value heads: Hq must be a multiple of Hkv"),
    "no kv heads": (t(*Q), t(2, 0, 7, D), t(2, 0, 7, D), {},
                    "Hq=4 query heads cannot share Hkv=0 key/value heads: Hq must be a multiple of Hkv"),
    **{f"scale {scale}": (t(*Q), t(*KV), t(*KV), {"scale": scale},
                          f"scale must be a number from 1.17549e-38 to 1.70141e+38; got {scale:g}")
       for scale in (0.0, -0.125, math.nan, -math.nan, math.inf, -math.inf, 1e300, 1e-300)},
    "scale for float64": (t(*Q).double(), t(*KV).double(), t(*KV).double(), {"scale": -1.0},
                          "scale must be a number from 2.22507e-308 to 8.98847e+307; got -1"),
    "bool lengths": (t(*Q), t(*KV), t(*KV), {"key_lengths": torch.tensor([True, False])},
                     "key_lengths must be int32 or int64; got bool"),
    "float lengths": (t(*Q), t(*KV), t(*KV), {"key_lengths": t(2)}, "key_lengths must be int32 or int64; got float32"),
    "shape of lengths": (t(*Q), t(*KV), t(*KV), {"key_lengths": torch.tensor([1, 2, 3])},
                         "key_lengths must have shape (2,), one length per batch entry; got (3,)"),
    "rank of lengths": (t(*Q), t(*KV), t(*KV), {"key_lengths": torch.tensor([[1, 2]])},
                        "key_lengths must have shape (2,), one length per batch entry; got (1, 2)"),
}  # fmt: skip
VALUES = {
    "too long": ([8, 1], "key_lengths[0] is 8; k and v have 7 keys"),
    "negative": ([3, -1], "key_lengths[1] is -1; k and v have 7 keys"),
    "huge": ([2**62, 1], f"key_lengths[0] is {2**62}; k and v have 7 keys"),
}


def sentence(call):
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


@pytest.mark.field("R062", "R121", "R122", "R124", "R125", "R126", "R036", "R058")
@pytest.mark.parametrize("name", BAD)
def test_one_sentence_wherever_the_call_comes_from(attn, forward, name):
    q, k, v, options, want = BAD[name]
    scale, lengths = options.get("scale", 0.25), options.get("key_lengths")
    assert sentence(lambda: attn.attention(q, k, v, **options)) == want
    assert sentence(lambda: forward(q, k, v, lengths, scale, 0)) == want
    assert sentence(lambda: attn.path(q, k, v, key_lengths=lengths)) == want if "scale" not in options else True
    with torch.inference_mode():
        assert sentence(lambda: forward(q, k, v, lengths, scale, 0)) == want
    with FakeTensorMode() as mode:
        fake = [x if x is None else mode.from_tensor(x) for x in (q, k, v, lengths)]
        assert sentence(lambda: forward(*fake, scale, 0)) == want
    x = t(1, 1, 2, D)
    assert torch.equal(attn.attention(x, x, x), x)  # the process is none the worse


@pytest.mark.field("R122")
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_out_of_range_on_the_cpu(attn, forward, name, dtype):
    values, want = VALUES[name]
    if max(values) >= 2**31 and dtype == torch.int32:
        dtype = torch.int64
    lengths = torch.tensor(values, dtype=dtype)
    assert sentence(lambda: attn.attention(t(*Q), t(*KV), t(*KV), key_lengths=lengths)) == want
    assert sentence(lambda: forward(t(*Q), t(*KV), t(*KV), lengths, 0.25, 0)) == want


def test_bad_requests_are_refused_before_anything_is_built(packages, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    attn = packages.imported(packages.emitted(tmp_path, "attn_unbuilt"))
    for q, k, v, options, want in BAD.values():
        assert sentence(lambda q=q, k=k, v=v, options=options: attn.attention(q, k, v, **options)) == want
    assert not (tmp_path / "cache").exists()


def unlike(name, shape, got, dtype="float32", got_dtype="float32"):
    return f"{name} must be {dtype} of shape {shape} on cpu for these q, k and v; got {got_dtype} of shape {got} on cpu"


LSE = (2, 4, 5)
# name -> (what differs from a good backward call, the sentence)
BAD_RESULTS = {
    "shape of dout": ({"dout": t(2, 4, 7, D)}, unlike("dout", Q, (2, 4, 7, D))),
    "rank of dout": ({"dout": t(4, 5, D)}, unlike("dout", Q, (4, 5, D))),
    "dtype of dout": ({"dout": t(*Q, dtype=torch.float16)}, unlike("dout", Q, Q, got_dtype="float16")),
    "dlse": ({"dlse": t(2, 4)}, unlike("dlse", LSE, (2, 4))),
    "o": ({"o": t(*KV)}, unlike("o", Q, KV)),
    "lse": ({"lse": t(*LSE, dtype=torch.float64)}, unlike("lse", LSE, LSE, got_dtype="float64")),
    "width of v": ({"v": t(2, 2, 7, 8)}, "this package is made for dv=16; v has dv=8"),
    "scale": ({"scale": -1.0}, "scale must be a number from 1.17549e-38 to 1.70141e+38; got -1"),
    "causal": ({"causal": 3}, "causal must be 0 (none), 1 (bottom_right) or 2 (top_left); got 3"),
    "lengths": ({"key_lengths": t(2)}, "key_lengths must be int32 or int64; got float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_the_backward_op_has_one_sentence_for_each_rule_too(attn, name):
    changed, want = BAD_RESULTS[name]
    call = {"dout": t(*Q), "dlse": None, "q": t(*Q), "k": t(*KV), "v": t(*KV), "o": t(*Q), "lse": t(*LSE),
            "key_lengths": None, "scale": 0.25, "causal": 0, "wanted": [True] * 3, "deterministic": False}  # fmt: skip
    backward = getattr(torch.ops, attn.op.NAMESPACE).backward.default
    assert [x.shape for x in backward(*call.values())] == [Q, KV, KV]
    call |= changed
    assert sentence(lambda: backward(*call.values())) == want
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call.values()]
        assert sentence(lambda: backward(*fake)) == want


def test_the_backward_op_looks_at_lengths_on_the_cpu(attn):
    backward = getattr(torch.ops, attn.op.NAMESPACE).backward.default
    for values, want in VALUES.values():
        lengths = torch.tensor(values)
        args = (t(*Q), None, t(*Q), t(*KV), t(*KV), t(*Q), t(*LSE), lengths, 0.25, 0, [True] * 3, False)
        assert sentence(lambda args=args: backward(*args)) == want


@pytest.mark.field("R109")
def test_mixed_devices_are_named(attn, forward):
    q, k, meta = t(*Q), t(*KV), t(*KV, device="meta")
    want = "q, k and v must be on one device; got q on cpu, k on cpu, v on meta"
    assert sentence(lambda: attn.attention(q, k, meta)) == want
    assert sentence(lambda: forward(q, k, meta, None, 0.25, 0)) == want
    lengths = torch.zeros(2, dtype=torch.int64, device="meta")
    want = "key_lengths must be on cpu like q; it is on meta"
    assert sentence(lambda: attn.attention(q, k, k, key_lengths=lengths)) == want
    with FakeTensorMode():
        a, b = torch.empty(Q, device="cuda"), torch.empty(KV)
        want = "q, k and v must be on one device; got q on cuda:0, k on cpu, v on cpu"
        assert sentence(lambda: attn.attention(a, b, b)) == want


@pytest.mark.field("R125")
def test_a_device_without_kernels_is_named(attn):
    with FakeTensorMode():
        q, k = torch.empty(Q, device="cuda"), torch.empty(KV, device="cuda")
        assert sentence(lambda: attn.attention(q, k, k)) == "this package has kernels for cpu; q is on cuda:0"


@pytest.mark.field("R035")
@pytest.mark.parametrize("causal", ["left", 2, None, "True", 0.5])
def test_an_unknown_causal_is_refused(attn, causal):
    x = t(*Q)
    want = f"causal must be False, True, 'bottom_right' or 'top_left'; got {causal!r}"
    assert sentence(lambda: attn.attention(x, x, x, causal=causal)) == want
    assert sentence(lambda: attn.path(x, x, x, causal=causal)) == want


@pytest.mark.parametrize("code", [-1, 3, 2**40])
def test_the_op_refuses_an_unknown_causal_code(forward, code):
    x = t(*Q)
    want = f"causal must be 0 (none), 1 (bottom_right) or 2 (top_left); got {code}"
    assert sentence(lambda: forward(x, x, x, None, 0.25, code)) == want
    with FakeTensorMode() as mode:
        y = mode.from_tensor(x)
        assert sentence(lambda: forward(y, y, y, None, 0.25, code)) == want


def test_what_is_not_a_dense_tensor_is_refused(attn):
    x = t(*Q)
    with pytest.raises(TypeError, match=r"^q must be a torch.Tensor; got ndarray$"):
        attn.attention(x.numpy(), x, x)
    with pytest.raises(TypeError, match=r"^key_lengths must be a torch.Tensor; got list$"):
        attn.attention(x, x, x, key_lengths=[1, 2])
    for call in (lambda: attn.attention(x.to_sparse(), x, x), lambda: attn.attention(x, x.to_sparse(), x)):
        assert "must be a dense tensor; its layout is torch.sparse_coo" in sentence(call)


def test_an_instruction_set_is_forced_by_name(attn, monkeypatch):
    x = t(*Q)
    assert attn.isas("float32") == attn.isas(torch.float32) and attn.isas("float32")[-1] == "baseline"
    for isa in attn.isas("float32"):
        monkeypatch.setenv("TILEPROOF_CPU_ISA", isa)
        assert attn.path(x, x, x)["isa"] == isa
        attn.attention(x, x, x)
    monkeypatch.setenv("TILEPROOF_CPU_ISA", "")
    assert attn.path(x, x, x)["isa"] == attn.isas("float32")[0]
    assert attn.isas("float64") == ["baseline"]  # the v3 unit of these tests has no float64


@pytest.mark.parametrize("isa, dtype", [("sse9", torch.float32), ("amx", torch.float32), ("v3", torch.float64)])
def test_an_instruction_set_that_cannot_serve_is_an_error(attn, monkeypatch, isa, dtype):
    x = t(*Q, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    want = (f"TILEPROOF_CPU_ISA={isa}: not an instruction set of this machine with a {name} kernel; "
            f"there are {', '.join(attn.isas(dtype))}")  # fmt: skip
    monkeypatch.setenv("TILEPROOF_CPU_ISA", isa)
    assert sentence(lambda: attn.attention(x, x, x)) == want
    assert sentence(lambda: attn.path(x, x, x)) == want


def test_path_states_the_kernel_and_its_plan(attn):
    x = t(*Q, dtype=torch.float64)
    assert attn.path(x, x, x) == {
        "target": "cpu", "isa": "baseline", "dtype": "float64", "arithmetic": "reference",
        "br": 16, "bc": 16, "plan": {"br": 16, "bc": 16},
    }  # fmt: skip


def test_unknown_dtypes_of_isas(attn):
    assert sentence(lambda: attn.isas("float8")) == "no kernel takes float8; dtypes are float32, float64, bf16, fp16"


def test_sparse_lengths_and_odd_causal_values_are_refused(attn):
    q = t(*Q)
    with pytest.raises(ValueError, match="key_lengths must be a dense tensor"):
        attn.attention(q, t(*KV), t(*KV), key_lengths=torch.tensor([3, 1]).to_sparse())
    for causal in ([], {}, 2, None, "diagonal"):
        with pytest.raises(ValueError, match="causal must be"):
            attn.attention(q, t(*KV), t(*KV), causal=causal)


def test_vmap_over_nothing_gives_nothing(attn):
    empty = torch.func.vmap(lambda x: attn.attention(x, x, x))(t(0, 1, 2, 5, D))
    assert empty.shape == (0, 1, 2, 5, D)
