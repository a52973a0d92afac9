"""The one Jinja environment: turns a template and a context into the text of an emitted file.

Jinja's default marks break CUDA (PTX operands `{%0, %1}` fail to parse, `{{0.f}}` renders to nothing),
so there is one environment per comment style, made here and nowhere else:

    ${ name }                 a value
    //% for x in xs           a line statement in C, C++ and CUDA; `#% for x in xs` in Python, TOML, Markdown
    /*% if flag %*/           a statement inside a line
    /*# why #*/               a remark that is not emitted

Holds always: an undefined name is an error (StrictUndefined), never empty text; a file without `.j2` is
copied byte for byte; nothing depends on the clock, the machine or the order of a set.
Source: Jinja 3 documentation, "Environment".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, meta

TEMPLATES = Path(__file__).resolve().parent / "templates"
SUFFIX = ".j2"
# A statement that names another template, in any of its marks.
_REFERENCE = re.compile(r"%[-+]?\s*(?:include|import|extends|from)\b")
# Emitted files whose comments start with `#`; all others are C, C++ or CUDA.
HASH_COMMENTS = (".py", ".toml", ".md", ".txt", ".cfg", ".in", ".sh", ".json")


def make_env(templates: Path = TEMPLATES, comment: str = "//") -> Environment:
    """The environment for files whose line comments start with `comment` ("//" or "#")."""
    return Environment(
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        autoescape=False,
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="/*%",
        block_end_string="%*/",
        comment_start_string="/*#",
        comment_end_string="#*/",
        line_statement_prefix=comment + "%",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


@lru_cache(maxsize=8)
def _environment(templates: Path, comment: str) -> Environment:
    return make_env(templates, comment)


def comment_of(name: str) -> str:
    """The line comment of the file that template `name` emits: "#" or "//"."""
    return "#" if PurePosixPath(name.removesuffix(SUFFIX)).suffix in HASH_COMMENTS else "//"


def render(name: str, context: Mapping[str, Any], templates: Path = TEMPLATES) -> bytes:
    """The emitted bytes of template `name` ("cpu/forward_simd.h.j2", relative to codegen/templates).

    A name without `.j2` is a verbatim file; its context is not used.
    Raises: jinja2.UndefinedError for a name that the context lacks, jinja2.TemplateNotFound.
    """
    if not name.endswith(SUFFIX):
        return (templates / name).read_bytes()
    return _environment(templates, comment_of(name)).get_template(name).render(context).encode()


def sources(name: str, templates: Path = TEMPLATES) -> tuple[str, ...]:
    """`name` and every template that it includes, imports or extends, sorted."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        found.add(one)
        text = (templates / one).read_text() if one.endswith(SUFFIX) else ""
        if _REFERENCE.search(text):  # parsing is the slowest part of an emission
            env = _environment(templates, comment_of(one))
            for child in meta.find_referenced_templates(env.parse(text)):
                if child is None:
                    raise ValueError(f"{one} includes a template by a computed name: its digest would not cover it")
                waiting.append(child)
    return tuple(sorted(found))


def digest(names: Iterable[str], templates: Path = TEMPLATES) -> str:
    """sha256 (hex) over the names and bytes of the templates `names` and of all that they include."""
    every = sorted({one for name in names for one in sources(name, templates)})
    h = hashlib.sha256()
    for one in every:
        data = (templates / one).read_bytes()
        h.update(f"{one}\0{len(data)}\0".encode())
        h.update(data)
    return h.hexdigest()
