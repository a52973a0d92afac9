"""Commands that hold results against their bounds: certificates, fuzzing, seeded bugs, real models."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click

from codegen.errors import RequestError
from verify.commands.options import device_option, finish, json_option, judged_on, out_option, seed_option, where_of

_ARCHS = {"cpu": ("cpu",), "cuda": ("sm80",)}  # targets of the package that is made for a model


@click.command()
@click.argument("package")
@judged_on
@seed_option
@click.option(
    "--cases", "per_dtype", type=click.IntRange(1), default=None, help="Cases per dtype, special values included."
)
@click.option("--only", default=None, help="Run the one case of this name, as a violation's message says.")
@click.option("--path", default=None, help="Run only this path, such as amx/bf16.")
@click.option("--debug-form", is_flag=True, help="Also build the debug form and judge (m, l, O) after every key tile.")
@click.option("--no-balls", is_flag=True, help="Leave python-flint out even where it is installed.")
@click.option("--replace", is_flag=True, help="Write the figures even where fuller ones of this device are there.")
@out_option
@json_option
def certify(
    package: str,
    device: str,
    arch: str | None,
    schedules: tuple[str, ...],
    accumulation: str | None,
    seed: int,
    per_dtype: int | None,
    only: str | None,
    path: str | None,
    debug_form: bool,
    no_balls: bool,
    replace: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Certify PACKAGE (a folder, or a name under ./generated) and write its certificate.json.

    Every case is heard by the readable reference (its invariant checked after every tile), by float64 with its own
    bound, by ball arithmetic where installed, and by mpmath on at least 8 rows; on every path that can be forced. The
    gradients of a package that has a backward pass are heard likewise, at the O and LSE of its own kernels.
    """
    from verify import certificate, certificate_table, devices, packages, suite, trace
    from verify import certify as judged
    from verify.progress import bar

    if replace and (only is not None or path is not None):
        raise RequestError("--replace: a run of one case or one path writes no certificate",
                           "try it without --only and --path, or leave out --replace")  # fmt: skip
    folder = packages.find(package)
    options = judged.Options(
        seed=seed, per_dtype=per_dtype or suite.PER_DTYPE, only=only, path=path, balls=not no_balls
    )
    where = where_of(device, arch, schedules, accumulation)
    total = None if only else options.per_dtype * len(devices.dtypes_of(packages.plan(folder), device))
    with bar(f"certify {folder.name} on {device}", total) as step:
        record = judged.certify(folder, where, options, step=step)
    traced = None
    if debug_form:
        with bar("debug form", None) as step:
            traced = trace.stated(folder, where, seed=seed, most=options.per_dtype, step=step)
        record.violations += traced["violations"]
    stated = record.describe(where.describe())
    if traced is not None:
        stated["debug_form"] = traced
    edited = packages.changed(folder)
    if edited:
        click.echo(f"verify: no certificate is written: {edited[0]} is not the file that plan.json names", err=True)
    elif only is None and path is None and (record.runs or record.violations):
        name = certificate.key(where)
        before = certificate.stated_devices(folder).get(name)
        if before is not None and certificate.is_poorer(stated, before) and not replace:
            click.echo(f"verify: {certificate.why_kept(name, stated, before)}", err=True)
        else:
            certificate.write(folder, name, stated)
    for text in record.violations[:10]:
        click.echo(text, err=True)
    if not record.runs and not record.violations:
        asked = [f"--{word} {name}" for word, name in (("only", only), ("path", path)) if name is not None]
        hint = "a violation's message names both; cases also depend on --seed and --cases"
        raise RequestError(f"{' '.join(asked)}: nothing has that name, and nothing ran", hint)
    title = f"{folder.name}: certificate on {certificate.key(where)}"
    finish(stated, as_json, out, lambda c: c.print(*certificate_table.tables(stated, title)), not record.violations)


