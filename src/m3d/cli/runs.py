"""Commands that make and measure condensed sets: condense, evaluate, relabel."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m3d.arguments import (
    assignments,
    check_evaluate,
    check_ranking,
    check_reading,
    last_words,
    refuse_others,
    values,
)
from m3d.cli.options import (
    DataRoot,
    Device,
    Json,
    OnBadImage,
    OnBadImageElsewhere,
    Precision,
    Resident,
    Seed,
    Size,
    TestFraction,
    app,
    examples,
)
from m3d.errors import Interrupted, M3DError
from m3d.terminal import board, decode_bar, epoch_bar, progress_bar, ranking_lines, training_bar
from m3d.wording import counted, with_sd

if TYPE_CHECKING:
    from m3d.evaluation import Result
    from m3d.ranking import Ranking
    from m3d.watch import Progress


@app.command(
    epilog=examples(
        "m3d condense digits --ipc 1 --steps 200",
        "m3d condense cifar10 --ipc 10 --out runs/cifar10-10",
        "m3d condense ./photos --size 64 --ipc 5 --val-fraction 0.1 --eval-every 1000",
        "m3d condense ./photos --size 64 --ipc 5 --test-fraction 0.2",
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
    test_fraction: TestFraction = 0.0,
    val_fraction: Annotated[float, typer.Option(help="Part of the training data held out for choices.")] = 0.0,
    keep_every: Annotated[int, typer.Option(help="Steps after which the set as it is is kept too; 0: none.")] = 0,
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
        from m3d.run_folder import RunFolder

        had_finished = RunFolder(resume).finished
        _condense(
            lambda api, report: api.resume(resume, report=report), resume, as_json, tensorboard, had_finished, True
        )
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
    load_options |= {
        "test_fraction": test_fraction,
        "on_bad_image": on_bad_image,
        "resident": resident,
        "progress": decode_bar(quiet=as_json),
    }
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
            keep_every=keep_every,
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
    call: Callable[[Any, Callable[[Progress], None] | None], Any],
    folder: Path,
    as_json: bool,
    tensorboard: bool,
    had_finished: bool = False,
    had_begun: bool = False,
) -> None:
    begun_before = _stamp(folder)
    from m3d import api
    from m3d.registry import loaded_plugins
    from m3d.run_folder import RunFolder
    from m3d.shards import Ranks

    leads = Ranks.from_environment().leads  # of several processes one speaks
    plugins = "".join(f" --plugin {quote(str(file))}" for file in loaded_plugins())
    again = f"; continue with: m3d{plugins} condense --resume {quote(str(folder))}"

    def interrupted() -> str:
        return "interrupted" + (again if had_begun or _stamp(folder) != begun_before else "")

    try:
        with (
            last_words(interrupted) if leads else nullcontext(),
            progress_bar(quiet=as_json or not leads) as report,
            board(folder, tensorboard and leads, report) as watched,
        ):
            condensed = call(api, watched)
    except (Interrupted, KeyboardInterrupt) as stop:
        if leads:
            typer.echo(f"m3d: {f'{stop}{again}' if isinstance(stop, Interrupted) else interrupted()}", err=True)
        raise SystemExit(130) from None
    if not leads:
        return
    manifest = condensed.manifest
    if as_json:
        typer.echo(json.dumps({"run": str(folder), "set": condensed.fingerprint, **manifest}))
        return
    before = " (had finished before)" if had_finished else ""
    typer.echo(
        f"{manifest['method']}: {len(condensed.class_names)} classes × {counted(manifest['ipc'], 'images')}, "
        f"{counted(manifest['steps'], 'steps')} in {manifest.get('seconds', 0):.1f} s → {folder}{before}"
    )
    if manifest.get("validation"):
        step, accuracy = max(manifest["validation"], key=lambda judged: judged[1])
        best = quote(str(folder / RunFolder.BEST))
        typer.echo(f"best on the held-out part: {accuracy:.2f} % after {counted(step, 'steps')} → {best}")
    net = "" if manifest["net"] == "convnet3" else f" --net {quote(manifest['net'])}"
    typer.echo(f"next: m3d show {quote(str(folder))}    m3d evaluate {quote(str(folder))}{net}")
    if manifest["device"].startswith("cpu"):
        typer.echo("      on a CPU, for a first look: m3d evaluate … --protocol quick --repeats 2")


def _stamp(folder: Path) -> int | None:
    """When the run in this folder was begun; None where there is none."""
    try:
        return (folder / "run.json").stat().st_mtime_ns
    except OSError:
        return None


@app.command(
    epilog=examples(
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
    net: Annotated[str | None, typer.Option(help="Network to train; see 'm3d list nets'.")] = None,
    nets: Annotated[str | None, typer.Option(help="Several networks one after the other: convnet3,convnet4.")] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="See 'm3d list protocols'; or paper:epochs=300; default paper (whole for --full)."),
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
    test_fraction: TestFraction = 0.0,
    zca: Annotated[
        bool | None, typer.Option("--zca/--no-zca", help="ZCA-whitened images; default: as the set was made.")
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    deterministic: Annotated[bool, typer.Option(help="Bit-reproducible on CUDA too (the CPU always is).")] = False,
    as_json: Json = False,
) -> None:
    """Train fresh networks on a condensed set and test them on real images."""
    check_evaluate(run, full, data, out, size, on_bad_image, test_fraction)
    if net is not None and nets is not None:
        raise M3DError(f"--net {net} --nets {nets}: give one of them")
    parts = {"--selections": selections, "--full-epochs": full_epochs, "--full-run": full_run}
    check_ranking(ranking, full, parts)
    from m3d.condensed import CondensedSet
    from m3d.data import load_data
    from m3d.evaluation import evaluate as evaluate_set
    from m3d.evaluation import evaluate_whole, make_protocol
    from m3d.nets import make_net
    from m3d.origin import load_source
    from m3d.ranking import rank, recorded_whole
    from m3d.run_folder import RunFolder, home_of
    from m3d.runtime import Runtime

    rules = make_protocol(protocol or ("whole" if full else "paper"), epochs=epochs, batch=batch)
    runtime = Runtime.choose(device, precision, deterministic)
    condensed = None if run is None else CondensedSet.load(run)
    reading: dict[str, Any] = {"data_root": data_root, "size": size, "test_fraction": test_fraction}
    dataset = (
        load_data(str(full), zca=bool(zca), on_bad_image=on_bad_image or "error", **reading)
        if condensed is None
        else load_source(condensed, data, zca=zca, on_bad_image=on_bad_image, **reading)
    )
    names = values(nets) if nets else [net or "convnet3"]
    for name in names:
        make_net(name, dataset.shape, dataset.classes)  # a wrong name is said before the first is trained
    folder, kept = home_of(run) if run is not None else (None if out is None else RunFolder(out), {})
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
            raise SystemExit(130) from None
        records.append({**result.as_record(), **kept})
        if not as_json:
            _print_result(records[-1], str(result))
        if folder is not None:  # after it was printed: whatever happens to the file, the number is not lost
            folder.add_result(records[-1])
    if folder is None and run is not None:
        typer.echo(f"m3d: not written down: {str(run)!r} lies in no run folder that can be written to", err=True)
    if as_json:
        typer.echo(json.dumps(records if nets else records[0]))


def _print_result(record: dict[str, Any], headline: str) -> None:
    rules = f"{record['protocol']['name']}, {counted(record['protocol']['epochs'], 'epochs')}"
    data = f"{record['data']['name']} ({record['data']['split']})"
    labels = "" if record["labels"] == "hard" else ", soft labels"
    typer.echo(f"{record['method']} on {data}, {record['net']}, protocol {rules}{labels}: {headline}")
    best = with_sd(record["best_of_checks"], record["best_sd"], record["n"])
    checks = f"best of {'epochs' if len(record['checks']) > 1 else 'epoch'} {', '.join(record['checks'])}"
    typer.echo(f"{checks}: {best} %; {record['seconds']:.1f} s on {record['device']}")
    if "ranking" in record:
        typer.echo("\n".join(ranking_lines(record["ranking"])))


@app.command(
    epilog=examples(
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
    from m3d.run_folder import kept_as

    home = run if run.is_dir() else run.parent
    home = home if home.name not in ("", "..") else home.resolve()
    folder = out or home.with_name("-".join(filter(None, (home.name, kept_as(run), "soft"))))
    options: dict[str, Any] = {
        "teacher": teacher,
        "teachers": teachers,
        "epochs": epochs,
        "temperature": temperature,
        "seed": seed,
    }
    place: dict[str, Any] = {"device": device, "precision": precision, "data_root": data_root}
    place |= {"deterministic": deterministic, "size": size, "on_bad_image": on_bad_image}
    with training_bar(as_json):
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
    told_net = "" if labelled.manifest["net"] == "convnet3" else f" --net {labelled.manifest['net']}"
    typer.echo(f"next: m3d evaluate {quote(str(folder))}{told_net}")
