"""Fixtures of the package tests: one emitted package, built once, and one build cache for the session."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def packages() -> ModuleType:
    """packages.py of this folder: emits packages with reference kernels, imports them."""
    name = "tests_package_packages"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("packages.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(session_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build cache of every test, unless it sets its own."""
    monkeypatch.setenv("TILEPROOF_CACHE", str(session_cache))
    for variable in ("TILEPROOF_CPU_ISA", "CXX", "MAX_JOBS"):
        monkeypatch.delenv(variable, raising=False)
    return session_cache


@pytest.fixture(scope="session")
def folder(packages: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An emitted CPU package: d = dv = 16, four dtypes, units baseline and v3."""
    return packages.emitted(tmp_path_factory.mktemp("emitted"))


@pytest.fixture(scope="session")
def attn(packages: ModuleType, folder: Path) -> ModuleType:
    """`folder`, imported. The first call of a test builds it."""
    return packages.imported(folder)


@pytest.fixture
def forward(attn: ModuleType):
    """The op itself, as a caller of torch.ops has it."""
    import torch

    return getattr(torch.ops, attn.op.NAMESPACE).forward.default
