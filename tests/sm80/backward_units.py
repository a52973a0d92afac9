"""Runs the emitted mma.sync backward kernels on the emulator, and judges what they return.

The forward pass plays no part: O and LSE are those of exact attention, O rounded to the input's format and LSE to
float32. Any pair (O, LSE) would do, because the stage-wise bound is about the gradients at the pair that was given.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from codegen import problem as problems
from codegen import render
from codegen.plans import sm80_backward
from codegen.plans.sm80_backward import Sm80BackwardPlan
from verify import arithmetic, cases, compare
from verify.bounds.backward_domain import outside_backward_domain
from verify.bounds.backward_model import backward_model
from verify.bounds.backward_output import backward
from verify.emulator import build
from verify.emulator.emulator import SCHEDULES, Emulator, Run, guarded
from verify.entry_points import DTYPE_CODES, BackwardArgs
from verify.oracle import backward_float64

DTYPE = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
CAUSAL = {False: 0, "bottom_right": 1, "top_left": 2}


def make_problem(d, dv=None, *, sram_kb=163, debug=False, dtypes=("bf16", "fp16")):
    return problems.make(sram_bytes=sram_kb * 1024, d=d, dv=dv, archs=("sm80",), debug=debug, dtypes=dtypes)


def plan_of(problem) -> Sm80BackwardPlan:
    return sm80_backward.plan_backward(problem, "bf16", "sm80")[0]


def sources(problem, plan) -> dict[str, str]:
    """The files under csrc/ that the backward unit needs: name -> text."""
    shared = {"problem": problem, "header": ["Emitted by a test."], "exact": []}
    wanted = {
        "csrc/forward.h": ("package/csrc/forward.h.j2", {}),
        "csrc/backward.h": ("package/csrc/backward.h.j2", {}),
        "csrc/ptx_sm80.cuh": ("sm80/ptx_sm80.cuh", {}),
        **sm80_backward.files(problem, {("sm80", dtype): plan for dtype in problem.dtypes}),
    }
    return {
        path.removeprefix("csrc/"): render.render(template, {**shared, **context}).decode()
        for path, (template, context) in wanted.items()
    }


@functools.cache
def folder(problem, plan):
    """A folder with the sources, in the cache of the emulator."""
    texts = sources(problem, plan)
    where = build.cache() / "sources" / build._hash([*texts, *texts.values()])
    where.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (where / name).write_text(text)
    return where


@functools.cache
def emulator(problem, plan, old="", new="") -> Emulator:
    """The compiled unit, with the only `old` of its text replaced by `new`."""
    text = (folder(problem, plan) / "backward_sm80.cu").read_text()
    if old:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    includes = [folder(problem, plan)]
    return Emulator(build.library(text, includes=includes, flags=build.QUICK, name="backward_sm80.cu"))


@dataclass
class Problem:
    """One call: arrays with any strides, (B,Hq,Nq,d) and so on, of the dtype; lse and dlse float32."""

    dtype: str
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    dout: Any
    dlse: Any = None
    scale: float = 1.0
    causal: Any = False
    key_lengths: Any = None
    wanted: str = "qkv"
    deterministic: bool = False
    kept: list[Any] = field(default_factory=list)

    @property
    def group(self) -> int:
        return self.q.shape[1] // max(self.k.shape[1], 1)

    def seen(self, batch: int):
        """(Nq, Nk) bool."""
        name = self.causal or "none"
        length = None if self.key_lengths is None else int(self.key_lengths[batch])
        return cases.visible(self.q.shape[2], self.k.shape[2], causal=name, length=length)


def draw(shape, d, dv, dtype, *, seed=0, dlse=False, **words) -> Problem:
    """N(0, 1) inputs, O and LSE exact but for their formats. shape: B, Hq, Hkv, Nq, Nk."""
    b, hq, hkv, nq, nk = shape
    rng = np.random.default_rng([seed, *shape, d, dv])
    sizes = ((b, hq, nq, d), (b, hkv, nk, d), (b, hkv, nk, dv), (b, hq, nq, dv))
    q, k, v, dout = (placed(rng.standard_normal(s).astype(DTYPE[dtype])) for s in sizes)
    made = Problem(dtype, q, k, v, None, None, dout, **{"scale": 1 / math.sqrt(d), **words})
    if dlse:
        made.dlse = placed(rng.standard_normal((b, hq, nq)).astype(np.float32))
    made.o, made.lse = exact_forward(made)
    return made


def placed(x, steps=None):
    """A copy in guarded memory, contiguous or with these strides in elements."""
    if steps is None:
        made = guarded(x.shape, x.dtype)
    else:
        size = sum((n - 1) * s for n, s in zip(x.shape, steps, strict=True)) + 1 if x.size else 0
        home = guarded((size,), x.dtype)
        made = np.lib.stride_tricks.as_strided(home, x.shape, [s * x.itemsize for s in steps])
    made[...] = x
    return made


def exact_forward(x: Problem):
    """(O, LSE) in the formats that a forward kernel stores."""
    b, hq, nq, _ = x.q.shape
    o, lse = np.zeros((b, hq, nq, x.v.shape[3])), np.full((b, hq, nq), -np.inf)
    for i, h in np.ndindex(b, hq):
        seen = x.seen(i)
        s = x.scale * (wide(x.q[i, h]) @ wide(x.k[i, h // x.group]).T)
        s = np.where(seen, s, -np.inf)
        top = s.max(axis=1, initial=-np.inf, keepdims=True)
        p = np.exp(s - np.where(np.isneginf(top), 0.0, top))
        total = p.sum(axis=1, keepdims=True)
        v = np.where(seen.any(axis=0)[:, None], wide(x.v[i, h // x.group]), 0.0)
        o[i, h] = np.divide(p @ v, total, out=np.zeros(o[i, h].shape), where=total > 0)
        with np.errstate(divide="ignore"):
            lse[i, h] = (top + np.log(total))[:, 0]
    return placed(o.astype(x.q.dtype)), placed(lse.astype(np.float32))


def wide(x):
    return np.asarray(x).astype(np.float64)


def launch(machine: Emulator, x: Problem, *, debug=False) -> tuple[Run, list[Any]]:
    """The run and [dQ, dK, dV], NaN where nothing was written."""
    kind = np.dtype(np.float32) if debug else x.q.dtype
    out = [guarded(a.shape, kind) if name in x.wanted else None for name, a in zip("qkv", (x.q, x.k, x.v), strict=True)]
    arrays = {n: getattr(x, n) for n in ("q", "k", "v", "o", "lse", "dout", "dlse")}
    arrays.update(zip(("dq", "dk", "dv"), out, strict=True))
    a = BackwardArgs(scale=x.scale, causal=CAUSAL[x.causal], deterministic=x.deterministic)
    (a.B, a.Hq, a.Nq), (a.Hkv, a.Nk) = x.q.shape[:3], x.k.shape[1:3]
    for name, array in arrays.items():
        if array is not None:
            setattr(a, name, array.ctypes.data)
            count = 4 if name == "dout" else 3
            steps = [s // array.itemsize for s in array.strides[:count]]
            setattr(a, f"{name}_stride", (ctypes.c_int64 * count)(*steps))
    machine.clear()
    if x.key_lengths is not None:
        lengths = guarded((len(x.key_lengths),), np.int64)
        lengths[:] = x.key_lengths
        a.key_lengths = lengths.ctypes.data
        machine.register("key_lengths", lengths)
    size_of = machine.library.attention_backward_sm80_scratch
    size_of.restype = ctypes.c_int64
    scratch = guarded((int(size_of(ctypes.byref(a), DTYPE_CODES[x.dtype])),), np.uint8)
    assert scratch.size % 256 == 0
    machine.register("scratch", scratch, writable=True)
    for name, array in arrays.items():
        if array is None:
            continue
        bits = array if array.dtype == np.float32 else array.view(np.uint16)
        if x.key_lengths is not None and name in ("k", "v"):
            for entry, length in zip(bits, x.key_lengths, strict=True):  # the keys beyond must not be read
                for head in entry[:, : max(0, int(length))]:
                    machine.register(name, head)
        else:
            machine.register(name, bits, once=name in ("dq", "dk", "dv"))
    return machine.launch("attention_backward_sm80", ctypes.byref(a), DTYPE_CODES[x.dtype], scratch, None), out


def gradients(problem, x: Problem, schedules=SCHEDULES, plan=None):
    """[dQ, dK, dV] after a clean run in every schedule; they agree bit for bit where they must."""
    machine = emulator(problem, plan or plan_of(problem))
    first = None
    for schedule in schedules:
        machine.configure(schedule)
        run, got = launch(machine, x, debug=problem.debug)
        run.check(schedule.name)
        if first is None:
            first = got
            continue
        summed = "q" in x.wanted and x.wanted != "q" and not x.deterministic  # dQ by reductions
        for name, one, two in zip("qkv", first, got, strict=True):
            if one is not None and not (name == "q" and summed):
                assert np.array_equal(bits(one), bits(two)), f"d{name} depends on the schedule: {schedule.name}"
    return first


def bits(x):
    return x.view(np.uint32 if x.dtype == np.float32 else np.uint16)


def model(problem, dtype, *, deterministic):
    path = arithmetic.model(sm80_backward.ARITHMETIC, dtype, debug=problem.debug)
    return backward_model(path, dq_restarts=not deterministic)


def assert_right(problem, x: Problem, got, *, plan=None) -> float:
    """Fail unless the wanted of got = [dQ, dK, dV] are within the stage-wise bound. Returns the largest error/bound."""
    plan, largest = plan or plan_of(problem), 0.0
    by_rows = x.deterministic or x.wanted == "q"
    model_ = model(problem, x.dtype, deterministic=by_rows)
    for b, g in np.ndindex(x.k.shape[:2]):
        heads = slice(g * x.group, (g + 1) * x.group)
        length = x.k.shape[2] if x.key_lengths is None else int(x.key_lengths[b])
        q, do, o, lse = (stacked(t[b, heads]) for t in (x.q, x.dout, x.o, x.lse))
        dlse = None if x.dlse is None else stacked(x.dlse[b, heads])
        k, v = wide(x.k[b, g]), wide(x.v[b, g])
        k[length:], v[length:] = 0.0, 0.0
        words = {"scale": x.scale, "dlse": dlse, "visible": np.tile(x.seen(b), (x.group, 1)), "given": (o, lse)}
        exact = backward_float64.gradients(q, k, v, do, **words)
        limits = backward(q, k, v, do, model=model_, br=plan.br, bc=plan.bc, heads=x.group, **words)
        assert outside_backward_domain(q, k, v, do, model=model_, bound=limits, **words) is None
        if by_rows:  # dQ stays in the accumulator over all key tiles
            assert not model_.dq_restarts
        results = {"dq": got[0], "dk": got[1], "dv": got[2]}
        for name, result in results.items():
            if name[1] not in x.wanted:
                continue
            mine = stacked(result[b, heads]) if name == "dq" else wide(result[b, g])
            largest = max(largest, compare.assert_within(
                mine, getattr(exact, name), getattr(limits, name), want_error=getattr(exact, name + "_err"),
                name=f"{x.dtype} head {b, g} {name}"))  # fmt: skip
    return largest


def stacked(x):
    """(heads, Nq, ...) -> (heads Nq, ...)."""
    return wide(np.asarray(x).reshape(x.shape[0] * x.shape[1], *x.shape[2:]))
