"""Named things a user can ask for by string: methods, kernels, networks, protocols, datasets.

A registry refuses duplicates, suggests the nearest name for a wrong one, and checks options against the builder's own
signature: keyword-only parameters with typed defaults *are* the schema of the configuration and of the command line. A
type may bring a check of its own: ``Annotated[str, check]``. Options that may not stand beside each other are refused
by the entry's ``together``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from m3d.errors import M3DError, unknown

_plugins: list[Path] = []  # in the order in which they were loaded
T = TypeVar("T")
B = TypeVar("B", bound=Callable[..., Any])
Together = Callable[[Mapping[str, Any]], object]  # refuses options that do not go together


def canonical(name: str) -> str:
    """Lower case, with underscores and hyphens the same."""
    return name.strip().lower().replace("_", "-")


@dataclass(frozen=True)
class Option:
    """One keyword-only parameter of a builder."""

    name: str
    annotation: Any
    default: Any

    @property
    def kind(self) -> str:
        """The type as a user would write it: ``int``, ``float or auto``, ``one of a, b``."""
        return _describe(self.annotation)


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered builder and what is said of it in listings."""

    name: str
    build: Callable[..., T]
    about: Mapping[str, str]
    of: Callable[..., T] | None = None  # what a variant passes the options on to that it does not name itself
    without: tuple[str, ...] = ()  # but these, which it decides
    together: Together | None = None

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.build) or "").partition("\n")[0].replace("``", "")  # a terminal shows them

    def options(self) -> dict[str, Option]:
        passed_on = {} if self.of is None else _keyword_only(self.of)
        named = {**passed_on, **_keyword_only(self.build)}
        return {name: option for name, option in named.items() if name not in self.without}

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every option with its value: the given ones checked and converted, the rest at their defaults."""
        known = self.options()
        for name in given:
            if name not in known:
                raise unknown(f"option of {self.name}", name, known)
        values = {
            name: convert(given[name], option, self.name) if name in given else option.default
            for name, option in known.items()
        }
        if self.together is not None:
            self.together(values)
        return values


class Registry(Generic[T]):
    """Names to builders of one kind of thing."""

    def __init__(self, kind: str, package: str | None = None):
        self.kind = kind
        self._package = package  # modules below this package register themselves when imported
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, *, together: Together | None = None, **about: str) -> Callable[[B], B]:
        return self._adder(name, lambda key, build: Entry(key, build, about, together=together))

    def variant(
        self,
        name: str,
        of: Callable[..., T],
        *,
        without: Sequence[str] = (),
        together: Together | None = None,
        **about: str,
    ) -> Callable[[B], B]:
        """Register a builder that names only the options it has other defaults for, and passes ``**options`` on to
        ``of``, whose options it takes too, all but ``without``."""
        return self._adder(name, lambda key, build: Entry(key, build, about, of, tuple(without), together))

    def _adder(self, name: str, entry: Callable[[str, Callable[..., T]], Entry[T]]) -> Callable[[B], B]:
        def add(build: B) -> B:
            key = canonical(name)
            if key in self._entries:
                raise M3DError(f"{self.kind} {key!r} is registered twice; choose another name")
            self._entries[key] = entry(key, build)
            return build

        return add

    def get(self, name: str) -> Entry[T]:
        self._discover()
        key = canonical(name)
        if key not in self._entries:
            raise self._unknown(name)
        return self._entries[key]

    def _unknown(self, name: str) -> M3DError:
        """The error for a name that is not registered: as it should be written, or where it may come from."""
        head, *rest = re.split(r"[,\s]", name, maxsplit=1)
        if rest and "=" in rest[0] and canonical(head) in self._entries:
            return M3DError(f"unknown {self.kind} {name!r}: options follow a colon, as in {head}:{rest[0]}")
        error = unknown(self.kind, name, self._entries)
        if _plugins or "Did you mean" in str(error):
            return error
        return M3DError(f"{error} One of your own is known after m3d --plugin FILE.py, or once it is imported.")

    def names(self) -> list[str]:
        self._discover()
        return sorted(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter([self._entries[name] for name in self.names()])

    def _discover(self) -> None:
        package, self._package = self._package, None
        if package is None:
            return
        module = importlib.import_module(package)
        for info in pkgutil.iter_modules(module.__path__):
            importlib.import_module(f"{package}.{info.name}")


def _keyword_only(build: Callable[..., Any]) -> dict[str, Option]:
    hints = typing.get_type_hints(build, include_extras=True)
    return {
        p.name: Option(p.name, hints.get(p.name, Any), p.default)
        for p in inspect.signature(build).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,key=value`` into the name and its options."""
    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise M3DError(f"{text!r}: expected name:key=value,key=value after the colon, got {part!r}")
        options[key.strip()] = value.strip()
    return name, options


def convert(value: Any, option: Option, owner: str) -> Any:
    """``value`` as the option's type; a string is parsed, anything else only checked."""
    for candidate in _alternatives(option.annotation):
        ok, converted = _as(value, candidate)
        if ok:
            return converted
    raise M3DError(f"{owner}: option {option.name}={value!r} is not valid; allowed: {option.kind}")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _as(value: Any, kind: Any) -> tuple[bool, Any]:
    if typing.get_origin(kind) is typing.Annotated:
        plain, check = typing.get_args(kind)
        fits, converted = _as(value, plain)
        if fits:
            check(converted)  # says itself what is wrong
        return fits, converted
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind), value
    if kind is type(None):
        return value is None or value == "auto", None
    if kind is bool:
        named = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        return (
            (True, value) if isinstance(value, bool) else (str(value).lower() in named, named.get(str(value).lower()))
        )
    if kind in (int, float):
        if isinstance(value, bool):
            return False, None
        try:
            converted = kind(value)
        except (TypeError, ValueError):
            return False, None
        exact = isinstance(value, str) or converted == value
        return exact and converted == converted, converted  # NaN is never a valid option
    return isinstance(value, kind) if isinstance(kind, type) else kind is Any, value


def _describe(annotation: Any) -> str:
    names = []
    for kind in _alternatives(annotation):
        if typing.get_origin(kind) is typing.Literal:
            names.append("one of " + ", ".join(map(str, typing.get_args(kind))))
        elif typing.get_origin(kind) is typing.Annotated:
            names.append(_describe(typing.get_args(kind)[0]))
        else:
            names.append("auto" if kind is type(None) else getattr(kind, "__name__", str(kind)))
    return " or ".join(names)


def load_plugin(path: str | Path) -> None:
    """Run a user's own Python file, which registers methods, kernels or networks when imported."""
    file = Path(path)
    if not file.is_file():
        raise M3DError(f"plugin {str(file)!r} is not a file")
    spec = importlib.util.spec_from_file_location(f"m3d_plugin_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise M3DError(f"plugin {str(file)!r} is not a Python file; allowed: a .py file")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except M3DError as error:
        raise M3DError(f"plugin {str(file)!r}: {error}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file.resolve()]
        where = f" in line {lines[-1]}" if lines else ""
        raise M3DError(f"plugin {str(file)!r} cannot be loaded{where}: {type(error).__name__}: {error}") from error
    _plugins.append(file)


def loaded_plugins() -> tuple[Path, ...]:
    """The plugins of this process, which another process that does its work must load too."""
    return tuple(_plugins)
