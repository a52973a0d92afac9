"""The gradients on the real kernels: probes within their bounds, heard by every judge, and equal bits over 100 runs."""

from __future__ import annotations

import numpy as np
import pytest

from verify import gpu_packages, judge_backward, output_gradients, packages
from verify.inputs import FAMILIES
from verify.suite import Shape, case

pytestmark = pytest.mark.gpu

PACKAGES = (
    "smallest rows of d=16, Br=32, Bc=16",
    "d no multiple of 16, Br=32, Bc=16",
    "dv larger than d, neither a multiple of 16",
    "fast tile at d=64",
)
# name -> family of the inputs, shape, dO, dLSE
PROBES = {
    "causal 20x20": ("gaussian", Shape(nq=20, nk=20, causal="bottom_right"), "normal", "normal"),
    "causal 24x5: rows without a key": ("gaussian", Shape(nq=24, nk=5, causal="bottom_right"), "normal", "none"),
    "causal 5x24 from the top left": ("gaussian", Shape(nq=5, nk=24, causal="top_left"), "mixed_scales", "none"),
    "two keys at -256": ("far_below_zero", Shape(nq=2, nk=2), "normal", "normal"),
    "one key": ("gaussian", Shape(nq=1, nk=1), "normal", "alone"),
    "rows and keys more than a tile": ("gaussian", Shape(nq=131, nk=133), "cancelling", "none"),
    "rising maximum": ("late_max", Shape(nq=33, nk=400), "positive", "none"),
    "one dominant key": ("one_dominant_key", Shape(nq=40, nk=300), "cancelling", "large"),
    "equal weights": ("identical_logits", Shape(nq=300, nk=70), "ones", "none"),
    "key lengths 0, part, all": ("gaussian", Shape(b=3, nq=9, nk=150, lengths=(0.0, 0.51, 1.0)), "same_row", "none"),
    "four heads share K and V": ("gaussian", Shape(hq=8, hkv=2, nq=19, nk=70, layout="bnhd"), "normal", "normal"),
}


@pytest.mark.parametrize("dtype", gpu_packages.DTYPES)
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_is_within_its_bound_in_both_forms(attn_of, cuda, record_property, probe, package, dtype):
    family, shape, gradient, dlse = PROBES[probe]
    words = gpu_packages.PACKAGES[package]
    d = words["d"]
    plain = case(FAMILIES[family], shape, probe, dtype=dtype, d=d, dv=words.get("dv", d), seed=7)
    made = output_gradients.attach(plain, gradient, dlse=dlse, seed=7)
    verdicts = judge_backward.check(attn_of(package), made, on=cuda, spec=True)
    assert [v.path.deterministic for v in verdicts] == [False, True]
    for verdict in verdicts:
        assert {f.judge for f in verdict.figures} >= {"spec", "mpmath", "float64", "end_to_end"}
    record_property("err_over_bound", f"{max(v.worst.ratio for v in verdicts):.4f}")


@pytest.mark.parametrize("name", gpu_packages.BACKWARD)
def test_the_deterministic_form_gives_the_same_bits_in_a_hundred_runs(cuda, name):
    words = gpu_packages.BACKWARD[name]
    attn, d, dv = packages.load(gpu_packages.request(words)), words["d"], words.get("dv", words["d"])
    shape = Shape(b=2, hq=4, hkv=2, nq=600, nk=700, causal="bottom_right")
    plain = case(FAMILIES["gaussian"], shape, name, dtype="bf16", d=d, dv=dv, seed=1)
    made = output_gradients.attach(plain, "normal", dlse="normal", seed=1)
    given = judge_backward.read_by_kernel(made, *cuda.run(attn, made, cuda.paths(attn, "bf16", made)[0]))
    sums, fixed = cuda.backward_paths(attn, "bf16", made)
    first = cuda.run_backward(attn, made, fixed, given)
    for _ in range(99):
        assert all(map(np.array_equal, first, cuda.run_backward(attn, made, fixed, given)))
    truth = judge_backward.Truth(made, given, with_balls=False)
    one = cuda.run_backward(attn, made, sums, given)
    assert all(truth.order(sums, one, cuda.run_backward(attn, made, sums, given)) <= 1 for _ in range(5))
