"""Commands that measure what kernels do with memory: the bytes they move, the bytes they hold."""

from __future__ import annotations

from pathlib import Path

import click

from verify.commands.options import device_option, finish, json_option, out_option


@click.command()
@click.argument("packages_", metavar="[PACKAGE...]", nargs=-1)
@click.option(
    "--device",
    type=click.Choice(["emulator", "cuda"]),
    default="emulator",
    show_default=True,
    help="cuda: also what the GPU's counters saw.",
)
@click.option("--arch", default="sm80", show_default=True, help="Target whose kernels are counted.")
@click.option("--sram", default="192KB", show_default=True, help="Budget of the package that --d asks for.")
@click.option("--d", type=click.IntRange(1), default=None, help="Also the package of this head width.")
@click.option("--br", type=click.IntRange(1), default=None, help="Its query rows per tile.")
@click.option("--bc", type=click.IntRange(1), default=None, help="Its keys per tile.")
@click.option("--n", "lengths", default=None, help="One head at these lengths in place of the grid of shapes.")
@click.option("--causal", default=None, help="Its masks: none, bottom_right, top_left.  [default: none,bottom_right]")
@out_option
@json_option
def io(
    packages_: tuple[str, ...],
    device: str,
    arch: str,
    sram: str,
    d: int | None,
    br: int | None,
    bc: int | None,
    lengths: str | None,
    causal: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Count the bytes that each kernel moves; compare with the formula and the lower bound.

    The emulator counts loads and stores per tensor, and every byte must be the formula's. Default: nine tiles.
    """
    from verify import devices, io_calls
    from verify import io as traffic
    from verify.progress import bar

    if device == "cuda":
        devices.device("cuda")
    shapes = io_calls.asked(lengths, causal)
    with bar("io", None) as step:
        folders = traffic.chosen(packages_, sram=sram, d=d, br=br, bc=bc, target=arch)
        figures = traffic.run(folders, device=device, target=arch, shapes=shapes, step=step)
    for text in figures["differences"][:10]:
        click.echo(text, err=True)
    finish(figures, as_json, out, lambda c: c.print(*traffic.tables(figures)), figures["holds"])


@click.command()
@click.argument("package", required=False)
@device_option
@click.option("--dtype", type=click.Choice(["float32", "bf16", "fp16", "float64"]), default=None, help="[default: two]")
@click.option("--sram", default="192KB", show_default=True, help="Budget of the package to measure if none is named.")
@click.option("--n", "lengths", default=None, help="Lengths.  [default: 512,1024,2048,4096]")
@out_option
@json_option
def memory(
    package: str | None, device: str, dtype: str | None, sram: str, lengths: str | None, out: Path | None, as_json: bool
) -> None:
    """Peak memory of forward plus backward over the length: a package (default: d=64) beside the standard algorithm.

    Ours must grow linearly. --out FILE.json also draws FILE.png (needs matplotlib).
    """
    from verify import bench_options, devices, memory_plot, packages
    from verify import memory as peaks
    from verify.progress import bar

    devices.device(device)
    dtypes = peaks.DTYPES[device] if dtype is None else (dtype,)
    asked = peaks.LENGTHS if lengths is None else bench_options.numbers(lengths, "--n")
    with bar("memory", len(dtypes) * len(peaks.ALGORITHMS) * len(asked)) as step:
        if package is None:
            archs = ("cpu",) if device == "cpu" else ("sm80",)
            folder = packages.emit(sram=sram, d=peaks.Shape.d, dtypes=dtypes, archs=archs)
        else:
            folder = packages.find(package)
        shape = peaks.Shape(d=packages.plan(folder)["request"]["d"])
        found = peaks.run(folder, device=device, dtypes=dtypes, lengths=asked, shape=shape, step=step)
    figures = {"kind": "memory", "device": device, **found}
    finish(figures, as_json, out, lambda c: c.print(peaks.table(figures)), figures["holds"], memory_plot.draw)
