"""Draws are a function of their key, have the right law, and shuffles are permutations."""

import pytest
import torch

from m3d import rng
from m3d.rng import Purpose


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([v]) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers published with the generator
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_answers(counter, key, expected):
    assert tuple(int(w) for w in rng.philox(words(*counter), key)) == expected


def draw(seed=0, purpose=Purpose.AUGMENT, steps=(0, 1, 2), lanes=(0, 1), n=1000):
    return rng.uniform(seed, purpose, torch.tensor(steps), torch.tensor(lanes), n)


def test_a_draw_depends_on_every_part_of_its_key_and_on_nothing_else():
    base = draw()
    assert torch.equal(base, draw())
    assert torch.equal(base[1:2, 1:], draw(steps=(1,), lanes=(1,)))
    assert torch.equal(base[..., :10], draw(n=10))
    for other in (
        draw(seed=1),
        draw(seed=2**32),
        draw(purpose=Purpose.REAL),
        draw(steps=(3, 4, 5)),
        draw(lanes=(2, 3)),
    ):
        assert (base == other).float().mean() < 0.01


def test_uniform_and_normal_have_their_moments():
    u = draw(n=100_000)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.002 and abs(u.var() - 1 / 12) < 0.001
    z = rng.normal(0, Purpose.INIT, torch.tensor([0]), torch.tensor([0]), 200_001)
    assert z.shape == (1, 1, 200_001) and torch.isfinite(z).all()
    assert abs(z.mean()) < 0.01 and abs(z.var() - 1) < 0.02 and abs((z**3).mean()) < 0.03


def test_permutation_is_one():
    order = rng.permutation(3, Purpose.ORDER, torch.arange(4), torch.arange(2), 37)
    assert torch.equal(order.sort(-1).values, torch.arange(37).expand(4, 2, 37))
    assert not torch.equal(order[0, 0], order[1, 0])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_a_deck_shows_every_card_once_a_pass(size):
    lanes, sizes = torch.arange(2), torch.tensor([size, size])
    position = torch.arange(3 * size).expand(1, 2, -1)
    cards = rng.shuffled(0, Purpose.REAL, position, lanes, sizes)[0]
    for lane in cards:
        for deck in lane.view(3, size):
            assert torch.equal(deck.sort().values, torch.arange(size))
    if size > 3:
        assert not torch.equal(cards[0], cards[1]) and not torch.equal(cards[0, :size], cards[0, size : 2 * size])


def test_a_shuffled_card_is_equally_likely_everywhere():
    """χ² of where card 0 lies over many decks: 9 degrees of freedom, 99.9 % quantile 27.9."""
    size, decks = 10, 5000
    position = torch.arange(size * decks).view(1, 1, -1)
    cards = rng.shuffled(0, Purpose.REAL, position, torch.tensor([0]), torch.tensor([size])).view(decks, size)
    place = (cards == 0).int().argmax(1)
    counts = torch.bincount(place, minlength=size).double()
    assert ((counts - decks / size) ** 2 / (decks / size)).sum() < 27.9


def test_neighbouring_cards_are_shuffled_apart():
    """How often cards 0 and 1 stay neighbours: 2/size of all decks for a fair shuffle."""
    size, decks = 20, 4000
    position = torch.arange(size * decks).view(1, 1, -1)
    cards = rng.shuffled(0, Purpose.REAL, position, torch.tensor([0]), torch.tensor([size])).view(decks, size)
    place = cards.argsort(1)
    for a, b in ((0, 1), (6, 7), (3, 11)):
        together = ((place[:, a] - place[:, b]).abs() == 1).float().mean()
        assert abs(float(together) - 2 / size) < 0.02
