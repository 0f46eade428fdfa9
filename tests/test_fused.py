"""The fused kernels against the plain path, values and gradients. Without a GPU they run in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional
from toys import make_dataset

pytest.importorskip("triton", reason="Triton is not installed (the dev extra has it)")

import triton

from m3d.augment import UNIFORMS, Augment, Parameters
from m3d.engine import condense
from m3d.fused_augment import augment
from m3d.fused_mmd import _gram_of
from m3d.kernels import Gaussian, Kernel, Linear, gaussian
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, fused_conv, grouped, make_net
from m3d.nets.convnet import ConvNet
from m3d.nets.fused_norm import norm_fits, norm_relu_pool
from m3d.nets.fused_stem import stem, stem_fits
from m3d.nets.grouped import conv_each
from m3d.nets.single import Single
from m3d.rng import Purpose
from m3d.runtime import Runtime
from m3d.step import Step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def whole_float32():
    """The library's convolutions, which ours are compared with, would round to TF32 on a GPU."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@triton.jit
def _count(out, n):
    total = 0
    for _ in range(n):
        total += 1
    triton.language.store(out, total)


@pytest.fixture
def loops():
    """Triton 3.6's interpreter cannot loop to a bound that is no constant where NumPy is 2.4 or later."""
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    try:
        _count[(1,)](out, 3)
    except Exception as error:
        if "only 0-dimensional arrays" not in str(error):
            raise
        pytest.skip(f"Triton {triton.__version__}'s interpreter does not loop under this NumPy: {error}")
    assert int(out) == 3


def tensor(*shape, seed=0, scale=1.0, offset=0.0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale + offset
    return values.to(DEVICE).requires_grad_()


def naive_norm(y, gain, shift):
    """Norm, ReLU and pooling of ``y`` [n, h, w, c] by the library's own functions."""
    z = functional.group_norm(y.permute(0, 3, 1, 2), y.shape[3], gain, shift, 1e-5)
    return functional.avg_pool2d(functional.relu(z), 2).permute(0, 2, 3, 1)


def agree(mine, naive, inputs, tolerance=2e-5):
    """Relative error of the value and of the gradient for each input."""
    direction = torch.randn(naive.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    gradients = [torch.autograd.grad((value * direction).sum(), inputs, retain_graph=True) for value in (mine, naive)]
    for a, b in zip((mine, *gradients[0]), (naive, *gradients[1]), strict=True):
        assert torch.isfinite(a).all()
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize(
    ("n", "h", "w", "c"), [(2, 8, 8, 16), (3, 4, 6, 96), (1, 2, 2, 48), (1, 32, 32, 16), (2, 34, 38, 48)]
)
def test_norm_relu_pool(n, h, w, c):
    inputs = (tensor(n, h, w, c, offset=0.7), tensor(c, seed=1, scale=0.3, offset=1), tensor(c, seed=2))
    agree(norm_relu_pool(*inputs, torch.float32), naive_norm(*inputs), inputs)


@pytest.mark.parametrize(
    ("nets", "n", "channels", "h", "w", "padding"),
    [(1, 2, 3, 8, 8, 1), (2, 2, 1, 8, 8, 1), (2, 1, 3, 16, 16, 1), (1, 1, 1, 28, 28, 3), (1, 1, 2, 6, 10, 1)],
)
def test_stem(nets, n, channels, h, w, padding):
    x, weight = tensor(nets * n, channels, h, w), tensor(nets, 16, channels, 3, 3, seed=1, scale=0.2)
    gain, shift = tensor(nets, 16, seed=2, scale=0.3, offset=1), tensor(nets, 16, seed=3)
    each = [
        naive_norm(
            functional.conv2d(x[r * n : (r + 1) * n], weight[r], padding=padding).permute(0, 2, 3, 1), gain[r], shift[r]
        )
        for r in range(nets)
    ]
    naive = torch.cat(each, dim=3)
    agree(stem(x, weight, gain, shift, padding, torch.float32), naive, (x, weight, gain, shift))
    frozen = stem(x, weight.detach(), gain.detach(), shift.detach(), padding, torch.float32)
    agree(frozen, naive, (x,))


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 1), (1, 2), (5, 3)])
@pytest.mark.parametrize(
    ("nets", "n", "inputs", "outputs", "h", "w"), [(2, 3, 4, 6, 8, 8), (3, 1, 5, 5, 4, 7), (1, 2, 3, 2, 2, 2)]
)
def test_every_networks_own_convolution(nets, n, inputs, outputs, h, w, kernel, stride):
    """Value, and the gradients of images and weights, of weights that are rows of one buffer."""
    x, flat = tensor(n, h, w, nets * inputs), tensor(nets, outputs * inputs * kernel**2 + 7, seed=1)
    weight = flat[:, 4:-3].view(nets, outputs, inputs, kernel, kernel)
    images, how = x.unflatten(3, (nets, inputs)), {"stride": stride, "padding": kernel // 2}
    each = [functional.conv2d(images[:, :, :, r].permute(0, 3, 1, 2), weight[r], **how) for r in range(nets)]
    naive = torch.cat(each, dim=1).permute(0, 2, 3, 1)
    agree(conv_each(x, weight, stride), naive, (x, flat), tolerance=1e-6)
    agree(conv_each(x, weight.detach(), stride), naive, (x,), tolerance=1e-6)
    agree(conv_each(x.detach(), weight, stride), naive, (flat,), tolerance=1e-6)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("kernel", "inputs", "outputs"), [(3, 3, 6), (3, 20, 70), (1, 70, 12), (5, 4, 16), (1, 2, 1)])
