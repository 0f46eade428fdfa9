"""What was typed on the command line: taken apart, and refused where it would be ignored."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from m3d.errors import M3DError

_ANOTHER = re.compile(r"[,\s]\s*[\w-]+\s*=")  # what looks like another option after a value
_last_words: list[Callable[[], str]] = [lambda: "interrupted"]


def check_ranking(ranking: bool, full: str | None, given: dict[str, int | Path | None]) -> None:
    """Refuse what would be ignored."""
    if ranking and full is not None:
        raise M3DError(f"--ranking scores a condensed set; --full {full} has none")
    for option, value in given.items():
        if value is not None and not ranking:
            raise M3DError(f"{option} {value}: it is a part of --ranking")
    if given["--full-epochs"] is not None and given["--full-run"] is not None:
        raise M3DError("--full-epochs, --full-run: the whole data are trained on, or were; give one of them")


def check_evaluate(
    run: Path | None,
    full: str | None,
    data: str | None,
    out: Path | None,
    size: int | None,
    on_bad_image: str | None,
    test_fraction: float,
) -> None:
    """Refuse what would be ignored."""
    if (run is None) == (full is None):
        raise M3DError("give a run folder, or --full DATASET; one of them")
    for option, value, allowed, rule in (
        ("--data", data, full is None, "it tests a condensed set on other data, and --full has none"),
        ("--out", out, full is not None, "a run's results go to its own folder"),
    ):
        if value is not None and not allowed:
            raise M3DError(f"{option} {value}: {rule}")
    check_reading(full or data, size, on_bad_image, test_fraction)


def check_reading(data: str | None, size: int | None, on_bad_image: str | None, test_fraction: float = 0.0) -> None:
    """Refuse to read a run's own data in another way than it was made with."""
    if data is None and size is not None:
        raise M3DError(f"--size {size}: a run's data keep the size they were made with")
    if data is None and on_bad_image is not None:
        raise M3DError(f"--on-bad-image {on_bad_image}: a run's data are read as they were when it was made")
    if data is None and test_fraction:
        raise M3DError(f"--test-fraction {test_fraction}: a run's data are divided as they were when it was made")


def one_process_unless(shared: bool) -> None:
    """Only some commands share their work among processes; the others would do all of it in each, over each other."""
    world = os.environ.get("WORLD_SIZE", "1")
    if not shared and world != "1":
        raise M3DError(f"torchrun started {world} processes (WORLD_SIZE), but only 'm3d condense' shares its work")


def assignments(texts: list[str], option: str = "--set") -> dict[str, str]:
    """The ``name=value``s that were typed after ``option``."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise M3DError(f"{option} {text!r}: expected name=value")
        key = name.strip().replace("-", "_")
        if key in values:
            raise M3DError(f"{option} {text}: {key} is given twice, and was {values[key]} before")
        if _ANOTHER.search(value) and ":" not in value:
            raise M3DError(f"{option} {text!r}: one name=value each; give {option} again for every option")
        values[key] = value.strip()
    return values


def values(text: str) -> list[str]:
    """The comma-separated parts of ``text``; the commas within one ``name:key=value,key=value`` do not divide it."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and "=" in part and ":" not in part and ":" in parts[-1]:
            parts[-1] += f",{part}"
        else:
            parts.append(part.strip())
    if not all(parts):
        raise M3DError(f"{text!r} holds an empty value; expected values with commas between them")
    return parts


def numbers(option: str, text: str, least: int) -> list[int]:
    """``1,10`` as whole numbers."""
    try:
        found = [int(part) for part in values(text)]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise M3DError(f"{option} {text} is not valid; allowed: whole numbers from {least}, with commas between them")
    return found


def refuse_others(context: typer.Context, option: str, beside: set[str]) -> None:
    """``option`` stands alone: any other that was typed, except those ``beside`` it, is a mistake."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in beside and source is not None and source.name == "COMMANDLINE":
            shown = name.rstrip("_").replace("_", "-")
            raise M3DError(f"{option} continues a run with its own settings; {shown} cannot be given beside it")


@contextmanager
def stop_in_imports() -> Iterator[None]:
    """Ctrl-C while a library is being imported ends the process at once.

    PyTorch's import takes seconds, and an exception in the midst of it is swallowed, wrapped or fatal.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # somebody else has a say in it
        return
    signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def last_words(say: Callable[[], str]) -> Iterator[None]:
    """What is said, within, when Ctrl-C ends the process at once."""
    _last_words.append(say)
    try:
        yield
    finally:
        _last_words.pop()


def _interrupted(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, f"m3d: {_last_words[-1]()}\n".encode())
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def refused_value(error: Any, arguments: list[str]) -> str:
    """The value that was refused, where the message itself does not name it."""
    options = getattr(getattr(error, "param", None), "opts", [])
    for option, value in pairwise(arguments):
        if option in options and value not in error.format_message():
            return f", got {value!r}"
    return ""


def usage_hint(error: Any) -> str:
    """Where to read on; of an option of a method, or one that is not like any of the command's, how it is given."""
    context = getattr(error, "ctx", None)
    if context is None:
        return ""
    hint = f" (see '{context.command_path} --help')"
    unknown, alike = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if not isinstance(unknown, str):
        return hint
    root = context.find_root()
    if context is not root and any(unknown in param.opts for param in root.command.params):
        return f"{hint}; it stands before the command: m3d {unknown} … {context.info_name}"
    commands = getattr(context.command, "commands", {})
    if any(unknown in param.opts for command in commands.values() for param in command.params):
        return f"{hint}; it stands after the command it is an option of"
    if not any("--set" in param.opts for param in context.command.params):
        return hint
    name = unknown.lstrip("-").replace("-", "_")
    if alike:
        from m3d.listing import MEANINGS  # late: it imports PyTorch

        if name not in MEANINGS:
            return hint
    return f"{hint}; if it is an option of the method: --set {name}=VALUE"
