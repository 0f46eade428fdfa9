"""DD-Ranking's scores: against a computation by hand, and end to end on the digits."""

import json
import math
import signal
import statistics

import pytest

import m3d
from m3d.cli import main
from m3d.condensed import CondensedSet
from m3d.errors import Interrupted, M3DError
from m3d.evaluation import evaluate, evaluate_whole, make_protocol
from m3d.ranking import Arm, Ranking, rank, recorded_whole, score, without_augmentation
from m3d.report import RANKING_COLUMNS, rows_of, table
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.teachers import Teachers, relabel

CPU = Runtime.choose("cpu")
NET = "convnet2:width=8"
PROTOCOL = make_protocol("quick", epochs=6, batch=8)
FULL = make_protocol("whole", epochs=2, batch=16)
SETTINGS = {"net": NET, "protocol": PROTOCOL, "full_protocol": FULL, "runtime": CPU}


@pytest.fixture
def condensed(tiny) -> CondensedSet:
    return m3d.condense(tiny, 2, "m3d", net=NET, steps=2, batch_real=4, factor=2)


@pytest.fixture
def soft(condensed, tiny) -> CondensedSet:
    return relabel(condensed, tiny, Teachers(NET, teachers=2, epochs=2), CPU)


def arm(*accuracies: float) -> Arm:
    """An arm whose networks reached these accuracies, in percent."""
    from m3d.evaluation import Result

    return Arm((Result(list(accuracies), list(accuracies), {}, 0.0, {}),))


def test_the_map_by_hand():
    """−1, 0 and 1 are what the paper's normalisation says of the worst, of nothing gained, and of the best."""
    assert score(-1) == pytest.approx(0) and score(1) == pytest.approx(100)
    assert score(0) == pytest.approx(100 * (1 - 1 / math.e) / (math.e - 1 / math.e))
    assert 0 < score(-0.3) < score(0.1) < 100  # fractions: percentages would leave [0, 100] at once


def test_scores_by_hand():
    arms = {"real_hard": arm(85), "set_hard": arm(60, 62), "set": arm(70), "random": arm(40, 50)}
    arms |= {"set_plain": arm(55), "random_plain": arm(35)}
    ranking = Ranking(arms, 0.5, 0.5)
    alpha = 0.5 * (0.70 - 0.45) - 0.5 * (0.85 - 0.61)
    beta = 0.5 * (0.70 - 0.45) + 0.5 * (0.55 - 0.35)
    slope = 100 * math.exp(alpha) / (math.e - 1 / math.e)
    assert ranking.lrs[0] == pytest.approx(score(alpha)) and ranking.ars[0] == pytest.approx(score(beta))
    # two arms have two networks: variances of the means 1 and 25 points²
    assert ranking.lrs[1] == pytest.approx(slope * math.sqrt(0.25 * 0.0001 + 0.25 * 0.0025))
    ior, hlr = 0.25, 0.24
    assert Ranking(arms, 1.0, 1.0).lrs[0] == pytest.approx(score(ior)) == pytest.approx(Ranking(arms, 1.0, 1.0).ars[0])
    assert Ranking(arms, 0.0, 0.0).lrs[0] == pytest.approx(score(-hlr))
    assert Ranking(arms, 0.0, 0.0).ars[0] == pytest.approx(score(0.20))
    assert Ranking(arms, 0.3, 0.5).lrs[0] == pytest.approx(score(0.3 * ior - 0.7 * hlr))


def test_an_arm_that_counts_twice_errs_once():
    """With hard labels the set's accuracy enters α with the weight w + (1 − w) = 1."""
    both = arm(60, 64)
    arms = {"real_hard": arm(80), "set_hard": both, "set": both, "random": arm(40)}
    arms |= {"set_plain": both, "random_plain": arm(40)}
    alpha = 0.5 * 0.22 - 0.5 * 0.18
    assert Ranking(arms, 0.5, 0.5).lrs[1] == pytest.approx(100 * math.exp(alpha) / (math.e - 1 / math.e) * 0.02)


