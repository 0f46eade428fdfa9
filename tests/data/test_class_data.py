"""ClassData and Dataset: indexing by class, shuffled decks, the held-out part, fingerprints, and refusals."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from m3d.data import ClassData, Dataset
from m3d.data.classes import channel_statistics
from m3d.errors import M3DError

COUNTS = (5, 3, 8)


def numbered(counts: tuple[int, ...] = COUNTS) -> ClassData:
    """Images [N, 1, 2, 2] whose every pixel is the image's own number."""
    n = sum(counts)
    images = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 1, 2, 2).contiguous()
    return ClassData(images, torch.tensor(counts))


def numbers(data: ClassData) -> list[int]:
    return data.images[:, 0, 0, 0].tolist()


def test_from_labels_sorts_by_class_and_keeps_the_order_within_one() -> None:
    images = np.arange(6, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 3, 1), np.uint8)
    data = ClassData.from_labels(images, np.array([1, 0, 1, 0, 2, 0]), ["a", "b", "c"], "train")
    assert numbers(data) == [1, 3, 5, 0, 2, 4]
    assert data.count.tolist() == [3, 2, 1]
    assert data.start.tolist() == [0, 3, 5]
    assert data.labels().tolist() == [0, 0, 0, 1, 1, 2]
    assert data.shape == (1, 2, 3)


def test_from_labels_keeps_the_order_within_a_large_class() -> None:
    images = np.arange(250, dtype=np.uint8)[:, None, None, None]
    data = ClassData.from_labels(images, np.arange(250) % 2, ["even", "odd"], "train")
    assert numbers(data) == [*range(0, 250, 2), *range(1, 250, 2)]


def test_from_labels_moves_channels_first() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), np.uint8)
    data = ClassData.from_labels(images, np.array([0, 1]), ["a", "b"], "train")
    assert torch.equal(data.images, torch.from_numpy(images).permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1], "train: 3 images but 2 labels"),
        ([0, 1, 3], "0 to 3; allowed: 0 to 2"),
        ([0, -1, 2], "from -1 to 2"),
        ([0, 0, 2], "class 'b' has no image"),
    ],
)
def test_from_labels_refuses(labels: list[int], message: str) -> None:
    with pytest.raises(M3DError, match=message):
        ClassData.from_labels(np.zeros((3, 2, 2, 1), np.uint8), np.array(labels), ["a", "b", "c"], "train")


def test_wrong_tensors_are_refused() -> None:
    with pytest.raises(M3DError, match="uint8"):
        ClassData(torch.zeros(2, 1, 2, 2), torch.tensor([1, 1]))
    with pytest.raises(M3DError, match="sum to 3"):
        ClassData(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([1, 2]))


def test_take_reads_within_each_class_as_fractions() -> None:
    taken = numbered().take(torch.tensor([[4, 0], [2, 2], [0, 7]]))
    assert taken.shape == (3, 2, 1, 2, 2)
    assert taken.dtype == torch.float32
    assert torch.equal(taken[..., 0, 0, 0], torch.tensor([[4.0, 0.0], [7.0, 7.0], [8.0, 15.0]]) / 255)


def test_deck_visits_each_image_once_a_pass() -> None:
    data, n = numbered(), 4
    deck = data.deck(3, torch.arange(12), n)  # 48 positions: whole passes of 8, and 9 passes and a bit of 5
    assert deck.shape == (12, 3, n)
    for c, count in enumerate(COUNTS):
        cards = deck[:, c].flatten()
        for start in range(0, len(cards) - count + 1, count):
            assert sorted(cards[start : start + count].tolist()) == list(range(count))


def test_deck_follows_the_seed_and_any_step_can_be_drawn_alone() -> None:
    data = numbered((50, 40))
    whole = data.deck(3, torch.arange(20), 4)
    assert torch.equal(data.deck(3, torch.tensor([7]), 4)[0], whole[7])
    assert not torch.equal(data.deck(4, torch.arange(20), 4), whole)
    assert whole[:10, 0].flatten().tolist() != list(range(40))


def test_split_is_stratified_disjoint_and_complete() -> None:
    data = numbered((20, 10, 40))
    rest, held = data.split(0.25, seed=1)
    assert held.count.tolist() == [5, 2, 10]
    assert rest.count.tolist() == [15, 8, 30]
    assert sorted(numbers(rest) + numbers(held)) == list(range(70))
    assert torch.equal(torch.bucketize(held.images[:, 0, 0, 0].long(), torch.tensor([19, 29])), held.labels())


def test_split_follows_the_seed() -> None:
    data = numbered((20, 10, 40))
    assert numbers(data.split(0.25, seed=1)[1]) == numbers(data.split(0.25, seed=1)[1])
    assert numbers(data.split(0.25, seed=1)[1]) != numbers(data.split(0.25, seed=2)[1])


def test_split_leaves_an_image_on_each_side_or_refuses() -> None:
    rest, held = numbered((2, 40)).split(0.1, seed=0)
    assert (rest.count.tolist(), held.count.tolist()) == ([1, 36], [1, 4])
    with pytest.raises(M3DError, match="smallest class has 1 image,"):
        numbered((1, 40)).split(0.1, seed=0)


def test_a_known_fingerprint_goes_along_to_another_device(monkeypatch) -> None:
    data = numbered()
    known = data.fingerprint
    monkeypatch.setattr("m3d.data.classes.hashlib.sha256", None)  # it is not worked out again
    assert data.to("cpu").fingerprint == known
    with pytest.raises(TypeError):
        _ = numbered().to("cpu").fingerprint


def test_fingerprint_depends_on_pixels_and_classes_only() -> None:
    assert numbered().fingerprint == numbered().fingerprint
    assert numbered((5, 4, 7)).fingerprint != numbered().fingerprint
    changed = numbered().images.clone()
    changed[9, 0, 1, 1] += 1
    assert ClassData(changed, torch.tensor(COUNTS)).fingerprint != numbered().fingerprint


def test_fingerprint_is_pinned() -> None:
    """Stored results name their data by it, so that a change would make them strangers."""
    expected = "80cd0f54b5587fd93057e6476f7a8bfaa621e8cff8d8f6840d056ac24202ed40"
    assert numbered((1, 1)).fingerprint == expected
    assert hashlib.sha256(b"((2, 1, 2, 2), [1, 1])" + bytes([0, 0, 0, 0, 1, 1, 1, 1])).hexdigest() == expected


def test_hold_out_moves_a_part_to_val() -> None:
    data = numbered((20, 10))
    whole = Dataset("numbers", data, data, ("a", "b"), (0.0,), (1.0,))
    parted = whole.hold_out(0.5, seed=0)
    assert parted.val is not None
    assert (len(parted.train), len(parted.val), len(parted.test)) == (15, 15, 30)
    assert whole.hold_out(0, seed=0) is whole


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_hold_out_refuses(fraction: float) -> None:
    data = numbered()
    with pytest.raises(M3DError, match="val_fraction"):
        Dataset("numbers", data, data, ("a", "b", "c"), (0.0,), (1.0,)).hold_out(fraction, seed=0)


def test_channel_statistics_are_those_of_all_pixels() -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5000, 3, 2, 2), np.uint8))  # two chunks
    pixels = images.double().div(255).transpose(0, 1).flatten(1)
    mean, std = channel_statistics(images)
    assert mean == pytest.approx(pixels.mean(1).tolist(), abs=1e-12)
    assert std == pytest.approx(pixels.std(1, correction=0).tolist(), abs=1e-9)
