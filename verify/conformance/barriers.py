"""Cases of what waits: mbarrier phases and parities, named barriers, bulk copies, setmaxnreg."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from verify.conformance import values
from verify.conformance.case import Case, Exact, Expected, Input, Output
from verify.emulator import isa


def cases() -> list[Case]:
    return [_phases(), _ring(), _bulk(), _named(), _registers()]


def _phases() -> Case:
    """What try_wait says of the phase before and, after three arrivals, of the phase itself: yes to both, every time.

    A wait for a phase that is not complete may block as long as the machine likes, so the probes never do it: `ring`
    shows that such a wait does not pass too early.
    """
    phases = 6

    def expected(_: float) -> Mapping[str, Expected]:
        barrier = isa.Mbarrier(3)
        want = np.zeros((phases, 4), np.uint32)
        for phase in range(phases):
            want[phase, 0] = barrier.try_wait_parity((phase + 1) % 2)
            if barrier.try_wait_parity(phase % 2):
                raise AssertionError("the statement completes a phase without arrivals")
            barrier.arrive()
            barrier.arrive_expect_tx(0)
            barrier.arrive()
            want[phase, 1] = barrier.try_wait_parity(phase % 2)
        return {"passed": Exact(want)}

    return Case(
        "mbarrier_phases",
        "barriers_sm90a.cu",
        "probe_phases",
        ("mbarrier_init", "fence_mbarrier_init", "mbarrier_arrive", "mbarrier_arrive_expect_tx",
         "mbarrier_try_wait_parity"),
        (Output("passed", np.full((phases, 4), 9, np.uint32)), ctypes.c_int(phases)),
        expected,
    )  # fmt: skip


def _ring() -> Case:
    """Twelve items through two places: a wait that passed too early would read another item's values."""
    items = 12

    def expected(_: float) -> Mapping[str, Expected]:
        item, lane = np.arange(items)[:, None], np.arange(32)[None, :]
        writer = 31 - lane
        parts = np.broadcast_arrays(1000 * item + writer, item, writer, item % 2)
        return {"read": Exact(np.stack(parts, axis=-1).astype(np.uint32))}

    return Case(
        "mbarrier_ring",
        "barriers_sm90a.cu",
        "probe_ring",
        ("mbarrier_init", "mbarrier_arrive", "mbarrier_try_wait_parity"),
        (Output("read", np.zeros((items, 32, 4), np.uint32)), ctypes.c_int(items)),
        expected,
    )


def _bulk() -> Case:
    """Two loads on one barrier, announced before and after they are issued; then a store and a reduction."""
    rounds, half = 4, 512
    source = values.integers(rounds * 2 * half // 4, 40, -1000, 1000).astype(np.float32)
    sums = values.integers(half // 4, 41, -1000, 1000).astype(np.float32)

    def expected(_: float) -> Mapping[str, Expected]:
        barrier = isa.Mbarrier(1)
        halves = source.reshape(rounds, 2, half // 4)
        for number in range(rounds):
            operations = [lambda: barrier.arrive_expect_tx(2 * half), *[lambda: barrier.complete_tx(half)] * 2]
            for operation in operations if number % 2 == 0 else reversed(operations):
                if barrier.try_wait_parity(number % 2):
                    raise AssertionError("the statement completes a phase before its bytes are there")
                operation()
            if not barrier.try_wait_parity(number % 2):
                raise AssertionError("the statement does not complete the phase")
        swapped = halves[:, ::-1]
        return {
            "loaded": Exact(swapped.ravel()),
            "stored": Exact(swapped[:, 0].ravel()),
            "sums": Exact(sums + swapped[:, 1].sum(axis=0, dtype=np.float32)),
        }

    return Case(
        "bulk",
        "barriers_sm90a.cu",
        "probe_bulk",
        ("bulk_load", "bulk_store", "bulk_reduce_add_f32", "bulk_commit", "bulk_wait", "bulk_wait_read",
         "mbarrier_arrive_expect_tx"),
        (
            Input(source), Output("loaded", np.zeros_like(source)), Output("stored", np.zeros_like(source[::2])),
            Output("sums", sums), ctypes.c_int(rounds), ctypes.c_int(half),
        ),
        expected,
    )  # fmt: skip


def _named() -> Case:
    """Four rounds from two warps to two others: a barrier released too early would show an older round."""
    rounds = 4

    def expected(_: float) -> Mapping[str, Expected]:
        barrier = isa.NamedBarrier(128)
        for number in range(rounds):
            for warp in range(4):
                if barrier.generation != number:
                    raise AssertionError(f"the statement releases the barrier after {warp} warps")
                barrier.arrive_warp()
        row, reader = np.arange(rounds)[:, None], np.arange(64)[None, :]
        writer = 63 - reader
        parts = np.broadcast_arrays(1000 * row + writer, row, writer, 0)
        return {"read": Exact(np.stack(parts, axis=-1).astype(np.uint32))}

    return Case(
        "named_barriers",
        "barriers_sm90a.cu",
        "probe_named",
        ("bar_sync", "bar_arrive"),
        (Output("read", np.zeros((rounds, 64, 4), np.uint32)), ctypes.c_int(rounds)),
        expected,
    )


def _registers() -> Case:
    """setmaxnreg changes no value: one warpgroup gives registers away, two take them."""
    thread = np.arange(384, dtype=np.float32)
    return Case(
        "setmaxnreg",
        "barriers_sm90a.cu",
        "probe_registers",
        ("setmaxnreg_inc", "setmaxnreg_dec"),
        (Output("out", np.zeros(384, np.float32)),),
        lambda _: {"out": Exact(np.where(thread < 128, thread, -thread))},
    )
