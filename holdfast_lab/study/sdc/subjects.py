"""The model that is trained, the trainer's GPT on real text, and its healthy copy.

A twin is a copy of the model, its optimizer and its place in the data. Until one of them is struck
both compute the same bits, so that whatever differs is the device's doing.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import torch
from torch.nn.utils import clip_grad_norm_

from holdfast import events
from holdfast_lab.emulation.profile import SUBMODULES, NodeProfile
from holdfast_lab.trainer.data import ByteLoader, Corpus, read_corpus
from holdfast_lab.trainer.gpt import GPT, GPTConfig, loss, make_optimizer

LARGEST_NORM = 1.0  # of the gradients: appendix B.3
LEARNING_RATE = 1e-3  # of a small model; the paper's is not printed for pre-training
WEIGHT_DECAY = 0.01
TEXT_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Size:
    """The sizes of a run: the model's, and sequences a batch."""

    model: GPTConfig
    batch: int

    @property
    def call_values(self) -> int:
        """Values of a submodule's output in one call."""
        return self.batch * self.model.context * self.model.width


TINY = Size(GPTConfig(layers=2, heads=2, width=32, context=32), batch=2)
SMALL = Size(GPTConfig(layers=2, heads=4, width=64, context=64), batch=4)
DEEP = Size(GPTConfig(layers=4, heads=4, width=64, context=64), batch=4)
# As deep as the paper's in lock-step.
FULL = Size(GPTConfig(layers=16, heads=8, width=256, context=256), batch=4)


def rate_scale(profile: NodeProfile, size: Size, setting: str, wrong_per_step: float) -> float:
    """Return the rate factor that gives a node a mean number of wrong values per step.

    At least 1: nodes that err often enough err as often as the paper's.
    """
    layers = size.model.layers
    rates = [sum(profile.frequencies(name, layers, setting)) for name in SUBMODULES]
    expected = sum(rates) * size.call_values
    return max(1.0, wrong_per_step / expected) if expected else 1.0


@cache
def text() -> Corpus:
    """Return the source of the running Python's standard library as text, without a download."""
    return read_corpus(max_bytes=TEXT_BYTES)


class Trainee:
    """A GPT, its optimizer and its data; each step is a function of its number.

    Args:
        size: of the model and its batches.
        seed: of the weights; data_seed: of the order of the data.
    """

    def __init__(self, size: Size, *, seed: int = 0, data_seed: int = 0) -> None:
        self.size = size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = GPT(replace(size.model, dropout=0.0))
        self.optimizer = make_optimizer(self.model, LEARNING_RATE, WEIGHT_DECAY)
        self._loader = ByteLoader(
            text(), context=size.model.context, batch_size=size.batch, seed=data_seed
        )

    def twin(self) -> Self:
        """Copy the subject with its weights and optimizer, so that it computes the same bits."""
        return deepcopy(self)

    def gradients(self, step: int) -> float:
        """Compute loss and gradients of a step's batch; events are then those of this step."""
        events.set_step(step)
        try:
            self.optimizer.zero_grad(set_to_none=True)
            value = loss(self.model, *self._loader.batch(step))
            torch.autograd.backward(value)
        finally:
            events.set_step(-1)
        return float(value.detach())

    def update(self) -> float:
        """Clip the gradients and apply them; return their norm before clipping."""
        norm = clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.optimizer.step()
        return float(norm)

    def train(self, step: int) -> float:
        """Train one step and return its loss."""
        value = self.gradients(step)
        self.update()
        return value

    def synchronise(self, reference: "Trainee") -> None:
        """Take another's parameters and optimizer state (parameter synchronisation)."""
        self.model.load_state_dict(reference.model.state_dict())
        self.optimizer.load_state_dict(deepcopy(reference.optimizer.state_dict()))

    def grads(self) -> list[torch.Tensor]:
        """Copy the gradients, in the order of the parameters."""
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def parameters(self) -> list[torch.Tensor]:
        """Copy the parameters."""
        return [p.detach().clone() for p in self.model.parameters()]

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.size, copy._loader = self.size, self._loader  # batches are read by number
        copy.model = deepcopy(self.model, memo)
        copy.optimizer = make_optimizer(copy.model, LEARNING_RATE, WEIGHT_DECAY)
        copy.optimizer.load_state_dict(deepcopy(self.optimizer.state_dict()))
        return copy


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """‖one - other‖₂ over all tensors, in fp64."""
    pairs = zip(one, other, strict=True)
    return float(sum((a.double() - b.double()).square().sum() for a, b in pairs) ** 0.5)


def norm(tensors: list[torch.Tensor]) -> float:
    """‖tensors‖₂ over all of them, in fp64."""
    return float(sum(t.double().square().sum() for t in tensors) ** 0.5)
