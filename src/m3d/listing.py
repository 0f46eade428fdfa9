"""What can be asked for by name, as plain rows."""

from __future__ import annotations

from typing import Any

from m3d.data import imagenet
from m3d.data.official import RECORDS, Record
from m3d.errors import M3DError
from m3d.evaluation import PROTOCOLS
from m3d.kernels import KERNELS
from m3d.methods import METHODS, Task
from m3d.nets import NETS
from m3d.registry import Registry
from m3d.select import INITS

_REGISTRIES: dict[str, Registry[Any]] = {
    "methods": METHODS,
    "kernels": KERNELS,
    "nets": NETS,
    "inits": INITS,
    "protocols": PROTOCOLS,
}
KINDS = (*_REGISTRIES, "datasets")


# What each option means, wherever it occurs; a test sees to it that none of the package's own is missing.
MEANINGS = {
    "augment": "augmentation shared by real and synthetic images: a+b applies both, a|b draws one (color, crop, "
    "cutout, flip, scale, rotate, none)",
    "balance": "weight of the mean representation against the attention",
    "amplitude": "weight of the amplitudes of characteristic functions against their phases, from 0 to 1",
    "average_from": "the result is the mean of the images after this part of the steps; 1: the images of the last one",
    "bandwidths": "Gaussians in the kernel, each twice as wide as the one before, around the mean squared distance",
    "batch": "images per training step",
    "batch_real": "real images per class and step",
    "batch_syn": "synthetic images per inner step; auto: the published number, or all of them",
    "batch_syn_max": "decoded synthetic images per class and step, at most",
    "bounded": "bring pixels back into [0, 1] after each step",
    "cell": "height in pixels of a mini-image, as many of which as fit into a class's stored numbers; 0: by the "
    "factor; auto: 0, but on MNIST and Fashion-MNIST what was found there, where neither factor nor margin is given",
    "ce_ramp": "part of the steps over which the cross-entropy's weight rises from 0; 0: it is there from the first on",
    "ce_weight": "weight of the cross-entropy of synthetic images; in idm it is times a network's accuracy in percent",
    "chroma": "colours at full resolution, or at half beside luminance, which makes room for twice the images",
    "cov_weight": "weight of the covariances",
    "decay": "what the images' learning rate is multiplied by at 1/2 and again at 3/4 of the steps; 1: it stays",
    "degree": "highest moment the kernel sees",
    "depth": "number of blocks",
    "discriminate": "weight of classifying real features by the class means of synthetic ones",
    "early": "weight of the maps of all blocks but the last",
    "encoder_batch": "images per step of that training; auto: 512 up to 64 pixels, 64 above",
    "encoder_epochs": "epochs each encoder is trained on the real data before the first step",
    "encoder_lr": "learning rate of that training, which falls to 0 epoch by epoch",
    "encoders": "networks trained on the real data before the first step",
    "epochs": "passes over the training images",
    "expert_epochs": "epochs an expert is trained at most; only those that can be used are",
    "experts": "networks whose training on the real data is recorded",
    "factor": "mini-images along each side of a stored image",
    "features": "what images are chosen by: a trained network's representation, or pixels",
    "frequencies": "at how many places characteristic functions are compared",
    "growth": "channels every layer adds",
    "history_after": "step from which on a class's mean is to stay near its own past",
    "history_keep": "how much of that past a step leaves",
    "history_weight": "weight of staying near it; 0: none",
    "init": "where the images start ('m3d list inits')",
    "inner": "epochs of training on the synthetic images after each step",
    "inner_max": "epochs of training on the synthetic images after each step, at most",
    "inner_stop": "training after a step ends when the accuracy on real images varied by more than this in the window",
    "ipm": "iterations per model",
    "kernel": "kernel of the maximum mean discrepancy ('m3d list kernels')",
    "layer_weight": "of each block's maps against the representation",
    "layers": "how many of the last blocks' maps are matched beside the representation",
    "lr": "learning rate of the images; auto: the method's own rule (m3d: IPC × the kernel's rate)",
    "lr_lr": "learning rate of the inner learning rate",
    "lr_sampler": "learning rate of what learns the frequencies",
    "lr_teacher": "inner learning rate to begin with",
    "margin": "width in pixels of a black frame around every mini-image, for data whose images have one; auto: as cell",
    "max_start": "epochs of an expert's training that a stretch may begin with",
    "mix_high": "largest share of its initial weights that an encoder is drawn with",
    "mix_low": "smallest share of its initial weights that an encoder is drawn with; the rest are its trained ones",
    "m3d_weight": "of L_M3D where it takes the place of the method's own loss",
    "moments": "1 matches means, 2 also variances, 3 also skewnesses",
    "momentum": "of the images' descent",
    "name": "what timm calls the network",
    "network": "network trained on the whole data for its representation",
    "norm": "normalisation in every block",
    "objective": "loss: the method's own, or L_M3D in its place",
    "offset": "constant added to the inner product",
    "outer": "steps per network",
    "outer_max": "steps per network, at most",
    "outer_stop": "a new network follows when the accuracy on real images varied by less than this in the window",
    "per_network": "steps per network",
    "power": "of the activations whose sum over channels is the attention",
    "push_every": "steps between two new networks of the queue",
    "queries": "real images per class that a network's accuracy is measured on",
    "queue": "networks in the queue, at most",
    "recompute": "keep no graph of inner steps but make it again: more work, far less memory; auto: by their number",
    "recount": "steps after which the networks' training accuracies are counted anew; 0: never",
    "sampler": "where frequencies come from: a normal law, or a network that learns where the sets differ most",
    "second": "weight of the variances",
    "span": "epochs of an expert's training that a step imitates",
    "steps": "iterations",
    "syn_steps": "inner steps of training on the synthetic images",
    "third": "weight of the skewnesses",
    "train_images": "real images the network is trained on after each step",
    "train_batch": "images in each training step of such a network",
    "train_before": "epochs of all real images that a network is trained for before its first step",
    "train_cutmix": "probability of CutMix in that training",
    "train_steps": "training steps of each network that learns after a step",
    "turns": "steps that classes take by turns in one optimiser, of which one here does the work; 1: a plain step",
    "upsample": "how a mini-image is enlarged: bilinear, or bicubic or cosine, which are sharper",
    "width": "channels of the first block",
    "window": "how many of the latest accuracies of a network are looked at together",
}


