"""2×2 average pooling: the library's on a GPU; on a CPU, where that goes number by number, sums of whole rows."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def halved(x: Tensor) -> Tensor:
    """[..., h/2, w/2]: the mean of every 2×2 square of ``x`` [..., h, w]; an odd last row or column is left out."""
    if x.is_cuda:
        pooled: Tensor = functional.avg_pool2d(x.flatten(0, -4), 2).unflatten(0, x.shape[:-3])
        return pooled
    h, w = (side // 2 * 2 for side in x.shape[-2:])
    even = x if x.shape[-2:] == (h, w) else x[..., :h, :w]
    # Unbound halves, not slices with a stride: the gradient of a slice is a whole map of zeros.
    upper, lower = even.unflatten(-2, (-1, 2)).unbind(-2)
    left, right = (upper + lower).unflatten(-1, (-1, 2)).unbind(-1)
    mean: Tensor = (left + right) * 0.25
    return mean
