"""The emitted wgmma kernels, thread by thread on a CPU: right, without a race, in every schedule of the emulator."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.sm90a import gpu_check, kernels
from verify.emulator import build, emulator
from verify.emulator.emulator import SCHEDULES, Emulator, Schedule

# P in shared memory and skipped key tiles; a lazy rescale and 80 keys; panels of 16 columns; unequal widths, one V.
PLANS = ("d128_192x128_skip", "d256_128x80", "d80_192x112", "d72_dv40")

# B, Hq, Hkv, Nq, Nk, mask form
SHAPES = (
    (1, 1, 1, 128, 128, "full"),
    (1, 2, 2, 70, 133, "bottom_right"),
    (1, 3, 1, 133, 70, "bottom_right"),  # the first rows see no key
    (1, 2, 1, 300, 700, "top_left"),
    (1, 2, 1, 65, 0, "full"),
    (1, 4, 2, 600, 600, "bottom_right"),  # more tiles than processors: in pairs
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Plan name -> its library; each is compiled once."""
    made = {}

    def load(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = build.library(kernels.write(folder, gpu_check.PLANS[name][0]))
        return made[name]

    return load


def bits(tensor: torch.Tensor) -> np.ndarray:
    return emulator.guarded_copy(tensor.contiguous().view(torch.int16).numpy().view(np.uint16))


def run(library, plan, shape, schedule, *, lengths=None, counter=False, seed=0):
    """(errors over bound of O and LSE, whether the empty rows are right) of one call without findings."""
    b, hq, hkv, nq, nk, causal = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(*size, generator=generator).bfloat16()
        for size in ((b, hq, nq, plan.d), (b, hkv, nk, plan.d), (b, hkv, nk, plan.dv))
    )
    if lengths is not None:
        for batch, length in enumerate(lengths):
            k[batch, :, length:] = torch.nan
            v[batch, :, length:] = torch.nan
    arrays = {"q": bits(q), "k": bits(k), "v": bits(v)}
    o = emulator.guarded((b, hq, nq, plan.dv), np.uint16)
    lse = emulator.guarded((b, hq, nq), np.float32)
    scratch, keys = emulator.guarded((1,), np.uint32), None
    machine = Emulator(library)
    machine.configure(schedule)
    for name, array in arrays.items():
        machine.register(name, array)
    machine.register("o", o, once=True)
    machine.register("lse", lse, once=True)
    machine.register("scratch", scratch, writable=True)
    if lengths is not None:
        keys = emulator.guarded_copy(np.array(lengths, np.int64))
        machine.register("lengths", keys)
    args = kernels.ForwardArgs(
        *(a.ctypes.data for a in (*arrays.values(), o, lse)), b, hq, hkv, nq, nk,
        *((ctypes.c_int64 * 3)(*(s // 2 for s in a.strides[:3])) for a in (*arrays.values(), o)),
        None if keys is None else keys.ctypes.data, plan.d**-0.5, kernels.CAUSAL_CODES[causal],
    )  # fmt: skip
    at = ctypes.c_void_p(scratch.ctypes.data) if counter else None
    machine.launch("attention_forward_sm90a", ctypes.byref(args), 2, at, None).check(f"{shape} {schedule.name}")
    call = SimpleNamespace(q=q, k=k, v=v, causal=causal, scale=plan.d**-0.5, lengths=None)
    if lengths is not None:
        call.lengths = torch.tensor(lengths)
    machine.clear()
    return gpu_check.errors(call, torch.from_numpy(o.view(np.int16)).view(torch.bfloat16), torch.from_numpy(lse))


def assert_right(found):
    error_o, error_lse, empty_rows = found
    assert error_o <= 1 and error_lse <= 1 and empty_rows, found


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("name", PLANS)
def test_kernels_are_right_in_every_schedule(loaded, name, schedule):
    plan = gpu_check.PLANS[name][0]
    for shape in SHAPES:
        assert_right(run(loaded(name), plan, shape, schedule))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_keys_beyond_a_length_may_be_anything(loaded, schedule):
    plan = gpu_check.PLANS["d80_192x112"][0]
    shape = (3, 2, 1, 130, 300, "full")
    assert_right(run(loaded("d80_192x112"), plan, shape, schedule, lengths=[0, 133, 300]))


def test_tiles_from_the_counter_are_all_done_once(loaded):
    """Long enough for the counter: 20 query tiles per head and more."""
    plan = gpu_check.PLANS["d72_dv40"][0]
    shape = (1, 1, 1, 20 * plan.br + 1, 64, "top_left")
    for schedule in (SCHEDULES[0], Schedule("random", "random", seed=7)):
        assert_right(run(loaded("d72_dv40"), plan, shape, schedule, counter=True))