def naive(condensed: CondensedSet, data, repeats: int) -> dict[str, list[float]]:
    """Every accuracy by calls a user could make, one after the other; two random selections."""
    bare = without_augmentation(PROTOCOL)
    common = {"net": NET, "runtime": CPU}
    accuracies = {"real_hard": evaluate_whole(data, protocol=FULL, repeats=repeats, **common).last}
    accuracies["set_hard"] = evaluate(condensed.hard(), data, protocol=PROTOCOL, repeats=repeats, **common).last
    for suffix, rules in (("", PROTOCOL), ("_plain", bare)):
        accuracies[f"set{suffix}"] = evaluate(condensed, data, protocol=rules, repeats=repeats, **common).last
        accuracies[f"random{suffix}"] = []
        for seed, share in ((0, 2), (1, 1)):
            chosen = m3d.condense(data, condensed.manifest["ipc"], "random", seed=seed)
            if condensed.soft is not None:
                chosen = relabel(chosen, data, Teachers.of(condensed), CPU)
            result = evaluate(chosen, data, protocol=rules, repeats=share, seed=seed, **common)
            accuracies[f"random{suffix}"] += result.last
    return accuracies


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_it_equals_the_naive_computation(kind, condensed, soft, tiny):
    chosen = condensed if kind == "hard" else soft
    ranking = rank(chosen, tiny, repeats=3, selections=2, **SETTINGS)
    expected = naive(chosen, tiny, 3)
    assert {name: a.last for name, a in ranking.arms.items()} == expected
    mean = {name: statistics.fmean(values) / 100 for name, values in expected.items()}
    alpha = 0.5 * (mean["set"] - mean["random"]) - 0.5 * (mean["real_hard"] - mean["set_hard"])
    beta = 0.5 * (mean["set"] - mean["random"]) + 0.5 * (mean["set_plain"] - mean["random_plain"])
    for got, value in ((ranking.lrs[0], alpha), (ranking.ars[0], beta)):
        assert got == pytest.approx(100 * (math.exp(value) - 1 / math.e) / (math.e - 1 / math.e))


def test_the_record_holds_all_ingredients(soft, tiny):
    ranking = rank(soft, tiny, repeats=3, selections=2, weight=0.3, gamma=0.6, seed=5, **SETTINGS)
    record = json.loads(json.dumps(ranking.as_record()))
    assert record["labels"] == "soft" and record["n"] == 3 and record["set"] == soft.fingerprint
    told = record["ranking"]
    parts = told["accuracies"]
    assert {name: part["labels"] for name, part in parts.items()} == {
        "real_hard": "hard",
        "set_hard": "hard",
        "set": "soft",
        "random": "soft",
        "set_plain": "soft",
        "random_plain": "soft",
    }
    alpha = 0.3 * told["ior"] / 100 - 0.7 * told["hlr"] / 100
    beta = 0.6 * told["ior"] / 100 + 0.4 * told["ior_plain"] / 100
    assert told["lrs"] == pytest.approx(score(alpha), abs=2e-3) and told["ars"] == pytest.approx(score(beta), abs=2e-3)
    assert told["hlr"] == pytest.approx(parts["real_hard"]["accuracy"] - parts["set_hard"]["accuracy"], abs=2e-3)
    assert told["weight"] == 0.3 and told["gamma"] == 0.6
    chosen = parts["random"]["sets"]
    assert [(s["seed"], s["repeats"], s["ipc"], s["method"]) for s in chosen] == [
        (5, 2, 2, "random"),
        (6, 1, 2, "random"),
    ]
    assert chosen[0]["set"] != chosen[1]["set"] and parts["real_hard"]["protocol"]["name"] == "whole"
    bare = parts["set_plain"]["protocol"]
    assert bare["cutmix"] == 0 and bare["augment"] == "none" and bare["photo"] is None and bare["lr"] == 0.02
    assert "LRS" in str(ranking) and "ARS" in str(ranking)


def test_a_protocol_without_augmentation_needs_no_second_training(condensed, tiny):
    rules = make_protocol("dc", epochs=2)
    assert without_augmentation(rules) is rules
    ranking = rank(condensed, tiny, repeats=1, selections=1, **{**SETTINGS, "protocol": rules})
    assert ranking.arms["set_plain"] is ranking.arms["set"] and ranking.arms["random_plain"] is ranking.arms["random"]
    photos = without_augmentation(make_protocol("imagenet", epochs=4))
    assert photos.recipe.photo is None and photos.recipe.cutmix == 0 and photos.recipe.milestones == (2, 3)


