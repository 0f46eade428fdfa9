"""The command line. Nothing heavy is imported until a command runs, so that help answers at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m3d.arguments import (
    assignments,
    check_evaluate,
    check_ranking,
    check_reading,
    one_process_unless,
    refuse_others,
    refused_value,
    stop_in_imports,
    usage_hint,
)
from m3d.errors import Interrupted, M3DError, unknown
from m3d.terminal import board, decode_bar, epoch_bar, progress_bar, ranking_lines
from m3d.version import __version__

if TYPE_CHECKING:
    from m3d.engine import Progress
    from m3d.evaluation import Result
    from m3d.ranking import Ranking

# Click's base error. Some releases of Typer depend on Click and some carry their own copy; this finds either.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="m3d",
    help="Condense a labelled image dataset into a tiny synthetic one, evaluate it, and use it.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


DataRoot = Annotated[
    Path | None, typer.Option(help="Where datasets lie or are put; default $M3D_DATA, else ~/.cache/m3d.")
]
Size = Annotated[int | None, typer.Option(help="Side in pixels that images of a folder are resized and cropped to.")]
OnBadImage = Annotated[str, typer.Option(help="error, or skip: images that cannot be read are left out and listed.")]
OnBadImageElsewhere = Annotated[
    str | None, typer.Option(help="error, or skip: images that cannot be read are left out; default: error.")
]
Resident = Annotated[
    str, typer.Option(help="Hold all real images in memory: yes, no (decoded once to the disk), or auto: if they fit.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Precision = Annotated[str, typer.Option(help="auto (bf16 on CUDA, fp32 on CPU), fp16, bf16, tf32 or fp32.")]
Seed = Annotated[int, typer.Option(help="Same seed, same result.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
On = Annotated[
    str,
    typer.Option(help="local, ray (this machine or $RAY_ADDRESS) or ray:ADDRESS (extra ray; --out on shared storage)."),
]
GpusPerCell = Annotated[
    float | None, typer.Option(help="With --on ray: GPUs of a cell, 0.5 for a half; default 1 where there are any.")
]
CpusPerCell = Annotated[float | None, typer.Option(help="With --on ray: CPUs of a cell; default 1.")]
Retries = Annotated[
    int | None, typer.Option(help="With --on ray: how often a cell whose worker was lost is tried again; default 1.")
]
TimeLimit = Annotated[float | None, typer.Option(help="Seconds after which to stop; the same command goes on later.")]
Net = Annotated[str, typer.Option(help="Network, e.g. convnet3 or convnet3:width=64; see 'm3d list nets'.")]


@app.callback(invoke_without_command=True)
def _common(
    context: typer.Context,
    plugin: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Your own .py file that registers methods or kernels.")
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"m3d {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
    one_process_unless(context.invoked_subcommand == "condense")
    from m3d.registry import load_plugin

    for path in plugin or []:
        load_plugin(path)


@app.command(
    epilog=_examples(
        "m3d condense digits --ipc 1 --steps 200",
        "m3d condense cifar10 --ipc 10 --out runs/cifar10-10",
        "m3d condense ./photos --size 64 --ipc 5 --val-fraction 0.1 --eval-every 1000",
        "m3d condense cifar10 --ipc 10 --kernel linear --set momentum=0.9",
        "m3d condense cifar10 --ipc 10 --method dm --objective m3d",
        "m3d condense --resume runs/cifar10-10",
        "torchrun --nproc-per-node 8 -m m3d condense cifar100 --ipc 10",
    )
)
def condense(
    context: typer.Context,
    data: Annotated[
        str | None, typer.Argument(help="Dataset name, image folder, .npz or hf:NAME; see 'm3d list datasets'.")
    ] = None,
    ipc: Annotated[int, typer.Option(help="Images per class to keep.")] = 1,
    method: Annotated[str, typer.Option(help="See 'm3d list methods'.")] = "m3d",
    steps: Annotated[int | None, typer.Option(help="Iterations.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the images.")] = None,
    factor: Annotated[int | None, typer.Option(help="Mini-images along each side of a stored image.")] = None,
    kernel: Annotated[str | None, typer.Option(help="See 'm3d list kernels'.")] = None,
    objective: Annotated[str | None, typer.Option(help="Another loss in the same method, e.g. dm with m3d.")] = None,
    ipm: Annotated[int | None, typer.Option(help="Iterations per model.")] = None,
    batch_real: Annotated[int | None, typer.Option(help="Real images per class and step.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other option of the method, as name=value."),
    ] = None,
    net: Annotated[
        str | None, typer.Option(help="Network to match through; default the method's own; see 'm3d list methods'.")
    ] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/DATA-METHOD-ipcN-seedN.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a run that is already in the folder.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder; takes no other option.")] = None,
    data_root: DataRoot = None,
    size: Size = None,
    on_bad_image: OnBadImage = "error",
    resident: Resident = "auto",
    zca: Annotated[bool, typer.Option("--zca", help="Show networks ZCA-whitened images.")] = False,
    val_fraction: Annotated[float, typer.Option(help="Part of the training data held out for choices.")] = 0.0,
    eval_every: Annotated[int, typer.Option(help="Steps between measurements on the held-out part; 0: none.")] = 0,
    device: Device = "auto",
    precision: Precision = "auto",
    deterministic: Annotated[
        bool, typer.Option(help="Bit-reproducible on CUDA too (slower; the CPU always is).")
    ] = False,
    step_mode: Annotated[str, typer.Option(help="auto (compile long CUDA runs), eager or compile.")] = "auto",
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    subtasks: Annotated[
        int, typer.Option(help="Groups of classes condensed one after the other: less memory, the same set.")
    ] = 1,
    classes_at_once: Annotated[
        int | None, typer.Option(help="Classes that go through a network together, at most; default: what fits.")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log to RUN/tensorboard (extra tensorboard).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Condense DATA to a few synthetic images per class."""
    if resume is not None:
        refuse_others(context, "--resume", {"resume", "as_json", "tensorboard"})
        _condense(lambda api, report: api.resume(resume, report=report), resume, as_json, tensorboard)
        return
    if data is None:
        raise M3DError(
            "which dataset? Give a name, an image folder or an .npz (see 'm3d list datasets'), or --resume RUN"
        )
    common = {"steps": steps, "lr": lr, "factor": factor, "kernel": kernel, "objective": objective, "ipm": ipm}
    common["batch_real"] = batch_real
    options = {k: v for k, v in common.items() if v is not None}
    for key, value in assignments(set_ or []).items():
        if key in options:
            raise M3DError(f"{key} is given twice: as an option and as --set {key}={value}")
        options[key] = value
    name = Path(data).stem if data.endswith(".npz") else Path(data).name
    folder = out or Path("runs") / f"{name}-{method}-ipc{ipc}-seed{seed}"
    load_options: dict[str, Any] = {"data_root": data_root, "size": size, "val_fraction": val_fraction, "zca": zca}
    load_options |= {"on_bad_image": on_bad_image, "resident": resident, "progress": decode_bar(quiet=as_json)}
    _condense(
        lambda api, report: api.condense(
            data,
            ipc,
            method,
            net=net,
            seed=seed,
            out=folder,
            overwrite=overwrite,
            device=device,
            precision=precision,
            deterministic=deterministic,
            step_mode=step_mode,
            checkpoint_seconds=checkpoint_seconds,
            subtasks=subtasks,
            classes_at_once=classes_at_once,
            eval_every=eval_every,
            load_options=load_options,
            report=report,
            **options,
        ),
        folder,
        as_json,
        tensorboard,
    )


