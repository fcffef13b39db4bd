"""What happens to one rank of a loop: a fault in a pass, a flipped bit at rest, or SIGKILL."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast.digest.tensors import tensor_bytes
from holdfast.inject import Fault, Injector
from holdfast_lab.zoo.ranks.loops import STEPS, Loop

KINDS = ("forward", "backward", "outside", "audited", "rest", "kill")
FIRST = 3  # the first step that may be struck
_LAYERS = ("up", "down", "head")
_LOW_BITS, _MANTISSA_BIT, _EXPONENT_BIT = (3, 12, 20, 26), 21, 30


@dataclass(frozen=True)
class Strike:
    """A fault of one rank, drawn by a seed.

    Args:
        kind: One of ``KINDS``.
        rank, step, micro_batch: Where it happens.
        draw: Chooses the product, the tensor or the element.
    """

    kind: str
    rank: int
    step: int
    micro_batch: int
    draw: int

    @classmethod
    def drawn(cls, kind: str, loop: type[Loop], seed: int) -> "Strike":
        """Draw rank, step and micro-batch."""
        draw = random.Random(f"{kind}/{loop.name}/{seed}")
        return cls(
            kind,
            draw.randrange(loop.ranks),
            draw.randrange(FIRST, STEPS - 1),
            draw.randrange(loop.micro_batches),
            draw.randrange(2**20),
        )

    def strike(self, loop: Loop, settle: Callable[[], None]) -> None:
        """Let this happen to a loop, once.

        Args:
            loop: The loop of this rank.
            settle: Waits until the snapshots are as the effect on the state, or the death, needs.
        """
        if loop.rank != self.rank:
            return
        if self.kind == "rest":
            effect: Callable[[], None] = _Flip(loop, self.draw, settle)
        elif self.kind == "kill":
            effect = partial(_die, settle)
        else:
            loop.around = _injected(self, loop)
            return
        loop.around = _once(self, effect)

    def fault(self) -> Fault:
        """Return what the injector injects."""
        where = self.step, 0
        layer = _LAYERS[self.draw % len(_LAYERS)]
        if self.kind == "forward":
            return Fault(*where, "bitflip", op=f"{layer}/addmm/forward", bit=_EXPONENT_BIT)
        if self.kind == "backward":
            return Fault(*where, "bitflip", op=f"{layer}/addmm/grad_b", bit=_EXPONENT_BIT)
        if self.kind == "outside":
            return Fault(*where, "inf", site="module", op="norm", index=self._element())
        return Fault(
            *where, "bitflip", site="module", op="norm", bit=_MANTISSA_BIT, index=self._element()
        )

    def _element(self) -> tuple[int, int]:
        return self.draw % 2, self.draw % 7


def _injected(strike: Strike, loop: Loop) -> Any:
    injector = Injector(loop.net, [strike.fault()], rank=0)

    @contextmanager
    def around(step: int, number: int) -> Iterator[None]:
        with injector.step(step if number == strike.micro_batch else -1):
            yield

    return around


def _once(strike: Strike, effect: Callable[[], None]) -> Any:
    left = [effect]

    @contextmanager
    def around(step: int, number: int) -> Iterator[None]:
        if (step, number) == (strike.step, strike.micro_batch) and left:
            left.pop()()
        yield

    return around


class _Flip:
    """Flips a bit of a weight, or of a moment of the optimizer, without PyTorch's knowledge."""

    def __init__(self, loop: Loop, draw: int, settle: Callable[[], None]) -> None:
        self._loop, self._draw, self._settle = loop, random.Random(draw), settle

    def __call__(self) -> None:
        self._settle()
        parameter = self._draw.choice(self._loop.parameters)
        moment = self._loop.optimizer.state[parameter]["exp_avg"]
        target = self._draw.choice([parameter, moment])
        local: torch.Tensor = getattr(target, "to_local", lambda: target)()
        words = np.frombuffer(tensor_bytes(local), np.uint32)
        words[self._draw.randrange(len(words))] ^= np.uint32(1 << self._draw.choice(_LOW_BITS))


def _die(settle: Callable[[], None]) -> None:
    settle()
    os.kill(os.getpid(), signal.SIGKILL)
