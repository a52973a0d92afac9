"""Emit a package through the generator, keep it in a cache, and import a package by its path.

    folder = emit(d=32, dtypes=("float32",), archs=("cpu",))     # a second call finds it there
    attn = load(folder)                                          # or load("generated/attn_d128_sram192k")

Holds always: two packages with different content are two modules, in one process as well; the cache is keyed by
the digest of the package's content, so an edited template or planner never meets an old package.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import math
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from codegen import emit as writer
from codegen import package, problem, sizes
from codegen.errors import RequestError, ToolError


def cache() -> Path:
    """Where emitted packages are kept: $TILEPROOF_CACHE/packages, else the user's cache folder."""
    root = os.environ.get("TILEPROOF_CACHE")
    if root:
        return Path(root).absolute() / "packages"  # compilers run elsewhere
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "tileproof" / "packages"


def request(*, sram: str = "192KB", d: int, **more: Any) -> problem.Problem:
    """A request as the command would make it: `sram` as typed, other words as `codegen.problem.make` takes them."""
    return problem.make(sram_bytes=sizes.parse_bytes(sram), d=d, **more)


def emit(asked: problem.Problem | None = None, /, **words: Any) -> Path:
    """The folder of the package for a request (a Problem, or the words of `request`), written if it is not there."""
    return emit_plans(package.decide(asked if asked is not None else request(**words)))


def emit_plans(plans: package.Plans) -> Path:
    """The folder of the package for plans that are already made: what `emit` does once the planners have spoken."""
    files = package.render_plans(plans)
    facts = package.read_plan(files[package.PLAN_FILE])
    folder = cache() / facts["digest"][: package.DIGEST_CHARS] / facts["name"]
    if not (folder / package.PLAN_FILE).exists():
        writer.write_files(files, folder.parent)
    return folder


def plan(folder: Path | str) -> dict[str, Any]:
    """plan.json of the package in `folder`.

    Raises: RequestError when the folder is not a tileproof package.
    """
    try:
        return package.read_plan((Path(folder) / package.PLAN_FILE).read_bytes())
    except OSError as error:
        raise RequestError(
            f"{folder} is not a tileproof package: {error.strerror}", "try generated/attn_d128_sram192k"
        ) from None


def load(folder: Path | str) -> ModuleType:
    """Import the package in `folder`, wherever it lies, under a module name of its own.

    The same content gives the same module again; the op that it registers carries its digest.
    Raises: RequestError when the folder is not a tileproof package, ToolError when it does not import.
    """
    root = Path(folder).resolve()
    facts = plan(root)
    place = hashlib.sha256(str(root).encode()).hexdigest()[:8]
    name = f"tileproof_under_test_{facts['name']}_{facts['digest'][:12]}_{place}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, root / "__init__.py", submodule_search_locations=[str(root)])
    if spec is None or spec.loader is None:
        raise ToolError(f"{root}/__init__.py cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def find(argument: str) -> Path:
    """The package folder that a command line names: a path, or a name under ./generated.

    Raises: RequestError when there is none, or its plan.json is not the one that was emitted.
    """
    for candidate in (Path(argument), Path("generated") / argument):
        if (candidate / package.PLAN_FILE).is_file():
            if package.content_digest(_files(candidate)) != plan(candidate)["digest"] and not changed(candidate):
                raise RequestError(f"{candidate}/{package.PLAN_FILE} was changed after it was emitted", "emit it again")
            return candidate
    raise RequestError(
        f"{argument}: no tileproof package there", "try generated/attn_d128_sram192k, or run codegen first"
    )


def changed(folder: Path) -> list[str]:
    """The files of a package that are not those its plan.json names: kernels that somebody edited, say."""
    files = _files(folder)
    named = plan(folder)["files"].items()
    return [name for name, one in named if hashlib.sha256(files.get(name, b"")).hexdigest() != one]


def _files(folder: Path) -> dict[str, bytes]:
    """The bytes of plan.json and of what it lists, as far as it is there."""
    paths = {name: folder / name for name in (package.PLAN_FILE, *plan(folder)["files"])}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def check_writable(path: Path) -> Path:
    """`path`, if a file can be written there: what a command asks before work that takes long.

    Raises: RequestError when it is a folder, or no file, or lies where none can be made.
    """
    if path.exists() and not path.is_file():
        raise RequestError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}", "try out.json")
    home = next(folder for folder in path.absolute().parents if folder.exists())
    if not path.name or not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise RequestError(f"{str(path)!r}: no file can be written there", "try out.json")
    return path


def as_json(value: Any) -> str:
    """`value` as JSON, which has no infinities and no NaN: they stand as the words "inf", "-inf" and "nan"."""
    return json.dumps(_finite(value), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, value: Any) -> None:
    """Write `value` where a reader never finds half of it; what is innermost and short stands on one line.

    Raises: RequestError as `check_writable`; ToolError when the file system refuses.
    """
    text = _INNERMOST.sub(_on_one_line, as_json(value)) + "\n"
    path = check_writable(path).resolve()  # a link stays, what it points to is replaced
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ToolError(f"cannot write {path}: {error.strerror or error}", "try another --out") from None


# A list or an object that holds numbers and short words only.
_INNERMOST = re.compile(r"(?P<open>[\[{])\n(?P<body>[^\[\]{}]*?)\n\s*(?P<close>[\]}])")


def _on_one_line(found: re.Match[str]) -> str:
    body = " ".join(line.strip() for line in found["body"].splitlines())
    return found["open"] + body + found["close"] if len(body) <= 150 else found.group(0)


def part(attn: ModuleType, name: str) -> Any:
    """A module of an imported package, such as its `toolchain`."""
    return importlib.import_module(f"{attn.__name__}.{name}")
