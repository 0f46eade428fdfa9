"""Factor & up-sampling against hand-made cases and the library's interpolation."""

import numpy
import pytest
import torch
from torch.nn import functional

import m3d
from m3d.errors import M3DError
from m3d.normalise import Normalise
from m3d.synth import Synthetic
from m3d.tiles import Tiles
from m3d.upsamplers import bilinear_matrix, cosine_matrix


def stored(n=2, ch=3, h=8, w=8):
    return torch.rand(4, n, ch, h, w, generator=torch.Generator().manual_seed(0))


def naive_decode(x, l):
    """Cut, pad, enlarge: one image and one cell at a time."""
    h, w = x.shape[-2:]
    cell_h, cell_w = -(-h // l), -(-w // l)
    out = []
    for picture in x.reshape(-1, *x.shape[-3:]):
        padded = torch.full((picture.shape[0], cell_h * l, cell_w * l), 0.5)
        padded[:, :h, :w] = picture
        for i in range(l):
            for j in range(l):
                cell = padded[:, i * cell_h : (i + 1) * cell_h, j * cell_w : (j + 1) * cell_w]
                out.append(functional.interpolate(cell[None], (h, w), mode="bilinear", align_corners=False)[0])
    return torch.stack(out).view(*x.shape[:-4], -1, *x.shape[-3:])


@pytest.mark.parametrize("factor", [1, 2, 3, 4])
@pytest.mark.parametrize("side", [(8, 8), (9, 9), (7, 10), (28, 28)])
def test_decode_matches_the_naive_one(factor, side):
    x = stored(h=side[0], w=side[1])
    out = Tiles(factor).decode(x)
    assert out.shape == (4, 2 * factor**2, 3, *side)
    torch.testing.assert_close(out, naive_decode(x, factor), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("factor", "side"), [(2, 8), (2, 9), (3, 9), (3, 32)])
def test_a_mosaic_may_start_from_interpolated_images(factor, side):
    """Every cell is the library's bilinear reduction of another image; at factor 2 the mean of 2×2 squares."""
    images = torch.rand(2, 2 * factor**2, 3, side, side, generator=torch.Generator().manual_seed(0))
    cell = -(-side // factor)
    made = Tiles(factor, "bilinear").encode(images)
    assert made.shape == (2, 2, 3, side, side)
    small = functional.interpolate(images.flatten(0, 1), (cell, cell), mode="bilinear", align_corners=False)
    small = small.view(2, 2, factor, factor, 3, cell, cell)
    for i in range(factor):
        for j in range(factor):
            part = made[..., i * cell : (i + 1) * cell, j * cell : (j + 1) * cell]
            torch.testing.assert_close(part, small[:, :, i, j][..., : part.shape[-2], : part.shape[-1]])
    assert not torch.allclose(made, Tiles(factor).encode(images))
    if (factor, side) == (2, 8):
        torch.testing.assert_close(made[:, 0, :, :4, :4], functional.avg_pool2d(images[:, 0], 2))


def test_224_pixels_by_3_are_75_pixel_cells():
    x = torch.rand(1, 1, 1, 224, 224)
    torch.testing.assert_close(Tiles(3).decode(x), naive_decode(x, 3), atol=1e-5, rtol=1e-5)


def test_decode_of_factor_2_by_hand():
    x = torch.zeros(1, 1, 4, 4)
    x[..., :2, 2:] = 1  # the second cell is white
    out = Tiles(2).decode(x)
    assert torch.equal(out[:, 0, 0, 0], torch.tensor([0.0, 1.0, 0.0, 0.0]))
    assert torch.equal(out.flatten(1).std(1) == 0, torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize(("factor", "side"), [(1, 8), (2, 8), (2, 9), (3, 8), (3, 224)])
def test_encode_puts_a_different_image_in_each_cell(factor, side):
    tiles = Tiles(factor)
    images = torch.arange(2.0 * factor**2).view(1, -1, 1, 1, 1).expand(1, -1, 1, side, side) / 20
    mosaic = tiles.encode(images)
    assert mosaic.shape == (1, 2, 1, side, side)
    back = tiles.decode(mosaic)
    centre = back[0, :, 0, side // 3, side // 3]
    torch.testing.assert_close(centre, images[0, :, 0, 0, 0])


def test_encode_takes_the_nearest_pixel():
    image = torch.rand(1, 4, 1, 8, 8)
    cell = Tiles(2).encode(image)[0, 0, 0, :4, :4]
    torch.testing.assert_close(cell, functional.interpolate(image[0, :1], (4, 4), mode="nearest")[0, 0])


def test_bilinear_matrix_rows_sum_to_one():
    matrix = bilinear_matrix(225, 75)
    torch.testing.assert_close(matrix.sum(1), torch.ones(225))
    assert (matrix >= 0).all()


@pytest.mark.parametrize("standardised", [False, True])
def test_synthetic_projects_into_the_pixel_range(standardised):
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.1])
    synthetic = Synthetic(stored(), Tiles(2), Normalise(mean.tolist(), std.tolist()), standardised)
    torch.testing.assert_close(synthetic.pixels(), stored())
    with torch.no_grad():
        synthetic.latent.add_(torch.randn_like(synthetic.latent) * 5)
    synthetic.project_()
    pixels = synthetic.pixels()
    assert pixels.min() >= -1e-6 and pixels.max() <= 1 + 1e-6
    assert (pixels < 1e-6).any() and (pixels > 1 - 1e-6).any()
    expected = (Tiles(2).decode(pixels) - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(synthetic(torch.tensor([2, 0])), expected[[2, 0]])


def test_factor_zero_is_refused():
    with pytest.raises(M3DError, match="factor=0"):
        Tiles(0)


@pytest.mark.parametrize(("factor", "side"), [(2, (32, 32)), (3, (32, 30)), (4, (28, 28)), (2, (9, 8))])
def test_bicubic_cells_are_the_library_s(factor, side):
    """Against its bicubic interpolation of each cell, what overshoots cut off; and it does overshoot."""
    x = torch.rand(2, 3, 1, *side, generator=torch.Generator().manual_seed(1)).round()
    cells = [-(-s // factor) for s in side]
    padded = functional.pad(x, (0, cells[1] * factor - side[1], 0, cells[0] * factor - side[0]), value=0.5)
    out = Tiles(factor, upsample="bicubic").decode(x)
    overshoots = 0
    for image in range(3):
        for i in range(factor):
            for j in range(factor):
                cell = padded[:, image, :, i * cells[0] : (i + 1) * cells[0], j * cells[1] : (j + 1) * cells[1]]
                large = functional.interpolate(cell, size=side, mode="bicubic", align_corners=False)
                overshoots += int(((large < -0.01) | (large > 1.01)).sum())
                mine = out[:, image * factor**2 + i * factor + j]
                torch.testing.assert_close(mine, large.clamp(0, 1), atol=1e-5, rtol=1e-5)
    assert overshoots > 0


@pytest.mark.parametrize(("target", "source"), [(32, 16), (32, 8), (225, 75), (9, 5), (8, 8)])
def test_cosine_cells_are_the_library_s_transform_with_zeros_above(target, source):
    """Against scipy's transform; columns are orthogonal, constants stay, and of the same size nothing changes."""
    fft = pytest.importorskip("scipy.fft")
    matrix, x = cosine_matrix(target, source).double(), torch.rand(source, 3, dtype=torch.float64)
    spectrum = fft.dct(x.numpy(), axis=0, norm="ortho") * (target / source) ** 0.5
    padded = numpy.pad(spectrum, ((0, target - source), (0, 0)))
    torch.testing.assert_close(matrix @ x, torch.from_numpy(fft.idct(padded, axis=0, norm="ortho")), atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(source).double() * target / source, atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix.sum(1), torch.ones(target).double(), atol=1e-5, rtol=0)
    if target == source:
        torch.testing.assert_close(matrix, torch.eye(source).double(), atol=1e-5, rtol=0)


def test_cosine_cells_are_decoded_row_by_column_and_cut_off():
    stored = torch.rand(1, 2, 3, 8, 8, generator=torch.Generator().manual_seed(2)).round()
    matrix = cosine_matrix(8, 4)
    whole = matrix @ stored[0, 1, :, 4:, :4] @ matrix.T
    assert (whole < -0.01).any() and (whole > 1.01).any()
    torch.testing.assert_close(Tiles(2, upsample="cosine").decode(stored)[0, 4 + 2], whole.clamp(0, 1))


def test_a_set_is_decoded_as_its_method_did(tmp_path):
    options = {"steps": 2, "batch_real": 4, "factor": 2, "augment": "none", "net": "convnet2:width=8"}
    made = m3d.condense("digits", 1, upsample="bicubic", out=tmp_path / "run", **options)
    loaded = m3d.CondensedSet.load(tmp_path / "run")
    assert loaded.manifest["upsample"] == "bicubic"
    images = Tiles(2, upsample="bicubic").decode(made.images)
    assert torch.equal(loaded.decoded()[0], images) and not torch.equal(images, Tiles(2).decode(made.images))
    dataset = m3d.CondensedDataset(tmp_path / "run", normalise=False)
    assert torch.equal(dataset[3][0], images[3])
    with pytest.raises(M3DError, match=r"upsample='cubic' is not valid; allowed: one of bilinear, bicubic, cosine"):
        m3d.condense("digits", 1, upsample="cubic", **options)
    with pytest.raises(M3DError, match=r"unknown upsample 'cubic'.*'bicubic'\?.*Allowed: bicubic, bilinear, cosine"):
        Tiles(2, upsample="cubic")
