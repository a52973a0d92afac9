"""The command line: parses, calls one function, prints.

Exit 0: done. 1: a tool failed or a check did not hold. 2: a request that cannot be met. Messages go to
stderr as `codegen: error: ...` with indented hints; a traceback means a bug of ours.

Everything beyond click is imported where it is used: `codegen --sram 192KB --d 128` is one process under 1.5 s,
and imports neither torch nor NumPy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from . import __version__
from .errors import RequestError, TileproofError

# Options whose feature comes later: refused by name, so that nobody believes they had an effect.
LATER = {
    "mask": "masks other than causal and key lengths (both are arguments of the call)",
    "score": "score modifications",
    "bias": "an additive bias",
    "dropout": "dropout",
    "varlen": "packed sequences (per-batch key_lengths is an argument of the call)",
}
DTYPE_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp32": "float32", "fp64": "float64"}
AT_N = 4096  # sequence length of --explain
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.command(context_settings=CONTEXT)
@click.option("--sram", metavar="SIZE", help="Fast memory of one kernel: 192KB = 192KiB = 196608 (bytes).")
@click.option("--d", metavar="N", help="Width of a query and key row: a multiple of 8, 8 to 256.")
@click.option("--dv", metavar="N", help="Width of a value row.  [default: d]")
@click.option("--dtype", metavar="LIST", help="float32,float64,bf16,fp16.  [default: all that the targets take]")
@click.option("--arch", metavar="LIST", help="Targets: cpu,sm80,sm90a (which brings sm80), ...  [default: cpu,sm80]")
@click.option("--algorithm", metavar="NAME", default="fa2", help="fa2: queries outside, K and V streamed past them.")
@click.option("--tiling", metavar="NAME", default="paper", help="paper: Algorithm 1's tile, made legal; or tuned.")
@click.option("--br", metavar="N", help="Query rows per tile, instead of the rule's. Refused if illegal.")
@click.option("--bc", metavar="N", help="Keys per tile, instead of the rule's. Refused if illegal.")
@click.option("--no-backward", is_flag=True, help="Without the gradient kernels: a call that needs one is refused.")
@click.option("--out", metavar="DIR", default="generated", show_default=True, help="Folder for the package.")
@click.option("--name", metavar="NAME", help="Name of the package.  [default: from the request]")
@click.option("--explain", is_flag=True, help="Print the plan and why; write nothing.")
@click.option("--at-n", metavar="N", help=f"Sequence length for --explain.  [default: {AT_N}]")
@click.option("--dry-run", is_flag=True, help="List the files; write nothing.")
@click.option("--check", "check_", is_flag=True, help="Compare with a regeneration: the request, or all under --out.")
@click.option("--build", is_flag=True, help="Also compile it for this machine.")
@click.option("--wheel", is_flag=True, help="Also make a wheel with the compiled libraries, in --out/dist.")
@click.option("--verify", is_flag=True, help="Also certify it against the reference and mpmath.")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
@click.option("--debug", is_flag=True, hidden=True, help="The judge's form: wide outputs and a trace per tile.")
@click.option("--mask", metavar="EXPR", hidden=True)
@click.option("--score", metavar="EXPR", hidden=True)
@click.option("--bias", metavar="SHAPE", hidden=True)
@click.option("--dropout", is_flag=True, hidden=True)
@click.option("--varlen", is_flag=True, hidden=True)
@click.version_option(__version__, prog_name="codegen")
def command(**options: Any) -> None:
    """Exact attention kernels for a fast-memory size and a head dimension, as a PyTorch package that stands alone.

    \b
    codegen --sram 192KB --d 128              write generated/attn_d128_sram192k
    codegen --sram 192KB --d 128 --verify     and certify it
    codegen --sram 192KB --d 128 --explain    what would be built, and why
    codegen --check                           is everything under generated/ fresh?
    """
    run(options)


def run(options: dict[str, Any]) -> None:
    """Do what the parsed options ask for.

    Raises: TileproofError for everything that is the user's business.
    """
    _refuse_later(options)
    _refuse_contradictions(options)
    out = Path(options["out"])
    if options["check_"]:
        return _check(options, out)
    problem = request(options)
    if options["explain"]:
        return _explain(options, problem)
    if options["dry_run"]:
        return _dry_run(options, problem, out)
    return _emit(options, problem, out)


def request(options: dict[str, Any]) -> Any:
    """The Problem that the options describe.

    Raises: RequestError; one message for the first thing that is wrong.
    """
    from . import problem
    from .sizes import parse_bytes, whole_number

    for name in ("sram", "d"):
        if options[name] is None:
            raise RequestError(f"--{name} is missing", "codegen --sram 192KB --d 128")
    return problem.make(
        sram_bytes=parse_bytes(options["sram"]),
        d=whole_number(options["d"], "--d"),
        dv=None if options["dv"] is None else whole_number(options["dv"], "--dv"),
        dtypes=_list(options["dtype"], "--dtype", DTYPE_ALIASES),
        archs=_list(options["arch"], "--arch", {}),
        tiling=options["tiling"],
        br=None if options["br"] is None else whole_number(options["br"], "--br"),
        bc=None if options["bc"] is None else whole_number(options["bc"], "--bc"),
        backward=not options["no_backward"],
        debug=options["debug"],
    )


def _list(text: str | None, option: str, aliases: dict[str, str]) -> list[str] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise RequestError(f"{option} {text!r}: an empty name", "a list such as a,b")
    return [aliases.get(word, word) for word in words]


def _refuse_later(options: dict[str, Any]) -> None:
    for option, feature in LATER.items():
        if options[option] not in (None, False):
            raise RequestError(f"--{option.replace('_', '-')}: not available yet: {feature}")
    if options["algorithm"] != "fa2":
        known = options["algorithm"] in ("standard", "fa1")
        what = "comes later as a kernel (spec/ has it in NumPy)" if known else "unknown"
        raise RequestError(f"--algorithm {options['algorithm']}: {what}", "today: fa2")


def _refuse_contradictions(options: dict[str, Any]) -> None:
    """Flags that write nothing go alone; an option that would have no effect is refused."""
    alone = {"explain": "--explain", "dry_run": "--dry-run", "check_": "--check"}
    chosen = [flag for key, flag in alone.items() if options[key]]
    chosen += [f"--{key}" for key in ("build", "wheel", "verify") if chosen and options[key]]
    if len(chosen) > 1:
        raise RequestError(f"{' and '.join(chosen)} do not go together", f"{chosen[0]} writes nothing: run it alone")
    if options["at_n"] is not None and not options["explain"]:
        raise RequestError("--at-n has no effect without --explain")


def _check(options: dict[str, Any], out: Path) -> None:
    from .check import check

    wanted = [key for key in ("sram", "d", "dv", "dtype", "arch", "br", "bc") if options[key] is not None]
    flags = options["debug"] or options["no_backward"] or options["tiling"] != "paper"
    problem = request(options) if wanted or flags else None
    reports = check(out, problem, options["name"])
    if options["json_"]:
        _print_json([{"package": str(r.folder), "digest": r.digest, "certified": r.certified} for r in reports])
        return
    for r in reports:
        certified = "certified" if r.certified else "not certified"
        click.echo(f"{r.folder}: fresh, digest {r.digest[:12]}, {certified}")


def _explain(options: dict[str, Any], problem: Any) -> None:
    from . import explain, package
    from .sizes import whole_number

    at_n = AT_N if options["at_n"] is None else whole_number(options["at_n"], "--at-n")
    if at_n < 1:
        raise RequestError(f"--at-n {at_n}: must be at least 1")
    told = explain.explanation(package.decide(problem, options["name"]), at_n)
    if options["json_"]:
        _print_json(told)
    else:
        explain.show(told)


def _dry_run(options: dict[str, Any], problem: Any, out: Path) -> None:
    from . import emit, package

    files = package.render_package(problem, options["name"])
    target = out / package.read_plan(files[package.PLAN_FILE])["name"]
    emit.refuse_foreign(target)
    if options["json_"]:
        _print_json({"package": str(target), "files": {path: len(data) for path, data in files.items()}})
        return
    for path, data in files.items():
        click.echo(f"{len(data):>9,}  {target / path}")
    click.echo(f"{sum(map(len, files.values())):>9,}  bytes in {len(files)} files; nothing written")


def _emit(options: dict[str, Any], problem: Any, out: Path) -> None:
    from . import emit, explain, package, planners, tools
    from .devices import DEVICES

    plans = package.decide(problem, options["name"])
    files = package.render_plans(plans)
    target = emit.write_files(files, out)
    quiet = options["json_"]
    if not quiet:
        explain.show_summary(plans, target, files)
    # A CUDA target that was asked for by name is compiled for; by default, the GPUs of this machine are.
    brought = planners.companions(problem.archs)
    gpus = [DEVICES[arch].built_for for arch in problem.archs if arch in DEVICES and arch not in brought]
    named = list(dict.fromkeys(gpus)) if options["arch"] else []
    if options["build"]:
        tools.build(target, named, quiet=quiet)
    made = tools.wheel(target, out / "dist", named) if options["wheel"] else None
    if options["verify"]:
        for device in tools.judged_devices(problem.archs):
            tools.verify(target, device, quiet=quiet)
    if quiet:
        plan = package.read_plan(files[package.PLAN_FILE])
        _print_json({"package": str(target), "digest": plan["digest"], "files": sorted(files),
                     "wheel": None if made is None else str(made), "plan": plan})  # fmt: skip
    elif made is not None:
        click.echo(f"wheel: {made}")


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script: runs the command and exits with its code."""
    try:
        code = command.main(args=arguments, prog_name="codegen", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except TileproofError as e:
        _fail(str(e), e.exit_code)
    except click.ClickException as e:
        _fail(e.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as e:  # a path too long, a folder that may not be read, a full disk under stdout
        _fail(": ".join(str(part) for part in (e.filename, e.strerror or e) if part), 1)


def _fail(message: str, code: int) -> None:
    click.echo(f"codegen: error: {message}", err=True)
    sys.exit(code)
