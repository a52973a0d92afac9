"""Cases of the copies and accesses that sm_80 has: cp.async, its zero fill and groups, ld and st of each width."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verify.conformance import values
from verify.conformance.case import Array, Case, Exact, Expected, Input, Output
from verify.emulator import isa

_THREADS = 64
_BYTES = 16 * _THREADS


def cases() -> list[Case]:
    return [_cp_async(), _cp_async_groups(), _access()]


def _source(count: int) -> Array:
    return values.labels(count // 4).view(np.uint8)


def _cp_async() -> Case:
    """Whole copies to a permutation of places, then the same with every third of them zero-filled."""
    source, before = _source(_BYTES), values.background(2 * _BYTES)

    def expected(_: float) -> Mapping[str, Expected]:
        memory = before
        for thread in range(_THREADS):
            place, chunk = 16 * ((5 * thread + 3) % _THREADS), source[16 * thread : 16 * thread + 16]
            memory = isa.cp_async_zfill(memory, place, chunk, 16, 16)
            memory = isa.cp_async_zfill(memory, _BYTES + place, chunk, 16, 16 if thread % 3 else 0)
        return {"memory": Exact(memory)}

    return Case(
        "cp_async",
        "memory_sm80.cu",
        "probe_cp_async",
        ("cp_async_16", "cp_async_16_zfill", "cp_async_commit", "cp_async_wait"),
        (Input(source), Input(before), Output("memory", np.zeros_like(before))),
        expected,
    )


def _cp_async_groups() -> Case:
    """Of four groups wait_group 2 completes the two oldest, wait_group 0 the others: each is read right after."""
    source = _source(4 * _BYTES)

    def expected(_: float) -> Mapping[str, Expected]:
        complete = [isa.groups_complete(4, newest) for newest in (2, 2, 0, 0)]
        want = np.zeros_like(source).reshape(4, -1)
        for group, limit in enumerate(complete):
            if group < limit:
                want[group] = source.reshape(4, -1)[group]
        return {"read": Exact(want.ravel())}

    return Case(
        "cp_async_groups",
        "memory_sm80.cu",
        "probe_cp_async_groups",
        ("cp_async_16", "cp_async_commit", "cp_async_wait"),
        (Input(source), Output("read", np.zeros_like(source))),
        expected,
    )


def _access() -> Case:
    """4-, 8- and 16-byte loads, 4-byte stores to shared memory, 16-byte loads of it, 16- and 4-byte stores.
    Little-endian. The loads of 4 and of 16 bytes joined when the vectors were there: by width they read the same words.
    """
    halves = values.labels(_THREADS, 2)
    halves[:, 1] = halves[:, 1] & 0x3FFFFFFF | 0x20000000  # a finite float
    words = halves.copy().view(np.int64).ravel()

    def expected(_: float) -> Mapping[str, Expected]:
        places = np.arange(4 * _THREADS) * 7 % (4 * _THREADS)
        shifted = words[:, None] >> np.array([0, 8, 16, 24])
        shared = np.zeros(4 * _THREADS, np.uint32)
        shared[places] = (shifted & 0xFFFFFFFF).astype(np.uint32).ravel()
        return {
            "wide": Exact(shared.reshape(_THREADS, 4)[np.arange(_THREADS) ^ 1]),
            "single": Exact(halves[:, 1].copy().view(np.float32)),
            "aligned": Exact(np.zeros(4, np.uint32)),
        }

    return Case(
        "access",
        "memory_sm80.cu",
        "probe_access",
        (
            "ld_global_f32", "ld_global_s64", "ld_global_b128", "st_shared_b32", "ld_shared_b128", "st_global_b128",
            "st_global_f32", "dynamic_smem",
        ),
        (
            Input(words), Output("wide", np.zeros((_THREADS, 4), np.uint32)),
            Output("single", np.zeros(_THREADS, np.float32)), Output("aligned", np.full(4, 99, np.uint32)),
        ),
        expected,
    )  # fmt: skip
