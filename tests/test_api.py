"""The library's front door: mistakes in Python are answered like those on the command line."""

import pytest
from short import NET

import m3d
from m3d.errors import M3DError
from m3d.evaluation import make_protocol

QUICK = {"net": NET, "repeats": 1}


def test_options_that_are_none_are_named_with_the_nearest(tiny):
    made = m3d.condense(tiny, 1, "random")
    with pytest.raises(M3DError, match="unknown option of evaluate 'runtime'"):
        m3d.evaluate(made, tiny, runtime=None)
    for call in (m3d.evaluate, m3d.rank):
        with pytest.raises(M3DError, match=r"unknown option of \w+ 'nett'. Did you mean 'net'\?"):
            call(made, tiny, nett=NET)
    with pytest.raises(M3DError, match=r"unknown option of eval_options 'repeat'. Did you mean 'repeats'\?"):
        m3d.condense(tiny, 1, "random", eval_options={"repeat": 1})
    with pytest.raises(M3DError, match=r"unknown option of load_options 'sise'. Did you mean 'size'\?"):
        m3d.condense("digits", 1, "random", load_options={"sise": 8})


def test_options_of_the_data_are_told_from_those_of_the_method(tiny):
    with pytest.raises(M3DError, match=r"size is not an option of m3d but of the data: load_options=\{'size': 32\}"):
        m3d.condense("no/such/folder", 1, size=32)
    with pytest.raises(M3DError, match="unknown option of m3d 'sise'"):
        m3d.condense(tiny, 1, sise=32)
    made = m3d.condense("digits", 1, "random", load_options={"size": 16})
    assert made.images.shape[2:] == (16, 16)


@pytest.mark.parametrize("ipc", ["1", 1.5, True, 0])
def test_a_wrong_number_of_images_is_shown_as_it_was_given(tiny, ipc):
    with pytest.raises(M3DError, match=rf"ipc={ipc!r} is not valid; allowed: a whole number"):
        m3d.condense(tiny, ipc)


def test_a_protocol_with_its_options_in_one_text(tiny):
    assert make_protocol("paper:epochs=3,batch=5").recipe == make_protocol("paper", epochs=3, batch=5).recipe
    result = m3d.evaluate(m3d.condense(tiny, 1, "random"), tiny, protocol="quick:epochs=2", **QUICK)
    assert result.record["protocol"]["epochs"] == 2 and list(result.checks)[-1] == 2
    with pytest.raises(M3DError, match="epochs is given twice, and is 4 elsewhere"):
        make_protocol("paper:epochs=3", epochs=4)
    with pytest.raises(M3DError, match=r"unknown protocol 'papper'. Did you mean 'paper'"):
        make_protocol("papper:epochs=3")
    with pytest.raises(M3DError, match="unknown option of paper 'epoch'"):
        make_protocol("paper:epoch=3")


def test_judging_by_another_network(tmp_path):
    from toys import make_dataset

    data = make_dataset(per_class=20).hold_out(0.25, 0)
    settings = {"steps": 2, "batch_real": 4, "eval_every": 2, "net": NET}
    how = {"net": "convnet1:width=2", "protocol": "quick:epochs=1", "repeats": 1}
    made = m3d.condense(data, 1, out=tmp_path / "run", eval_options=how, **settings)
    assert len(made.manifest["validation"]) == 1


def test_an_evaluation_is_written_down_where_compare_finds_it(tmp_path):
    from m3d.report import rows_of
    from m3d.run_folder import RunFolder

    net, run = "convnet2:width=8", tmp_path / "run"
    made = m3d.condense("digits", 1, "random", net=net, out=run, device="cpu")
    quick = {"net": net, "protocol": "quick", "epochs": 2, "batch": 5, "repeats": 1, "device": "cpu"}
    result = m3d.evaluate(run, keep=True, **quick)
    assert (result.record["protocol"]["epochs"], result.record["protocol"]["batch"]) == (2, 5)
    assert (
        RunFolder(run).results()[0]["last"]
        == result.as_record()["last"]
        == m3d.evaluate(made, **quick).as_record()["last"]
    )
    assert rows_of([run])[0]["protocol"] == "quick/2, batch 5"
    m3d.evaluate(run / "condensed.safetensors", keep=True, **quick)
    assert len(RunFolder(run).results()) == 2  # m3d.evaluate(made) wrote nothing
    with pytest.raises(M3DError, match="keep=True needs the folder of a run"):
        m3d.evaluate(made, keep=True, **quick)
    made.save(tmp_path / "alone.safetensors")
    with pytest.raises(M3DError, match=r"keep=True: '.*alone\.safetensors' lies in no run folder"):
        m3d.evaluate(tmp_path / "alone.safetensors", keep=True, **quick)
    with pytest.raises(M3DError, match="beside a protocol that has its own"):
        m3d.evaluate(made, net=net, protocol=m3d.evaluation.make_protocol("quick"), epochs=3)


def test_what_networks_cost_does_not_depend_on_the_cache(monkeypatch, tmp_path):
    """Herding asks for a trained network: found in the cache, its seconds and memory count as the first time."""
    from m3d import trained

    options = {"net": "convnet2:width=8", "network": "convnet2:width=8", "device": "cpu"}
    first = m3d.condense("digits", 1, "herding", **options).manifest["seconds"]
    asked = []
    original = trained._read
    monkeypatch.setattr(trained, "_read", lambda *a: asked.append(found := original(*a)) or (found[0], 1000.0, 2**40))
    again = m3d.condense("digits", 2, "herding", **options).manifest
    assert asked and asked[0][1] <= first and 1000 < again["seconds"] < 1000 + 10 * first + 60
    assert again["peak_memory"] == 2**40


def test_a_stopped_run_says_how_it_goes_on(tmp_path):
    import signal

    from m3d.errors import Interrupted

    pressed = []

    def press(progress):
        if not pressed:
            pressed.append(progress.step)
            signal.raise_signal(signal.SIGINT)

    options = {"net": "convnet2:width=8", "steps": 500, "batch_real": 4, "device": "cpu"}
    with pytest.raises(Interrupted):
        m3d.condense("digits", 1, out=tmp_path / "run", report=press, **options)
    with pytest.raises(M3DError, match=r"run' is not finished; go on with: m3d.resume.*run'.$"):
        m3d.evaluate(tmp_path / "run")


def test_what_was_held_out_stays_so_where_the_data_are_named_again(digits):
    """Teachers of a set whose data are named (--data) must not learn from the part that judges it."""
    from m3d.origin import load_source

    data = m3d.load_data("digits", val_fraction=0.2, split_seed=3)
    made = m3d.condense(data, 1, "random")
    again = load_source(made, "digits")
    assert again.train.fingerprint == data.train.fingerprint and again.val is not None
    assert again.val.fingerprint == data.val.fingerprint
    plain = load_source(m3d.condense(digits, 1, "random"), "digits")
    assert plain.val is None and len(plain.train) == len(data.train) + len(data.val)
