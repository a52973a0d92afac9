"""The problems on which a broken backward pass of `spec` shows, and what is asked of its gradients.

Each probe runs Algorithm 2 of FlashAttention-2 or Algorithm 4 of FlashAttention-1 of a copy of `spec` on one head, at
the O and LSE of the exact forward pass (made by the oracle, rounded to float64), and is heard by the float64 oracle
under the stage-wise bound. With dropout each row is a problem of its own for the oracle: its values are Z_ik v_k.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from spec import dropout, masks
from verify import arithmetic
from verify.arithmetic import gamma
from verify.bounds.backward_model import backward_model
from verify.bounds.backward_output import BackwardBound, backward
from verify.cases import GRADIENTS, Array, Mask
from verify.mutate import gradients
from verify.mutate.kill import ERROR, Kill
from verify.mutate.probes_spec import Probe, _causal, _family, _gaussian, _logits, _Real
from verify.mutate.reference import Copy
from verify.oracle import backward_float64, float64
from verify.oracle.backward_reference import Given, Gradients

# FlashAttention-1 has P = exp(S - m) / l where the bound counts exp(S - LSE). Beside NumPy's exp (8 u): the division, l
# as exp(LSE - m), and u |S - m| beyond u |S - LSE|, at most 8 + 2 + 2 ln Nk <= 18 u for the Nk of these probes.
FLASH1_EXP_ERROR = 32 * 2.0**-53


@dataclass(frozen=True, eq=False)
class BackwardProbe:
    """A head, the gradient of the loss by O (Nq, dv) and, where there is one, by LSE (Nq,)."""

    head: Probe
    do: Array
    dlse: Array | None = None

    @property
    def name(self) -> str:
        return self.head.name

    @property
    def scale(self) -> float:
        return float(self.head.q.shape[1] ** -0.5 if self.head.scale is None else self.head.scale)

    def visible(self) -> Mask:
        nq, nk = len(self.head.q), len(self.head.k)
        return np.ones((nq, nk), bool) if self.head.mask is None else masks.dense(self.head.mask(masks), nq, nk)

    def z(self) -> Array | None:
        """The dropout factors (Nq, Nk), 0 or a power of two in every probe."""
        if not self.head.dropout:
            return None
        rows, keys = np.arange(len(self.head.q)), np.arange(len(self.head.k))
        return dropout.Dropout(**self.head.dropout).z(rows[:, None], keys[None, :])


def _with(head: Probe, *, dlse: bool = False, seed: int = 11) -> BackwardProbe:
    rng = np.random.default_rng([seed, *head.q.shape, len(head.k)])
    do = rng.standard_normal((len(head.q), head.v.shape[1]))
    return BackwardProbe(head, do, rng.standard_normal(len(head.q)) if dlse else None)


@lru_cache(maxsize=1)
def probes() -> tuple[BackwardProbe, ...]:
    """All of them, the cheapest that show most first."""
    tall = _with(_gaussian("rows without a key", 24, 5, mask=_causal()), dlse=True)
    tall.do[:19], tall.dlse[:19] = np.nan, np.nan  # type: ignore[index]  # of the rows without a key
    spoilt = _with(_gaussian("NaN in dO", 20, 20, mask=_causal()))
    spoilt.do[7, 3] = np.nan
    hidden = _gaussian("NaN beyond the last key", 20, 24, mask=lambda m: m.KeyPadding(13), bc=8)
    hidden.k[13:], hidden.v[13:] = np.nan, np.nan
    found = [
        _with(_gaussian("one key", 4, 1)),
        _with(_gaussian("causal square", 20, 20, mask=_causal()), dlse=True),
        _with(_gaussian("causal wide", 5, 24, mask=_causal())),
        _with(_gaussian("causal top left", 5, 24, mask=_causal(masks.TOP_LEFT))),
        _with(_gaussian("whole tiles", 32, 32)),
        _with(_gaussian("ragged tail", 17, 17, 24, 8)),
        _with(_gaussian("many tiles", 32, 48, br=8, bc=16), dlse=True),
        _with(_gaussian("window of 3", 12, 12, mask=lambda m: m.Window(2, 0), bc=4, br=4)),
        _with(_logits("large LSE", np.linspace(400.0, 420.0, 20), 5)),
        _with(_gaussian("dropout", 20, 20, dropout={"p": 0.75, "seed": 7}, br=8, bc=8)),
        _with(_family("all_masked_row", "explicit mask", 6, 40, seed=2)),
        tall,
        spoilt,
        _with(replace(hidden, length=13)),
        _with(_gaussian("no keys", 3, 0)),
        _with(_gaussian("no rows", 0, 3)),
    ]
    for probe in list(found):
        if probe.name in ("causal square", "many tiles", "rows without a key", "large LSE", "dropout", "ragged tail"):
            found.append(replace(probe, head=replace(probe.head, name=f"FA-1: {probe.name}", algorithm="flash1")))
    return tuple(found)


@dataclass(frozen=True)
class _Truth:
    given: Given
    exact: Gradients
    bound: BackwardBound


@lru_cache(maxsize=64)
def _truth(probe: BackwardProbe) -> _Truth:
    """What the algorithm is given, and what must come out."""
    head, seen, z = probe.head, probe.visible(), probe.z()
    alive = np.asarray(seen.any(axis=1))
    more: dict[str, Any] = {"exp2_error": FLASH1_EXP_ERROR} if head.algorithm == "flash1" else {}
    model = backward_model(arithmetic.model("numpy_f64", "float64", **more), dq_restarts=True)
    beyond = slice(head.length, None) if head.length is not None else slice(0, 0)
    k, v = head.k.copy(), head.v.copy()
    k[beyond], v[beyond] = 0.0, 0.0
    do = np.where(alive[:, None], probe.do, 0.0)
    dlse = None if probe.dlse is None else np.where(alive, probe.dlse, 0.0)

    def one(at: slice, v: Array) -> tuple[Given, Gradients, BackwardBound]:
        words: dict[str, Any] = {"scale": probe.scale, "visible": seen[at]}
        forward = float64.attention(head.q[at], k, v, **words)
        given = forward.o, forward.lse
        words |= {"dlse": None if dlse is None else dlse[at], "given": given}
        exact = backward_float64.gradients(head.q[at], k, v, do[at], **words)
        limits = backward(head.q[at], k, v, np.nan_to_num(do[at]), model=model, br=head.br, bc=head.bc, **words)
        return given, exact, limits

    if z is None:
        return _Truth(*one(slice(None), v))
    rows = [one(slice(i, i + 1), z[i][:, None] * v) for i in range(len(head.q))]
    parts = {name: [getattr(exact, name) for _, exact, _ in rows] for name in GRADIENTS}
    rooms = {
        name: [getattr(limits, name) + getattr(exact, f"{name}_err") for _, exact, limits in rows] for name in GRADIENTS
    }
    parts["dv"], rooms["dv"] = ([z[i][:, None] * x for i, x in enumerate(of["dv"])] for of in (parts, rooms))
    # Both sides add the rows up, in any order.
    adding = 2 * float(gamma(2 * len(rows), 2.0**-53))
    total = {name: sum(parts[name]) for name in ("dk", "dv")}
    room = {name: sum(rooms[name]) + adding * sum(map(np.abs, parts[name])) for name in ("dk", "dv")}
    dq, dq_room = np.concatenate(parts["dq"]), np.concatenate(rooms["dq"])
    zero = {f"{name}_err": 0.0 for name in GRADIENTS}
    given = tuple(np.concatenate([one_given[i] for one_given, _, _ in rows]) for i in (0, 1))
    exact = Gradients(dq=dq, **total, **zero, rows=np.arange(len(dq)), keys=np.arange(len(k)))  # type: ignore[arg-type]
    bound = BackwardBound(dq=dq_room, **room, dq_order=dq_room, largest_ds=0.0, largest_out=0.0)
    return _Truth(given, exact, bound)  # type: ignore[arg-type]


def hear(copy: Copy | None, probe: BackwardProbe) -> Kill | None:
    """Run the probe on a copy of `spec` (None: on `spec` itself): what is wrong with the answer, or None."""
    subject: Any = _Real if copy is None else copy
    truth, head = _truth(probe), probe.head
    o, lse = truth.given
    saved = (o, lse) if head.algorithm == "flash2" else (o, *_statistics(probe, lse))
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            got = getattr(subject, head.algorithm).backward(
                head.q, head.k, head.v, *saved, probe.do, br=head.br, bc=head.bc, dlse=probe.dlse,
                **head.arguments(subject),
            )  # fmt: skip
            answer = {name: getattr(got, name) for name in GRADIENTS}
            return gradients.wrong(probe.name, answer, truth.exact, truth.bound)
    except Exception as error:  # whatever a broken program does
        return Kill(ERROR, probe.name, None, f"{type(error).__name__}: {error}")


def _statistics(probe: BackwardProbe, lse: Array) -> tuple[Array, Array]:
    """(m, l) of a row with this LSE: m the largest visible score, l = exp(LSE - m)."""
    seen = probe.visible()
    scores = np.where(seen, probe.scale * (probe.head.q @ np.nan_to_num(probe.head.k).T), -np.inf)
    m = scores.max(axis=1, initial=-np.inf)
    return m, np.where(np.isneginf(lse), 0.0, np.exp(lse - np.where(np.isneginf(m), 0.0, m)))
