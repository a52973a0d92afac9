"""The one template environment keeps CUDA text intact and forgives no undefined name."""

from __future__ import annotations

import jinja2
import pytest

from codegen import render


@pytest.fixture
def templates(tmp_path):
    (tmp_path / "k").mkdir()

    def put(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path

    return put


def test_cuda_braces_survive(templates):
    text = 'float s[2][4] = {{{0.f}}};\nasm("{%0, %1}, {%2};");\n// 100 % of {{x}} and {# no comment #}\n'
    assert render.render("k/a.cu.j2", {}, templates("k/a.cu.j2", text)).decode() == text


def test_values_statements_and_remarks(templates):
    root = templates(
        "k/a.cu.j2", "/*# why #*/\n//% for i in range(n)\nf(${ i })/*% if i %*/, g()/*% endif %*/;\n//% endfor\n"
    )
    assert render.render("k/a.cu.j2", {"n": 2}, root) == b"f(0);\nf(1), g();\n"


def test_python_templates_use_hash_statements(templates):
    root = templates("k/a.py.j2", "#% if yes\nx = {'a': {}}  # ${ yes }\n#% endif\n")
    assert render.render("k/a.py.j2", {"yes": 1}, root) == b"x = {'a': {}}  # 1\n"


@pytest.mark.parametrize("text", ["${ missing }", "${ plan.missing }", "//% if missing\n//% endif\n"])
def test_an_undefined_name_is_an_error(templates, text):
    with pytest.raises(jinja2.UndefinedError):
        render.render("k/a.cu.j2", {"plan": {}}, templates("k/a.cu.j2", text))


def test_a_file_without_the_suffix_is_copied_byte_for_byte(tmp_path):
    data = b"${ not a template }\r\n\x00\xff{{{0.f}}}"
    (tmp_path / "v.cuh").write_bytes(data)
    assert render.render("v.cuh", {}, tmp_path) == data


def test_the_digest_covers_included_templates(templates):
    templates("k/part.cu.j2", "// one\n")
    root = templates("k/a.cu.j2", '//% include "k/part.cu.j2"\n')
    before = render.digest(["k/a.cu.j2"], root)
    assert render.sources("k/a.cu.j2", root) == ("k/a.cu.j2", "k/part.cu.j2")
    templates("k/part.cu.j2", "// two\n")
    assert render.digest(["k/a.cu.j2"], root) != before


def test_a_computed_include_is_refused_because_no_digest_covers_it(templates):
    root = templates("k/a.cu.j2", "//% include which\n")
    with pytest.raises(ValueError, match="computed name"):
        render.sources("k/a.cu.j2", root)
