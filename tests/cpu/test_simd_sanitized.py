"""The vector kernels under the address and undefined-behaviour sanitizers, every tensor in its own allocation."""

import subprocess

import pytest

from tests.cpu import judged, programs, units
from tests.cpu.test_simd import _machine as _machine  # skips what this machine cannot run
from tests.cpu.test_simd import draw, dtypes, package

SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-static-libasan")


@pytest.fixture(scope="module")
def _sanitizers(tmp_path_factory):
    """Some installations of the compiler come without them."""
    source = tmp_path_factory.mktemp("sanitizers") / "empty.cpp"
    source.write_text("int main() { return 0; }")
    built = source.with_suffix("")
    if subprocess.run(["g++", *SANITIZE, str(source), "-o", str(built)], capture_output=True, check=False).returncode:
        pytest.skip("this g++ has no address sanitizer")


def flags(isa):
    return (*SANITIZE, *(f for f in units.ISAS[isa].flags if f != "-O3"))


# Rows narrower than a vector, and not whole vectors: the last one then overlaps the one before it.
UNITS = [("v4", (8, 24, 64, 40)), ("v4", (72, 8, 32, 16)), ("v3", (40, 8, 32, 16)), ("baseline", (8, 24, 64, 40))]


@pytest.mark.field("R066")
@pytest.mark.parametrize(("isa", "sizes"), UNITS, ids=str)
@dtypes
def test_no_access_is_out_of_bounds_and_no_behaviour_undefined(_sanitizers, isa, sizes, dtype):
    """One row or key more or less than a vector, a panel, a tile, a group and a block; no keys; lengths below Nk."""
    problem = package(*sizes)
    program = programs.build(problem, isa, flags(isa))
    for shape, causal, lengths in (
        ((1, 2, 1, 65, 41), "bottom_right", None),
        ((2, 3, 1, 5, 17), "top_left", (0, 16)),
        ((1, 1, 1, 1, 1), False, None),
        ((1, 2, 2, 33, 0), True, None),
    ):
        q, k, v = draw(shape, *sizes[:2], dtype)
        try:
            got = programs.attention([program], problem, dtype, q, k, v, causal=causal, key_lengths=lengths)
        except subprocess.CalledProcessError as error:
            pytest.fail(error.stderr.decode())
        judged.assert_right(problem, isa, dtype, q, k, v, got, causal=causal, key_lengths=lengths)
