"""The problems on which a broken `spec` shows, and what is asked of its answer.

Each probe runs one algorithm of a copy of `spec` on one head. Its answer is heard by the float64 oracle under the
derived bound, by the table of special values, by the real package's invariants after every tile, and, where the probe
rounds, by the definition of rounding. The oracle gets masks and dropout factors from the real `spec`, never from the
copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from spec import dropout, errors, flash1, flash2, invariants, masks, rounding, split
from spec.merge import MERGE_ROUNDOFFS
from verify import arithmetic, bounds, special
from verify.cases import Array, Mask
from verify.compare import ratio
from verify.formats import FORMATS, round_to
from verify.inputs import FAMILIES
from verify.mutate.kill import BITS, BOUND, ERROR, INVARIANT, SPECIAL, Kill
from verify.mutate.reference import Copy
from verify.oracle import float64
from verify.oracle.reference import Reference

U = 2.0**-53
MaskOf = Callable[[Any], Any]  # from a module `masks`, real or copied


@dataclass(frozen=True, eq=False)
class Probe:
    """One head for one algorithm of `spec`. Words of `rounding` and `dropout` are those of the classes."""

    name: str
    q: Array
    k: Array
    v: Array
    scale: float | None = None
    mask: MaskOf | None = None
    length: int | None = None  # keys from here on are not numbers; the mask hides them
    br: int = 16
    bc: int = 16
    algorithm: str = "flash2"
    parts: int = 1
    rounding: dict[str, str] = field(default_factory=dict)
    dropout: dict[str, Any] = field(default_factory=dict)

    def arguments(self, copy: Any) -> dict[str, Any]:
        """Words for an algorithm of `copy`, which has the modules of `spec`."""
        words: dict[str, Any] = {"scale": self.scale}
        if self.mask is not None:
            words["mask"] = self.mask(copy.masks)
        if self.rounding:
            words["rounding"] = copy.rounding.Rounding(**self.rounding)
        if self.dropout:
            words["dropout"] = copy.dropout.Dropout(**self.dropout)
        return words


class _Real:
    """The package itself, as a copy would offer it."""

    masks, rounding, dropout, flash1, flash2, split = masks, rounding, dropout, flash1, flash2, split


def _gaussian(name: str, nq: int, nk: int, d: int = 16, dv: int = 16, **more: Any) -> Probe:
    return _family("gaussian", name, nq, nk, d, dv, **more)


def _family(family: str, name: str, nq: int, nk: int, d: int = 16, dv: int = 16, **more: Any) -> Probe:
    x = FAMILIES[family](nq, nk, d, dv, dtype="bf16", seed=more.pop("seed", 1))
    q, k, v = x
    mask = more.pop("mask", None)
    if mask is None and x.visible is not None:
        seen = x.visible
        mask = lambda m: m.Explicit(seen)  # noqa: E731
    if mask is None and x.length is not None:
        length = x.length
        mask, more = (lambda m: m.KeyPadding(length)), {**more, "length": length}
    return Probe(name, q, k, v, mask=mask, **more)


def _logits(name: str, logits: Any, nq: int = 2, **more: Any) -> Probe:
    """Every row has these scaled scores, exactly."""
    rng = np.random.default_rng(len(logits))
    q, k = np.zeros((nq, 16)), np.zeros((len(logits), 16))
    q[:, 0], k[:, 0] = 4.0, logits
    return Probe(name, q, k, round_to(rng.standard_normal((len(logits), 16)), "bf16"), **more)


def _causal(align: str = masks.BOTTOM_RIGHT) -> MaskOf:
    return lambda m: m.Causal(align)


@lru_cache(maxsize=1)
def probes() -> tuple[Probe, ...]:
    """All of them, the cheapest that show most first."""
    far = -256.0 - np.arange(2)
    hidden_above = np.concatenate([[0.0], far])  # row 0 sees the far keys only
    second_half, first_half = np.zeros(16), np.zeros(16)
    second_half[12], first_half[3] = 100.0, 100.0
    hide_first = lambda m: m.Explicit(np.array([[False, True, True]] * 2))  # noqa: E731
    padding = np.full((2, 16), np.nan)
    tail = _gaussian("ragged tail", 5, 17)
    rng = np.random.default_rng(5)
    late = FAMILIES["late_max"](4, 40, 16, 16, dtype="float32", seed=3)
    found = [
        _gaussian("one key", 4, 1),
        _gaussian("causal square", 20, 20, mask=_causal()),
        _gaussian("causal wide", 5, 24, mask=_causal()),
        _gaussian("causal tall", 24, 5, mask=_causal()),
        _gaussian("causal top left", 5, 24, mask=_causal(masks.TOP_LEFT)),
        tail,
        _gaussian("whole tiles", 32, 32),
        _logits("rising maximum", np.repeat([0.0, 3.0, 6.0], 16), 32, br=32),
        _logits("falling maximum", np.repeat([0.0, -200.0], 16)),
        _logits("far below zero", far),
        _logits("masked keys above", hidden_above, mask=hide_first),
        _logits("maximum in the second half", second_half),
        _logits("maximum in the first half", first_half),
        _logits("deep logits", np.array([-1.3e5, -1.3e5 - 1.0])),
        _family("first_tile_masked", "first tile masked", 4, 40),
        _family("all_masked_row", "rows without a key", 6, 40, seed=2),
        _gaussian("no keys", 3, 0),
        _gaussian("d = 24", 5, 20, 24, 24),
        _gaussian("window of 3", 12, 12, mask=lambda m: m.Window(2, 0), bc=4, br=4),
        _gaussian("more rows than keys per tile", 5, 48, br=32, bc=16),
        _gaussian("key length", 5, 24, mask=lambda m: m.KeyPadding(13), bc=8),
        Probe("poisoned padding", tail.q, np.concatenate([tail.k, padding]), np.concatenate([tail.v, padding]),
              mask=lambda m: m.KeyPadding(17), length=17),
        _gaussian("documents", 12, 12, mask=lambda m: m.Documents(np.repeat([0, 1], 6)), br=4, bc=4),
        _gaussian("NaN in a query", 4, 20),
        Probe("float32 inputs", late.q, late.k, late.v, bc=8),
        _logits("large logits", np.linspace(-3000.0, 0.0, 40), bc=8),
        _logits("equal logits", np.zeros(600), 1, bc=64),
        _gaussian("dropout", 20, 20, dropout={"p": 0.75, "seed": 7}),
        _gaussian("dropout over a long row", 9, 40, dropout={"p": 0.75, "seed": 11}, br=4, bc=8),
        _gaussian("P and O in bf16", 8, 40, rounding={"p": "bf16", "o": "bf16"}),
        _gaussian("O in bf16", 8, 40, rounding={"o": "bf16"}),
        _gaussian("O in fp16", 8, 40, rounding={"o": "fp16"}),
        _weights("weights in bf16", rng, "bf16"),
        _weights("weights in fp16", rng, "fp16"),
        _gaussian("three splits", 6, 40, algorithm="split", parts=3, br=8, bc=8),
        _gaussian("splits without keys", 6, 2, algorithm="split", parts=5, br=8, bc=8),
        _gaussian("no split has keys", 3, 0, algorithm="split", parts=3),
        _gaussian("FA-1: causal square", 20, 20, mask=_causal(), algorithm="flash1"),
        _logits("FA-1: rising maximum", np.repeat([0.0, 3.0, 6.0], 16), 20, algorithm="flash1"),
        _logits("FA-1: falling maximum", np.repeat([0.0, -200.0], 16), algorithm="flash1"),
        _gaussian("FA-1: causal tall", 24, 5, mask=_causal(), algorithm="flash1"),
    ]  # fmt: skip
    nan_query = found[[p.name for p in found].index("NaN in a query")]
    nan_query.q[1, 0] = np.nan
    return tuple(found)


def _weights(name: str, rng: np.random.Generator, dtype: str) -> Probe:
    """One tile whose weights are away from every midpoint of `dtype`: their rounding is known. See `_by_definition`."""
    logits = clear_logits(rng, 64, dtype, distance=0.02)
    more: dict[str, Any] = {"bc": len(logits), "rounding": {"p": dtype}}
    return _logits(name, logits, 3, **more)


def clear_logits(rng: np.random.Generator, count: int, dtype: str, *, distance: float) -> Array:
    """Logits <= 0, values of bf16, the first 0, whose exp stays `distance` spacings of `dtype` away from where its
    rounding changes: from midpoints, and from the numbers of the format, where truncation would not differ."""
    logits = round_to(-rng.uniform(0.02, 4.0, 8 * count), "bf16")
    steps = np.exp(logits) / 2.0 ** (np.floor(logits / np.log(2.0)) + 1 - FORMATS[dtype].precision)
    share = steps - np.floor(steps)
    clear = (np.abs(share - 0.5) > distance) & (np.minimum(share, 1 - share) > distance)
    return np.concatenate([[0.0], logits[clear][: count - 1]])


@lru_cache(maxsize=256)
def _truth(probe: Probe) -> tuple[special.Expected, Reference, Array, Array]:
    """What must come out, its exact value, and the bounds of O and LSE."""
    scale = probe.q.shape[1] ** -0.5 if probe.scale is None else probe.scale
    nq, nk = len(probe.q), len(probe.k)
    seen = np.ones((nq, nk), bool) if probe.mask is None else masks.dense(probe.mask(masks), nq, nk)
    e = special.expect(probe.q, probe.k, probe.v, visible=seen, length=probe.length)
    plan: dict[str, Any] = {"exp2_error": 2.0**-50, "log_error": 2.0**-50, "log_tiny": 2.0**-50}
    if "p" in probe.rounding:
        plan["p_format"] = probe.rounding["p"]
    if "o" in probe.rounding:
        plan["out_format"] = probe.rounding["o"]
    model = arithmetic.model("muladd_f64", "float64", **plan)

    def one(q: Array, v: Array, visible: Mask) -> tuple[Reference, bounds.ForwardBound]:
        words: dict[str, Any] = {"scale": scale, "visible": visible}
        return float64.attention(q, e.k, v, **words), bounds.forward(
            q, e.k, v, **words, model=model, bc=probe.bc, failure=None
        )

    if not probe.dropout:
        exact, bound = one(e.q, e.v, e.visible)
        return e, exact, bound.o + exact.o_err, bound.lse + exact.lse_err
    # O of row i is attention over the values Z_ik v_k; Z is 0 or a power of two here, so they are exact.
    z = dropout.Dropout(**probe.dropout).z(np.arange(nq)[:, None], np.arange(nk)[None, :])
    rows = [one(e.q[i : i + 1], z[i][:, None] * e.v, e.visible[i : i + 1]) for i in range(nq)]
    o, lse = (np.concatenate([getattr(t, name) for t, _ in rows]) for name in ("o", "lse"))
    o_room = np.concatenate([b.o + t.o_err for t, b in rows])
    lse_room = np.concatenate([b.lse + t.lse_err for t, b in rows])
    return e, Reference(o=o, lse=lse, o_err=o_room, lse_err=lse_room, rows=np.arange(nq)), o_room, lse_room


def hear(copy: Copy | None, probe: Probe) -> Kill | None:
    """Run the probe on a copy of `spec` (None: on `spec` itself): what is wrong with the answer, or None."""
    subject: Any = _Real if copy is None else copy
    checks = (_split,) if probe.algorithm == "split" else (_within_bound, _invariants, _by_definition)
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return next(filter(None, (check(subject, probe) for check in checks)), None)
    except errors.InvariantError as error:
        return Kill(INVARIANT, probe.name, None, str(error))
    except Exception as error:  # whatever a broken program does
        return Kill(ERROR, probe.name, None, f"{type(error).__name__}: {error}")


def _run(subject: Any, probe: Probe, **more: Any) -> Any:
    algorithm = getattr(subject, probe.algorithm).forward
    return algorithm(probe.q, probe.k, probe.v, br=probe.br, bc=probe.bc, **{**probe.arguments(subject), **more})


def _within_bound(subject: Any, probe: Probe) -> Kill | None:
    """O and LSE against the oracle. The bound is derived for FlashAttention-2; the others have their invariants."""
    if probe.algorithm != "flash2":
        return None
    out = _run(subject, probe)
    e, exact, o_room, lse_room = _truth(probe)
    for output, got, want, room in (("o", out.o, exact.o, o_room), ("lse", out.lse, exact.lse, lse_room)):
        classes = getattr(e, output)
        if special.mismatch(got, classes).any():
            at = tuple(map(int, np.argwhere(special.mismatch(got, classes))[0]))
            return Kill(SPECIAL, probe.name, None, f"{output}{list(at)}: got {got[at]}, must be NaN or an infinity")
        r = np.where(special.must_be_number(got, classes), ratio(got, want, room), 0.0)
        if r.max(initial=0.0) > 1:
            at = tuple(map(int, np.unravel_index(int(r.argmax()), r.shape)))
            text = f"{output}{list(at)}: got {got[at]}, want {want[at]}, bound {room[at]:.3e}"
            return Kill(BOUND, probe.name, float(r[at]), text)
    return None


def _invariants(subject: Any, probe: Probe) -> Kill | None:
    """The state after every tile. Raises: InvariantError."""
    watch = invariants.InvariantChecker(probe.q, probe.k, probe.v, **probe.arguments(_Real))
    out = _run(subject, probe, on_tile=watch)
    watch.finish(out.o, out.lse)
    return None


def _by_definition(subject: Any, probe: Probe) -> Kill | None:
    """What a rounding must give: O the rounded unrounded O, bit for bit; P the rounded weights."""
    if not probe.rounding:
        return None
    out = _run(subject, probe)
    if "o" in probe.rounding:
        wide = _run(subject, probe, rounding=subject.rounding.Rounding(**{**probe.rounding, "o": None}))
        wanted = round_to(wide.o, probe.rounding["o"])
        if not np.array_equal(wanted, out.o):
            at = tuple(map(int, np.argwhere(wanted != out.o)[0]))
            return Kill(BITS, probe.name, None, f"O{list(at)} = {out.o[at]!r}, rounded to nearest {wanted[at]!r}")
    if probe.rounding.keys() == {"p"}:  # one tile, its maximum 0: P = round(exp(S))
        logits = probe.k[:, 0]
        p = np.exp(logits)
        rounded = round_to(p, probe.rounding["p"])
        wanted = np.broadcast_to((rounded @ probe.v) / p.sum(), out.o.shape)
        # NumPy's exp, sums in any order, products, division, on both sides.
        room = 2 * (8 + 2 * len(p) + 4) * U * (rounded @ np.abs(probe.v)) / p.sum()
        r = ratio(out.o, wanted, np.broadcast_to(room, out.o.shape))
        if r.max() > 1:
            return Kill(BITS, probe.name, float(r.max()), "O is not made of the weights rounded to nearest")
    return None


def _split(subject: Any, probe: Probe) -> Kill | None:
    """A split against the exact merge of its parts, which the real FlashAttention-2 computes."""
    tile: dict[str, Any] = {"br": probe.br, "bc": probe.bc}
    got = subject.split.forward(probe.q, probe.k, probe.v, parts=probe.parts, **tile, **probe.arguments(subject))
    size = -(-len(probe.k) // probe.parts)
    ranges = [(min(p * size, len(probe.k)), min((p + 1) * size, len(probe.k))) for p in range(probe.parts)]
    parts = [flash2.forward(probe.q, probe.k, probe.v, **tile, keys=r, **probe.arguments(_Real)) for r in ranges]
    lse = np.stack([p.lse for p in parts]).astype(np.longdouble)
    o = np.stack([p.o for p in parts]).astype(np.longdouble)
    m = lse.max(axis=0)
    w = np.exp(lse - np.where(np.isneginf(m), 0, m))
    total = w.sum(axis=0)
    want_o = np.asarray((w[..., None] * o).sum(axis=0) / np.where(total == 0, 1, total)[:, None], float)
    want_lse = np.asarray(m + np.log(np.where(total == 0, 1, total)), float)
    merges = probe.parts - 1
    room_o = merges * MERGE_ROUNDOFFS * U * np.abs(o).max(axis=0).astype(float)
    # Per merge: exponents, two exps of 4 ulp, their sum, ln of 4 ulp on [0, ln 2], and one rounding of the LSE.
    room_lse = merges * (20 + np.abs(np.where(np.isfinite(want_lse), want_lse, 0.0))) * U
    for output, have, want, room in (("o", got.o, want_o, room_o), ("lse", got.lse, want_lse, room_lse)):
        r = ratio(have, want, room)
        if r.max() > 1:
            text = f"{output}: error {r.max():.3g} times what merging {probe.parts} parts may cost"
            return Kill(BOUND, probe.name, float(r.max()), text)
    return None
