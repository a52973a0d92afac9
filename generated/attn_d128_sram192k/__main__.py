# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 ed57f3af4ee11d88
"""python -m attn_d128_sram192k build|wheel: compile the kernels ahead of time."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .build import BuildError, build, wheel


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 1 when a tool failed."""
    parser = argparse.ArgumentParser(prog="python -m attn_d128_sram192k", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("build", "compile into the cache and print the libraries"),
        ("wheel", "write a wheel that carries the compiled libraries"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--cuda-arch", action="append", metavar="sm_90", help="compile for this GPU (default: the visible ones)"
        )
        if name == "wheel":
            command.add_argument("out", type=Path, help="the folder to write it to")
    options = parser.parse_args(arguments)
    try:
        if options.command == "wheel":
            print(wheel(options.out, cuda_archs=options.cuda_arch))
        else:
            for kind, file in build(cuda_archs=options.cuda_arch).items():
                print(f"{kind} {file}")
    except BuildError as error:
        print(f"attn_d128_sram192k: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