def test_narrow_convolutions(loops, kernel, inputs, outputs, stride):
    """Tiles that are not full, channels of every alignment, several parts of the pixels: value and both gradients."""
    x, weight = tensor(3, 7, 9, 2 * inputs), tensor(2, outputs, inputs, kernel, kernel, seed=1)
    images, how = x.unflatten(3, (2, inputs)), {"stride": stride, "padding": kernel // 2}
    each = [functional.conv2d(images[:, :, :, r].permute(0, 3, 1, 2), weight[r], **how) for r in range(2)]
    naive = torch.cat(each, dim=1).permute(0, 2, 3, 1)
    direction = tensor(*naive.shape, seed=2).detach()
    dx, dweight = torch.autograd.grad((naive * direction).sum(), (x, weight))
    with torch.no_grad():
        mine = fused_conv.convolved(x, weight, stride)
        turned = fused_conv.images_gradient(direction, weight, (7, 9), stride)
        summed = fused_conv.weights_gradient(direction, x, weight, stride)
    for ours, theirs in ((mine, naive), (turned, dx), (summed, dweight)):
        assert ours.shape == theirs.shape and (ours - theirs).norm() < 3e-6 * theirs.norm()


@pytest.mark.parametrize("spec", ["resnet10:width=4,norm=batch", "resnetap10:width=4"])
def test_networks_through_the_kernels_of_narrow_convolutions(loops, monkeypatch, spec):
    """Side by side with every convolution through them, against one by one through the library."""
    calls = []
    monkeypatch.setattr(grouped, "_ours", lambda x, weight: not calls.append(weight.shape[1:]))
    net = FlatNet(make_net(spec, (3, 16, 16), 4), DEVICE)
    zero = torch.zeros(1, dtype=torch.long, device=DEVICE)
    flat = net.fresh(0, Purpose.ENCODER, zero, torch.arange(2, device=DEVICE)).requires_grad_()
    x = tensor(2, 2, 3, 16, 16)
    ways = (Single.stacked, type(net.net).side_by_side)
    plain, ours = (way(net.net, net.unflatten(flat), x, torch.float32).logits for way in ways)
    agree(ours, plain, (flat, x), tolerance=1e-3)
    assert len(calls) > 20


@pytest.mark.parametrize(
    "operations", ["color+crop+cutout", "flip+crop", "color", "flip+cutout", "color|crop|cutout|flip"]
)
@pytest.mark.parametrize(("channels", "h", "w"), [(3, 8, 8), (1, 7, 5), (3, 34, 40)])
def test_augmentation(operations, channels, h, w):
    """Every operation it knows, in images smaller and larger than a tile: the value and the gradient."""
    chosen, groups = Augment.parse(operations), 6
    uniforms = torch.rand(groups, UNIFORMS, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    parameters = chosen.parameters(uniforms, (h, w))
    images = tensor(groups, 2, channels, h, w)
    assert chosen.fits(images)
    naive = chosen.apply(images.cpu(), Parameters(*(part.cpu() for part in parameters))).to(DEVICE)
    agree(chosen.fused(images, parameters), naive, (images,), tolerance=1e-6)


@pytest.mark.parametrize(
    "operations", ["flip+color+crop|scale|rotate", "color|crop|cutout|flip|scale|rotate", "rotate"]
)
@pytest.mark.parametrize(("channels", "h", "w"), [(3, 8, 8), (1, 7, 5), (3, 34, 40)])
def test_augmentation_between_pixels(operations, channels, h, w):
    """Images are scaled and turned as the library samples them; there is no gradient."""
    chosen, groups = Augment.parse(operations), 12
    uniforms = torch.rand(groups, UNIFORMS, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    parameters = chosen.parameters(uniforms, (h, w))
    images = tensor(groups, 1, channels, h, w).detach()
    assert chosen.fits(images) and not chosen.fits(images.clone().requires_grad_())
    naive = chosen.apply(images.cpu(), Parameters(*(part.cpu() for part in parameters))).to(DEVICE)
    torch.testing.assert_close(chosen.fused(images, parameters), naive, rtol=1e-4, atol=2e-5)


def test_augmentations_that_one_kernel_does_not_do():
    images = torch.zeros(1, 1, 3, 8, 8)
    assert Augment.parse("color+crop").fits(images)
    assert not Augment.parse("none").fits(images)
    assert not Augment.parse("crop").fits(images.half())
    assert not Augment.parse("crop").fits(torch.zeros(1, 1, 5, 8, 8))


@pytest.mark.parametrize(("n", "m", "d"), [(4, 9, 5), (1, 3, 2), (40, 150, 8), (3, 1, 4)])
@pytest.mark.parametrize("bands", [1, 5])
def test_mmd2_of_gaussians(n, m, d, bands):
    """Value and gradient, far from the origin, in tiles smaller and larger than the Gram matrix."""
    kernel = gaussian(bandwidths=bands)
    synthetic, real = tensor(3, n, d, offset=4.0), tensor(3, m, d, seed=1, scale=1.3, offset=4.5).detach()
    assert kernel.fits(real, synthetic)
    double = Kernel.mmd2(kernel, real.double(), synthetic.double())
    agree(kernel.fused_mmd2(real, synthetic), double.float(), (synthetic,), tolerance=2e-5)


@pytest.mark.parametrize(("groups", "many", "width"), [(2, 5, 7), (1, 33, 300), (3, 70, 1024), (1, 64, 2048)])
def test_gram_matrices_in_tiles_and_parts(groups, many, width):
    points = tensor(groups, many, width).detach()
    gram, exact = _gram_of(points), points.double() @ points.double().mT
    assert (gram - exact).norm() <= 1e-6 * exact.norm() and (gram - gram.mT).norm() <= 1e-6 * exact.norm()


def test_mmd2_of_points_that_agree_is_nothing_and_pulls_nowhere():
    points = tensor(2, 6, 4, offset=1.0)
    value = Gaussian().fused_mmd2(points.detach(), points)
    (gradient,) = torch.autograd.grad(value.sum(), points)
    assert value.abs().max() < 1e-6 and gradient.abs().max() < 1e-6
    same = torch.ones(2, 3, 4, device=DEVICE)
    assert Gaussian().fused_mmd2(same, same.clone()).abs().max() < 1e-6  # no distance is the unit of distance


def test_differentiating_again_is_refused():
    """The gradient is written by a kernel: what it depends on further is not known, and not nothing."""
    synthetic, real = tensor(1, 3, 4), tensor(1, 5, 4, seed=1).detach()
    images = tensor(1, 2, 3, 8, 8)
    numbers = Augment.parse("color").parameters(torch.rand(1, UNIFORMS, device=DEVICE), (8, 8)).packed()
    maps, weight = tensor(2, 4, 4, 6), tensor(2, 3, 3, 3, 3, seed=1)
    for value, of in (
        (Gaussian().fused_mmd2(real, synthetic), synthetic),
        (augment(images, numbers).square(), images),
        (conv_each(maps, weight).square(), maps),
    ):
        (gradient,) = torch.autograd.grad(value.sum(), of, create_graph=True)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(gradient.square().sum(), of)


class _Fixed(Gaussian):
    """A kernel that someone else wrote upon ours."""

    def scale(self, x, y):
        return torch.ones_like(super().scale(x, y))


def test_kernels_that_are_not_fused():
    assert not _Fixed().fits(torch.zeros(1, 2, 3), torch.zeros(1, 4, 3))
    a, b = torch.zeros(1, 2, 3), torch.zeros(1, 4, 3)
    assert gaussian().fits(a, b) and not Gaussian((1.0, 3.0)).fits(a, b) and not gaussian().fits(a.double(), b.double())
    assert not gaussian().fits(a.clone().requires_grad_(), b) and not gaussian().fits(a[0], b[0])
    assert not hasattr(Linear(), "fits")


def test_which_sizes_fit():
    assert norm_fits(32, 32, 128) and norm_fits(2, 2, 16)
    assert norm_fits(112, 112, 128) and not norm_fits(7, 8, 128) and not norm_fits(8, 8, 24)
    assert stem_fits(224, 224, 3, 128) and not stem_fits(32, 32, 4, 128) and not stem_fits(32, 32, 3, 256)
    assert not stem_fits(31, 32, 3, 128) and not stem_fits(32, 32, 3, 8)
    assert make_net("convnet3", (3, 32, 32), 10).fused and make_net("convnet3", (1, 28, 28), 10).fused
    assert not make_net("convnet3:norm=none", (3, 32, 32), 10).fused and not make_net("convnet3", (3, 36, 36), 10).fused


_BF16 = pytest.param(
    torch.bfloat16,
    None,
    marks=pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter cannot multiply bf16 matrices"),
)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, None), _BF16])
@pytest.mark.parametrize("nets", [1, 2])
def test_a_whole_network(nets, dtype, tolerance):
    """Representation, logits, and gradients of images and parameters against the plain path in float32.

    float32 to a stated tolerance; half precision is off by no more than twice what the plain path in it is.
    """
    net = FlatNet(make_net("convnet2:width=16", (3, 8, 8), 4), DEVICE)
    flat = net.fresh(
        0, Purpose.ENCODER, torch.tensor([0], device=DEVICE), torch.arange(nets, device=DEVICE)
    ).requires_grad_()
    x = tensor(nets, 3, 3, 8, 8)
    with Runtime.choose(DEVICE, "fp32").active():  # no TF32 on the plain side
        fast = net.net._fused(net.unflatten(flat), x, dtype)
        net.net.fused = False
        gradients = []
        for seen in (fast, net(flat, x, dtype), net(flat, x, torch.float32)):
            loss = (seen.features.square().sum((1, 2)) + seen.logits.square().sum((1, 2))).sum()
            gradients.append((seen.features, seen.logits, *torch.autograd.grad(loss, (x, flat))))
    for fused, plain, exact in zip(*gradients, strict=True):
        allowed = 2 * (plain - exact).norm() if tolerance is None else tolerance * exact.norm()
        assert (fused - exact).norm() <= allowed


