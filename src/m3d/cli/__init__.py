"""The command line. Nothing heavy is imported until a command runs, so that help answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from m3d.arguments import one_process_unless, refused_value, stop_in_imports, usage_hint

from m3d.cli import runs, sets, grids  # isort: skip (the order in which help lists their commands)
from m3d.cli.options import app
from m3d.errors import Interrupted, M3DError
from m3d.version import __version__
from m3d.wording import typed

# Click's base error. Some releases of Typer depend on Click and some carry their own copy; this finds either.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: one-line errors, exit code 2, no traceback."""
    _wait_patiently()
    try:
        with stop_in_imports(), typed():
            code = app(arguments, prog_name="m3d", standalone_mode=False)
    except M3DError as error:
        _fail(str(error), 2)
    except _ClickException as error:
        _fail(error.format_message() + refused_value(error, arguments or sys.argv[1:]) + usage_hint(error), 2)
    except Interrupted as stop:
        _fail(str(stop), 130)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    if code == 130:  # some releases of Typer turn Ctrl-C into this, without a word
        _fail("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _wait_patiently() -> None:
    """Let threads that wait for each other spin for microseconds instead of a millisecond, before PyTorch starts them.

    Where every core is taken, the one waited for cannot run while the other spins: on two such cores the demo takes
    less than half as long, and no longer on idle ones (LAB.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def _fail(message: str, code: int) -> NoReturn:
    typer.echo("m3d: " + " ".join(message.split()), err=True)
    sys.exit(code)


__all__ = ["app", "grids", "main", "runs", "sets"]
