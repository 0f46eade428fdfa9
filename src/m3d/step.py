"""One step of a run: a pure function of tensors at fixed addresses.

Randomness is drawn for a block of steps at a time into fixed buffers, as a function of (seed, step, class), so that
CUDA can replay the step from a recorded graph while the host only counts.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from m3d import rng
from m3d.augment import NUMBERS, UNIFORMS, Parameters
from m3d.data.classes import Dataset
from m3d.method import Method
from m3d.nets.flat import FlatNet
from m3d.players import LivePlayer, Player
from m3d.pools import World
from m3d.runtime import COMPILE_FROM, COMPILE_OWN_FROM, Runtime, pick
from m3d.shards import Shard
from m3d.synth import Synthetic
from m3d.types import Batch, Eyes, Reading

BLOCK = 64  # steps whose draws are made together, and whose losses wait together on the device
_CPU_MAPS = 2**26  # bytes


class Step(nn.Module):
    """The tensors of a run and one step over them."""

    average: Tensor  # like the latent pixels: their mean since the step it begins with, where one is asked for

    def __init__(
        self,
        method: Method,
        data: Dataset,
        net: FlatNet,
        pixels: Tensor,
        seed: int,
        runtime: Runtime,
        shard: Shard | None = None,
    ):
        """``pixels`` [own classes, ipc, ch, h, w] of the shard, which is all classes unless another one is given."""
        super().__init__()
        assert method.matching is not None
        matching = method.matching
        self.matching, self.data, self.net, self.seed, self.runtime = matching, data, net, seed, runtime
        self.shard = shard or Shard(range(data.classes))
        device, classes = data.train.device, len(self.shard.mine)
        self.synthetic = Synthetic(pixels, method.tiles, data.normalise(), matching.standardised, matching.bounded)
        # The record itself is never changed: parts that may learn are copied.
        self.objective = copy.deepcopy(matching.objective).to(device)
        self.probe = _on(copy.deepcopy(matching.probe), device)
        self.pool = matching.pool.start(World(net, data, self.synthetic, seed, runtime, self.shard))
        self.real = data.train.reader(seed, matching.batch_real, classes=self.shard.mine)
        self.objective.start(seed, self._sample)
        if matching.average_start < matching.steps:
            self.register_buffer("average", torch.zeros_like(self.synthetic.latent, requires_grad=False))
        self.learned: list[Tensor] = [self.synthetic.latent]
        self.players: list[LivePlayer] = [matching.player.start(self.synthetic.latent)]
        for part in (self.objective, self.probe):
            self._teach(part)
        self._players = nn.ModuleList(self.players)  # so that their state is saved
        decoded = method.tiles.count(pixels.shape[1], data.shape)
        self.subset = min(matching.batch_syn_max, decoded)
        self.decoded = decoded
        self.lanes = torch.arange(self.shard.mine.start, self.shard.mine.stop, device=device)  # own classes by number
        # Draws of a block of steps, and the losses it leaves; ``slot`` says which step of the block is next.
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.number = torch.zeros_like(self.slot)  # the same step counted from the beginning
        self.real_index = torch.zeros(BLOCK, classes, matching.batch_real, dtype=torch.long, device=device)
        self.syn_index = torch.zeros(BLOCK, classes, self.subset, dtype=torch.long, device=device)
        self.augmentation = torch.zeros(BLOCK, classes, NUMBERS, device=device)
        self._draws = (self.real_index, self.syn_index, self.augmentation)
        self.losses = torch.zeros(BLOCK, classes, device=device)
        self.together = matching.together(net)
        at_once = self.shard.at_once or _classes_at_once(data, matching.batch_real)
        self.chunk = classes if self.together else min(classes, at_once)
        usual = COMPILE_OWN_FROM if self._own_kernels() else COMPILE_FROM
        least = getattr(matching.probe, "compile_from", usual)
        self._loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = self.loss
        self._compiles = runtime.compiles(matching.steps, least)
        if self._compiles:
            self._compile()
            self._rehearse()

    def take_fewer_classes(self) -> None:
        """Half as many at a time from here on."""
        self.chunk = -(-self.chunk // 2)
        if self._compiles:  # anew: every size is another version, of which the compiler keeps few
            self._compile()

    def _compile(self) -> None:
        self._loss = torch.compile(self.own_loss(), dynamic=False)

    def _fused_network(self) -> bool:
        reads_maps = getattr(self.matching.probe, "maps", True)  # which our kernels do not keep
        return getattr(self.net.net, "fused", False) and not reads_maps

    def _own_kernels(self) -> bool:
        """Whether kernels of our own do most of a step where there is a GPU, which leaves a compiler little to gain."""
        augment = self.matching.augment
        return self._fused_network() and (augment.empty or augment.fits(self.synthetic.latent))

    def _rehearse(self) -> None:
        """Let another process compile our own kernels while this one compiles the step around them."""
        if self.runtime.device.type == "cuda" and self._fused_network() and self.shard.ranks.alone:
            from m3d import rehearsal

            sizes = rehearsal.Sizes(self.chunk, self.matching.batch_real, self.subset)
            data, augment = self.data, self.matching.augment
            rehearsal.start(self.net, data.shape, data.classes, sizes, augment, self.runtime.dtype)

    def own_loss(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """:meth:`loss` with a code object of its own.

        The compiler keeps its versions of a function by that, gives up silently after eight of them, and every run in a
        process would be another one.
        """
        plain = Step.loss
        own = types.FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__)
        return cast(Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], types.MethodType(own, self))

    def _teach(self, part: object) -> None:
        """Give every parameter of ``part`` the player it names."""
        for module in part.modules() if isinstance(part, nn.Module) else ():
            for parameter in module.parameters(recurse=False):
                player = cast(Player, module.player)
                self.learned.append(parameter)
                self.players.append(player.start(parameter))

    def learned_numbers(self) -> dict[str, float]:
        """What the probe and the objective learned beside the images, where they report it."""
        reports = [getattr(part, "learned", dict) for part in (self.probe, self.objective)]
        return {name: float(value) for report in reports for name, value in report().items()}

    @torch.no_grad()
    def refill(self, step: int) -> None:
        """Draw everything the block that ``step`` lies in needs, and point at ``step``."""
        first = step - step % BLOCK
        steps = torch.arange(first, first + BLOCK, device=self.lanes.device)
        self.real_index.copy_(self.data.train.deck(self.seed, steps, self.matching.batch_real, classes=self.lanes))
        uniforms = rng.uniform(self.seed, rng.Purpose.AUGMENT, steps, self.lanes, UNIFORMS).flatten(0, 1)
        numbers = self.matching.augment.parameters(uniforms, self.data.shape[1:]).packed()
        self.augmentation.copy_(numbers.view(self.augmentation.shape))
        if self.subset < self.decoded:
            order = rng.permutation(self.seed, rng.Purpose.SYNTHETIC, steps, self.lanes, self.decoded)
            self.syn_index.copy_(order[..., : self.subset])
        self.slot.fill_(step - first)
        self.number.fill_(step)

    def loss(self, classes: Tensor, real_index: Tensor, syn_index: Tensor, augmentation: Tensor) -> Tensor:
        """[c]: the losses of ``classes`` [c], a function of their draws, the encoder and the latent pixels.

        Nothing else is read or written, but what an objective that ``remembers`` keeps.
        """
        matching, eyes = self.matching, self.pool.eyes()
        parameters = Parameters.unpacked(augmentation)
        goal = self._goal(eyes, classes, real_index, parameters) if eyes.goal is None else eyes.goal
        images = self.synthetic(classes - self.shard.mine.start)
        if self.subset < self.decoded:
            images = images[torch.arange(len(classes), device=classes.device)[:, None], syn_index]
        batch = _batch(matching.augment.apply(images, parameters), classes)
        value: Tensor = self.objective(goal, self.probe(self.net, eyes, batch, self.runtime.dtype))
        if matching.guide is not None:
            value = value + matching.guide(self.net, eyes, batch, self.runtime.dtype)
        return value

    @torch.no_grad()
    def _goal(self, eyes: Eyes, classes: Tensor, real_index: Tensor, parameters: Parameters) -> Reading:
        """The reading of real images of ``classes``, augmented as the synthetic ones are."""
        real = self.synthetic.normalise(self.real.take(real_index, classes))
        batch = _batch(self.matching.augment.apply(real, parameters), classes)
        reading: Reading = self.probe(self.net, eyes, batch, self.runtime.dtype)
        return reading

    def _sample(self) -> Reading:
        """A reading of one real image of the first class, for its shape."""
        index = torch.zeros(1, 1, dtype=torch.long, device=self.data.train.device)
        uniforms = torch.zeros(1, UNIFORMS, device=index.device)
        parameters = self.matching.augment.parameters(uniforms, self.data.shape[1:])
        return self._goal(self.pool.eyes(), index[0], index, parameters)

    def whole_state(self) -> dict[str, Tensor]:
        """The state of the whole run, whatever processes hold it: what a checkpoint keeps. Every process must ask."""
        state: dict[str, Tensor] = self.state_dict()
        return {k: self.shard.whole(v.detach()) if _class_major(k, v) else v for k, v in state.items()}

    def load_whole_state(self, state: dict[str, Tensor]) -> None:
        """Take this process's part of a :meth:`whole_state`."""
        self.load_state_dict({k: v[self.shard.rows] if _class_major(k, v) else v for k, v in state.items()})

    def advance(self) -> None:
        """One step: loss, gradient, move, clamp. Nothing here waits for the host.

        Classes go through in chunks that fit; their gradients do not overlap, so the sum over chunks is exact. Each
        is as large as the whole set, so they are added up as they come.
        """
        draws = [self.lanes, *(pick(buffer, self.slot) for buffer in self._draws)]
        self.objective.draw(self.number)
        losses: list[Tensor] = []
        gradients: tuple[Tensor, ...] = ()
        scale = self.runtime.loss_scale
        for part in zip(*(torch.split(d, self.chunk) for d in draws), strict=True):
            loss = self._loss(*part)
            found = torch.autograd.grad(loss.sum() * scale, self.learned)
            gradients = tuple(a.add_(b) for a, b in zip(gradients, found, strict=True)) if gradients else found
            losses.append(loss.detach())
        for player, gradient in zip(self.players, gradients, strict=True):
            player.step(gradient if scale == 1 else gradient / scale)
        self.synthetic.project_()
        self.losses.index_copy_(0, self.slot, torch.cat(losses).expand(len(self.lanes))[None])
        self.slot.add_(1)
        self.number.add_(1)
        self._average()

    @torch.no_grad()
    def _average(self) -> None:
        """Take this step's images into the mean: ā ← ā + (x − ā) / k, k images in it with these."""
        if self.matching.average_start >= self.matching.steps:
            return
        many = self.number - self.matching.average_start  # counted on the device: a recorded step runs from step 0 on
        share = torch.where(many > 0, 1 / many.clamp(min=1), 0.0)
        self.average.lerp_(self.synthetic.latent, share)

    def result(self, step: int) -> Tensor:
        """[C, ipc, ch, h, w]: the images after ``step`` steps, or their mean once it has begun."""
        if step <= self.matching.average_start or self.matching.average_start >= self.matching.steps:
            return self.synthetic.pixels().detach()
        return self.synthetic.pixels(self.average)


def _class_major(name: str, value: Tensor) -> bool:
    """Whether an entry of the state has a row per class: the images, and what the player that moves them keeps."""
    return name.startswith(("synthetic.", "_players.0.", "average")) and value.ndim > 0


def _on(part: Any, device: torch.device) -> Any:
    return part.to(device) if isinstance(part, nn.Module) else part


def _batch(images: Tensor, classes: Tensor) -> Batch:
    return Batch(images, classes[:, None].expand(images.shape[:2]))


def _classes_at_once(data: Dataset, batch_real: int) -> int:
    """All classes on a GPU; on a CPU as many as keep a layer's maps (of 128 channels) near its caches."""
    if data.train.device.type != "cpu":
        return data.classes
    maps = batch_real * data.shape[1] * data.shape[2] * 128 * 4
    return max(1, _CPU_MAPS // maps)
