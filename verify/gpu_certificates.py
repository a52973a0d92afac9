"""The parts of a GPU session that certify packages, each in a process of its own; the figures of all in one file."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from codegen.devices import DEVICES
from verify import machine, packages
from verify.gpu_packages import BACKWARD, HOPPER, PACKAGES, request
from verify.gpu_run import Session, identity

CASES, BACKWARD_CASES = 56, 44  # per dtype


def certify(session: Session) -> None:
    """Certify every package of PACKAGES."""
    _certify(session, "certify", PACKAGES)


def certify_sm90a(session: Session) -> None:
    """Certify every package of HOPPER: each of their kernels must have been heard."""
    _certify(session, "certify_sm90a", HOPPER)


def certify_backward(session: Session) -> None:
    """Certify every package of BACKWARD, gradients included."""
    _certify(session, "certify_backward", BACKWARD, BACKWARD_CASES)


def unheard(folder: Path, stated: dict[str, Any]) -> list[str]:
    """The kernels in code for one capability that a package has and its certificate says nothing of."""
    rows = [v for v in packages.plan(folder)["variants"] if v["target"] in DEVICES and DEVICES[v["target"]].is_exact]
    wanted = dict.fromkeys(f"{v['unit']}/{v['dtype']}" for v in rows)
    heard = {row["path"] for row in stated["paths"]}
    return [path for path in wanted if path not in heard]


def _certify(session: Session, part: str, table: dict[str, dict[str, Any]], cases: int = CASES) -> None:
    """Certify packages in processes of their own; the figures of all in one file."""
    figures: dict[str, Any] = {
        "kind": "certificates",
        "device": "cuda",
        "machine": machine.describe("cuda"),
        "command": f"python -m verify certify PACKAGE --device cuda --cases {cases}",
        "holds": False,
        "cases": 0,
        "violations": 0,
        "packages": {},
    }

    def one(name: str) -> tuple[str, Path, dict[str, Any] | None, str]:
        folder = request(table[name])
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "certificate.json"
            words = ["-m", "verify", "certify", str(folder), "--device", "cuda", "--cases", str(cases)]
            done = session.command(
                [*words, "--out", str(file)], most=400.0, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"
            )
            stated = json.loads(file.read_text()) if file.exists() else None
        return name, folder, stated, done.stderr

    with ThreadPoolExecutor(min(session.jobs, len(table))) as pool:
        for job in [pool.submit(one, name) for name in table]:
            name, folder, stated, said = job.result()
            entry: dict[str, Any] = identity(folder)
            if stated is None:
                entry |= {"holds": False, "error": said[-2000:]}
            else:
                stated.pop("machine")
                entry |= stated | ({"messages": said[-4000:]} if stated["violations"] else {})
                silent = unheard(folder, stated)
                if silent:
                    entry |= {"holds": False, "unheard": silent}
            figures["packages"][name] = entry
            done = list(figures["packages"].values())
            figures |= {
                "cases": sum(e.get("cases", 0) for e in done),
                "violations": sum(e.get("violations", 0) for e in done),
                "holds": len(done) == len(table) and all(e["holds"] for e in done),
            }
            session.keep(part, figures)
