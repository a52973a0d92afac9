"""Record golden vectors: run every primitive probe on the GPU at hand and store its raw outputs.

    python -m verify.record --out tests/data

Needs an sm_90 GPU, nvcc 12.3 or later and torch. Takes well under a minute. Writes `ptx_<topic>.npz` for each topic of
verify.conformance.suite and `ptx_vectors.json`, which names the machine, the versions and the date, and holds a digest
of each case's inputs. Prints what differs from the statement of the PTX ISA; it is recorded all the same.

Exit status: 0 when all agree, 1 when something differs or a tool fails, 2 when the machine cannot do it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from codegen.errors import RequestError, ToolError
from verify import arithmetic, machine, packages
from verify.conformance import suite
from verify.conformance.case import Array, Case, Host, Input, Output

FLAGS = (
    "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC", "-shared",
)  # fmt: skip
CALIBRATED = "sm_90"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verify.record", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the vectors, such as tests/data")
    folder = parser.parse_args(arguments).out
    try:
        return _record(folder)
    except RequestError as error:
        print(f"record: error: {error}", file=sys.stderr)
        return 2
    except ToolError as error:
        print(f"record: error: {error}", file=sys.stderr)
        return 1


def _record(folder: Path) -> int:
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise RequestError("recording needs an sm_90 GPU, and torch sees none here")
    folder.mkdir(parents=True, exist_ok=True)
    misses: list[str] = []
    faults: dict[str, int] = {}
    digests: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as work:
        libraries, nvcc = compile_probes(Path(work))
        for topic, make in suite.TOPICS.items():
            results, topic_faults = _outputs(topic, libraries)
            for case in make():
                digests[case.name] = case.digest
                if (case.name in topic_faults) != case.faults:
                    code = topic_faults.get(case.name)
                    misses.append(
                        f"{case.name}: " + (f"CUDA error {code}" if code else "the device does not refuse it")
                    )
                elif not case.faults:
                    got = {o.name: results[suite.key(case, o.name)] for o in case.outputs}
                    misses += case.misses(got, relative_error())
            faults.update(topic_faults)
            path = suite.write(folder, topic, results)
            print(f"{path.name}: {len(results)} arrays, {path.stat().st_size} bytes", flush=True)
    header = {**machine.describe("cuda"), "command": "python -m verify.record --out tests/data", "nvcc": nvcc}
    text = {"machine": header, "flags": list(FLAGS), "faults": faults, "cases": digests}
    (folder / suite.RECORD).write_text(json.dumps(text, indent=1) + "\n")
    print("\n".join(misses) if misses else f"{len(digests)} cases, all as the PTX ISA says")
    return 1 if misses else 0


def _outputs(topic: str, libraries: dict[str, Path]) -> tuple[dict[str, Array], dict[str, int]]:
    """Outputs and faults of a topic. A fault ends the CUDA context: the cases behind it run in another process."""
    results: dict[str, Array] = {}
    faults: dict[str, int] = {}
    first: int | None = 0
    while first is not None:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            more, fault, first = pool.submit(_run_from, topic, libraries, first).result()
        results.update(more)
        faults.update(fault)
    return results, faults


def _run_from(
    topic: str, libraries: dict[str, Path], first: int
) -> tuple[dict[str, Array], dict[str, int], int | None]:
    """Outputs of the cases from number `first` up to one that faults, that fault, and the number behind it."""
    results: dict[str, Array] = {}
    loaded = {name: ctypes.CDLL(str(path)) for name, path in libraries.items()}
    for number, case in enumerate(suite.TOPICS[topic]()):
        if number >= first:
            code, got = run(loaded[case.source], case)
            if code:
                return results, {case.name: code}, number + 1
            results.update({suite.key(case, name): array for name, array in got.items()})
    return results, {}, None


def relative_error(device: str | None = CALIBRATED) -> float:
    """Of one product of 16 terms: on the device that the vectors are recorded on, as calibrated, or (None) on any."""
    return float(arithmetic.model("mma_sm80", "bf16", device=device).score_sum(16).g)


def compile_probes(work: Path) -> tuple[dict[str, Path], str]:
    """One library in `work` for each probe file, and the version of nvcc.

    Raises: ToolError when one does not compile.
    """
    emitted = packages.emit(d=64, sram="96KB", dtypes=("bf16",), archs=("sm80",))
    nvcc = packages.part(packages.load(emitted), "toolchain").cuda_toolkit().nvcc
    include = suite.include_folder()

    def compiled(source: Path) -> Path:
        product = work / f"{source.stem}.so"
        command = [*nvcc.command, *FLAGS, f"-I{include}", str(source), "-o", str(product)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ToolError(f"{source.name} does not compile", *done.stderr.splitlines()[:12])
        return product

    sources = sorted(suite.PROBES.glob("*.cu"))
    with ThreadPoolExecutor() as pool:
        return {s.name: library for s, library in zip(sources, pool.map(compiled, sources), strict=True)}, nvcc.version


def run(library: ctypes.CDLL, case: Case) -> tuple[int, dict[str, Array]]:
    """The CUDA error of one launch on the current device, and its outputs if that is 0."""
    import torch

    def on_device(array: Array) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy()).cuda()

    tensors = [on_device(a.array if isinstance(a, Input) else a.before) if isinstance(a, Input | Output) else None
               for a in case.arguments]  # fmt: skip
    words: list[Any] = []
    for argument, tensor in zip(case.arguments, tensors, strict=True):
        if tensor is not None:
            words.append(ctypes.c_void_p(tensor.data_ptr()))
        else:
            words.append(ctypes.byref(argument.structure) if isinstance(argument, Host) else argument)
    torch.cuda.synchronize()
    code = getattr(library, case.function)(*words)
    if code:
        return int(code), {}
    return 0, {
        a.name: tensor.cpu().numpy().view(a.before.dtype).reshape(a.before.shape)
        for a, tensor in zip(case.arguments, tensors, strict=True)
        if isinstance(a, Output) and tensor is not None
    }


if __name__ == "__main__":
    sys.exit(main())
