"""Bulk groups and their two waits, atomics between blocks, the ends of tensors, stmatrix, and integer primitives."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import hopper
from verify.emulator import build
from verify.emulator.emulator import SCHEDULES, Emulator, Schedule, guarded, guarded_copy

RELAY, ECHO, FRAGMENTS, INTEGERS = range(4)
NAME = "hopper_groups"
WORDS = 128  # 32-bit words of a row


def run(which, choice, schedule=SCHEDULES[0], *, rows=1, values=None):
    emulator = hopper.emulator(NAME)
    given = guarded_copy(np.arange(WORDS, dtype=np.uint32) if values is None else values)
    scratch, output = guarded_copy(np.zeros(WORDS, np.uint32)), guarded((rows * WORDS,), np.uint32)
    emulator.clear()
    emulator.configure(schedule)
    emulator.register("input", given)
    emulator.register("scratch", scratch, writable=True)
    emulator.register("output", output, writable=True)
    return emulator.launch(NAME, which, given, scratch, output, rows, choice, None), output


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_a_buffer_may_be_filled_again_when_only_the_newest_store_reads(schedule):
    done, output = run(RELAY, 1, schedule, rows=7)
    done.check()
    np.testing.assert_array_equal(output, np.arange(7 * WORDS))
    found = run(RELAY, 2, schedule, rows=7)[0].findings
    assert [one.kind for one in found] == ["race"]
    assert "(st.shared) writes" in found[0].sentence and "which a bulk store of thread 0 read" in found[0].sentence


def test_what_was_stored_is_read_back_after_the_wait_for_the_writing_only():
    for schedule in SCHEDULES:
        done, output = run(ECHO, 0, schedule)
        done.check()
        np.testing.assert_array_equal(output, np.arange(WORDS))
        (found,) = run(ECHO, 1, schedule)[0].findings  # .read waits for the reading of shared memory and no more
        assert found.kind == "global-race"
        assert "(bulk load) reads 'scratch'" in found.sentence and "which thread 0 wrote at" in found.sentence


@pytest.mark.parametrize("transposed", [0, 1], ids=["stmatrix", "transposed"])
def test_stmatrix_stores_each_element_of_the_registers(transposed):
    halves = np.arange(32 * 4 * 2, dtype=np.uint16).reshape(32, 4, 2)  # lane, register, half
    done, output = run(FRAGMENTS, transposed, values=halves.reshape(-1).view(np.uint32))
    done.check()
    g, t = np.arange(32) // 4, np.arange(32) % 4
    want = np.empty((4, 8, 8), np.uint16)
    for e in range(2):
        rows, columns = (2 * t + e, g) if transposed else (g, 2 * t + e)
        want[:, rows, columns] = halves[:, :, e].T
    np.testing.assert_array_equal(output.view(np.uint16).reshape(4, 8, 8), want)


@pytest.mark.parametrize("choice", [-7, 5, 31, 40])
def test_votes_shuffles_and_maxima(choice):
    done, output = run(INTEGERS, choice)
    done.check()
    lane = np.arange(32)
    np.testing.assert_array_equal(output[:32].view(np.int32), np.maximum(np.maximum(3 * lane - 40, 17 - lane), choice))
    np.testing.assert_array_equal(output[32:64], (lane ^ 5) | (0x80000000 if 0 <= choice < 32 else 0))
    assert (output[64:96].view(np.float32) == -1.5).all()


# ---- The host's side

HOST = """#include <cuda.h>
extern "C" int processors(int device) {
  int count = -1;
  return cudaGetDevice(&count) == cudaSuccess && count == 0 &&
         cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : -1;
}
extern "C" int entry_point(const char* name, int version) {
  void* function = &function;
  cudaDriverEntryPointQueryResult status;
  if (cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &status) != cudaSuccess) return -1;
  return status == cudaDriverEntryPointSuccess ? (function ? 0 : -2) : (function ? -3 : status);
}
"""


def test_the_host_finds_the_encoder_and_a_small_device():
    host = build.library(HOST, name="host.cu")
    assert host.entry_point(b"cuTensorMapEncodeTiled", 12000) == 0
    assert host.entry_point(b"cuTensorMapEncodeTiled", 11080) == 2  # the version is not sufficient
    assert host.entry_point(b"cuTensorMapEncodeIm2col", 12000) == 1  # not found
    assert host.processors(0) == 2 and host.processors(1) == -1
    Emulator(host).option("multiprocessors", 5)
    assert host.processors(0) == 5


# ---- Global memory


def split_k(c, way, schedule=SCHEDULES[0], *, k=128, registered=None):
    emulator = hopper.emulator("hopper_reduce")
    a, b = (guarded_copy(hopper.to_bf16(np.ones((64, k), np.float32))) for _ in range(2))
    emulator.clear()
    emulator.configure(schedule)
    for label, array in (("a", a), ("b", b)):
        emulator.register(label, array)
    emulator.register("c", c if registered is None else registered, writable=True)
    return emulator.launch("hopper_split_k", a, b, c, k, 0, way, None)


@pytest.mark.parametrize("way", range(4), ids=["tensor", "linear", "vector", "scalar"])
def test_reductions_of_different_blocks_do_not_race(way):
    for seed in range(4):
        c = guarded_copy(np.zeros((64, 64), np.float32))
        split_k(c, way, Schedule("random", "random", seed=seed)).check()
        assert (c == 128).all()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_a_reduction_and_an_ordinary_store_of_two_blocks_race(schedule):
    c = guarded_copy(np.zeros((64, 64), np.float32))
    found = split_k(c, 4, schedule).findings
    assert [one.kind for one in found] == ["global-race"]


@pytest.mark.parametrize("way", range(4), ids=["tensor", "linear", "vector", "scalar"])
def test_a_write_outside_of_the_registered_tensor_is_found(way):
    c = guarded_copy(np.zeros((64, 64), np.float32))
    found = split_k(c, way, registered=c[:60]).findings
    assert len(found) == 1 and "out-of-bounds" in found[0].kind


def test_a_load_outside_of_the_registered_tensor_is_found():
    emulator = hopper.emulator("hopper_reduce")
    a, b = (guarded_copy(hopper.to_bf16(np.ones((64, 64), np.float32))) for _ in range(2))
    c = guarded_copy(np.zeros((64, 64), np.float32))
    emulator.clear()
    emulator.configure(SCHEDULES[0])
    emulator.register("a", a[:63])
    emulator.register("b", b)
    emulator.register("c", c, writable=True)
    found = emulator.launch("hopper_split_k", a, b, c, 64, 0, 0, None).findings
    assert len(found) == 1 and "out-of-bounds" in found[0].kind and "TMA load" in found[0].sentence
