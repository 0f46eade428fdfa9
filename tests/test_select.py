"""Selections against exhaustive definitions, and the cache of trained networks."""

import pytest
import torch

from m3d.errors import M3DError
from m3d.methods import Task, make_method
from m3d.runtime import Runtime
from m3d.select import INITS, ByFeatures, herding, k_center, k_means, make_init
from m3d.tiles import Tiles
from m3d.trained import cache_folder, default_recipe, representations, trained_networks

CPU = Runtime.choose("cpu")
NET = "convnet2:width=8"


def points(n=15, d=3, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_herding_takes_the_point_that_brings_the_mean_nearest():
    x = points()
    chosen = herding(x, 6).tolist()
    assert len(set(chosen)) == 6
    picked: list[int] = []
    for k, index in enumerate(chosen):  # from the definition: the next point minimises ‖mean of chosen − mean of all‖
        others = [i for i in range(15) if i not in picked]
        gaps = [float((x[[*picked, i]].mean(0) - x.mean(0)).norm()) for i in others]
        assert index == others[min(range(len(others)), key=gaps.__getitem__)], k
        picked.append(index)


def test_herding_follows_the_mean_better_than_chance():
    x = points(200, 8)
    gap = (x[herding(x, 10)].mean(0) - x.mean(0)).norm()
    chance = [
        (x[torch.randperm(200, generator=torch.Generator().manual_seed(s))[:10]].mean(0) - x.mean(0)).norm()
        for s in range(20)
    ]
    assert gap < 0.5 * min(chance)


def test_k_center_takes_the_farthest():
    x = points()
    chosen = k_center(x, 5).tolist()
    assert chosen[0] == int((x - x.mean(0)).norm(dim=1).argmin())
    for k in range(1, 5):
        nearest = torch.cdist(x, x[chosen[:k]]).min(1).values
        assert chosen[k] == int(nearest.argmax())
    same = torch.zeros(4, 2)
    assert sorted(k_center(same, 4).tolist()) == [0, 1, 2, 3] == sorted(herding(same, 4).tolist())


def test_k_means_takes_one_point_of_each_cluster():
    """Four clouds of unequal size: the point nearest to each cloud's mean."""
    centres = torch.tensor([[0.0, 0.0], [20.0, 0.0], [0.0, 20.0], [20.0, 20.0]], dtype=torch.float64)
    owner = torch.tensor([0] * 30 + [1] * 10 + [2] * 6 + [3] * 4)
    x = centres[owner] + points(50, 2)
    chosen = k_means(x, 4)
    expected = set()
    for c in range(4):
        mine = (owner == c).nonzero().flatten()
        expected.add(int(mine[(x[mine] - x[mine].mean(0)).square().sum(1).argmin()]))
    assert set(chosen.tolist()) == expected
    assert sorted(k_means(torch.zeros(4, 2), 4).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "spec",
    [
        "real",
        "noise",
        "herding:features=pixels",
        "k-center:features=pixels",
        "k-means:features=pixels",
        f"herding:network={NET.split(':')[0]},epochs=1",
    ],
)
def test_every_initialisation_gives_images_of_every_class(tiny, spec):
    images = make_init(spec)(tiny, 3, 0, CPU)
    assert images.shape == (3, 3, 3, 8, 8)
    if spec != "noise":
        assert images.min() >= 0 and images.max() <= 1
        for c in range(3):
            own = tiny.train.images[int(tiny.train.start[c]) :][:12].float() / 255
            index = [int((own == picture).flatten(1).all(1).int().argmax()) for picture in images[c]]
            assert len(set(index)) == 3 and all(torch.equal(own[i], p) for i, p in zip(index, images[c], strict=True))


def test_the_sweep_is_complete():
    assert INITS.names() == ["herding", "k-center", "k-means", "noise", "random", "real"]


def test_wrong_requests_are_named(tiny):
    with pytest.raises(M3DError, match="Did you mean 'herding'"):
        make_init("hearding")
    with pytest.raises(M3DError, match="one of network, pixels"):
        make_init("herding:features=colour")
    with pytest.raises(M3DError, match="but 13 different ones"):
        make_init("herding:features=pixels").require(tiny, 13)


def test_trained_networks_are_kept(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("M3D_CACHE", str(tmp_path))
    first = trained_networks(tiny, NET, default_recipe(3), 2, 0, CPU)
    assert len(list(cache_folder().iterdir())) == 1 and not torch.equal(first.initial, first.final)

    def never(*arguments):
        raise AssertionError("trained again")

    with monkeypatch.context() as patch:
        patch.setattr("m3d.trained.Trainer", never)
        again = trained_networks(tiny, NET, default_recipe(3), 2, 0, CPU)
    assert torch.equal(again.final, first.final) and torch.equal(again.initial, first.initial)
    for changed in ({"repeats": 1}, {"seed": 1}, {"recipe": default_recipe(4)}, {"spec": "convnet1:width=8"}):
        arguments = {"spec": NET, "recipe": default_recipe(3), "repeats": 2, "seed": 0, **changed}
        other = trained_networks(tiny, runtime=CPU, **arguments)
        assert other.final.shape != first.final.shape or not torch.equal(other.final, first.final)
    assert len(list(cache_folder().iterdir())) == 5
    features = representations(first, tiny, CPU, chunk=7)
    assert features.shape[0] == len(tiny.train) and torch.isfinite(features).all()


def test_training_learns(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("M3D_CACHE", str(tmp_path))
    from m3d.files import read_checked

    trained_networks(tiny, NET, default_recipe(40), 1, 0, CPU)
    _, state = read_checked(next(tmp_path.iterdir()))
    assert state["training_accuracy"][0] > 90


@pytest.mark.parametrize(("name", "rule"), [("herding", herding), ("k-center", k_center)])
def test_a_coreset_chooses_by_its_own_rule_and_takes_all_options(name, rule):
    options = {"factor": 2, "chroma": "half", "margin": 1, "features": "pixels", "epochs": 3}
    made, _ = make_method(name, Task("photos", (3, 16, 16), 3, 2), options)
    assert made.init == ByFeatures(rule, "pixels", "convnet3", 3)
    assert made.tiles == Tiles(2, chroma="half", margin=1)
