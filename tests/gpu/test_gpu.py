"""What only a CUDA device can show. Skipped, saying so, without one; benchmarks/results keeps the last log."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import scenes
import torch
from launch import together
from toys import make_dataset

from m3d import rng
from m3d.augment import Augment
from m3d.batches import Images
from m3d.data import streamed
from m3d.engine import condense
from m3d.errors import Interrupted
from m3d.methods import METHODS, Task, make_method
from m3d.nets import FlatNet, grouped, make_net
from m3d.nets.single import Single
from m3d.normalise import Normalise, Zca
from m3d.photo import Photo
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.train import Recipe, Trainer
from m3d.watch import Watch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
NET = "convnet2:width=16"


@pytest.fixture(scope="module")
def data():
    return make_dataset(classes=4, per_class=40, shape=(3, 16, 16)).to("cuda")


def run(data, runtime, name="m3d", watch=None, **options):
    known = METHODS.get(name).options()
    given = {"steps": 40, "batch_real": 8, "lr": 0.05, **({"factor": 2} if name == "m3d" else {}), **options}
    given = {option: value for option, value in given.items() if option in known}
    method = make_method(name, Task("tiny", data.shape, data.classes, 2), given)[0]
    return condense(method, data, FlatNet(make_net(NET, data.shape, data.classes), "cuda"), 2, 0, runtime, watch)


def test_both_devices_draw_the_same_bits():
    for purpose in rng.Purpose:
        draws = [
            rng.bits(7, purpose, torch.arange(3, device=d), torch.arange(4, device=d), 37) for d in ("cpu", "cuda")
        ]
        assert torch.equal(draws[0], draws[1].cpu())
    decks = []
    for d in ("cpu", "cuda"):
        position = torch.arange(300, device=d).view(1, 3, 100)
        decks.append(
            rng.shuffled(
                7, rng.Purpose.REAL, position, torch.arange(3, device=d), torch.tensor([17, 40, 100], device=d)
            )
        )
    assert torch.equal(decks[0], decks[1].cpu())


@pytest.mark.parametrize("name", ["m3d", "dm"])
def test_cuda_equals_cpu(data, name):
    """20 float32 steps with recorded graphs on CUDA against the CPU: pixels agree to 1e-3."""
    on_gpu = run(data, Runtime.choose("cuda", "fp32"), name, steps=20, lr=0.01)
    method = make_method(
        name,
        Task("tiny", data.shape, data.classes, 2),
        {"steps": 20, "batch_real": 8, "lr": 0.01, "factor": 2 if name == "m3d" else 1},
    )[0]
    cpu = data.to("cpu")
    on_cpu = condense(method, cpu, FlatNet(make_net(NET, cpu.shape, cpu.classes)), 2, 0, Runtime.choose("cpu"))
    assert (on_gpu.pixels - on_cpu.pixels).abs().max() < 1e-3
    assert (on_gpu.pixels - on_cpu.pixels).abs().mean() < 1e-5


ENCODERS = {"encoders": 2, "encoder_epochs": 2}
EVERY_METHOD = {
    "m3d": {"average_from": 0.5},
    "dm": {},
    "m3d+": {**ENCODERS, "ce_ramp": 0.5, "decay": 0.5, "average_from": 0.5},
    "dance": ENCODERS,
    "dsdm": {**ENCODERS, "history_after": 1},
    "ncfm": {**ENCODERS, "frequencies": 32, "sampler": "learned", "lr": 0.002},
    "cafe": {"steps": 12},
    "cafe-dsa": {"steps": 12},
    "datadam": {"steps": 12},
    "dc": {"steps": 6},
    "dsa": {"steps": 6},
    "idc": {"steps": 6},
    "idc-i": {"steps": 6},
    "idm": {"steps": 12, "push_every": 3, "queue": 4, "train_steps": 2, "recount": 5},
    "mtt": {"steps": 4, "experts": 2, "expert_epochs": 4, "max_start": 2, "syn_steps": 3},
}
COMPILED = ("m3d", "dm", "m3d+", "dance", "dsdm", "ncfm")  # the others take minutes to compile


def test_every_method_that_steps_is_run_here():
    assert set(EVERY_METHOD) == {name for name in METHODS.names() if "steps" in METHODS.get(name).options()}
    assert len(EVERY_METHOD) == 15


@pytest.mark.parametrize(("name", "mode"), [*((n, "eager") for n in EVERY_METHOD), *((n, "compile") for n in COMPILED)])
def test_deterministic_runs_are_bit_identical_and_resume(data, name, mode, tmp_path, monkeypatch):
    """Twice the same bits, and again when stopped in the middle and resumed."""
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    runtime, options = Runtime.choose("cuda", "bf16", deterministic=True, step_mode=mode), EVERY_METHOD[name]
    whole, again = run(data, runtime, name, **options), run(data, runtime, name, **options)
    assert torch.equal(whole.pixels, again.pixels) and whole.losses == again.losses
    folder, middle, asked = RunFolder(tmp_path / "run"), len(whole.losses) // 2, []

    def stop(progress):
        if progress.step >= middle and not asked:
            asked.append(1)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        run(data, runtime, name, Watch(report=stop, folder=folder), **options)
    resumed = run(data, runtime, name, Watch(folder=folder), **options)
    assert torch.equal(resumed.pixels, whole.pixels) and resumed.losses == whole.losses


def test_compiled_equals_eager(data):
    """Float32, 20 steps: the compiler's fused kernels against eager ones, pixels to 2e-3."""
    results = [
        run(data, Runtime.choose("cuda", "fp32", step_mode=m), steps=20, lr=0.01).pixels for m in ("eager", "compile")
    ]
    assert (results[0] - results[1]).abs().max() < 2e-3


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_fused_kernels_equal_the_plain_path_over_a_run(data, mode, monkeypatch):
    """Float32, 20 steps with the fused kernels and without: pixels to 2e-3."""
    method = make_method(
        "m3d", Task("tiny", data.shape, 4, 2), {"steps": 20, "batch_real": 8, "lr": 0.01, "factor": 2}
    )[0]
    results = []
    for fused in (True, False):
        net = FlatNet(make_net(NET, data.shape, data.classes), "cuda")
        assert net.net.fused
        net.net.fused = fused
        for module in ("m3d.augment", "m3d.kernels"):
            monkeypatch.setattr(f"{module}.HAS_KERNELS", fused)
        results.append(condense(method, data, net, 2, 0, Runtime.choose("cuda", "fp32", step_mode=mode)).pixels)
    assert (results[0] - results[1]).abs().max() < 2e-3


