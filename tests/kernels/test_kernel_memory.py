"""What the allocator hands out never shows: scratch that begins as NaN, and scratch that cannot be had.

A shim in front of the C library's allocator fills every aligned block (the scratch of the kernels, torch's tensors)
with NaN, or refuses blocks. It is loaded before Python, so the calls run in a process of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
int poisoned_blocks, refuse_scratch;
void* aligned_alloc(size_t alignment, size_t size) {
  static void* (*real)(size_t, size_t);
  if (!real) real = (void* (*)(size_t, size_t))dlsym(RTLD_NEXT, "aligned_alloc");
  if (refuse_scratch && alignment == 4096) { errno = ENOMEM; return NULL; }
  void* p = real(alignment, size);
  if (p) { memset(p, 0xff, size); __atomic_fetch_add(&poisoned_blocks, 1, __ATOMIC_RELAXED); }
  return p;
}
int posix_memalign(void** out, size_t alignment, size_t size) {
  static int (*real)(void**, size_t, size_t);
  if (!real) real = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  int failed = real(out, alignment, size);
  if (!failed) memset(*out, 0xff, size);
  return failed;
}
"""

SCRIPT = """
import ctypes, sys, torch
from tests.kernels.running import draw, each_isa, run
from verify import packages
attn = packages.load(sys.argv[1])
shim = ctypes.CDLL(None)
fresh = torch.empty(1000, 16)
assert fresh.isnan().all(), "torch's tensors do not begin as NaN: the shim is not in effect"
for dtype in ("float32", "float64", "bf16", "fp16"):
    for nq, nk in ((1, 1), (5, 97), (33, 95), (45, 300), (70, 0)):
        q, k, v = draw(dtype, (2, 4, nq, 16), (2, 2, nk, 16), (2, 2, nk, 16))
        for causal in (False, "bottom_right", "top_left"):
            for isa in each_isa(attn, dtype):
                before = ctypes.c_int.in_dll(shim, "poisoned_blocks").value
                first = run(attn, q, k, v, causal=causal)
                poisoned = ctypes.c_int.in_dll(shim, "poisoned_blocks").value - before
                lengths = torch.tensor([nk, nk // 2])
                second = run(attn, q, k, v, causal=causal, key_lengths=lengths)
                for o, lse in (first, second):
                    assert not o.isnan().any() and not lse.isnan().any(), (isa, dtype, nq, nk, causal)
                print(dtype, nq, nk, causal, isa, [x.double().sum().item().hex() for x in (*first, *second)])
                assert poisoned > 0 or nk == 0, "the kernel took no scratch through the shim"
refuse = ctypes.c_int.in_dll(shim, "refuse_scratch")
for dtype in ("float32", "float64", "bf16", "fp16"):
    q, k, v = draw(dtype, *[(2, 4, 70, 16)] * 3)
    for isa in each_isa(attn, dtype):
        want = run(attn, q, k, v)[0]
        refuse.value = 1
        try:
            run(attn, q, k, v)
        except (RuntimeError, MemoryError) as error:
            print("refused", dtype, isa, error, file=sys.stderr)
        else:
            raise SystemExit(f"{isa} {dtype}: no scratch, no error")
        finally:
            refuse.value = 0
        assert torch.equal(run(attn, q, k, v)[0], want)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    assert compiler, "a C compiler is needed, as for the package itself"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", "shim.so", "shim.c", "-ldl"], cwd=folder, check=True)
    return folder / "shim.so"


@pytest.mark.field("R068", "R076", "R106", "R126")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is a Linux way to replace an allocator")
def test_poisoned_and_refused_scratch(small, shim):
    """No NaN of the scratch reaches a result, in any ragged tile; without scratch a call raises and writes nothing
    that anyone sees, and the next call works."""
    small.isas("float32")  # built before the allocator is replaced
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, small.__path__[0]],
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stderr.count("refused") == sum(len(small.isas(t)) for t in ("float32", "float64", "bf16", "fp16"))
