"""Strange values, and what may become of them: they are taken, or refused in one line."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from m3d.errors import M3DError

TOTAL = int(os.environ.get("M3D_FUZZ_CASES", "1000"))


def cases(share: float) -> settings:
    """So large a part of all cases. Nothing may take long: a hang is a failure."""
    return settings(
        max_examples=max(10, round(TOTAL * share)),
        deadline=timedelta(seconds=20),
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def tame(call: Callable[[], Any]) -> Any:
    """The value of ``call``, or None where it was refused as a user's mistake is; anything else is a failure."""
    try:
        return call()
    except M3DError as error:
        assert str(error).strip()
        return None


numbers = st.one_of(
    st.integers(), st.integers(-3, 70), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30]), st.floats()
)
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "..", "/", "../../x", "\0", "a" * 5000, "digits", "cuda:9", "-1", "nan", "0" * 5000]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def changed(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with one to three of its entries, at any depth, replaced, removed or added to."""
    result = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        place = result
        while True:
            inner = [k for k, v in place.items() if isinstance(v, dict) and v]
            if not inner or not draw(st.booleans()):
                break
            place = place[draw(st.sampled_from(sorted(inner)))]
        key = draw(st.one_of(st.sampled_from(sorted(place) or ["x"]), texts))
        if draw(st.integers(0, 4)) == 0:
            place.pop(key, None)
        else:
            place[key] = draw(values)
    return result


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file with bytes changed, cut out, put in or cut off, most often near its beginning, where headers are."""
    result = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.one_of(st.integers(0, min(600, len(result))), st.integers(0, len(result))))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            del result[at:]
        elif kind == 1:
            del result[at : at + draw(st.integers(1, 64))]
        elif kind == 2:
            result[at:at] = draw(st.binary(min_size=1, max_size=32))
        else:
            some = draw(st.binary(min_size=1, max_size=8))
            result[at : at + len(some)] = some
    return bytes(result)


def as_json(value: Any) -> str:
    """JSON with whatever text is in it, lone surrogates too."""
    return json.dumps(value)