def test_the_fused_ops_trace_into_one_graph():
    net = FlatNet(make_net("convnet2:width=16", (3, 8, 8), 4), DEVICE)
    flat = net.fresh(
        0, Purpose.ENCODER, torch.tensor([0], device=DEVICE), torch.arange(2, device=DEVICE)
    ).requires_grad_()
    x = tensor(2, 3, 3, 8, 8)

    chosen = Augment.parse("color+crop+cutout")
    numbers = chosen.parameters(torch.rand(2, UNIFORMS, device=DEVICE), (8, 8)).packed()

    goal = tensor(2, 5, 64).detach()

    def loss(flat, x):
        seen = net.net._fused(net.unflatten(flat), augment(x, numbers), torch.float32)
        return seen.logits.square().sum() + Gaussian().fused_mmd2(goal, seen.features).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(
        torch.autograd.grad(loss(flat, x), (flat, x)), torch.autograd.grad(compiled(flat, x), (flat, x)), strict=True
    ):
        torch.testing.assert_close(a, b)


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from m3d import fused_augment, fused_mmd
from m3d.nets import fused_conv, fused_norm

half = {"x_ptr", "weight_ptr", "y_ptr", "out_ptr", "grad_ptr"}
convolution = {"STRIDE": 1, "K": 3, "AI": 16, "AO": 4, "N": 64, "PRECISION": "tf32"}
maps = {**convolution, "SPREAD": 2, "TURNED": True, "M": 128, "D": 32}
norms = (fused_norm._norm_forward_tiled, fused_norm._norm_backward_tiled), {"Q": 64, "BC": 32, "TILES": 49}, half
augmentation = fused_augment._augment_forward, fused_augment._augment_backward, fused_augment._augment_between
sizes = {"CHANNELS": 3, "NUMBERS": 13, "B": 1024, "TILES": 2}
mmd = (fused_mmd._discrepancy,), {"BANDS": 5, "R": 16, "B": 128, "TILES": 2}, ()
gram = (fused_mmd._gram,), {"T": 32, "K": 32, "TILES": 6, "EACH": 512}, ()
alone = augmentation, {**sizes, "group": 1}, ()  # an argument that is 1 becomes a constant
one = mmd[0], {**mmd[1], "synthetic": 1}, ()
conv = (fused_conv._conv,), maps, half
weights = (fused_conv._weights,), {**convolution, "M": 64, "D": 64}, half
for kernels, constants, half in (conv, weights, norms, (augmentation, sizes, ()), alone, mmd, one, gram):
    for kernel in kernels:
        signature = {}
        for name in kernel.arg_names:
            pointer = "*bf16" if name in half else "*fp32"
            number = "fp32" if name in {"eps", "largest", "least", "tiny"} else "i32"
            signature[name] = "constexpr" if name in constants else pointer if name.endswith("_ptr") else number
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()})
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        assert made.metadata.shared <= 49_152
"""


def test_kernels_that_only_the_interpreter_runs_here_compile_for_a_gpu(tmp_path):
    """The interpreter takes more than the compiler does; compiling needs no device."""
    import os
    import subprocess
    import sys

    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def fuse_everything(monkeypatch) -> list[str]:
    """Let every fused kernel take part, by the interpreter. The list fills with the names of those that do."""
    calls: list[str] = []

    def stacked(self, p, images, dtype, maps=False):
        return self._fused(p, images, dtype)

    monkeypatch.setattr(Augment, "apply", lambda self, *given: calls.append("augment") or self.fused(*given))
    monkeypatch.setattr(Gaussian, "mmd2", lambda self, *given: calls.append("mmd") or self.fused_mmd2(*given))
    monkeypatch.setattr(ConvNet, "stacked", stacked)
    return calls


def m3d_of(data, **options):
    method = make_method("m3d", Task("tiny", data.shape, 3, 1), {"batch_real": 5, "factor": 2, **options})[0]
    return method, FlatNet(make_net("convnet2:width=16", data.shape, 3)), Runtime.choose("cpu")


def a_step(data):
    """Losses of the first step and the images' gradient."""
    method, net, runtime = m3d_of(data)
    step = Step(method, data, net, method.tiles.encode(method.init(data, 4, 0, runtime)), 0, runtime)
    step.refill(0)
    step.pool.draw(0)
    loss = step.loss(step.lanes, step.real_index[0], step.syn_index[0], step.augmentation[0])
    return loss.detach(), *torch.autograd.grad(loss.sum(), step.synthetic.latent)


