"""Kernels and MMD² against naive double loops, and the paper's motivation as a test."""

import math

import pytest
import torch

from m3d.errors import M3DError
from m3d.kernels import (
    KERNELS,
    Gaussian,
    Kernel,
    Linear,
    Polynomial,
    make_kernel,
    mean_squared_distance,
    squared_distance,
)

NAMED = KERNELS.names()
COMPOSED = [Gaussian() + 0.5 * Linear(), Linear() * Polynomial(), 2 * Gaussian(), Gaussian((0.3, 1.1))]


def kernels() -> list[Kernel]:
    return [make_kernel(name) for name in NAMED] + COMPOSED


def points(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive_gaussian(x, y, b):
    """Σ_m exp(−‖x−y‖²/(b·m)) from the definition, one pair at a time."""
    return torch.tensor(
        [[sum(math.exp(-float(((p - q) ** 2).sum()) / (b * m)) for m in (0.25, 0.5, 1, 2, 4)) for q in y] for p in x],
        dtype=torch.float64,
    )


def naive_bandwidth(z):
    n = len(z)
    return sum(float(((z[i] - z[j]) ** 2).sum()) for i in range(n) for j in range(n)) / (n * n - n)


def test_the_sweep_covers_the_registered_kernels():
    assert {"gaussian", "linear", "polynomial"} <= set(NAMED)
    assert len(NAMED) == 3 and len(kernels()) == 7  # raise these with every kernel added


def test_bandwidth_is_the_mean_squared_distance_of_pairs():
    z = points(2, 7, 5)
    expected = torch.tensor([naive_bandwidth(z[c]) for c in range(2)], dtype=torch.float64)
    torch.testing.assert_close(mean_squared_distance(z), expected)


def test_squared_distance_survives_a_large_offset_in_float32():
    x, y = points(4, 8).float(), points(5, 8, seed=1).float()
    expected = ((x[:, None] - y) ** 2).sum(-1)
    torch.testing.assert_close(squared_distance(x + 1000, y + 1000), expected, rtol=2e-3, atol=2e-3)


def test_gaussian_gram_matches_the_naive_one():
    x, y = points(6, 4), points(3, 4, seed=1)
    b = naive_bandwidth(torch.cat([x, y]))
    torch.testing.assert_close(Gaussian()(x, y, torch.tensor([b], dtype=torch.float64)), naive_gaussian(x, y, b))


def test_gaussian_with_other_multiples_matches_its_definition():
    x, y, b = points(6, 4), points(3, 4, seed=1), 2.5
    expected = sum(torch.exp(-squared_distance(x, y) / (b * m)) for m in (0.3, 1.1))
    torch.testing.assert_close(Gaussian((0.3, 1.1))(x, y, torch.tensor([b], dtype=torch.float64)), expected)


def test_polynomial_and_linear_match_their_definitions():
    x, y = points(6, 4), points(3, 4, seed=1)
    none = torch.ones(0, dtype=torch.float64)
    for i in range(6):
        for j in range(3):
            dot = float(x[i] @ y[j])
            assert math.isclose(float(Linear()(x, y, none)[i, j]), dot)
            assert math.isclose(float(Polynomial(3, 2.0)(x, y, none)[i, j]), (dot + 2) ** 3)


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: type(k).__name__)
def test_every_kernel_keeps_the_contract(kernel):
    x, y = points(3, 6, 4), points(3, 5, 4, seed=1)
    scale = kernel.scale(x, y)
    assert scale.shape == (3, kernel.scales) and not scale.requires_grad
    gram = kernel(x, y, scale)
    assert gram.shape == (3, 6, 5)
    torch.testing.assert_close(gram, kernel(y, x, scale).mT)  # symmetric
    torch.testing.assert_close(kernel.mean(x, y, scale), gram.mean((-2, -1)))  # closed form equals Gram mean
    for c in range(3):  # batched equals loop
        torch.testing.assert_close(kernel(x[c], y[c], scale[c]), gram[c])
    own = kernel(x, x, scale)
    assert torch.linalg.eigvalsh(own).min() > -1e-9  # positive semidefinite
    fixed = scale[0]
    assert torch.autograd.gradcheck(lambda a, b: kernel(a, b, fixed), (x[0].requires_grad_(), y[0].requires_grad_()))


def test_rates():
    """Every named kernel has a default learning rate; products have none, and M3D asks for one."""
    assert [make_kernel(n).rate for n in ("gaussian", "linear")] == [1.0, 5.2e-3]
    assert math.isclose(make_kernel("polynomial").rate, 6.5e-6) and make_kernel("polynomial:degree=3").rate < 2e-8
    assert (2 * Gaussian()).rate == 0.5 and (Gaussian() + Linear()).rate == 5.2e-3
    assert (Linear() * Polynomial()).rate is None and (2 * (Linear() * Polynomial())).rate is None


