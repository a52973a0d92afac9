"""Commands that time packages and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from verify.commands.options import device_option, finish, json_option, out_option, seed_option


@click.command()
@click.argument("packages_", metavar="[PACKAGE...]", nargs=-1)
@device_option
@click.option("--sram", default=None, help="Budget of the packages to time when no PACKAGE is named.  [default: 192KB]")
@click.option("--tiling", default=None, help="GPU: their tiling, paper or tuned.  [default: paper]")
@click.option("--arch", "archs", default=None, help="GPU: their targets, timed together.  [default: the GPU's best]")
@click.option("--tiles", default=None, help="BRxBC,BRxBC, or grid on a CPU. CPU: the best is timed; GPU: each is.")
@click.option("--d", "widths", default=None, help="Head widths.  [default: 64,128; GPU: 64,128,256]")
@click.option("--n", "lengths", default=None, help="Lengths.  [default: 512,2048,4096; GPU: 512 to 16384]")
@click.option("--dtype", "dtypes", default=None, help="Dtypes.  [default: all; GPU: bf16]")
@click.option("--mask", "masks", default=None, help="GPU: full, causal.  [default: both]")
@click.option("--layout", "layouts", default=None, help="GPU: order in memory, bhnd or bnhd.  [default: bhnd]")
@click.option("--gqa", "groups", default=None, help="GPU: query heads per K/V head.  [default: 1]")
@click.option("--peers", default=None, help="GPU: cudnn,fa2,efficient,flex,fa3,fa4; all, none.  [default: all]")
@click.option("--tokens", type=click.IntRange(1), default=None, help="GPU: batch x N.  [default: 16384]")
@click.option("--hidden", "columns", type=click.IntRange(1), default=None, help="GPU: heads x d.  [default: 2048]")
@click.option("--batch", type=click.IntRange(1), default=None, help="CPU.  [default: 1]")
@click.option("--heads", type=click.IntRange(1), default=None, help="CPU.  [default: 8]")
@click.option("--threads", type=click.IntRange(1), default=None, help="CPU: torch threads, for both sides.")
@click.option("--rounds", type=click.IntRange(1), default=None, help="[default: 7]")
@click.option("--seed", type=int, default=None, help="GPU: of the order within the rounds.  [default: 0]")
@click.option("--seconds", type=float, default=None, help="GPU: begin no further shape after so long.")
@click.option("--overhead", is_flag=True, default=None, help="GPU: also what a call costs the host.")
@click.option("--backward", is_flag=True, default=None, help="The backward pass alone, the forward pass outside.")
@out_option
@json_option
def bench(packages_: tuple[str, ...], device: str, out: Path | None, as_json: bool, **options: Any) -> None:
    """Time packages beside torch's own attention (CPU) or every installed peer (GPU), and print the ratios.

    Lists of --dtype, --layout and --gqa are forms of one shape, timed in the same rounds and compared with the first.
    --backward on a GPU: d=64,128 at N=4096 to 16384 by default, and the deterministic form beside the default one.
    On a GPU --out FILE.json also draws FILE.png where matplotlib is installed; $TILEPROOF_PEERS names folders with
    peers that are not installed.
    """
    from verify import bench_grid, bench_options, bench_plot, bench_report, bench_table
    from verify.progress import bar

    with bar(f"bench on {device}", None) as step:
        if device == "cpu":
            figures = bench_report.run(step=step, **bench_options.cpu(packages_, options))
            made = bench_report.table(figures)
        else:
            grid = bench_options.grid(packages_, options)
            figures = bench_grid.run(grid, out=out, step=step, say=lambda text: click.echo(text, err=True))
            made = bench_table.table(figures)
    drawn = bench_plot.draw if device == "cuda" else None
    finish(figures, as_json, out, lambda c: c.print(made), figures.get("holds", True), drawn)


@click.command()
@click.option("--arch", default="sm90a", show_default=True, help="Target whose plans are measured.")
@click.option("--d", "widths", default="64,128,256", show_default=True, help="Head widths; 192/128 is d=192, dv=128.")
@click.option("--sram", default="227KB", show_default=True, help="Plans that need more are not tried.")
@click.option("--mask", "masks", default="full,causal", show_default=True, help="Mask forms.")
@click.option("--class", "classes", default="short,medium,long", show_default=True, help="Length classes.")
@click.option("--tiles", default=None, help="Only plans with these tiles, BRxBC,BRxBC.  [default: all candidates]")
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Of the candidates that stay.")
@seed_option
@click.option("--seconds", type=float, default=None, help="Begin no further case after so long.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Default: codegen/tuning/CARD.json.")
@json_option
def tune(
    arch: str, widths: str, sram: str, masks: str, classes: str, tiles: str | None, dtype: str, rounds: int, seed: int,
    seconds: float | None, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure the legal plans of a target on this GPU, alternating, and write what `codegen --tiling tuned` reads."""
    from verify import bench_options, tune_report
    from verify import tune as measuring
    from verify.progress import bar

    wanted = measuring.cases(
        arch=arch, sram=sram, widths=bench_options.widths(widths), masks=bench_options.words(masks, "--mask"),
        classes=bench_options.words(classes, "--class"), dtype=dtype,
        tiles=() if tiles is None else bench_options.tiles(tiles),
    )  # fmt: skip
    with bar(f"tune {arch}", measuring.steps(wanted, rounds)) as step:
        figures = tune_report.run(
            wanted, dtype=dtype, out=out, rounds=rounds, seed=seed, seconds=seconds, step=step,
            say=lambda text: click.echo(text, err=True),
        )  # fmt: skip
    finish(figures, as_json, None, lambda c: c.print(tune_report.table(figures)), True)
