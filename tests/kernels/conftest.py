"""Emitted packages with the real forward kernels, each compiled once and kept in the build cache."""

from __future__ import annotations

from types import ModuleType

import pytest

from verify import packages
from verify.devices import ISA_VARIABLE


@pytest.fixture(autouse=True)
def _unforced_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a failing test leaves forced ends with that test."""
    monkeypatch.delenv(ISA_VARIABLE, raising=False)


def _package(d: int, *, backward: bool = False, **words: object) -> ModuleType:
    return packages.load(packages.emit(d=d, archs=("cpu",), backward=backward, **words))


@pytest.fixture(scope="session")
def small() -> ModuleType:
    """d = dv = 16, every dtype, one tile for every path: quick, so most tests use it.

    With gradients, which no test here asks for: so it is the package of tests/package/autograd_calls.py, built once.
    """
    return _package(16, br=32, bc=96, backward=True)


@pytest.fixture(scope="session")
def small_retiled() -> ModuleType:
    """`small` with other tiles."""
    return _package(16, br=64, bc=32)


@pytest.fixture(scope="session")
def d192_dv128() -> ModuleType:
    return _package(192, dv=128, dtypes=("float32", "bf16"))


@pytest.fixture(scope="session")
def d64_dv128() -> ModuleType:
    return _package(64, dv=128, dtypes=("float32", "bf16"))


@pytest.fixture(scope="session")
def d128_dv64() -> ModuleType:
    return _package(128, dv=64, dtypes=("float32", "bf16", "fp16"))
