"""IDM: Zhao et al., "Improved Distribution Matching for Dataset Condensation", CVPR 2023.

DM with three changes: a stored image is a mosaic of four ("partitioning and expansion"); encoders are networks of all
ages from a queue that goes on learning from real images; and beside the means of the flattened representation, the
synthetic images shall be told apart by the encoder that matches them:

    Σ_c ‖mean f(real) − mean f(synthetic)‖² + ce_weight · (training accuracy of f in percent) · CE(f, synthetic)

``objective`` m3d puts L_M3D in place of the first term and changes nothing else, as in the M3D paper's compatibility
table.

Settings are those of the authors' published commands (not of their script's defaults, which give plain DM): 20,000
iterations, of which they report the best evaluated one; learning rate 0.2 in standardised units; a new network every 30
iterations (5 at one image per class, 50 for large images), at most 100 of them (50); 256 real images (the whole class,
at most 5,000, at one image per class; 128 large ones), and batches of 256 (128) where networks train; the weights of
the cross-entropy by resolution, classes and IPC. Training accuracies are counted anew every 100 to 1,000 iterations,
because the authors' meters are reset at each of their evaluations: a network that did not learn since has no say.

Departures:
- The result is the last step's set, not the best of all by test accuracy. At most 200 decoded images of a class serve a
  step (``batch_syn_max``), which is all of them up to 50 images per class.
- All classes move in one step. The authors step class after class through one optimiser whose momentum goes on moving
  every class while the others have their turn; when a class comes to its next turn it has been moved by
  lr · (1 + m + … + m^(C−1)) times its gradient, and m^C of it is still to come. So here the rate is that sum, and no
  momentum is carried from one iteration to the next (at m = 0.5 and ten classes, a thousandth is neglected).
- Images are clamped to [0, 1] after each step (unless ``bounded=false``).
- The four parts of a mosaic start from different images; the authors draw each part by itself. A network reads the real
  images in shuffled passes instead of drawing each batch anew.
- The size of L_M3D against the cross-entropy is not published. Its gradient is about 1/214 of DM's (measured on real
  CIFAR-10 images under random ConvNet-3s, where the bandwidth is 535), so it is weighted by 200 and the learning rate
  stays.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from m3d.augment import Augment
from m3d.guides import CrossEntropy
from m3d.kernels import Gaussian, Linear
from m3d.method import Matching, Method
from m3d.methods import METHODS, Task
from m3d.objectives import MMD, Objective
from m3d.players import Descent
from m3d.pools.queue import Queue
from m3d.select import InitSpec, make_init
from m3d.tiles import Factor, Tiles
from m3d.train import Recipe
from m3d.types import Seen

_WHOLE_CLASS = 5000


class Settings(NamedTuple):
    """What the authors' commands set by dataset and images per class."""

    network: str
    ce_weight: float
    push_every: int
    queue: int
    train_steps: int
    batch_real: int
    recount: int
    train_batch: int = 256


def published(task: Task) -> Settings:
    """The authors' settings; between their numbers of images per class, those of the next smaller one.

    Large images (128 pixels and more) stand for their ImageNet subset, those from 64 pixels for Tiny ImageNet, smaller
    ones of 100 and more classes for CIFAR-100, and all others for CIFAR-10.
    """
    side, ipc = min(task.shape[1:]), task.ipc
    few, large = ipc < 10, ipc >= 50
    if side >= 128:
        recount = 200 if few else 500 if large else 1000
        return Settings("convnet6", 3.0, 50, 100 if large else 50, 10, 128, recount, train_batch=128)
    if side >= 64:
        recount = 100 if few else 1000 if large else 500
        return Settings("convnet3", 0.8 if large else 0.5, 30, 100, 50 if large else 10, 256, recount)
    recount = 500 if large else 100
    many = task.classes >= 100
    weight = 0.1 if ipc >= (10 if many else 50) else 0.5
    if few:
        whole = _WHOLE_CLASS if task.smallest is None else min(_WHOLE_CLASS, task.smallest)
        return Settings("convnet3", weight, 5, 100, 10, whole, recount)
    return Settings("convnet3", weight, 30, 100, 50 if many and not large else 10, 256, recount)


@METHODS.register(
    "idm", paper="Zhao et al., CVPR 2023", equation="means, trained encoders, cross-entropy", cost="medium"
)
def idm(
    task: Task,
    *,
    steps: int = 20_000,
    lr: float = 0.2,
    momentum: float = 0.5,
    factor: Factor = 2,
    ce_weight: float | None = None,
    push_every: int | None = None,
    queue: int | None = None,
    train_steps: int | None = None,
    train_batch: int | None = None,
    recount: int | None = None,
    batch_real: int | None = None,
    batch_syn_max: int = 200,
    augment: str | None = None,
    init: InitSpec = "real",
    bounded: bool = True,
    objective: Literal["dm", "m3d"] = "dm",
    m3d_weight: float = 200.0,
) -> Method:
    """Match mean representations under networks trained on real images, which must recognise the synthetic ones."""
    known = published(task)
    given: dict[str, Any] = {"ce_weight": ce_weight, "push_every": push_every, "queue": queue}
    given |= {"train_steps": train_steps, "train_batch": train_batch, "recount": recount, "batch_real": batch_real}
    known = known._replace(**{name: value for name, value in given.items() if value is not None})
    operations = Augment.any_one(task.mirror) if augment is None else Augment.parse(augment)
    loss: Objective[Seen] = m3d_weight * MMD(Gaussian()) if objective == "m3d" else MMD(Linear())
    return Method(
        init=make_init(init),
        tiles=Tiles(factor, shrink="bilinear"),
        network=known.network,
        matching=Matching(
            steps=steps,
            pool=Queue(
                recipe=Recipe(epochs=1, batch=known.train_batch, lr=0.01),
                every=known.push_every,
                capacity=known.queue,
                train_steps=known.train_steps,
                recount=known.recount,
            ),
            objective=loss,
            guide=CrossEntropy(known.ce_weight),
            player=Descent(lr=class_by_class(lr, momentum, task.classes)),
            augment=operations,
            batch_real=known.batch_real,
            batch_syn_max=batch_syn_max,
            standardised=True,
            bounded=bounded,
            diverged_at=1e6,  # the cross-entropy counts for nothing before the networks have learned, and much later on
        ),
        settled={**known._asdict(), "augment": str(operations)},
    )


def class_by_class(lr: float, momentum: float, classes: int) -> float:
    """lr · (1 + m + … + m^(C−1)): how far a class is moved, per unit of gradient, while all C classes have a turn."""
    Descent(lr=lr, momentum=momentum)  # refuses what is not valid, in the user's own numbers
    return lr * (1 - momentum**classes) / (1 - momentum)
