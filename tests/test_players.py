"""Who moves the images: AdamW against the library's, in turns and alone."""

import pytest
import torch

from m3d.errors import M3DError
from m3d.players import AdamW


@pytest.mark.parametrize(("turns", "decay"), [(2, 0.0), (10, 0.3), (100, 0.0)])
def test_a_round_of_turns_is_that_many_steps_of_the_library_s(turns, decay):
    """Classes share one optimiser: each has its gradient in its own turn. The first one's path, step for step."""
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(turns, 5, generator=generator), torch.randn(12, turns, 5, generator=generator)
    mine, theirs = start.clone(), start.clone().requires_grad_()
    player = AdamW(0.03, decay=decay, turns=turns).start(mine)
    optimiser = torch.optim.AdamW([theirs], lr=0.03, weight_decay=decay)
    for round_ in gradients:
        player.step(round_)
        for c in range(turns):
            theirs.grad = torch.zeros_like(theirs)
            theirs.grad[c] = round_[c]
            optimiser.step()
        torch.testing.assert_close(mine[0], theirs.detach()[0], atol=2e-5, rtol=1e-4)
    assert AdamW(0.1).turns == 1
    with pytest.raises(M3DError, match="turns=0"):
        AdamW(0.1, turns=0)


@pytest.mark.parametrize("ascent", [False, True])
def test_adamw_is_the_library_s(ascent):
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(7, generator=generator), torch.randn(20, 7, generator=generator)
    mine, theirs = start.clone(), start.clone().requires_grad_()
    player = AdamW(0.03, (0.8, 0.95), decay=0.1, ascent=ascent).start(mine)
    optimiser = torch.optim.AdamW([theirs], lr=0.03, betas=(0.8, 0.95), weight_decay=0.1, maximize=ascent)
    for gradient in gradients:
        player.step(gradient)
        theirs.grad = gradient.clone()
        optimiser.step()
    torch.testing.assert_close(mine, theirs.detach(), atol=1e-6, rtol=1e-5)
    with pytest.raises(M3DError, match="lr=0"):
        AdamW(0)
    with pytest.raises(M3DError, match="betas"):
        AdamW(0.1, (0.9, 1.0))
