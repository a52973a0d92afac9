"""Compile CUDA text against the emulator with g++: a shared library that runs the kernel on this CPU.

    kernels = build.library(Path("generated/attn_d128_sram192k/csrc/forward_sm80.cu"))
    kernels = build.library(text, includes=[folder])          # text in place of a file: for tests and mutants

The text is what nvcc would get; `include/` shadows CUDA's headers and `emu_ptx.h` comes before the first line. The
runtime (`src/*.cpp`) is linked into each library, so that two loaded libraries share no state.

Holds always: a library or object appears in the cache by one rename of a finished one, under a name that hashes all
texts it was made of, the flags and the compiler; of many processes that need it at once, one compiles. One whose bytes
are not those that were published is made again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from codegen.errors import RequestError, ToolError
from verify import packages

HOME = Path(__file__).resolve().parent
INCLUDE, SOURCES = HOME / "include", HOME / "src"
PRELUDE = "emu_ptx.h"
# What the debug information of a library calls INCLUDE: another checkout that finds it in the cache knows it by that.
INCLUDE_NAME = "/tileproof/emulator/include"

OLDEST = (12,)  # the first g++ with -ftrivial-auto-var-init
COMPILERS = ("g++", "g++-15", "g++-14", "g++-13", "g++-12")
# No STB_GNU_UNIQUE symbol: the loader would share it between libraries.
_COMMON = ("-std=c++17", "-fPIC", "-fno-gnu-unique", "-fno-strict-aliasing", "-Wno-psabi")
_RUNTIME = (*_COMMON, "-O2", "-Wall", "-Wextra")
# A kernel spends its time in the runtime: its own text runs as fast from -O1, which compiles in two thirds of the time
# of -O2, and even from -Og (QUICK), in half of it. Inlining as in -O2: a finding names the calls that were inlined.
_OPTIMISED = ("-O1", "-finline-functions", "-finline-small-functions", "-findirect-inlining")
# -ffp-contract=off: g++ contracts differently from nvcc. pattern: a register never starts as a lucky zero.
# -g1: lines and inlined calls, for the calls around a finding.
_KERNEL = (*_COMMON, *_OPTIMISED, "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", "-g1")
# Flags for a kernel that is compiled for a few runs, such as a mutant. A finding in it names fewer of the calls around.
QUICK = ("-Og",)
_LINK = ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs")
# What /proc/cpuinfo calls the instruction sets of x86-64-v3.
_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}

_QUOTED_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Compiler:
    """A g++ that is new enough."""

    command: str
    version: str  # the first line of its own

    @property
    def architecture(self) -> tuple[str, ...]:
        """The flags for this machine: x86-64-v3 where it has all of that, the compiler's portable default elsewhere."""
        return ("-march=x86-64-v3",) if _has_v3() else ()


def compiler() -> Compiler:
    """$CXX if it is a g++ that is new enough, else the first such one of COMPILERS.

    Raises: RequestError when there is none.
    """
    return _compiler(os.environ.get("CXX", "").strip())


@lru_cache(maxsize=8)
def _compiler(chosen: str) -> Compiler:
    turned_down = []
    for command in dict.fromkeys(filter(None, (chosen, *COMPILERS))):
        if shutil.which(command) is None:
            continue
        try:
            said = subprocess.run([command, "--version"], capture_output=True, text=True, errors="replace")
            dump = subprocess.run([command, "-dumpfullversion"], capture_output=True, text=True, errors="replace")
        except OSError as error:  # a file that can be executed, and is no program
            turned_down.append(f"{command}: {error.strerror}")
            continue
        text = said.stdout.split("\n")[0].strip()
        numbers = tuple(int(part) for part in dump.stdout.strip().split(".") if part.isdigit())
        if dump.returncode == 0 and "clang" not in text and numbers >= OLDEST:
            return Compiler(command, text)
        turned_down.append(f"{command} is {text or 'no compiler'}")
    raise RequestError(
        f"the emulator needs g++ {OLDEST[0]} or later, and none is on PATH",
        *turned_down,
        "try apt install g++, or name one in CXX",
    )


@lru_cache(maxsize=1)
def _has_v3() -> bool:
    if platform.machine() != "x86_64":
        return False
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return False
    return flags is not None and set(flags[1].split()) >= _V3


def library(
    source: Path | str,
    *,
    includes: Sequence[Path] = (),
    flags: Sequence[str] = (),
    runtime_flags: Sequence[str] = (),
    name: str = "kernel.cu",
) -> ctypes.CDLL:
    """The loaded library of one CUDA file; the same text, includes and flags give the same library again.

    Args:
        source: a file, or the text itself.
        includes: folders searched for what the text includes, after its own.
        flags: more of them for g++, such as "-DMUTANT=3" or "-fsanitize=undefined"; for the kernel only.
        runtime_flags: the same for the runtime, which is compiled anew for them.
        name: what findings call a text that is no file.
    Raises:
        RequestError: no g++, or one too old. ToolError: it does not compile.
    """
    return _load(file(source, includes=includes, flags=flags, runtime_flags=runtime_flags, name=name))


