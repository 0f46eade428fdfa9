"""Commands that show and hand on what there is: show, export, compare, list, demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from m3d.cli.options import (
    Json,
    app,
    examples,
)
from m3d.errors import M3DError, unknown
from m3d.terminal import progress_bar
from m3d.wording import counted


@app.command(epilog=examples("m3d show runs/cifar10-10", "m3d show runs/cifar10-10 --decoded --out decoded.png"))
def show(
    run: Annotated[Path, typer.Argument(help="Run folder or condensed.safetensors.")],
    out: Annotated[
        Path | None, typer.Option(help="Picture to write (.png, .svg or .pdf); default beside the set.")
    ] = None,
    decoded: Annotated[bool, typer.Option(help="Show the images as a network sees them.")] = False,
    history: Annotated[bool, typer.Option(help="Draw the loss over steps instead.")] = False,
    most: Annotated[int, typer.Option(help="Images per class to show at most.")] = 10,
    classes: Annotated[int, typer.Option(help="Classes to show at most.")] = 20,
) -> None:
    """Draw the condensed images as a labelled grid."""
    from m3d.condensed import CondensedSet
    from m3d.pictures import grid, loss_curve, picture_format, save_figure
    from m3d.run_folder import RunFolder

    if most < 1 or classes < 1:
        raise M3DError(f"--most {most} --classes {classes}: allowed are 1 and more")
    home = run if run.is_dir() else run.parent
    what = "decoded" if decoded else "images"
    target = out or home / ("loss.png" if history else f"{_named(what, run)}.png")
    picture_format(target)
    figure = loss_curve(RunFolder(home)) if history else grid(CondensedSet.load(run), decoded, most, classes)
    save_figure(figure, target)
    typer.echo(str(target))


@app.command(
    epilog=examples(
        "m3d export runs/cifar10-10 --to imagefolder --out cifar10-tiny",
        "m3d export runs/cifar10-10 --to npz",
    )
)
def export(
    run: Annotated[Path, typer.Argument(help="Run folder or condensed.safetensors.")],
    to: Annotated[str, typer.Option(help="imagefolder, npz or pt.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to; default beside the set: imagefolder or condensed.FORMAT.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier export.")] = False,
) -> None:
    """Write the images a network trains on in a format other tools read."""
    from m3d.condensed import CondensedSet
    from m3d.export import export as write

    home = run if run.is_dir() else run.parent
    default = home / (_named("imagefolder", run) if to == "imagefolder" else f"{_named('condensed', run)}.{to}")
    condensed = CondensedSet.load(run)
    typer.echo(str(write(condensed, to, out or default, overwrite)))
    typer.echo(f"m3d: {counted(condensed.per_class, 'images')} per class, as a network is shown them", err=True)


def _named(what: str, run: Path) -> str:
    """``what``, with the name of the set where it is not the run's last one."""
    from m3d.run_folder import kept_as

    return f"{what}-{name}" if (name := kept_as(run)) else what


@app.command(
    epilog=examples(
        "m3d compare runs/cifar10-m3d runs/cifar10-dm runs/cifar10-random",
        "m3d compare runs/* --form markdown",
        "m3d compare runs/* --chart methods.png",
        "m3d compare runs/*-seed? --over-seeds",
    )
)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders that have been evaluated.")],
    form: Annotated[str, typer.Option(help="text, csv, markdown or latex.")] = "text",
    chart: Annotated[Path | None, typer.Option(help="Also draw a bar chart (.png, .svg or .pdf).")] = None,
    seeds: Annotated[
        bool, typer.Option("--over-seeds", help="One row per setting: mean and sd over condensation seeds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put the results of several runs into one table."""
    from m3d.pictures import picture_format, save_figure
    from m3d.report import bar_chart, over_seeds, rows_of, table

    if chart is not None:
        picture_format(chart)
    rows = over_seeds(rows_of(runs)) if seeds else rows_of(runs)
    text = json.dumps(rows) if as_json else table(rows, form).rstrip("\n")
    if chart is not None:
        save_figure(bar_chart(rows), chart)
    typer.echo(text)
    if seeds and form == "text" and not as_json:
        typer.echo("± is over the means of a row's seeds; in rows of one seed, over the networks of its set")


@app.command(name="list", epilog=examples("m3d list methods", "m3d list methods m3d", "m3d list datasets --json"))
def list_(
    what: Annotated[str | None, typer.Argument(help="methods, kernels, nets, inits, protocols or datasets.")] = None,
    name: Annotated[str | None, typer.Argument(help="One of them, to see its options.")] = None,
    as_json: Json = False,
) -> None:
    """List what can be asked for by name, with options and defaults."""
    from m3d.listing import KINDS, describe, overview

    if what is None:
        typer.echo(json.dumps(KINDS) if as_json else "\n".join(f"m3d list {kind}" for kind in KINDS))
        return
    if what not in KINDS:
        raise unknown("list", what, KINDS)
    rows = overview(what) if name is None else describe(what, name)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    width = max(len(str(row["name"])) for row in rows)
    for row in rows:
        rest = {k: v for k, v in row.items() if k not in ("name", "about")}
        extra = "  [" + ", ".join(f"{k}: {v}" for k, v in rest.items()) + "]" if rest else ""
        typer.echo(f"{row['name']:<{width}}  {row['about']}{extra}".rstrip())


@app.command(epilog=examples("m3d demo", "m3d demo --out /tmp/demo"))
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the two runs and the picture.")] = Path("runs/demo"),
    repeats: Annotated[int, typer.Option(help="Networks trained on each set.")] = 5,
    as_json: Json = False,
) -> None:
    """Condense the embedded digits to one image per class, and compare with a random selection. No download."""
    from m3d.demo import run_demo

    with progress_bar(quiet=as_json) as report:
        summary = run_demo(out, repeats, report)
    if as_json:
        typer.echo(json.dumps(summary))
        return
    typer.echo("")
    typer.echo(f"{'1 image per class of digits':<34}{'test accuracy':>16}{'seconds':>10}")
    for row in summary["rows"]:
        sd = f"± {row['sd']:<4.1f}" if repeats > 1 else " " * 6
        typer.echo(f"{row['label']:<34}{row['accuracy']:>8.1f} {sd}%{row['seconds']:>10.1f}")
    spread = "mean ± sd" if repeats > 1 else "accuracy"
    typer.echo(f"\n{spread} of {counted(repeats, 'networks')}, last epoch. Picture: {summary['picture']}")
