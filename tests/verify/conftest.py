"""What the tests of the judge share: a stand-in package in plain torch, and one small package that is really built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def stand_in(**broken: Callable[..., Any]) -> Any:
    """A package in plain torch, computed in float64: right, unless `broken` replaces a step of it.

    Steps: seen(mask, causal, lengths), scores(s), output(o), lse(lse).
    """

    def step(name: str, value: torch.Tensor, *more: Any) -> torch.Tensor:
        return broken[name](value, *more) if name in broken else value

    def attention(q, k, v, *, causal=False, scale=None, key_lengths=None, return_lse=False):
        (b, hq, nq, d), (_, hkv, nk, _) = q.shape, k.shape
        wide = [x.double() for x in (q, k, v)]
        k, v = (x.repeat_interleave(hq // hkv, dim=1) for x in wide[1:])
        i, j = torch.arange(nq)[:, None], torch.arange(nk)[None]
        seen = torch.ones(b, 1, nq, nk, dtype=torch.bool)
        if causal:
            seen &= j <= i + (0 if causal == "top_left" else nk - nq)
        if key_lengths is not None:
            inside = (torch.arange(nk)[None] < key_lengths[:, None])[:, None, :, None]
            k, v = torch.where(inside, k, 0.0), torch.where(inside, v, 0.0)
            seen = seen & inside.transpose(-1, -2)
        seen = step("seen", seen, causal, key_lengths)
        s = step("scores", wide[0] @ k.transpose(-1, -2) * (d**-0.5 if scale is None else scale))
        s = s.masked_fill(~seen, -torch.inf)
        lse = torch.logsumexp(s, dim=-1)
        lse = torch.where(torch.isposinf(lse), torch.nan, lse)  # a score of +inf is a NaN row
        p = torch.where(torch.isneginf(lse)[..., None], 0.0, torch.softmax(s, dim=-1))
        o = step("output", p @ v).to(q.dtype)
        lse = step("lse", lse).to(torch.float64 if q.dtype == torch.float64 else torch.float32)
        return (o, lse) if return_lse else o

    def path(q, k, v, **_):
        arithmetic = "fma_f64" if q.dtype == torch.float64 else "fma_f32"
        return {"target": "cpu", "isa": "stand_in", "arithmetic": arithmetic, "br": 32, "bc": 16, "plan": {}}

    return SimpleNamespace(attention=attention, path=path, isas=lambda dtype: ["stand_in"])


@pytest.fixture
def right() -> Any:
    """The stand-in without a mistake."""
    return stand_in()


@pytest.fixture
def broken() -> Callable[..., Any]:
    """Makes a stand-in with mistakes."""
    return stand_in


@pytest.fixture(scope="session")
def small_package() -> Path:
    """A package for the CPU that is built once: d = dv = 32, float32."""
    from verify import packages

    return packages.emit(d=32, dtypes=("float32",), archs=("cpu",))
