"""What the checks that sample by default cost a step, together: convolutions, updates and modules.

    python -m bench.sampled_checks [--model NAME …] [--rounds N]

Both sides are protected and under a Guard. One samples as by default, the other computes nothing of
convolutions, the optimizer's update and modules again. The transformers are those of
``bench.step_costs`` in fp32 with sequences of 512 tokens; ResNet-50 is that of
``bench.convolutions``, with 16 images of 96 pixels. A round is 64 steps of each side in turns, in
which each parameter and each module is computed again once. Correctness first: both sides have the
same bits, and no step was in doubt.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from bench import convolutions, step_costs
from bench.rows import record
from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.guard import Guard
from holdfast.protection import protect

ROUND, TOKENS, IMAGES, PIXELS = 64, 512, 16, 96
RESNET = "resnet50"
MODELS = (*step_costs.MODELS, RESNET)


class Side:
    """A protected model under a Guard, which samples as by default or not at all."""

    def __init__(self, name: str, *, samples: bool) -> None:
        self.seconds, self.cpu_s = list[float](), list[float]()
        self.model, optimizer, self._batch, self._pass = made(name)
        conv = None if samples else 0.0
        self.protection = protect(self.model, convolutions=conv)
        self.guard = Guard(self.model, optimizer, spot=conv, optimizer_check=conv)

    def step(self) -> None:
        """Train one step."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        self.guard.step(self._pass, self._batch)
        self.cpu_s.append(time.process_time() - cpu_s)
        self.seconds.append(time.perf_counter() - wall_s)


Made = tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def made(name: str) -> Made:
    """Make a model with its optimizer, its batch and its pass."""
    if name != RESNET:
        step = step_costs.Step(name, TOKENS, "fp32")
        return step.model, step.optimizer, step.batch, step.forward_backward
    images = convolutions.Step(IMAGES, PIXELS, bf16=False)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(images.model(batch), images.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return images.model, images.optimizer, images.images, forward_backward


def measure(name: str, rounds: int) -> None:
    """Train both sides in turns, the first round to warm up, and record a row."""
    sides = Side(name, samples=True), Side(name, samples=False)
    for number in range(ROUND * (rounds + 1)):
        for side in sides if number % 2 else sides[::-1]:
            side.step()
    if events.recent() or len({state_digest(side.model.state_dict()) for side in sides}) > 1:
        raise SystemExit(f"{name}: steps were in doubt or gave other bits: nothing is recorded")
    row = {
        "model": name,
        "rounds": rounds,
        "step_s": sum(sides[1].seconds[ROUND:]) / ROUND / rounds,
    }
    for what in ("cpu_s", "seconds"):
        one, other = (getattr(side, what)[ROUND:] for side in sides)
        rounds_of = [slice(ROUND * number, ROUND * (number + 1)) for number in range(rounds)]
        row[f"{what}_ratio"] = round(sum(one) / sum(other), 4)
        row[f"{what}_ratios"] = [round(sum(one[r]) / sum(other[r]), 4) for r in rounds_of]
    record("sampled_checks", row)
    for side in sides:
        side.protection.remove()


def main() -> None:
    """Measure the models that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    for name in args.model or MODELS:
        measure(name, args.rounds)


if __name__ == "__main__":
    main()