@click.command()
@click.argument("package", required=False)
@judged_on
@seed_option
@click.option("--examples", type=click.IntRange(1), default=500, show_default=True, help="Examples in all.")
@click.option(
    "--packages", "count", type=click.IntRange(0, 1000), default=0, help="Build this many packages and fuzz each."
)
@click.option("--mutants", is_flag=True, help="Also break the fuzzed code on purpose, and see each break found.")
@click.option(
    "--spec", "spec_examples", type=click.IntRange(0), default=0, help="Examples for the reference, all masks."
)
@out_option
@json_option
def fuzz(
    package: str | None,
    device: str,
    arch: str | None,
    schedules: tuple[str, ...],
    accumulation: str | None,
    seed: int,
    examples: int,
    count: int,
    mutants: bool,
    spec_examples: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Fuzz PACKAGE, or a set of packages made for it, with random problems; each is judged by its bound."""
    from verify import campaign
    from verify.progress import bar

    if package is None and not count and not mutants and not spec_examples:
        raise click.UsageError("name a PACKAGE, or use --packages, --spec or --mutants")
    where = where_of(device, arch, schedules, accumulation)
    with bar(f"fuzz on {device}", None) as step:
        report = campaign.run(
            package, where, examples=examples, packages_wanted=count, mutants_wanted=mutants,
            spec_examples=spec_examples, seed=seed, step=step,
        )  # fmt: skip
    figures = report.describe()
    for text in report.failures():
        click.echo(text, err=True)
    finish(figures, as_json, out, lambda c: c.print(*campaign.tables(figures)), not report.failures())


@click.command()
@click.option("--of", default="", help="Comma list: spec, cpu, sm80-backward, ... Default: all that run here.")
@click.option("--name", "names", multiple=True, help="Only the mutants of this name or catalogue number.")
@click.option("--sample", type=click.IntRange(1), default=None, help="So many per target, the same at every run.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Mutants at a time; default: one per core.")
@out_option
@json_option
def mutate(
    of: str, names: tuple[str, ...], sample: int | None, jobs: int | None, out: Path | None, as_json: bool
) -> None:
    """Seed one bug at a time into spec and into emitted kernels, and see each one noticed."""
    from verify.mutate import command
    from verify.mutate import run as mutation
    from verify.progress import bar

    with bar("mutate", None) as step:
        chosen = [word.strip() for word in of.split(",") if word.strip()]
        figures = mutation.run(chosen, names=names, sample=sample, jobs=jobs, step=step)
    finish(figures, as_json, out, lambda c: c.print(*command.tables(figures)), bool(figures["holds"]))


@click.command()
@device_option
@click.option("--dtype", type=click.Choice(["float32", "bf16", "fp16", "float64"]), default=None)
@click.option("--sram", default="192KB", show_default=True, help="Budget of the package made for the model.")
@click.option("--training", is_flag=True, help="Train a small GPT instead, beside torch's own attention. Dtype: all.")
@click.option("--seed", type=click.IntRange(0), default=None, help="First seed of --training.  [default: 0]")
@out_option
@json_option
def real(
    device: str, dtype: str | None, sram: str, training: bool, seed: int | None, out: Path | None, as_json: bool
) -> None:
    """Run a real sentence encoder on a generated package and judge every attention layer.

    With --training, train a GPT with our op and with torch's attention from the same seeds: the losses must stay as
    close as those of two of torch's own back ends. --out FILE.json then also draws FILE.png (needs matplotlib).
    """
    from verify import devices, packages
    from verify import real as encoder
    from verify.progress import bar

    if training:
        _train(device, (dtype,) if dtype else None, sram, seed or 0, out, as_json)
    if seed is not None:
        raise RequestError("--seed: only --training draws from seeds", "leave it out, or add --training")
    where = devices.device(device)
    chosen = dtype or ("float32" if device == "cpu" else "bf16")
    with bar("real", 8) as step:
        folder = packages.emit(sram=sram, d=encoder.HEAD_DIM, dtypes=(chosen,), archs=_ARCHS[device])
        report = encoder.run(packages.load(folder), where, dtype=chosen, step=step)
    figures = {"kind": "real", "device": device, **report.describe(), "machine": where.describe()}
    for verdict in report.layers:
        if not verdict.holds:
            click.echo(verdict.message(), err=True)
    finish(figures, as_json, out, lambda c: c.print(*encoder.tables(figures)), report.holds)


def _train(
    device: str, dtypes: tuple[str, ...] | None, sram: str, first_seed: int, out: Path | None, as_json: bool
) -> NoReturn:
    """`real --training`."""
    from verify import devices, packages, training, training_plot, training_text
    from verify.progress import bar

    dtypes = dtypes or training.DTYPES[device]
    setting = training.Setting(first_seed=first_seed)
    header = devices.device(device).describe()  # the load at the start
    with bar("train", training.runs(setting, dtypes)) as step:
        folder = packages.emit(sram=sram, d=setting.size.head_dim, dtypes=dtypes, archs=_ARCHS[device])
        found = training.run(
            packages.load(folder), training_text.documentation(), device=device, dtypes=dtypes, setting=setting,
            step=step,
        )  # fmt: skip
    figures = {"kind": "training", "device": device, **found, "machine": header}
    finish(figures, as_json, out, lambda c: c.print(training.table(figures)), figures["holds"], training_plot.draw)