def overview(what: str) -> list[dict[str, Any]]:
    """One row per name: {name, about, …}."""
    if what == "datasets":
        named = [{"name": r.name, "about": _about_dataset(r)} for r in RECORDS.values()]
        subsets = [{"name": name, "about": _about_subset(ids)} for name, ids in imagenet.subsets().items()]
        return [
            *named,
            *subsets,
            {
                "name": "PATH",
                "about": "an image folder, root/{train,test}/class/*.jpg (png, webp, …) or, with "
                "--test-fraction, root/class/*.jpg; or an .npz",
            },
            {"name": "hf:NAME", "about": "a dataset of the Hugging Face hub, or a folder saved from one (extra hf)"},
        ]
    rows = [{"name": entry.name, "about": entry.summary, **entry.about} for entry in _REGISTRIES[what]]
    if what == "methods":
        for row in rows:
            row |= _default_net(row["name"])
    return rows


def _default_net(name: str) -> dict[str, str]:
    """The network a method matches through unless another is asked for, as it is on CIFAR-10; coresets match none."""
    entry = METHODS.get(name)
    try:
        method = entry.build(Task("cifar10", (3, 32, 32), 10, 1), **entry.resolve({}))
    except M3DError:  # a user's method that does not take such images is still listed
        return {}
    return {} if method.matching is None else {"net": method.network}


def _about_subset(ids: tuple[str, ...]) -> str:
    return f"{len(ids)} classes, colour, {imagenet.SIDE} pixels, from your own ILSVRC folder (--data-root)"


def _about_dataset(record: Record) -> str:
    origin = "shipped with m3d" if record.bundled else "downloaded when first used"
    return f"{len(record.class_names)} classes, {'grey' if record.channels == 1 else 'colour'}, {origin}"


def describe(what: str, name: str) -> list[dict[str, Any]]:
    """One row per option of ``name``: {name, about, default}."""
    if what not in _REGISTRIES:
        raise M3DError(f"{what} have no options; 'm3d list {what}' shows them all")
    options = _REGISTRIES[what].get(name).options()
    rows = [
        {
            "name": o.name,
            "about": MEANINGS.get(o.name, ""),
            "type": o.kind,
            "default": "auto" if o.default is None else o.default,
        }
        for o in options.values()
    ]
    return rows or [{"name": name, "about": "takes no option"}]