@pytest.mark.parametrize("recompute", [False, True])
def test_recorded_trajectory_matching_equals_the_cpu(data, recompute):
    """8 float32 steps with the same experts (the cache serves both devices): loss, pixels and the learned rate."""
    given = {"steps": 8, "syn_steps": 3, "experts": 3, "max_start": 3, "batch_syn": 5, "lr": 0.1, "lr_lr": 1e-7}
    method = make_method("mtt", Task("tiny", data.shape, 4, 2), {**given, "recompute": recompute})[0]
    results = []
    for runtime in (Runtime.choose("cuda", "fp32"), Runtime.choose("cpu", "fp32")):
        own, net = data.to(runtime.device), FlatNet(make_net(NET, data.shape, 4), runtime.device)
        results.append(condense(method, own, net, 2, 0, runtime))
    gpu, cpu = results
    assert gpu.losses == pytest.approx(cpu.losses, rel=1e-2) and (gpu.pixels - cpu.pixels).abs().max() < 1e-2
    assert gpu.learned["lr"] == pytest.approx(cpu.learned["lr"], rel=1e-3)


def test_whitening_is_the_same_on_both_devices(data):
    made = [Zca(data.train.images.cpu(), data.mean, data.std).on(torch.device(d)) for d in ("cuda", "cpu")]
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01), ("tf32", 0.01)])
def test_lower_precision_follows_float32(data, precision, tolerance):
    losses = [run(data, Runtime.choose("cuda", p)).losses for p in ("fp32", precision)]
    a, b = (torch.tensor(v) for v in losses)
    assert ((a - b).abs() / a).mean() < tolerance


def test_one_process_may_condense_and_evaluate_many_times(data):
    """Recordings of earlier runs stay out of the way of later ones, whatever sizes came between."""
    for k in range(6):
        run(data, Runtime.choose("cuda", "fp16"), steps=8, batch_real=8 + 8 * (k % 2))
        images = Images(data.train.images, data.train.labels(), data.normalise())
        net = FlatNet(make_net(NET, data.shape, data.classes), "cuda")
        Trainer(net, images, Recipe(epochs=1, batch=32 + k, lr=0.01), 2, 0, Runtime.choose("cuda")).run(1)


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_recorded_training_equals_the_cpu(mode):
    """5 epochs of 3 batches (the last smaller) with recorded graphs against the CPU, float32, weights to 1e-3."""
    recipe = Recipe(
        5, 8, 0.05, milestones=(3,), augment=Augment(("flip", "color"), ("crop", "scale", "rotate")), cutmix=0.5
    )
    flats = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        pixels, labels = torch.rand(20, 3, 16, 16, generator=generator), torch.randint(0, 4, (20,), generator=generator)
        images = Images(pixels.to(device), labels.to(device), Normalise((0.5,) * 3, (0.2,) * 3, device=device))
        net = FlatNet(make_net(NET, (3, 16, 16), 4), device)
        runtime = Runtime.choose(device, "fp32", step_mode=mode if device == "cuda" else "eager")
        with runtime.active():
            trainer = Trainer(net, images, recipe, 3, 0, runtime)
            trainer.run(5)
        flats.append(trainer.flat.detach().cpu())
    assert (flats[0] - flats[1]).norm() / flats[0].norm() < 1e-3


