"""Names and options: suggestions, duplicates, conversion by annotation."""

from typing import Annotated, Literal

import pytest

from m3d.errors import M3DError
from m3d.registry import Registry, canonical, parse_spec


@pytest.fixture
def things() -> Registry[dict]:
    registry: Registry[dict] = Registry("thing")

    @registry.register("big-thing", paper="P")
    def build(
        base: int = 0, *, count: int = 3, rate: float | None = None, kind: Literal["a", "b"] = "a", on: bool = False
    ) -> dict:
        """A big thing.

        More text.
        """
        return {"count": count, "rate": rate, "kind": kind, "on": on}

    return registry


def test_names_are_canonical_and_unique(things):
    assert things.get("Big_Thing").name == "big-thing" == canonical(" BIG_THING")
    assert things.get("big-thing").summary == "A big thing." and things.get("big-thing").about == {"paper": "P"}
    with pytest.raises(M3DError, match=r"unknown thing 'big-thin'\. Did you mean 'big-thing'\?"):
        things.get("big-thin")
    with pytest.raises(M3DError, match="registered twice"):
        things.register("BIG_THING")(dict)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"count": 3, "rate": None, "kind": "a", "on": False}),
        ({"count": "7", "rate": "0.5", "kind": "b", "on": "yes"}, {"count": 7, "rate": 0.5, "kind": "b", "on": True}),
        ({"count": 7, "rate": 2, "on": True}, {"count": 7, "rate": 2.0, "kind": "a", "on": True}),
        ({"rate": "auto"}, {"count": 3, "rate": None, "kind": "a", "on": False}),
        ({"rate": "1e-3"}, {"count": 3, "rate": 0.001, "kind": "a", "on": False}),
    ],
)
def test_options_are_converted_by_their_annotation(things, given, expected):
    entry = things.get("big-thing")
    assert entry.build(**entry.resolve(given)) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cout": 1}, "Did you mean 'count'"),
        ({"count": "many"}, "count='many' is not valid; allowed: int"),
        ({"count": 1.5}, r"count=1\.5"),
        ({"count": True}, "count=True"),
        ({"rate": "nan"}, "rate='nan' is not valid; allowed: float or auto"),
        ({"kind": "c"}, "allowed: one of a, b"),
        ({"on": "maybe"}, "on='maybe'"),
        ({"base": 1}, "unknown option"),
    ],
)
def test_wrong_options_are_named(things, given, message):
    with pytest.raises(M3DError, match=message):
        things.get("big-thing").resolve(given)


def test_specs():
    assert parse_spec("convnet3") == ("convnet3", {})
    assert parse_spec("net:width=64, depth=2") == ("net", {"width": "64", "depth": "2"})
    with pytest.raises(M3DError, match="key=value"):
        parse_spec("net:width")


def test_a_variant_takes_the_options_of_what_it_varies(things):
    """In their order, its own defaults in their places; what it decides itself is no option."""

    @things.variant("small-thing", of=things.get("big-thing").build, without=("kind",), paper="Q")
    def build(base: int = 0, *, count: int = 1, extra: str = "", **options: object) -> dict:
        """A small thing."""
        return {**things.get("big-thing").build(base, count=count, kind="b", **options), "extra": extra}

    entry = things.get("small-thing")
    assert list(entry.options()) == ["count", "rate", "on", "extra"] and entry.options()["count"].default == 1
    assert entry.summary == "A small thing." and entry.about == {"paper": "Q"}
    whole = {"count": 1, "rate": 0.5, "kind": "b", "on": True, "extra": ""}
    assert entry.build(**entry.resolve({"rate": "0.5", "on": "yes"})) == whole
    with pytest.raises(M3DError, match="unknown option of small-thing 'kind'"):
        entry.resolve({"kind": "a"})
    assert list(things.get("big-thing").options()) == ["count", "rate", "kind", "on"]


def test_a_type_may_bring_a_check_of_its_own():
    """It is asked once the value is of the plain type, which is what a listing shows."""

    def even(value: int) -> None:
        if value % 2:
            raise M3DError(f"{value} is odd")

    registry: Registry[int] = Registry("number")

    @registry.register("pair")
    def pair(*, first: Annotated[int, even] = 2, second: Annotated[int, even] | None = None) -> int:
        """Two even numbers."""
        return first + (second or 0)

    entry = registry.get("pair")
    assert [option.kind for option in entry.options().values()] == ["int", "int or auto"]
    assert entry.resolve({"first": "4", "second": "auto"}) == {"first": 4, "second": None}
    for given, message in (({"first": 3}, "3 is odd"), ({"second": "5"}, "5 is odd"), ({"first": "x"}, "allowed: int")):
        with pytest.raises(M3DError, match=message):
            entry.resolve(given)