def test_a_learned_rate_serves_random_images_too(condensed, tiny):
    learned = CondensedSet(condensed.images, condensed.labels, {**condensed.manifest, "learned": {"lr": 0.037}})
    rules = make_protocol("mtt", epochs=1)
    record = rank(learned, tiny, repeats=1, selections=1, **{**SETTINGS, "protocol": rules}).as_record()["ranking"]
    rates = {name: part["protocol"]["lr"] for name, part in record["accuracies"].items()}
    assert rates.pop("real_hard") == 0.02 and set(rates.values()) == {0.037} and len(rates) == 5


def test_a_stopped_ranking_makes_nothing_twice(condensed, tiny, tmp_path, monkeypatch):
    settings = {**SETTINGS, "repeats": 2, "selections": 2}
    whole = rank(condensed, tiny, **settings)
    folder = RunFolder(tmp_path)
    epochs = []

    def stop(epoch, epochs_of_this):
        epochs.append(epoch)
        if len(epochs) == 15:  # the set has 6 epochs, each random selection 6: in the second selection
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        rank(condensed, tiny, report=stop, folder=folder, **settings)
    assert len(list(tmp_path.glob("evaluation-part-*.json"))) == 2
    assert len(list(tmp_path.glob("evaluation-*.safetensors"))) == 1
    trained = []
    resumed = rank(condensed, tiny, report=lambda e, n: trained.append(e), folder=folder, **settings)
    assert len(trained) == 3 + 6 * 3 + 2  # the rest of that selection, three plain sets, the whole data's two epochs
    assert {n: a.last for n, a in resumed.arms.items()} == {n: a.last for n, a in whole.arms.items()}
    assert resumed.lrs == whole.lrs and resumed.ars == whole.ars
    assert list(tmp_path.iterdir()) == []


def test_damaged_and_foreign_parts(condensed, tiny, tmp_path):
    """Another ranking's parts are not taken and not removed; a damaged one of one's own is named."""
    settings = {**SETTINGS, "repeats": 1, "selections": 1, "folder": RunFolder(tmp_path)}
    (tmp_path / "evaluation-part-0123456789abcdef.json").write_text("{}")
    seen = []
    rank(condensed, tiny, report=lambda e, n: seen.extend(tmp_path.glob("evaluation-part-*")), **settings)
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation-part-0123456789abcdef.json"]
    own = next(p for p in seen if "0123456789abcdef" not in p.name)
    own.write_text('{"last": 1}')
    with pytest.raises(M3DError, match="is no finished evaluation"):
        rank(condensed, tiny, **settings)
    condensed.save(tmp_path / RunFolder.CONDENSED)
    RunFolder(tmp_path).begin({}, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == [RunFolder.RUN]  # a new run keeps no part of an old ranking


def test_the_command_on_digits(capsys, tmp_path):
    """Condensed digits stand above random ones and below the whole data, and the scores say so."""
    run = tmp_path / "run"
    net = "convnet2:width=16"
    options = {"steps": 60, "batch_real": 16, "augment": "none"}
    m3d.condense("digits", 1, net=net, out=run, **options)
    arguments = ["evaluate", str(run), "--net", net, "--protocol", "quick", "--epochs", "60", "--repeats", "2"]

    def command(*more):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, *more])
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    code, out, _ = command("--ranking", "--selections", "2", "--full-epochs", "12", "--json")
    record = json.loads(out)
    told = record["ranking"]
    assert code in (0, None) and RunFolder(run).results() == [record]
    assert told["accuracies"]["real_hard"]["protocol"]["epochs"] == 12 and told["hlr"] > 0 and told["ior"] > 3
    assert len(told["accuracies"]["random"]["sets"]) == 2
    nothing = 100 * (1 - 1 / math.e) / (math.e - 1 / math.e)
    assert nothing < told["ars"] < 100
    arguments[arguments.index("60")] = "2"
    code, out, _ = command("--ranking", "--full-epochs", "1")
    assert code in (0, None) and "LRS" in out and "random selections, no augmentation" in out and "above random" in out
    rows = rows_of([run])
    assert rows[0]["lrs"] == (told["lrs"], told["lrs_error"]) and all(c in table(rows) for c in RANKING_COLUMNS)
    code, _, err = command("--selections", "2")
    assert code == 2 and "--selections 2: it is a part of --ranking" in err
    code, _, err = command("--full-epochs", "2")
    assert code == 2 and "--full-epochs 2: it is a part of --ranking" in err
    code, _, err = command("--full-run", "x")
    assert code == 2 and "--full-run x: it is a part of --ranking" in err
    code, _, err = command("--ranking", "--full-epochs", "2", "--full-run", "x")
    assert code == 2 and "give one of them" in err
    code, _, err = command("--ranking", "--full-run", str(run))
    assert code == 2 and "has no result of convnet2:width=16 trained on these digits (test)" in err
    arguments[1:2] = ["--full", "digits"]
    code, _, err = command("--ranking")
    assert code == 2 and "--ranking scores a condensed set; --full digits has none" in err


