"""The table of machines agrees with what the CUDA Programming Guide says, and every target has a planner."""

from __future__ import annotations

from importlib import import_module

import pytest

from codegen import planners
from codegen.devices import ARCHS, DEVICES, FEATURE_TARGETS
from codegen.errors import RequestError

# Technical specifications per compute capability: KB of shared memory per multiprocessor and block, resident threads.
GUIDE = {
    "sm75": (64, 64, 1024), "sm80": (164, 163, 2048), "sm86": (100, 99, 1536), "sm87": (164, 163, 1536),
    "sm89": (100, 99, 1536), "sm90": (228, 227, 2048), "sm90a": (228, 227, 2048), "sm100": (228, 227, 2048),
    "sm103": (228, 227, 2048), "sm110": (228, 227, 1536), "sm120": (100, 99, 1536), "sm121": (100, 99, 1536),
}  # fmt: skip


def test_the_table_is_the_guides():
    table = {
        a: (d.smem_per_sm_bytes // 1024, d.smem_per_block_bytes // 1024, d.threads_per_sm) for a, d in DEVICES.items()
    }
    assert table == GUIDE
    assert ("cpu", *GUIDE) == ARCHS


@pytest.mark.field("R095")
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_what_a_block_may_ask_for_and_what_the_system_keeps_add_up(device):
    reserved = 1024 if device.capability >= (8, 0) else 0
    assert device.smem_reserved_bytes == reserved
    assert device.smem_per_block_bytes + device.smem_reserved_bytes == device.smem_per_sm_bytes
    assert device.arch == f"sm{device.capability[0]}{device.capability[1]}" + ("a" if device.is_exact else "")
    assert device.built_for == "sm_" + device.arch.removeprefix("sm").removesuffix("a")


def test_every_target_is_a_known_machine_with_a_planner():
    assert set(planners.TARGETS) <= set(ARCHS) and set(FEATURE_TARGETS.values()) <= set(DEVICES)
    for arch, target in planners.TARGETS.items():
        module = import_module(target.module)
        assert planners.planner(arch) is module and callable(module.decide) and callable(module.files)


def test_a_companion_runs_on_every_device_that_its_target_runs_on():
    assert planners.companions(["sm90a", "cpu"]) == {"sm80": "sm90a"} and planners.companions(["sm80", "sm90"]) == {}
    for arch, target in planners.TARGETS.items():
        if target.companion is not None:
            own = DEVICES[target.companion]
            assert not own.is_exact and own.capability <= DEVICES[arch].capability
            assert planners.TARGETS[target.companion].dtypes == target.dtypes
            assert planners.TARGETS[target.companion].companion is None
    assert all(planners.TARGETS[a].companion for a in planners.TARGETS if a in DEVICES and DEVICES[a].is_exact)


@pytest.mark.parametrize("arch", ["sm75", "sm100a", "sm120a"])
def test_a_machine_without_kernels_is_known_and_refused(arch):
    with pytest.raises(
        RequestError, match=rf"--arch {arch}: known \(.+\), but its kernels come later\n  today: cpu, sm80"
    ):
        planners.planner(arch)


@pytest.mark.parametrize("arch", ["", "gpu", "sm_80", "SM80", "sm70"])
def test_an_unknown_target_is_refused(arch):
    with pytest.raises(RequestError, match="no such target"):
        planners.planner(arch)
