"""Commands of many runs: reproduce, sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m3d.arguments import assignments, numbers, values
from m3d.cli.options import (
    CpusPerCell,
    DataRoot,
    Device,
    GpusPerCell,
    Json,
    On,
    OnBadImageElsewhere,
    Precision,
    Retries,
    Size,
    TestFraction,
    TimeLimit,
    app,
    examples,
)
from m3d.errors import M3DError


@app.command(
    epilog=examples(
        "m3d reproduce lowres --cell cifar10/10/m3d",
        "m3d reproduce table1 --dry-run",
        "m3d reproduce fig1",
        "m3d reproduce lowres --cell '*/m3d' --time-limit 3600",
        "m3d reproduce imagenet --data-root /data/ILSVRC2012",
        "m3d reproduce lowres --cell cifar10/10/m3d --steps 1000 --repeats 3",
        "m3d reproduce lowres --on ray --gpus-per-cell 0.5",
        "m3d reproduce steps --render",
    )
)
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="moments, lowres, methods, beyond, imagenet, cross-arch, compat, motivation, steps, ipm, kernel, "
            "images, all; or the paper's number: table1 to table5, fig1 to fig11."
        ),
    ],
    cell: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these cells, in this order: data/ipc/method, or a part of it; * stands for anything. "
            "May be given several times."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan with estimates; run nothing.")] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Make tables and figures from the records again; run nothing.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for records, tables, figures and runs.")] = Path(
        "results/reproduce"
    ),
    steps: Annotated[
        int | None, typer.Option(help="At most so many condensing steps: a quick look, kept apart.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="At most so many epochs: a quick look, kept apart.")] = None,
    repeats: Annotated[int | None, typer.Option(help="At most so many networks: a quick look, kept apart.")] = None,
    time_limit: TimeLimit = None,
    again: Annotated[
        bool, typer.Option("--again", help="Remove what was made of these cells and make them again.")
    ] = False,
    data_root: DataRoot = None,
    device: Device = "auto",
    precision: Precision = "auto",
    deterministic: Annotated[bool, typer.Option(help="Bit-reproducible on CUDA too (the CPU always is).")] = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    on: On = "local",
    gpus_per_cell: GpusPerCell = None,
    cpus_per_cell: CpusPerCell = None,
    retries: Retries = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a record per cell, instead of text.")] = False,
) -> None:
    """Make a table or figure of the paper: our numbers beside the published ones."""
    from m3d.grid.cells import Overrides
    from m3d.grid.where import Where
    from m3d.reproduce.command import Request

    overrides = Overrides(steps, epochs, repeats, precision, deterministic)
    where = Where(on, gpus_per_cell, cpus_per_cell, retries)
    request = Request(name, tuple(cell or ()), out, overrides, as_json, where)
    if dry_run + render + again > 1:
        raise M3DError("--dry-run, --render and --again: give one of them")
    if render and cell:
        raise M3DError(f"--cell {' --cell '.join(cell)}: --render shows all cells that have a record")
    if (render or dry_run) and time_limit is not None:
        raise M3DError(f"--time-limit {time_limit}: nothing is run that could be stopped")
    if dry_run:
        request.plan()
    elif render:
        request.render()
    else:
        request.run(data_root, device, checkpoint_seconds, time_limit, again)


@app.command(
    epilog=examples(
        "m3d sweep cifar10 --ipc 1,10 --set lr=5,10,20 --set factor=1,2 --seeds 0,1,2 --repeats 3",
        "m3d sweep cifar10 --ipc 10 --method m3d,dm --set kernel=linear,polynomial:degree=2,offset=1 --dry-run",
        "m3d sweep cifar10 --ipc 50 --method m3d+ --vary ce_weight=0.003,0.03 --vary mix_high=0.5 --vary encoders=10",
        "m3d sweep ./photos --size 64 --ipc 5 --set lr=5,10 --on ray --gpus-per-cell 0.5",
        "m3d sweep cifar10 --ipc 10 --set lr=10 --seeds 0,1,2 --final",
    )
)
def sweep(
    data: Annotated[str, typer.Argument(help="Dataset name, image folder, .npz or hf:NAME; see 'm3d list datasets'.")],
    method: Annotated[str, typer.Option(help="One or more: m3d,dm; see 'm3d list methods'.")] = "m3d",
    ipc: Annotated[str, typer.Option(help="Images per class, one or more numbers: 1,10.")] = "1",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUES", help="An option of the methods that have it, and its values: lr=5,10,20."
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUES", help="The same, but each value is tried alone, not with all others."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the condensation: 0,1,2.")] = "0",
    net: Annotated[str | None, typer.Option(help="Network to match through; default the method's own.")] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Part of the training data held out to measure on; default 0.1.")
    ] = None,
    final: Annotated[
        bool,
        typer.Option("--final", help="Measure one setting chosen before on the test data, with all training data."),
    ] = False,
    eval_net: Annotated[str, typer.Option(help="Network that is trained on the sets.")] = "convnet3",
    protocol: Annotated[str, typer.Option(help="See 'm3d list protocols'.")] = "paper",
    epochs: Annotated[int | None, typer.Option(help="Epochs instead of the protocol's.")] = None,
    repeats: Annotated[int, typer.Option(help="Networks trained on each set.")] = 10,
    out: Annotated[Path, typer.Option(help="Folder for records and runs.")] = Path("results/sweep"),
    time_limit: TimeLimit = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and print the cells; run none.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Remove what was made of these cells and make them again.")
    ] = False,
    data_root: DataRoot = None,
    size: Size = None,
    on_bad_image: OnBadImageElsewhere = None,
    test_fraction: TestFraction = 0.0,
    zca: Annotated[bool, typer.Option("--zca", help="Show networks ZCA-whitened images.")] = False,
    device: Device = "auto",
    precision: Precision = "auto",
    deterministic: Annotated[bool, typer.Option(help="Bit-reproducible on CUDA too (the CPU always is).")] = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    on: On = "local",
    gpus_per_cell: GpusPerCell = None,
    cpus_per_cell: CpusPerCell = None,
    retries: Retries = None,
    as_json: Json = False,
) -> None:
    """Compare settings of a method on held-out training data; the test data stay unseen."""
    from m3d.grid.cells import Overrides
    from m3d.grid.where import Where
    from m3d.sweep import Call, Measured, Sweep, load_options

    load = load_options(val_fraction, final, size, on_bad_image, test_fraction)
    if dry_run and time_limit is not None:
        raise M3DError(f"--time-limit {time_limit}: nothing is run that could be stopped")
    if dry_run and again:
        raise M3DError("--dry-run and --again: give one of them")
    where = Where(on, gpus_per_cell, cpus_per_cell, retries)
    options, alone = (
        [(name, values(text)) for name, text in assignments(given or [], word).items()]
        for word, given in (("--set", set_), ("--vary", vary))
    )
    grid = Sweep(
        data,
        values(method),
        numbers("--ipc", ipc, 1),
        options,
        alone,
        seeds=numbers("--seeds", seeds, 0),
        net=net,
        measured=Measured(eval_net, protocol, epochs, repeats),
        load=load,
        zca=zca,
        final=final,
        overrides=Overrides(precision=precision, deterministic=deterministic),
    )
    from m3d.grid.work import Place

    place = Place(out, data_root, device, checkpoint_seconds)
    Call(grid, place, where, as_json).run(time_limit, dry_run, again)
