"""Augmentation: siamese, differentiable, each operation against a hand-made case."""

import pytest
import torch
from torch.nn import functional

from m3d.augment import NUMBERS, OPERATIONS, UNIFORMS, Augment, Parameters, _sample_by_index, translate, warp
from m3d.errors import M3DError


def images(groups=2, n=3, ch=3, h=8, w=8, seed=0):
    return torch.randn(groups, n, ch, h, w, generator=torch.Generator().manual_seed(seed))


def uniforms(groups, **at):
    """0.5 everywhere (which changes nothing but saturation and contrast of 1) unless said otherwise."""
    u = torch.full((groups, UNIFORMS), 0.5)
    for place, value in at.items():
        u[:, int(place[1:])] = value
    return u


def run(augment, x, u):
    return augment.apply(x, augment.parameters(u, (x.shape[-2], x.shape[-1])))


def random_uniforms(groups, seed=0):
    return torch.rand(groups, UNIFORMS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_acts_and_is_the_same_for_all_images_of_a_group(operation):
    augment, x = Augment(always=(operation,)), images(groups=8)
    u = random_uniforms(8)
    out = run(augment, x, u)
    assert out.shape == x.shape and not torch.equal(out, x)
    both = run(augment, torch.cat([x, x.flip(1)], dim=1), u)  # real and synthetic side by side: siamese
    torch.testing.assert_close(both[:, :3], out)
    torch.testing.assert_close(both[:, 3:], out.flip(1))


def test_nothing_is_done_by_none_and_by_neutral_parameters():
    x = images()
    assert torch.equal(run(Augment(), x, uniforms(2)), x)
    torch.testing.assert_close(
        run(Augment(always=("color", "crop", "scale", "rotate")), x, uniforms(2, _5=0.4545455, _6=0.4545455)), x
    )


def test_color_matches_its_formulas():
    x = images(groups=1)
    out = run(Augment(always=("color",)), x, uniforms(1, _1=0.9, _2=0.25, _3=0.2))
    y = x + 0.4
    grey = y.mean(2, keepdim=True)
    y = (y - grey) * 0.5 + grey
    level = y.mean((2, 3, 4), keepdim=True)
    torch.testing.assert_close(out, (y - level) * 0.7 + level)


@pytest.mark.parametrize(("u", "shift"), [(0.0, -1), (0.5, 0), (0.99, 1)])
def test_crop_is_a_translation_with_zeros_flowing_in(u, shift):
    x = images(groups=1)
    out = run(Augment(always=("crop",)), x, uniforms(1, _8=u, _9=0.5))
    padded = functional.pad(x, (0, 0, 1, 1))
    torch.testing.assert_close(out, padded[..., 1 + shift : 9 + shift, :], atol=1e-5, rtol=0)


def test_crop_reaches_an_eighth_of_the_side():
    augment, shifts = Augment(always=("crop",)), set()
    for u in torch.linspace(0, 0.999, 50):
        shifts.add(int(augment.parameters(uniforms(1, _8=float(u)), (32, 32)).shift[0, 0]))
    assert shifts == set(range(-4, 5))


def test_flip_mirrors_with_probability_a_half():
    x = images(groups=1)
    augment = Augment(always=("flip",))
    torch.testing.assert_close(run(augment, x, uniforms(1, _4=0.49)), x.flip(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(run(augment, x, uniforms(1, _4=0.5)), x, atol=1e-5, rtol=0)


def test_cutout_zeroes_one_square_clipped_at_the_border():
    x = torch.ones(1, 1, 1, 8, 8)
    out = run(Augment(always=("cutout",)), x, uniforms(1, _10=0.5, _11=0.0))[0, 0, 0]
    expected = torch.ones(8, 8)
    expected[2:6, 0:2] = 0  # centre (4, 0), side 4
    assert torch.equal(out, expected)


def test_scale_and_rotate_match_the_librarys_affine_sampling():
    x = images(groups=1, h=9, w=7)
    u = uniforms(1, _5=0.9, _6=0.1, _7=0.8)
    for name in ("scale", "rotate"):
        p = Augment(always=(name,)).parameters(u, (9, 7))
        m = p.matrix[0]
        # (y, x) pixels → the library's (x, y) in [−1, 1]
        theta = torch.tensor([[m[1, 1], m[1, 0] * 9 / 7, 0], [m[0, 1] * 7 / 9, m[0, 0], 0]])[None]
        grid = functional.affine_grid(theta, [1, 9, 9, 7], align_corners=False)
        expected = functional.grid_sample(x.view(1, 9, 9, 7), grid, align_corners=False).view(x.shape)
        torch.testing.assert_close(warp(x, p.matrix, p.shift), expected, atol=1e-5, rtol=1e-4)


def test_sampling_by_index_equals_grid_sampling_forward_and_backward():
    augment = Augment(always=("flip", "crop", "scale", "rotate"))
    x = images(groups=4, h=8, w=8).requires_grad_()
    p = augment.parameters(random_uniforms(4), (8, 8))
    centre = torch.arange(8) - 3.5
    points = torch.stack(torch.meshgrid(centre, centre, indexing="ij"), -1).view(1, 64, 2)
    source = (points @ p.matrix.mT + p.shift[:, None] + 3.5).view(4, 8, 8, 2)
    mine, theirs = _sample_by_index(x, source[..., 0], source[..., 1]), warp(x, p.matrix, p.shift)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    gradients = [
        torch.autograd.grad((out * images(groups=4, seed=5)).sum(), x, retain_graph=True)[0] for out in (mine, theirs)
    ]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_translation_equals_sampling_forward_and_backward():
    """Shifts past the border and mirrors, float64, and the compiled one in one graph."""
    images = torch.rand(5, 2, 3, 7, 6, dtype=torch.float64, requires_grad=True)
    shift = torch.tensor([[0, 0], [2, -1], [-3, 2], [0, 5], [9, 0]], dtype=torch.float64)
    sign = torch.tensor([1, -1, 1, -1, 1], dtype=torch.float64)
    matrix = torch.diag_embed(torch.stack([torch.ones_like(sign), sign], dim=-1))
    expected, weight = warp(images, matrix, shift), torch.rand_like(images)
    (gradient,) = torch.autograd.grad((expected * weight).sum(), images)
    assert expected[1:4].abs().sum() > 0 and expected[4].abs().sum() == 0
    for move in (translate, torch.compile(translate, backend="aot_eager", fullgraph=True)):
        moved = move(images, sign, shift)
        torch.testing.assert_close(moved, expected)
        torch.testing.assert_close(torch.autograd.grad((moved * weight).sum(), images)[0], gradient)
    assert torch.autograd.gradcheck(lambda x: translate(x, sign, shift), images)


def test_the_whole_is_differentiable():
    augment = Augment(always=OPERATIONS)
    x = images(groups=2, n=1, h=6, w=6).double().requires_grad_()
    p = augment.parameters(random_uniforms(2).double(), (6, 6))
    assert torch.autograd.gradcheck(lambda v: augment.apply(v, p), (x,), eps=1e-5, atol=1e-3, rtol=1e-3)


def test_parameters_packed_and_back():
    p = Augment(always=OPERATIONS).parameters(random_uniforms(5), (8, 6))
    assert p.packed().shape == (5, NUMBERS)
    for mine, again in zip(p, Parameters.unpacked(p.packed()), strict=True):
        assert torch.equal(mine, again)


def test_one_of_applies_exactly_one():
    augment = Augment(one_of=("color", "crop", "cutout", "flip", "scale", "rotate"))
    x = images(groups=1)
    for k, name in enumerate(augment.one_of):
        u = random_uniforms(1, seed=3)
        u[:, 0] = (k + 0.5) / 6
        torch.testing.assert_close(run(augment, x, u), run(Augment(always=(name,)), x, u), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("text", ["none", "color+crop+cutout", "color|crop|flip", "flip+color+crop|scale|rotate"])
def test_text_and_back(text):
    assert str(Augment.parse(text)) == text


def test_bad_augmentations_are_refused():
    with pytest.raises(M3DError, match="Did you mean 'color'"):
        Augment.parse("colour")
    with pytest.raises(M3DError, match="only one part"):
        Augment.parse("color|crop+flip|scale")
    for twice in ("color|color|crop", "crop+crop"):  # one of them would be drawn and do nothing
        with pytest.raises(M3DError, match=f"'{twice.replace('|', '.').replace('+', '.')}'.*twice"):
            Augment.parse(twice)
    with pytest.raises(M3DError, match="flip stands there twice"):
        Augment(always=("flip",), one_of=("flip", "crop"))


def test_without_leaves_out():
    assert Augment.parse("flip+color+flip|crop".replace("flip|crop", "crop|scale")).without("flip", "crop") == Augment(
        always=("color",), one_of=("scale",)
    )
