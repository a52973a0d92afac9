# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 5147846d8626226a
"""What a build must know of the installed torch, whether this process has imported it or not.

Importing torch takes about as long as compiling one file, and the command that compiles (__main__.py) needs little of
it: its folder, what its version.py says, and whether it sees a GPU.

Holds always: the answers are those of the imported torch, so a first call of the op finds what the command has built.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import NamedTuple


class Facts(NamedTuple):
    """folder: where it is installed. version: "2.10.0+cu128". commit: of its source.

    cuda, hip: the version that it was built for, None for neither.
    """

    folder: Path
    version: str
    commit: str
    cxx11_abi: bool
    cuda: str | None
    hip: str | None


def facts() -> Facts:
    """The torch that this process has imported, or would import. Imports it where version.py does not tell.

    Raises: ModuleNotFoundError, as the import would.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        folder, abi, built = Path(torch.__file__ or "").resolve().parent, torch.compiled_with_cxx11_abi(), torch.version
        return Facts(folder, str(torch.__version__), built.git_version, abi, built.cuda, built.hip)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    folder = Path(spec.origin).resolve().parent
    try:
        read = runpy.run_path(str(folder / "version.py"))  # it imports nothing of torch
        # True: from 2.10 on torch has one C++ ABI, and torch.compiled_with_cxx11_abi() returns this constant.
        return Facts(folder, read["__version__"], read["git_version"], True, read["cuda"], read["hip"])
    except (OSError, LookupError):  # not laid out as a release is
        importlib.import_module("torch")
        return facts()


def sees_a_gpu() -> bool:
    """torch.cuda.is_available(). Imports torch only where the answer is not plain without it."""
    if "torch" not in sys.modules and facts().hip is None and not _has_nvidia_driver():
        return False
    import torch

    return torch.cuda.is_available()


def _has_nvidia_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")  # the name by which the CUDA runtime finds it; loading it starts nothing
    except OSError:
        return False
    return True