def test_wrong_operands_and_values_are_refused():
    with pytest.raises(M3DError, match="kernel \\+ 3"):
        Gaussian() + 3
    with pytest.raises(M3DError, match="kernel \\* 'a'"):
        Gaussian() * "a"
    with pytest.raises(M3DError, match="positive"):
        -1 * Gaussian()
    with pytest.raises(M3DError, match="degree=0"):
        Polynomial(0)
    with pytest.raises(M3DError, match="multiples"):
        Gaussian(())
    with pytest.raises(M3DError, match="Did you mean 'gaussian'"):
        make_kernel("gausian")
    with pytest.raises(M3DError, match="degree"):
        make_kernel("polynomial:degre=2")


def naive_mmd2(kernel, real, syn):
    scale = kernel.scale(syn, real)

    def mean(a, b):
        return sum(float(kernel(p[None], q[None], scale)) for p in a for q in b) / (len(a) * len(b))

    return mean(real, real) + mean(syn, syn) - 2 * mean(real, syn)


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: type(k).__name__)
def test_mmd2_matches_a_double_loop_for_every_class(kernel):
    real, syn = points(2, 5, 3), points(2, 4, 3, seed=1) + 0.3
    value = kernel.mmd2(real, syn)
    assert value.shape == (2,)
    for c in range(2):
        assert math.isclose(float(value[c]), naive_mmd2(kernel, real[c], syn[c]), rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: type(k).__name__)
def test_mmd2_gradient_with_the_bandwidth_held(kernel):
    real, syn = points(1, 5, 3), points(1, 4, 3, seed=1).requires_grad_()
    scale = kernel.scale(syn, real)

    def value(s):
        return kernel.mean(real, real, scale) + kernel.mean(s, s, scale) - 2 * kernel.mean(s, real, scale)

    assert torch.autograd.gradcheck(value, (syn,))
    (mine,) = torch.autograd.grad(kernel.mmd2(real, syn).sum(), syn)
    (held,) = torch.autograd.grad(value(syn).sum(), syn)
    torch.testing.assert_close(mine, held)  # the bandwidth is detached


def test_linear_mmd2_is_the_distance_of_the_means():
    real, syn = points(3, 9, 4), points(3, 2, 4, seed=1)
    torch.testing.assert_close(Linear().mmd2(real, syn), (real.mean(1) - syn.mean(1)).square().sum(-1))


def atoms(values, weights, copies=60):
    """A one-dimensional distribution as a list of points."""
    return torch.cat(
        [torch.full((round(w * copies), 1), v, dtype=torch.float64) for v, w in zip(values, weights, strict=True)]
    )


def test_what_each_kernel_sees():
    """The paper's Fig. 1: equal means fool the linear kernel, equal means and variances the degree-2 polynomial,
    neither the Gaussian (Theorem 1: only its mean map is injective)."""
    wide = atoms((-2, 2), (0.5, 0.5))
    narrow = atoms((-1, 1), (0.5, 0.5))
    skewed = atoms((-1, 4), (0.8, 0.2))  # mean 0, variance 4 like `wide`, but skewed
    quadratic = Polynomial(2)
    assert abs(float(Linear().mmd2(wide, narrow))) < 1e-12
    assert float(quadratic.mmd2(wide, narrow)) > 1
    assert abs(float(quadratic.mmd2(wide, skewed))) < 1e-9
    assert float(Polynomial(3).mmd2(wide, skewed)) > 1
    for other in (narrow, skewed):
        assert float(Gaussian().mmd2(wide, other)) > 0.05
    assert Gaussian().universal and not Linear().universal and not quadratic.universal


def test_the_estimate_converges_at_the_rate_of_theorem_2():
    """‖μ[P] − μ[sample]‖ falls as n^(−1/2): the fitted exponent over a 64-fold range lies near −1/2."""
    sizes = (16, 64, 256, 1024)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for n in sizes:
        pairs = [torch.randn(2, n, 2, dtype=torch.float64, generator=generator) for _ in range(40)]
        errors.append(sum(float(Gaussian().mmd2(a, b).clamp(min=0).sqrt()) for a, b in pairs) / len(pairs))
    slope = (math.log(errors[-1]) - math.log(errors[0])) / (math.log(sizes[-1]) - math.log(sizes[0]))
    assert -0.58 < slope < -0.42


def test_the_number_of_bandwidths():
    assert make_kernel("gaussian").multiples == Gaussian().multiples == (0.25, 0.5, 1.0, 2.0, 4.0)
    assert make_kernel("gaussian:bandwidths=1").multiples == (1.0,)
    assert make_kernel("gaussian:bandwidths=4").multiples == pytest.approx([2**-1.5, 2**-0.5, 2**0.5, 2**1.5])
    with pytest.raises(M3DError, match="bandwidths=0"):
        make_kernel("gaussian:bandwidths=0")
