"""Numbers as a person says them."""

import pytest

from m3d.errors import Interrupted
from m3d.wording import counted, with_sd


@pytest.mark.parametrize(
    ("number", "things", "said"),
    [
        (0, "steps", "0 steps"),
        (1, "steps", "1 step"),
        (2, "steps", "2 steps"),
        (1, "epochs of training the networks it needs", "1 epoch of training the networks it needs"),
    ],
)
def test_one_is_not_many(number, things, said):
    assert counted(number, things) == said
    assert str(Interrupted(number, things)) == f"stopped after {said}"


def test_a_single_network_has_no_deviation():
    assert with_sd(12.345, 0.5, 2) == "12.35 ± 0.50" and with_sd(12.345, 0.0, 1) == "12.35"
