"""The model that is trained, the trainer's GPT on real text, and the emulated node it runs on."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from holdfast import events
from holdfast_lab.emulation.device import UnhealthyDevice
from holdfast_lab.emulation.profile import SUBMODULES, TRAINING, NodeProfile, node_profile
from holdfast_lab.trainer.data import ByteLoader, Corpus, read_corpus
from holdfast_lab.trainer.gpt import GPT, GPTConfig, loss, make_optimizer

LARGEST_NORM = 1.0  # of the gradients: appendix B.3
LEARNING_RATE = 1e-3  # of a small model; the paper's is not printed for pre-training
WEIGHT_DECAY = 0.01
TEXT_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Size:
    """The sizes of a run: those of the model, and the number of sequences in a batch."""

    model: GPTConfig
    batch: int

    @property
    def call_values(self) -> int:
        """Number of values of a submodule's output in one call."""
        return self.batch * self.model.context * self.model.width


TINY = Size(GPTConfig(layers=2, heads=2, width=32, context=32), batch=2)
SMALL = Size(GPTConfig(layers=2, heads=4, width=64, context=64), batch=4)
DEEP = Size(GPTConfig(layers=4, heads=4, width=64, context=64), batch=4)
# As deep as the paper's model in lock-step.
FULL = Size(GPTConfig(layers=16, heads=8, width=256, context=256), batch=4)


def rate_scale(profile: NodeProfile, size: Size, setting: str, wrong_per_step: float) -> float:
    """Return the rate factor that gives a node a mean number of wrong values per step.

    It is at least 1, so that nodes that err often enough err as often as the paper's.
    """
    layers = size.model.layers
    rates = [sum(profile.frequencies(name, layers, setting)) for name in SUBMODULES]
    expected = sum(rates) * size.call_values
    return max(1.0, wrong_per_step / expected) if expected else 1.0


def device_for(
    model: GPT,
    size: Size,
    node: int,
    seed: int,
    wrong_per_step: float,
    *,
    setting: str = TRAINING,
    **settings: Any,
) -> UnhealthyDevice:
    """Emulate a node that makes at least this mean number of wrong values in a step of a model."""
    scale = rate_scale(node_profile(node), size, setting, wrong_per_step)
    return UnhealthyDevice(
        model, node=node, seed=seed, setting=setting, rate_scale=scale, **settings
    )


@cache
def text() -> Corpus:
    """Return the source of the running Python's standard library as text, without a download."""
    return read_corpus(max_bytes=TEXT_BYTES)


class Trainee:
    """A GPT, its optimizer and its data; each step is a function of its number.

    ``seed`` is that of the weights, ``data_seed`` that of the order of the data.
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

    def gradients(self, step: int) -> float:
        """Compute loss and gradients of a step's batch; events meanwhile belong to this step."""
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

    def grads(self) -> list[torch.Tensor]:
        """Copy the gradients, in the order of the parameters."""
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def parameters(self) -> list[torch.Tensor]:
        """Copy the parameters."""
        return [p.detach().clone() for p in self.model.parameters()]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return ‖one - other‖₂ over all tensors, in fp64."""
    pairs = zip(one, other, strict=True)
    return float(sum((a.double() - b.double()).square().sum() for a, b in pairs) ** 0.5)


def norm(tensors: list[torch.Tensor]) -> float:
    """Return the 2-norm of all tensors together, in fp64."""
    return float(sum(t.double().square().sum() for t in tensors) ** 0.5)