def a_run(data):
    """The set of a run of four steps through two encoders, and its losses."""
    method, net, runtime = m3d_of(data, steps=4, ipm=2, lr=0.5)
    outcome = condense(method, data, net, 1, 0, runtime)
    return outcome.pixels, torch.tensor(outcome.losses)


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu compares whole runs")
@pytest.mark.parametrize(("work", "augmented", "compared"), [(a_step, 2, 1), (a_run, 8, 4)])
def test_with_every_kernel_as_without(monkeypatch, work, augmented, compared):
    """A step, and a short run, against the plain ones."""
    data = make_dataset(classes=3, per_class=12, shape=(3, 8, 8))
    plain = work(data)
    calls = fuse_everything(monkeypatch)
    for fused, expected in zip(work(data), plain, strict=True):
        torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-5)
    assert (calls.count("augment"), calls.count("mmd")) == (augmented, compared)


def test_the_first_block_knows_its_weights_as_it_rounds_them():
    """Statistics and products are of the same numbers: weights that are rounded already give the same bits."""
    x, weight = tensor(2, 3, 8, 8, offset=4.0).detach(), tensor(1, 16, 3, 3, 3, seed=1).detach()
    gain, shift = torch.ones(1, 16, device=DEVICE), torch.zeros(1, 16, device=DEVICE)
    found = [stem(x, w, gain, shift, 1, torch.float16) for w in (weight, weight.half().float())]
    assert torch.equal(*found) and found[0].abs().sum() > 0


def test_a_network_of_one_block_is_left_to_the_library():
    """Its first block's maps are its representation, which is never rounded."""
    assert not make_net("convnet1:width=16", (3, 8, 8), 3).fused and make_net("convnet2:width=16", (3, 8, 8), 3).fused
    many = torch.empty(1, 1, 1, 4100, 4100, device="meta")
    assert not Augment.parse("crop").fits(many) and Augment.parse("crop").fits(many[..., :4000])
