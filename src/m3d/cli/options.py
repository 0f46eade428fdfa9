"""The application, and the options that several of its commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="m3d",
    help="Condense a labelled image dataset into a tiny synthetic one, evaluate it, and use it.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def examples(*lines: str) -> str:
    """What a command's help ends with."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


DataRoot = Annotated[
    Path | None, typer.Option(help="Where datasets lie or are put; default $M3D_DATA, else ~/.cache/m3d.")
]
Size = Annotated[int | None, typer.Option(help="Side in pixels that images of a folder are resized and cropped to.")]
TestFraction = Annotated[
    float, typer.Option(help="Part of each class kept back to test on, of data that have no test split.")
]
OnBadImage = Annotated[str, typer.Option(help="error, or skip: images that cannot be read are left out and listed.")]
OnBadImageElsewhere = Annotated[
    str | None,
    typer.Option(help="error, or skip: images that cannot be read are left out; default: as for the run, else error."),
]
Resident = Annotated[
    str, typer.Option(help="Hold all real images in memory: yes, no (decoded once to the disk), or auto: if they fit.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Precision = Annotated[str, typer.Option(help="auto (CUDA: bf16, mtt tf32; CPU: fp32), fp16, bf16, tf32 or fp32.")]
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
