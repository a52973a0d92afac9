"""Fixtures of the tests that need an NVIDIA GPU; without one each is skipped and says why.

Packages are those of `verify.gpu_session`, so that a session which has built them does not build them again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from verify import devices, gpu_packages, packages


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    """The GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch sees none here")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def attn_of(gpu: torch.device) -> Callable[[str], ModuleType]:
    """The package with this name in `verify.gpu_packages.PACKAGES`, imported; its first call builds it."""
    return lambda name: packages.load(gpu_packages.request(gpu_packages.PACKAGES[name]))


@pytest.fixture
def attn(attn_of: Callable[[str], ModuleType]) -> ModuleType:
    """The package with d = 64 and tiles of 128 rows."""
    return attn_of("fast tile at d=64")


@pytest.fixture(scope="session")
def cuda(gpu: torch.device) -> Any:
    """The GPU as the judge knows it."""
    return devices.Cuda()


@pytest.fixture(autouse=True)
def give_memory_back(gpu: torch.device):
    """A test of large sizes leaves the memory to the next one."""
    yield
    torch.cuda.empty_cache()