def _condense(
    call: Callable[[Any, Callable[[Progress], None] | None], Any], folder: Path, as_json: bool, tensorboard: bool
) -> None:
    from m3d import api
    from m3d.shards import Ranks

    leads = Ranks.from_environment().leads  # of several processes one speaks
    try:
        with (
            progress_bar(quiet=as_json or not leads) as report,
            board(folder, tensorboard and leads, report) as watched,
        ):
            condensed = call(api, watched)
    except Interrupted as stop:
        if leads:
            typer.echo(f"m3d: {stop}; continue with: m3d condense --resume {quote(str(folder))}", err=True)
        raise typer.Exit(130) from None
    if not leads:
        return
    manifest = condensed.manifest
    if as_json:
        typer.echo(json.dumps({"run": str(folder), "set": condensed.fingerprint, **manifest}))
        return
    typer.echo(
        f"{manifest['method']}: {len(condensed.class_names)} classes × {manifest['ipc']} images, "
        f"{manifest['steps']} steps in {manifest.get('seconds', 0):.1f} s → {folder}"
    )
    typer.echo(f"next: m3d show {quote(str(folder))}    m3d evaluate {quote(str(folder))}")


@app.command(
    epilog=_examples(
        "m3d evaluate runs/cifar10-10",
        "m3d evaluate runs/cifar10-10 --repeats 3 --epochs 300",
        "m3d evaluate runs/cifar10-10 --protocol dsa --json",
        "m3d evaluate runs/cifar10-10 --nets convnet3,convnet4",
        "m3d evaluate --full cifar10 --repeats 3",
        "m3d evaluate runs/cifar10-10 --ranking",
    )
)
def evaluate(
    run: Annotated[Path | None, typer.Argument(help="Run folder or condensed.safetensors.")] = None,
    full: Annotated[str | None, typer.Option(help="Train on this whole dataset instead: the upper bound.")] = None,
    data: Annotated[str | None, typer.Option(help="Test on this dataset instead of the one it was made from.")] = None,
    net: Net = "convnet3",
    nets: Annotated[str | None, typer.Option(help="Several networks one after the other: convnet3,convnet4.")] = None,
    protocol: Annotated[
        str | None, typer.Option(help="See 'm3d list protocols'; default paper (whole for --full).")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs instead of the protocol's.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size instead of the protocol's.")] = None,
    repeats: Annotated[int, typer.Option(help="Networks trained, each from its own random weights.")] = 10,
    split: Annotated[str, typer.Option(help="test, or val where a part was held out.")] = "test",
    out: Annotated[Path | None, typer.Option(help="With --full: folder for the record and the checkpoint.")] = None,
    ranking: Annotated[
        bool, typer.Option("--ranking", help="Also DD-Ranking's label- and augmentation-robust scores.")
    ] = False,
    selections: Annotated[
        int | None, typer.Option(help="With --ranking: random selections to compare with; default 5.")
    ] = None,
    full_epochs: Annotated[
        int | None, typer.Option(help="With --ranking: epochs on the whole data instead of the protocol's.")
    ] = None,
    full_run: Annotated[
        Path | None,
        typer.Option(help="With --ranking: folder of an 'evaluate --full --out', instead of that training."),
    ] = None,
    seed: Seed = 0,
    data_root: DataRoot = None,
    size: Size = None,
    on_bad_image: OnBadImageElsewhere = None,
    zca: Annotated[
        bool | None, typer.Option("--zca/--no-zca", help="ZCA-whitened images; default: as the set was made.")
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    deterministic: Annotated[bool, typer.Option(help="Bit-reproducible on CUDA too (the CPU always is).")] = False,
    as_json: Json = False,
) -> None:
    """Train fresh networks on a condensed set and test them on real images."""
    check_evaluate(run, full, data, out, size, on_bad_image)
    parts = {"--selections": selections, "--full-epochs": full_epochs, "--full-run": full_run}
    check_ranking(ranking, full, parts)
    from m3d.api import load_source
    from m3d.data import load_data
    from m3d.evaluation import evaluate as evaluate_set
    from m3d.evaluation import evaluate_whole, make_protocol
    from m3d.nets import make_net
    from m3d.ranking import rank, recorded_whole
    from m3d.runtime import Runtime
    from m3d.store import CondensedSet, RunFolder

    rules = make_protocol(protocol or ("whole" if full else "paper"), epochs=epochs, batch=batch)
    runtime = Runtime.choose(device, precision, deterministic)
    condensed = None if run is None else CondensedSet.load(run)
    dataset = (
        load_data(str(full), data_root=data_root, size=size, zca=bool(zca), on_bad_image=on_bad_image or "error")
        if condensed is None
        else load_source(condensed, data, data_root, size, zca, on_bad_image)
    )
    names = [name.strip() for name in nets.split(",")] if nets else [net]
    for name in names:
        make_net(name, dataset.shape, dataset.classes)  # a wrong name is said before the first is trained
    home = out if condensed is None else run
    folder = RunFolder(home) if home is not None and (condensed is None or home.is_dir()) else None
    if folder is not None:
        folder.require_writable()
    common: dict[str, Any] = {"protocol": rules, "repeats": repeats, "seed": seed, "split": split}
    common |= {"runtime": runtime, "folder": folder}
    if ranking:
        common |= {"full_protocol": make_protocol("whole", epochs=full_epochs)}
        common |= {"selections": min(5, repeats) if selections is None else selections}
    known = {name: recorded_whole(RunFolder(full_run), dataset, name, split) for name in names if full_run is not None}
    records = []
    for name in names:
        try:
            with epoch_bar(quiet=as_json) as report:
                settings = {"net": name, "report": report, **common, **({"full": known[name]} if known else {})}
                result: Result | Ranking
                if condensed is None:
                    result = evaluate_whole(dataset, **settings)
                else:
                    result = (rank if ranking else evaluate_set)(condensed, dataset, **settings)
        except Interrupted as stop:
            again = "; the same command continues it" if folder is not None else ""
            typer.echo(f"m3d: {stop}{again}", err=True)
            raise typer.Exit(130) from None
        records.append(result.as_record())
        if not as_json:
            _print_result(records[-1], str(result))
        if folder is not None:  # after it was printed: whatever happens to the file, the number is not lost
            folder.add_result(records[-1])
    if as_json:
        typer.echo(json.dumps(records if nets else records[0]))


def _print_result(record: dict[str, Any], headline: str) -> None:
    rules = f"{record['protocol']['name']}, {record['protocol']['epochs']} epochs"
    data = f"{record['data']['name']} ({record['data']['split']})"
    labels = "" if record["labels"] == "hard" else ", soft labels"
    typer.echo(f"{record['method']} on {data}, {record['net']}, protocol {rules}{labels}: {headline}")
    best = f"{record['best_of_checks']:.2f} ± {record['best_sd']:.2f} %"
    typer.echo(f"best of epochs {', '.join(record['checks'])}: {best}; {record['seconds']:.1f} s on {record['device']}")
    if "ranking" in record:
        typer.echo("\n".join(ranking_lines(record["ranking"])))


@app.command(
    epilog=_examples(
        "m3d relabel runs/cifar10-10",
        "m3d relabel runs/cifar10-10 --teacher convnet3 --teachers 10 --epochs 60 --temperature 2",
    )
)
def relabel(
    run: Annotated[Path, typer.Argument(help="Run folder or condensed.safetensors.")],
    teacher: Annotated[str, typer.Option(help="Network trained on the real data; see 'm3d list nets'.")] = "convnet3",
    teachers: Annotated[int, typer.Option(help="Networks whose probabilities are averaged.")] = 5,
    epochs: Annotated[int, typer.Option(help="Epochs they are trained for.")] = 20,
    temperature: Annotated[float, typer.Option(help="Their outputs are divided by it.")] = 1.0,
    seed: Seed = 0,
    data: Annotated[str | None, typer.Option(help="Real data, if not where the set says they came from.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the labelled set; default RUN-soft.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a run that is already in the folder.")] = False,
    data_root: DataRoot = None,
    size: Size = None,
    on_bad_image: OnBadImageElsewhere = None,
    device: Device = "auto",
    precision: Precision = "auto",
    deterministic: Annotated[bool, typer.Option(help="Bit-reproducible on CUDA too (the CPU always is).")] = False,
    as_json: Json = False,
) -> None:
    """Give a condensed set soft labels: what networks trained on the real data say of its images."""
    check_reading(data, size, on_bad_image)
    from m3d import api

    home = run if run.is_dir() else run.parent
    home = home if home.name not in ("", "..") else home.resolve()
    folder = out or home.with_name(f"{home.name}-soft")
    options: dict[str, Any] = {
        "teacher": teacher,
        "teachers": teachers,
        "epochs": epochs,
        "temperature": temperature,
        "seed": seed,
    }
    place: dict[str, Any] = {"device": device, "precision": precision, "data_root": data_root}
    place |= {"deterministic": deterministic, "size": size, "on_bad_image": on_bad_image}
    labelled = api.relabel(run, data, out=folder, overwrite=overwrite, **place, **options)
    told, stored = labelled.manifest["soft_labels"], labelled.storage
    if as_json:
        typer.echo(json.dumps({"run": str(folder), "storage": stored, **labelled.manifest}))
        return
    typer.echo(
        f"{len(labelled.decoded()[0])} images labelled by {teachers} {teacher} in {told['seconds']:.1f} s "
        f"({100 * told['agreement']:.1f} % agree with their class) → {folder}"
    )
    typer.echo(f"stored: {stored['pixels']:,} bytes of pixels + {stored['labels']:,} bytes of labels")
    typer.echo(f"next: m3d evaluate {quote(str(folder))}")


@app.command(epilog=_examples("m3d show runs/cifar10-10", "m3d show runs/cifar10-10 --decoded --out decoded.png"))
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
    from m3d.pictures import grid, loss_curve, picture_format, save_figure
    from m3d.store import CondensedSet, RunFolder

    if most < 1 or classes < 1:
        raise M3DError(f"--most {most} --classes {classes}: allowed are 1 and more")
    home = run if run.is_dir() else run.parent
    target = out or home / ("loss.png" if history else "images.png")
    picture_format(target)
    figure = loss_curve(RunFolder(home)) if history else grid(CondensedSet.load(run), decoded, most, classes)
    save_figure(figure, target)
    typer.echo(str(target))


@app.command(
    epilog=_examples(
        "m3d export runs/cifar10-10 --to imagefolder --out cifar10-tiny",
        "m3d export runs/cifar10-10 --to npz",
    )
)
def export(
    run: Annotated[Path, typer.Argument(help="Run folder or condensed.safetensors.")],
    to: Annotated[str, typer.Option(help="imagefolder, npz or pt.")],
    out: Annotated[Path | None, typer.Option(help="Where to; default RUN/imagefolder or RUN/condensed.FORMAT.")] = None,
) -> None:
    """Write the images a network trains on in a format other tools read."""
    from m3d.export import export as write
    from m3d.store import CondensedSet

    home = run if run.is_dir() else run.parent
    default = home / ("imagefolder" if to == "imagefolder" else f"condensed.{to}")
    typer.echo(str(write(CondensedSet.load(run), to, out or default)))


@app.command(
    epilog=_examples(
        "m3d compare runs/cifar10-m3d runs/cifar10-dm runs/cifar10-random",
        "m3d compare runs/* --form markdown",
        "m3d compare runs/* --chart methods.png",
    )
)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders that have been evaluated.")],
    form: Annotated[str, typer.Option(help="text, csv, markdown or latex.")] = "text",
    chart: Annotated[Path | None, typer.Option(help="Also draw a bar chart (.png, .svg or .pdf).")] = None,
    as_json: Json = False,
) -> None:
    """Put the results of several runs into one table."""
    from m3d.pictures import picture_format, save_figure
    from m3d.report import bar_chart, rows_of, table

    if chart is not None:
        picture_format(chart)
    rows = rows_of(runs)
    text = json.dumps(rows) if as_json else table(rows, form).rstrip("\n")
    if chart is not None:
        save_figure(bar_chart(rows), chart)
    typer.echo(text)


@app.command(name="list", epilog=_examples("m3d list methods", "m3d list methods m3d", "m3d list datasets --json"))
def list_(
    what: Annotated[str, typer.Argument(help="methods, kernels, nets, inits, protocols or datasets.")],
    name: Annotated[str | None, typer.Argument(help="One of them, to see its options.")] = None,
    as_json: Json = False,
) -> None:
    """List what can be asked for by name, with options and defaults."""
    from m3d.listing import KINDS, describe, overview

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


@app.command(
    epilog=_examples(
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
            help="moments, lowres, methods, imagenet, cross-arch, compat, motivation, steps, ipm, kernel, images, all; "
            "or the paper's number: table1 to table5, fig1 to fig11."
        ),
    ],
    cell: Annotated[
        str | None, typer.Option(help="Only these cells: data/ipc/method, or a part of it; * stands for anything.")
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
    request = Request(name, cell, out, overrides, as_json, Where(on, gpus_per_cell, cpus_per_cell, retries))
    if dry_run + render + again > 1:
        raise M3DError("--dry-run, --render and --again: give one of them")
    if render and cell is not None:
        raise M3DError(f"--cell {cell}: --render shows all cells that have a record")
    if (render or dry_run) and time_limit is not None:
        raise M3DError(f"--time-limit {time_limit}: nothing is run that could be stopped")
    if dry_run:
        request.plan()
    elif render:
        request.render()
    else:
        request.run(data_root, device, checkpoint_seconds, time_limit, again)


@app.command(
    epilog=_examples(
        "m3d sweep cifar10 --ipc 1,10 --set lr=5,10,20 --set factor=1,2 --seeds 0,1,2 --repeats 3",
        "m3d sweep cifar10 --ipc 10 --method m3d,dm --set kernel=linear,polynomial:degree=2,offset=1 --dry-run",
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
        typer.Option("--set", metavar="NAME=VALUES", help="An option of the method and its values: lr=5,10,20."),
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
    data_root: DataRoot = None,
    size: Size = None,
    on_bad_image: OnBadImageElsewhere = None,
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
    from m3d.sweep import Call, Measured, Sweep, load_options, numbers, values

    load = load_options(val_fraction, final, size, on_bad_image)
    if dry_run and time_limit is not None:
        raise M3DError(f"--time-limit {time_limit}: nothing is run that could be stopped")
    where = Where(on, gpus_per_cell, cpus_per_cell, retries)
    options = [(name, values(text)) for name, text in assignments(set_ or []).items()]
    grid = Sweep(
        data,
        values(method),
        numbers("--ipc", ipc, 1),
        options,
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
    Call(grid, place, where, as_json).run(time_limit, dry_run)


@app.command(epilog=_examples("m3d demo", "m3d demo --out /tmp/demo"))
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
        typer.echo(f"{row['label']:<34}{row['accuracy']:>8.1f} ± {row['sd']:<4.1f}%{row['seconds']:>10.1f}")
    typer.echo(f"\nmean ± sd of {repeats} networks, last epoch. Picture: {summary['picture']}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: one-line errors, exit code 2, no traceback."""
    try:
        with stop_in_imports():
            code = app(arguments, prog_name="m3d", standalone_mode=False)
    except M3DError as error:
        _fail(str(error), 2)
    except _ClickException as error:
        _fail(error.format_message() + refused_value(error, arguments or sys.argv[1:]) + usage_hint(error), 2)
    except Interrupted as stop:
        _fail(str(stop), 130)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    typer.echo("m3d: " + " ".join(message.split()), err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
