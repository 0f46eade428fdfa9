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