@pytest.mark.parametrize(("precision", "kernels"), [("fp32", False), ("bf16", False), ("bf16", True)])
@pytest.mark.parametrize(
    "spec",
    ["resnet10:width=32,norm=batch", "densenet121:growth=12,norm=batch", "resnetap10:width=16", "vgg11", "alexnet"],
)
def test_networks_side_by_side_are_as_exact_as_one_by_one(monkeypatch, spec, precision, kernels):
    """What is seen and its gradient, in each precision: not further from float64 than half as much again.

    So the median of five networks; the worst is only held against what no rounding does. Rounding that carries one
    activation over a kink changes a network's whole gradient, in whichever way it is computed: on a CPU in float32 that
    of 53 networks of 240 by more than a ten-thousandth, of the worst by a thirteenth.
    """
    monkeypatch.setattr(grouped, "NARROW_KERNELS", kernels)
    nets = 5
    runtime, net = Runtime.choose("cuda", precision), FlatNet(make_net(spec, (3, 32, 32), 10), "cuda")
    zero = torch.zeros(1, dtype=torch.long, device="cuda")
    flat = net.fresh(0, rng.Purpose.ENCODER, zero, torch.arange(nets, device="cuda"))
    x = torch.rand(nets, 16, 3, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for way, dtype in ((Single.stacked, torch.float64), (Single.stacked, runtime.dtype), (None, runtime.dtype)):
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        rows, images = flat.to(kind).requires_grad_(), x.to(kind)
        with runtime.active():
            way = way or type(net.net).stacked
            logits = way(net.net, net.unflatten(rows), images, dtype).logits
            (gradient,) = torch.autograd.grad(logits.log_softmax(-1)[..., 0].sum(), rows)
        found.append((logits.detach().double(), gradient.double()))

    def errors(values, exact):
        return (values - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)

    for exact, *others in zip(*found, strict=True):
        apart, ours = (errors(values, exact) for values in others)
        assert ours.median() < 1.5 * apart.median() + 1e-6 and ours.max() < 2 * apart.max() + 0.2


def test_photographs_augmentation_is_the_same_and_can_be_recorded():
    """The same draws give the same images on both devices, and a step with them replays as a graph."""
    pixels = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    recipe = Recipe(epochs=8, batch=4, lr=0.05, cutmix=1.0, photo=Photo())
    batches = []
    for device in ("cpu", "cuda"):
        images = Images(
            pixels.to(device), (torch.arange(12) % 3).to(device), Normalise((0.5,) * 3, (0.2,) * 3, device=device)
        )
        net = FlatNet(make_net(NET, (3, 16, 16), 3), device)
        trainer = Trainer(net, images, recipe, 2, 0, Runtime.choose(device, "fp32"))
        trainer._begin_epoch()
        batches.append(trainer.batches.take(4, ahead=False).images.cpu())
        before = trainer.flat.detach().clone()
        trainer.run(8)
        assert torch.isfinite(trainer.flat).all() and not torch.equal(trainer.flat, before)
    torch.testing.assert_close(*batches, atol=1e-4, rtol=1e-4)


def test_a_recorded_refill_draws_each_step_its_own_encoder(data):
    """Against the definition, long after the recording (the first three calls run unrecorded)."""
    from m3d.pools import World
    from m3d.pools.pretrained import Pretrained, encoder_recipe

    net = FlatNet(make_net(NET, data.shape, data.classes), "cuda")
    pool = Pretrained(encoder_recipe(2), networks=3).start(World(net, data, None, 0, Runtime.choose("cuda", "fp32")))
    place = pool.eyes().flat.data_ptr()
    for step in range(12):
        pool.draw(step)
        words = rng.bits(0, rng.Purpose.MIXTURE, torch.tensor([step]), torch.arange(2), 1)[0, :, 0].tolist()
        row, share = words[0] % 3, (words[1] >> 8) * 2.0**-24
        assert torch.equal(pool.eyes().trained, pool.networks.final[row])
        expected = share * pool.networks.initial[row] + (1 - share) * pool.networks.final[row]
        torch.testing.assert_close(pool.eyes().flat, expected, atol=1e-6, rtol=1e-5)
    assert pool.eyes().flat.data_ptr() == place


def test_processes_exchange_tensors_on_their_own_gpus_by_nccl(tmp_path, monkeypatch):
    """As many as there are GPUs, four at most; all get the same set. That of one is the set of a process that torchrun
    did not start; several take other numbers of networks and classes through at once, which rounds otherwise."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    ranks = min(4, torch.cuda.device_count())
    (told,) = together(ranks, tmp_path, "here")
    for rank, one in enumerate(told):
        assert one["device"] == f"cuda:{rank}" and one["backend"] == "ProcessGroupNCCL" and one["rank"] == rank
        assert one["joined"] == [[float(r)] * 3 for r in range(ranks)] and one["given"] == [[0.0] * 3]
    assert len({one["set"] for one in told}) == 1
    if ranks == 1:
        assert told[0]["set"] == scenes.condensed_here()


def test_images_streamed_from_the_host_give_the_resident_run(monkeypatch):
    """Under a recorded graph, with two steps staged at a time and the next ones gathered meanwhile."""
    host = make_dataset(classes=4, per_class=40, shape=(3, 16, 16))
    monkeypatch.setattr(streamed, "_STAGED", 2 * 4 * 8 * 3 * 16 * 16)
    runtime = Runtime.choose("cuda", "fp32", deterministic=True)
    resident, there = (replace(host, resident=choice).to("cuda") for choice in ("yes", "no"))
    assert isinstance(there.train, streamed.StreamedData) and there.train.device.type == "cuda"
    assert torch.equal(run(resident, runtime).pixels, run(there, runtime).pixels)


@pytest.mark.parametrize("name", sorted(name for name, options in EVERY_METHOD.items() if "steps" in options))
def test_the_other_methods_run_recorded_and_equal_the_cpu_at_first(data, name, tmp_path, monkeypatch):
    """A few float32 steps of each, recorded on CUDA, against the CPU: the losses agree while rounding has not grown."""
    monkeypatch.setenv("M3D_CACHE", str(tmp_path))
    losses = []
    for device in ("cuda", "cpu"):
        here = data.to(device)
        method = make_method(name, Task("tiny", here.shape, here.classes, 2), EVERY_METHOD[name])[0]
        net = FlatNet(make_net(NET, here.shape, here.classes), device)
        losses.append(condense(method, here, net, 2, 0, Runtime.choose(device, "fp32")).losses)
    assert len(losses[0]) == EVERY_METHOD[name]["steps"]
    torch.testing.assert_close(torch.tensor(losses[0][:4]), torch.tensor(losses[1][:4]), rtol=2e-2, atol=1e-4)


def test_a_rehearsal_compiles_the_kernels_that_a_run_launches(data, tmp_path, monkeypatch):
    """After it, a run in a new process adds none of our kernels to Triton's cache."""
    from m3d import rehearsal

    script = (
        "import m3d; from toys import make_dataset; "
        "m3d.condense(make_dataset(classes=4, per_class=40, shape=(3, 16, 16)), 2, net='convnet2:width=32', steps=4, "
        "batch_real=8, factor=2, precision='bf16', step_mode='compile')"
    )
    own = ("_gather", "_stem_forward", "_stem_backward", "_fold", "_norm_forward", "_norm_backward")
    own += ("_augment_forward", "_augment_backward")

    def compiled():
        return {name: len(list(tmp_path.glob(f"*/{name}.cubin"))) for name in own}

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    net = FlatNet(make_net("convnet2:width=32", data.shape, data.classes), "cuda")
    sizes, augment = rehearsal.Sizes(4, 8, 8), Augment.parse("color+crop+cutout")
    child = rehearsal.start(net, data.shape, data.classes, sizes, augment, torch.bfloat16)
    assert child is not None and child.wait(120) == 0
    before = compiled()
    assert all(before.values())
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])
    assert compiled() == before


def test_a_runs_peak_memory_is_its_own(data):
    """Whatever the process did before: records of a small run after a large one do not carry the large one's peak."""
    import m3d

    large, small = (
        m3d.condense(data, 1, "m3d", net=NET, device="cuda", steps=2, batch_real=n).manifest for n in (40, 2)
    )
    assert 0 < small["peak_memory"] < large["peak_memory"]