def package(folder: Path | str, target: str = "sm80", *, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The loaded library of the CUDA kernels that a package has for `target`.

    Raises: as `library`; RequestError when the package has no kernel for the target.
    """
    source = Path(folder) / "csrc" / f"forward_{target}.cu"
    if not source.is_file():
        raise RequestError(f"{folder} has no kernel for {target}: there is no csrc/{source.name}")
    return library(source, flags=flags)


@lru_cache(maxsize=1024)
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def file(
    source: Path | str,
    *,
    includes: Sequence[Path] = (),
    flags: Sequence[str] = (),
    runtime_flags: Sequence[str] = (),
    name: str = "kernel.cu",
) -> Path:
    """The path of the library that `library` loads; it is compiled if it is not in the cache."""
    chosen = compiler()
    text = _read(source) if isinstance(source, Path) else source
    called = source.name if isinstance(source, Path) else name
    own = [source.resolve().parent] if isinstance(source, Path) else []
    folders = [*own, *(Path(one).resolve() for one in includes)]
    command = [chosen.command, *_KERNEL, *chosen.architecture, *flags, *_LINK]
    objects = runtime(flags=runtime_flags)
    texts = [text, *(one.read_text() for one in _included(text, folders)), *_headers()]
    key = _hash([called, INCLUDE_NAME, chosen.version, *command, *map(str, objects), *texts])

    def make(work: Path) -> None:
        # Compiled where it lies, so that __FILE__, and with it every finding, is the bare name.
        where = own[0] if own else work
        if not own:
            (work / called).write_text(text)
        searched = [f"-I{folder}" for folder in (INCLUDE, SOURCES, *folders)]
        searched.append(f"-fdebug-prefix-map={INCLUDE}={INCLUDE_NAME}")
        product = str(work / "kernel.so")
        words = [*searched, "-include", PRELUDE, "-x", "c++", called, "-x", "none", *map(str, objects), "-o", product]
        _run([*command, *words], where, called)

    return _published(cache() / f"{Path(called).stem}-{key}.so", "kernel.so", make)


def _read(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{source} cannot be read as CUDA text: {error}") from None


def runtime(*, flags: Sequence[str] = ()) -> list[Path]:
    """The objects of the runtime, one per file of `src/`, compiled if they are not in the cache."""
    chosen = compiler()
    command = [chosen.command, *_RUNTIME, *chosen.architecture, *flags]

    def one(source: Path) -> Path:
        key = _hash([chosen.version, *command, source.read_text(), *_headers()])

        def make(work: Path) -> None:
            words = [f"-I{INCLUDE}", f"-I{SOURCES}", "-c", source.name, "-o", str(work / "part.o")]
            _run([*command, *words], SOURCES, f"emulator/src/{source.name}")

        return _published(cache() / "runtime" / f"{source.stem}-{key}.o", "part.o", make)

    sources = sorted(SOURCES.glob("*.cpp"))
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(one, sources))


def cache() -> Path:
    """Where the libraries are kept: beside the emitted packages."""
    return packages.cache().parent / "emulator"


def _headers() -> list[str]:
    """The texts of the emulator's own headers."""
    return [one.read_text() for folder in (INCLUDE, SOURCES) for one in sorted(folder.glob("*.h"))]


def _included(text: str, folders: Sequence[Path]) -> list[Path]:
    """The files that a text includes in quotation marks, and that they include, as far as they lie in `folders`."""
    found: dict[Path, None] = {}
    waiting = list(_QUOTED_INCLUDE.findall(text))
    while waiting:
        word = waiting.pop(0)
        for path in (folder / word for folder in folders):
            if path.is_file() and path not in found:
                found[path] = None
                waiting += _QUOTED_INCLUDE.findall(path.read_text())
    return list(found)


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _published(path: Path, product: str, make: Callable[[Path], None]) -> Path:
    """`path`, which `make` makes as the file `product` of a folder that it is given, if it is not there whole.

    Raises: ToolError when the file system refuses, or `make` makes nothing.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_whole(path):
            return path
        with FileLock(path.with_name(f".{path.name}.lock")):
            if _is_whole(path):
                return path
            for left in path.parent.glob(f".{path.stem}-*"):  # by a build that was killed: the lock was its own
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as work:
                make(Path(work))
                made = Path(work) / product
                if not made.is_file():
                    raise ToolError(f"{path.name}: the compiler says that all went well, and wrote nothing")
                _sum_of(path).write_text(hashlib.sha256(made.read_bytes()).hexdigest())
                made.replace(path)
    except OSError as error:
        why = f"cannot write to {path.parent}: {error.strerror or error}"
        raise ToolError(why, "try TILEPROOF_CACHE=FOLDER, one with room that can be written to") from None
    return path


def _sum_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.sha256")


def _is_whole(path: Path) -> bool:
    """Whether a file of the cache is what was published: to load a library that a full disk cut off kills us."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == _sum_of(path).read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _run(command: Sequence[str], where: Path, what: str) -> None:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error: " in line or "undefined reference" in line]
        raise ToolError(f"{what} does not compile for the emulator", *(said or done.stderr.splitlines())[:12])
