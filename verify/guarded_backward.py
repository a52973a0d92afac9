"""The backward kernels of a package in memory that tells: the part of `verify.guarded` for the gradients.

Each form of a call runs through the kernel's own C entry point, into gradients and scratch memory that were filled with
NaN and lie between guard bytes; and, where asked for, through the op, whose gradients are exactly as long as they are
said to be and which nobody wrote before. Keys beyond the length were never written.

Holds, or a sentence says what does not: the guard bytes are intact, no NaN is left in a gradient, keys beyond the
length have gradient 0, and dK and dV of both runs agree bit for bit; so does dQ of the deterministic form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from verify import packages, plain
from verify.cases import CAUSAL, Case, torch_dtype
from verify.entry_points import BACKWARD_TENSORS, DTYPE_CODES, BackwardArgs
from verify.guarded_memory import Guarded, drawn, scattered, unwritten
from verify.guarded_problems import Problem

NAMES = ("dQ", "dK", "dV")


@dataclass(frozen=True)
class Call:
    """What a backward call is given: tensors by the names of BackwardArgs, on the device."""

    tensors: dict[str, torch.Tensor]
    lengths: torch.Tensor | None
    scale: float
    causal: int  # index of CAUSAL


def prepare(problem: Problem, dtype: str, d: int, dv: int, device: str = "cuda") -> Call:
    """N(0, 1) for q, k, v and dO; O and LSE of the plain formula on the host, so that no forward kernel runs here."""
    p, kind = problem, torch_dtype(dtype)
    queries, keys = (p.nq,) * p.b, (p.nk,) * p.b if p.lengths is None else p.lengths
    shapes = {"q": (p.hq, p.nq, d), "k": (p.hkv, p.nk, d), "v": (p.hkv, p.nk, dv), "dout": (p.hq, p.nq, dv)}
    host = {name: drawn((p.b, *shape), kind, seed) for seed, (name, shape) in enumerate(shapes.items(), 1)}
    q, k, v = (np.asarray(host[name].to(torch.float64).numpy()) for name in "qkv")
    case = Case(
        name=p.name, family="gaussian", dtype="float32", q=q, k=k, v=v,
        scale=d**-0.5, causal=p.causal, key_lengths=p.lengths,
    )  # fmt: skip
    result = plain.attention(case)
    host["o"] = torch.from_numpy(np.nan_to_num(result.o)).to(kind)  # O of a row without a key is 0
    tensors = {
        name: scattered(x, keys if name in ("k", "v") else queries, p.layout, device) for name, x in host.items()
    }
    lse_type = torch.float64 if dtype == "float64" else torch.float32
    tensors["lse"] = torch.from_numpy(result.lse).to(lse_type).to(device)
    tensors["dlse"] = torch.ones_like(tensors["lse"])
    lengths = None if p.lengths is None else torch.tensor(p.lengths, device=device)
    return Call(tensors, lengths, case.scale, CAUSAL.index(p.causal))


def launch(
    library: Any, unit: str, dtype: str, call: Call, *, deterministic: bool, debug: bool, device: str = "cuda"
) -> tuple[Guarded, ...]:
    """Run the entry point of `unit` in guarded memory; returns dQ, dK and dV, in float32 from the debug form.

    Raises: RuntimeError when it returns an error, or wrote beside its scratch memory.
    """
    (b, hq, nq, _), (_, hkv, nk, _) = call.tensors["q"].shape, call.tensors["k"].shape
    inputs = {name: call.tensors[name] for name in "qkv"}
    made = {f"d{n}": Guarded(x.shape, torch.float32 if debug else x.dtype, device) for n, x in inputs.items()}
    args = BackwardArgs(
        B=b, Hq=hq, Hkv=hkv, Nq=nq, Nk=nk,
        key_lengths=None if call.lengths is None else call.lengths.data_ptr(),
        scale=call.scale, causal=call.causal, deterministic=deterministic,
    )  # fmt: skip
    for name in BACKWARD_TENSORS:
        x = made[name].values if name in made else call.tensors[name]
        steps = x.stride() if name == "dout" else x.stride()[:3]
        setattr(args, name, x.data_ptr())
        setattr(args, f"{name}_stride", (ctypes.c_int64 * len(steps))(*steps))
    size_of = getattr(library, f"attention_backward_{unit}_scratch")
    size_of.restype = ctypes.c_int64
    scratch = Guarded((int(size_of(ctypes.byref(args), DTYPE_CODES[dtype])),), torch.uint8, device)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if device == "cuda" else None)
    entry = getattr(library, f"attention_backward_{unit}")
    error = entry(ctypes.byref(args), DTYPE_CODES[dtype], ctypes.c_void_p(scratch.values.data_ptr()), stream)
    if error:
        raise RuntimeError(f"attention_backward_{unit} returned CUDA error {error}")
    for text in scratch.faults("scratch memory"):
        raise RuntimeError(f"attention_backward_{unit}: {text}")
    return tuple(made.values())


def faults(
    attn: ModuleType, problem: Problem, dtype: str, library: Any, unit: str, *, op_too: bool, debug: bool = False,
    device: str = "cuda",
) -> Iterator[str]:  # fmt: skip
    """Run one problem in both forms; yields what does not hold. op_too: through the op as well."""
    checks, op = packages.part(attn, "checks"), getattr(torch.ops, packages.part(attn, "op").NAMESPACE).backward
    call = prepare(problem, dtype, checks.D, checks.DV, device)
    lengths = (problem.nk,) * problem.b if problem.lengths is None else problem.lengths
    for deterministic in (False, True):
        names = [f"{'deterministic ' if deterministic else ''}{name}" for name in NAMES]
        guarded = launch(library, unit, dtype, call, deterministic=deterministic, debug=debug, device=device)
        for name, one in zip(names, guarded, strict=True):
            yield from one.faults(name)
            x = one.read()
            yield from unwritten(name, x)
            if not name.endswith("dQ") and any(bool(x[i, :, n:].any()) for i, n in enumerate(lengths)):
                yield f"{name}: a key beyond the length has a gradient"
        if op_too:
            t = call.tensors
            given = (t["dout"], t["dlse"], t["q"], t["k"], t["v"], t["o"], t["lse"], call.lengths, call.scale)
            of_op = op(*given, call.causal, [True] * 3, deterministic)
            for name, one, got in zip(names, guarded, of_op, strict=True):
                yield from unwritten(name, got)
                if (deterministic or name != "dQ") and not torch.equal(got, one.values):
                    yield f"{name}: the op and the kernel's entry point differ"
