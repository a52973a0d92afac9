"""--sram means exact bytes, or is refused with a message that shows how to write one."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.errors import RequestError
from codegen.sizes import format_bytes, parse_bytes, whole_number


@pytest.mark.parametrize(
    "text, count",
    [("192KB", 196608), ("192KiB", 196608), ("192kb", 196608), (" 192 KB ", 196608), ("196608", 196608),
     ("196608B", 196608), ("1MB", 1048576), ("2MiB", 2097152), ("1", 1)],
)  # fmt: skip
def test_a_size_is_a_whole_number_of_bytes_or_of_1024_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["abc", "0", "0KB", "-1KB", "-5", "1.5", "1.5KB", "1e3", "", "KB", "12 12", "1GBs", "٣"]
)
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(RequestError, match=r"192KB = 192KiB = 196608 bytes"):
        parse_bytes(text)


@pytest.mark.parametrize("count", [1, 1000, 1023, 1024, 1025, 196608, 1048576, 2**40 + 1])
def test_format_is_read_back(count):
    assert parse_bytes(format_bytes(count)) == count


@pytest.mark.parametrize("value", [128, "128", np.int64(128), np.array(128, dtype=np.int32)])
def test_a_whole_number_of_any_type_becomes_a_plain_int(value):
    got = whole_number(value, "--d")
    assert got == 128 and type(got) is int


@pytest.mark.parametrize("value", [1.0, np.float64(2), True, "12.5", "x", "", None, np.array([1, 2])])
def test_what_is_not_a_whole_number_is_refused(value):
    with pytest.raises(RequestError, match="not a whole number"):
        whole_number(value, "--d")
