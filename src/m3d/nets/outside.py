"""Networks of the library timm, where it is installed: ``timm:resnet18``.

They are taken as architectures alone. Nothing pretrained is ever loaded; batch norms become this project's, which keep
no running statistics; dropout is off, since its draws would not be keyed by the seed. Layers start as PyTorch starts
their kind (convolutions and linear layers uniform by fan-in, norms at one and zero), *not* by the laws of timm's own
models (truncated normals, zeroed last norms): a network that keeps other parameters, such as position embeddings or
layer scales, has no such law and is refused.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from m3d.errors import M3DError
from m3d.nets.norms import BatchNorm
from m3d.nets.single import Single, wide
from m3d.types import Seen


class Outside(Single):
    """A timm model: its pooled representation and logits, without block maps."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Seen:
        """What it sees in ``images`` [n, ch, h, w]; convolutions compute in the precision of the images."""
        low = images.dtype in (torch.bfloat16, torch.float16)
        # Weights are cast where they are used and the casts not kept: a kept one would outlive a recorded step.
        cast = torch.autocast(images.device.type, images.dtype, cache_enabled=False) if low else nullcontext()
        with cast:
            maps = self.model.forward_features(wide(images))
            features = wide(self.model.forward_head(maps, pre_logits=True))
        logits: Tensor = self.model.get_classifier()(features)
        return Seen((), features, logits)


def timm_net(shape: tuple[int, int, int], classes: int, name: str) -> Single:
    """The architecture that timm calls ``name``, for images of ``shape``."""
    try:
        import timm
    except ImportError as error:
        raise M3DError(f"timm:{name} needs the library timm, not installed here ({error}): pip install timm") from error
    except Exception as error:  # installed, but not for this PyTorch: torchvision says so by a RuntimeError
        raise M3DError(f"timm:{name}: timm is installed but cannot be imported: {error}") from error
    try:
        model = timm.create_model(name, pretrained=False, num_classes=classes, in_chans=shape[0])
    except Exception as error:  # an unknown name, or a model that does not take these arguments
        raise M3DError(f"timm has no usable network {name!r}: {error}") from error
    if not isinstance(model.get_classifier(), nn.Linear):
        raise M3DError(f"timm:{name} does not end in one linear layer; allowed: networks that do")
    _make_stateless(model)
    left = [key for key, _ in model.named_buffers()]
    if left:
        raise M3DError(f"timm:{name} keeps buffers beside its parameters ({left[0]}, …); allowed: networks without")
    return Outside(model)


def _make_stateless(parent: nn.Module) -> None:
    """Replace batch norms and switch off dropout, in place."""
    for name, child in parent.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(parent, name, _batch_norm(child))
            continue
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        if hasattr(child, "drop_prob"):  # timm's stochastic depth
            setattr(child, "drop_prob", 0.0)  # noqa: B010 (its type is not known here)
        _make_stateless(child)


def _batch_norm(norm: nn.BatchNorm2d) -> nn.Module:
    """The same norm without running statistics; timm's own kind has an activation after it."""
    if not norm.affine:
        raise M3DError("a batch norm without gain and shift is not known; allowed: those with both")
    mine = BatchNorm(norm.num_features)
    mine.eps = norm.eps
    activation = getattr(norm, "act", None)
    return mine if activation is None else nn.Sequential(mine, activation)
