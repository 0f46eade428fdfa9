"""Whether a run goes well: losses that are numbers and do not rise, pixels that are not all black and white."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m3d.errors import M3DError
from m3d.wording import option

_RECENT = 8  # steps whose mean loss tells whether a run diverges
_NOTHING = 1e-5  # a loss below it is rounding: synthetic images that are all of a class begin at zero
_SATURATED = 0.97  # share of pixels at the ends of their range that no image has by itself


def require_numbers(block: Tensor, first: int, class_names: Sequence[str]) -> None:
    """Stop on NaN or infinity among the losses [steps, C] from step ``first`` on, naming the step and the class."""
    broken = (~torch.isfinite(block)).nonzero()
    if len(broken):
        step, c = broken[0].tolist()
        raise M3DError(
            f"step {first + step}: the loss of class {class_names[c]!r} is {block[step, c].item()}; "
            f"try a smaller {option('lr')} or {option('precision', 'fp32')}"
        )


def require_no_rise(losses: Sequence[float], block: Tensor, limit: float, class_names: Sequence[str]) -> None:
    """Stop where the mean loss is lately over ``limit`` times its first value, naming the class that rose most.

    ``losses`` are the means of all steps so far, ``block`` [steps, C] the latest ones, class by class.
    """
    start, recent = losses[0], sum(losses[-_RECENT:]) / len(losses[-_RECENT:])
    if recent > limit * max(start, _NOTHING):
        worst = int(block[-_RECENT:].mean(0).argmax())
        raise M3DError(
            f"step {len(losses)}: the loss rose from {start:.3g} to {recent:.3g}, most in class "
            f"{class_names[worst]!r}; the run diverges, try a smaller {option('lr')}"
        )


def require_unsaturated(share: float, at_first: float, step: int) -> None:
    """A bounded loss cannot show divergence; images that are all black and white do, unless they began so."""
    if share > _SATURATED > at_first:
        raise M3DError(
            f"step {step}: {share:.0%} of the pixels are pushed to black or white; the run diverges, "
            f"try a smaller {option('lr')}"
        )


def saturated(pixels: Tensor) -> Tensor:
    """The share of pixels [C, ipc, ch, h, w] at the ends of their range, class by class: [C]."""
    return ((pixels <= 1e-6) | (pixels >= 1 - 1e-6)).float().flatten(1).mean(1)
