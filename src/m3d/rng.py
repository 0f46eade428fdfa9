"""Random numbers as a function: Philox-4x32-10 keyed by (seed, purpose, step, lane, index).

Nothing here has a state. Any draw can be made again from its key alone, so a resumed run continues as if never stopped,
classes may be spread over devices in any way, and the CPU and a GPU draw the same bits. Philox is the counter-based
generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11); a test holds it to its published
vectors.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUND = (0xD2511F53, 0xCD9E8D57)  # multipliers
_WEYL = (0x9E3779B9, 0xBB67AE85)  # key increments
_SHUFFLE_ROUNDS = 16  # an element's place is uniform up to the 2^-16 chance that no round moved it


class Purpose(IntEnum):
    """What a draw is for: draws of different purposes are independent."""

    ENCODER = 1  # initial weights of the networks used for matching
    REAL = 2  # which real images enter a step
    SYNTHETIC = 3  # which decoded synthetic images enter a step
    AUGMENT = 4  # augmentation in matching
    INIT = 5  # initial synthetic images
    SPLIT = 6  # held-out part of the training data
    ORDER = 7  # order of the images in an epoch of training
    TRAIN_AUGMENT = 8  # augmentation in training
    CUTMIX = 9  # CutMix boxes
    PARTNER = 10  # who is mixed with whom
    CLASSIFIER = 11  # initial weights of the networks trained for evaluation: never those of an encoder
    TEACHER = 12  # initial weights of networks trained on the real data
    TEST_SPLIT = 13  # part of data without test images that is kept back as such
    QUERY = 15  # real images that an encoder's accuracy is measured on
    QUEUE = 16  # which networks of a queue serve a step and which learn after it
    EXPERT = 20  # initial weights of experts, whose training is recorded
    SEGMENT = 21  # which stretch of which expert's training a step imitates
    LESSON = 22  # mini-batches a student is taught with
    LESSON_AUGMENT = 23  # their augmentation
    MIXTURE = 30  # which pre-trained network serves a step, and how much of its training is taken back
    FREQUENCY = 31  # at which frequencies characteristic functions are compared
    SAMPLER = 32  # initial weights of a network that learns them


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for each 128-bit counter. All tensors are int64 holding values below 2^32, broadcastable."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The 64-bit product may wrap into the sign bit; shift-and-mask still reads its true high word.
        left, right = c0 * _ROUND[0], c2 * _ROUND[1]
        c0, c1, c2, c3 = (
            ((right >> 32) & _MASK) ^ c1 ^ k0,
            right & _MASK,
            ((left >> 32) & _MASK) ^ c3 ^ k1,
            left & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def bits(seed: int, purpose: Purpose, steps: Tensor, lanes: Tensor, n: int) -> Tensor:
    """[S, L, n] int64 words in [0, 2^32) for steps [S] and lanes [L] (a lane is a class, or a repeat)."""
    quarter = -(-n // 4)
    index = torch.arange(quarter, device=steps.device)
    counter = (index, lanes[:, None], steps[:, None, None], torch.full_like(index[:1], int(purpose)))
    words = philox(counter, (seed & _MASK, (seed >> 32) & _MASK))
    shape = (len(steps), len(lanes), quarter)
    return torch.stack([w.expand(shape) for w in words], dim=-1).flatten(2)[..., :n]


def uniform(seed: int, purpose: Purpose, steps: Tensor, lanes: Tensor, n: int) -> Tensor:
    """[S, L, n] float32 in [0, 1), multiples of 2^-24."""
    return (bits(seed, purpose, steps, lanes, n) >> 8).float() * 2.0**-24


def normal(seed: int, purpose: Purpose, steps: Tensor, lanes: Tensor, n: int) -> Tensor:
    """[S, L, n] float32 standard normal draws (Box–Muller)."""
    half = -(-n // 2)
    radius, angle = uniform(seed, purpose, steps, lanes, 2 * half).split(half, dim=-1)
    length = torch.sqrt(-2.0 * torch.log1p(-radius))
    return torch.cat([length * torch.cos(2 * math.pi * angle), length * torch.sin(2 * math.pi * angle)], dim=-1)[
        ..., :n
    ]


def permutation(seed: int, purpose: Purpose, steps: Tensor, lanes: Tensor, n: int) -> Tensor:
    """[S, L, n] a random order of 0..n-1 for each step and lane."""
    return torch.argsort(bits(seed, purpose, steps, lanes, n), dim=-1, stable=True)


def shuffled(seed: int, purpose: Purpose, position: Tensor, lanes: Tensor, size: Tensor) -> Tensor:
    """Read endless shuffled decks: the card at ``position`` [S, L, n] of lane l, whose deck holds 0..size[l]-1.

    Each pass through a deck is a new permutation, so ``size`` consecutive positions visit every card exactly once. The
    permutation is the swap-or-not shuffle (Hoang, Morris, Rogaway, 2012): it needs no memory of the deck and works for
    any size, unlike sorting, whose cost grows with the class.
    """
    size = size[:, None]  # [L, 1]
    card, deck = position % size, position // size
    zero = torch.zeros_like(lanes[:1])
    word = philox((zero, lanes[:, None], deck, zero + int(purpose)), (seed & _MASK, (seed >> 32) & _MASK))
    for r in range(_SHUFFLE_ROUNDS):
        pivot = _mix(word[0] + r * _WEYL[0]) % size
        partner = (pivot + size - card) % size
        coin = _mix(torch.maximum(card, partner) ^ _mix(word[1] + r * _WEYL[1])) & 1
        card = torch.where(coin == 1, partner, card)
    return card


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (xor-shift-multiply) for the shuffle's many small coins."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