def test_the_whole_datas_result_may_come_from_a_record(condensed, tiny, tiny_file, tmp_path, capsys):
    folder = RunFolder(tmp_path / "full")
    settings = {**SETTINGS, "repeats": 2, "selections": 1, "protocol": make_protocol("dc", epochs=1)}
    whole = rank(condensed, tiny, **settings)
    for net, data in (("convnet1", tiny), (NET, tiny), (NET, tiny.hold_out(0.25, 0))):  # only the second is meant
        folder.add_result(evaluate_whole(data, net=net, protocol=FULL, repeats=2, runtime=CPU).as_record())
    full = recorded_whole(folder, tiny, NET)
    again = rank(condensed, tiny, full=full, **settings)
    assert again.lrs == pytest.approx(whole.lrs, abs=1e-3)
    made, told = (r.as_record()["ranking"]["accuracies"]["real_hard"] for r in (whole, again))
    assert {k: told[k] for k in ("last", "accuracy", "n", "labels", "sets")} == {
        k: made[k] for k in ("last", "accuracy", "n", "labels", "sets")
    }
    assert told["protocol"]["name"] == "whole" and told["protocol"]["epochs"] == 2
    with pytest.raises(M3DError, match="has no result of convnet3"):
        recorded_whole(folder, tiny, "convnet3")
    run = tmp_path / "run"
    m3d.condense(tiny_file, 2, "random", out=run)
    arguments = ["evaluate", run, "--net", NET, "--epochs", 1, "--repeats", 1, "--ranking", "--full-run", folder.path]
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in (*arguments, "--json")])
    record = json.loads(capsys.readouterr().out)
    assert stop.value.code in (0, None) and record["ranking"]["accuracies"]["real_hard"]["last"] == told["last"]


def test_the_library(condensed, tiny):
    settings = {"net": NET, "protocol": make_protocol("dc", epochs=1), "full_protocol": FULL}
    ranking = m3d.rank(condensed, tiny, device="cpu", repeats=1, selections=1, **settings)
    assert isinstance(ranking, m3d.Ranking) and ranking.result.record["device"].startswith("cpu")


def test_wrong_requests(condensed, soft, tiny, digits):
    for options, message in (
        ({"selections": 3, "repeats": 2}, "selections=3 is not valid; allowed: 1 to 2"),
        ({"selections": 0, "repeats": 2}, "selections=0 is not valid"),
        ({"weight": 1.5}, "weight=1.5 is not valid"),
        ({"gamma": -0.1}, "gamma=-0.1 is not valid"),
    ):
        with pytest.raises(M3DError, match=message):
            rank(condensed, tiny, **SETTINGS, **options)
    with pytest.raises(M3DError, match="they must be the same"):
        rank(condensed, digits, **SETTINGS)
    nameless = CondensedSet(soft.images, soft.labels, condensed.manifest, soft.soft)
    with pytest.raises(M3DError, match="does not say who made its soft labels"):
        rank(nameless, tiny, **SETTINGS)
