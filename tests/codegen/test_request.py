"""A request is validated when it is made, and equal requests are equal whatever types they came from."""

from __future__ import annotations

import numpy as np
import pytest

from codegen import names, problem
from codegen.errors import RequestError
from codegen.problem import HEAD_DIMS, Problem


@pytest.mark.field("R123")
@pytest.mark.parametrize("d", [1, 8, 12, 15, 31, 46, 72, 96, 127, 256, 257, 264, 16384, 0, -8])
@pytest.mark.parametrize("side", ["d", "dv"])
def test_a_head_size_is_supported_or_refused_with_the_list_of_what_is(d, side):
    sizes = {"d": 64, "dv": 64, side: d}
    if d % 8 == 0 and 8 <= d <= 256:
        assert getattr(problem.make(sram_bytes=65536, **sizes), side) == d
        return
    with pytest.raises(RequestError) as e:
        problem.make(sram_bytes=65536, **sizes)
    assert f"--{side} {d}: no kernel for this head size" in str(e.value)
    assert "every multiple of 8 from 8 to 256" in str(e.value) and ", ".join(map(str, HEAD_DIMS)) in str(e.value)


@pytest.mark.field("R093")
def test_sizes_of_any_integer_type_give_the_same_request():
    plain = problem.make(sram_bytes=65536, d=64, dv=32, br=64, bc=128)
    for _ in range(100):
        for t in (np.int32, np.int64, np.uint32, lambda x: np.array(x)):
            other = problem.make(sram_bytes=t(65536), d=t(64), dv=t(32), br=t(64), bc=t(128))
            assert other == plain and hash(other) == hash(plain)
            assert names.package_name(other) == names.package_name(plain)
            assert type(other.d) is type(other.sram_bytes) is type(other.br) is int
            assert other.as_dict() == plain.as_dict()


@pytest.mark.field("R093")
def test_a_zero_dim_tensor_gives_the_same_request():
    import torch

    assert problem.make(sram_bytes=torch.tensor(65536), d=torch.tensor(64)) == problem.make(sram_bytes=65536, d=64)


def test_lists_are_sorted_and_made_unique():
    a = problem.make(sram_bytes=65536, d=64, dtypes=["fp16", "bf16", "fp16"], archs=["sm80", "cpu"])
    assert a == problem.make(sram_bytes=65536, d=64, dtypes=("bf16", "fp16"))
    assert a.dtypes == ("bf16", "fp16") and a.archs == ("cpu", "sm80")


def test_a_default_narrows_to_what_the_other_option_leaves():
    assert problem.make(sram_bytes=65536, d=64, dtypes=["float32"]).archs == ("cpu",)
    assert problem.make(sram_bytes=65536, d=64, archs=["sm80"]).dtypes == ("bf16", "fp16")


def test_what_was_asked_for_by_name_never_narrows():
    with pytest.raises(RequestError, match=r"--arch sm80 has no kernel for float32\n  sm80 takes bf16, fp16"):
        problem.make(sram_bytes=65536, d=64, dtypes=["float32"], archs=["cpu", "sm80"])


def test_a_request_survives_plan_json():
    p = problem.make(sram_bytes=65536, d=64, dv=8, archs=["cpu"], br=96, debug=True)
    assert problem.from_dict(p.as_dict()) == p


@pytest.mark.parametrize(
    "change", [{"d": None}, {"extra": 1}, {"archs": ["sm75"]}, {"dtypes": []}, {"tiling": "tuned"}]
)
def test_a_damaged_request_is_refused(change):
    values = problem.make(sram_bytes=65536, d=64).as_dict() | change
    if change == {"d": None}:
        del values["d"]
    with pytest.raises(RequestError):
        problem.from_dict(values)


def test_a_request_that_skips_make_is_validated_too():
    with pytest.raises(RequestError, match="--br 0"):
        Problem(sram_bytes=65536, d=64, dv=64, br=0)
