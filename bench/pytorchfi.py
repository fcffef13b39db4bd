"""The same faults injected by ``holdfast.inject.campaign`` and by PyTorchFI: outcomes and time.

    pip install --no-deps pytorchfi==0.6.0
    python -m bench.pytorchfi [--trials 100] [--pairs 5] [--size 64] [--width 64]

A ResNet-18, one image batch of four, one thread. A trial sets one element of a convolution's output
(its "neuron") or weight to a value between -1 and 1, PyTorchFI's own default model, or to such a
value whose top exponent bit is flipped. Both get the same layer, position and value; the outputs of
every trial are compared bit for bit, and the outcomes by the same rule. Times are paired: both run
all trials in turn. A ratio below 1 means that holdfast took less time.
"""

import argparse
import random
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from bench.paired import paired
from bench.rows import record
from examples.injection.resnet import images, trained
from holdfast.inject import Faults, campaign
from holdfast.inject.faults import flip_bit
from holdfast.inject.trials import OUTCOMES

BATCH = 4


@dataclass(frozen=True)
class Trial:
    """One fault: the number of a convolution in the order of execution, an index and a value."""

    layer: int
    index: tuple[int, ...]
    value: float


class Sides:
    """Both injectors on one model, and the trials that both run."""

    def __init__(self, what: str, trials: int, size: int, width: int, steps: int = 30) -> None:
        from pytorchfi.core import fault_injection

        self.what, self.model = what, trained(steps, width, size)
        self.inputs = images(BATCH, seed=0, size=size)[0]
        self.names = [n for n, m in self.model.named_modules() if isinstance(m, nn.Conv2d)]
        with torch.no_grad():
            self._theirs = fault_injection(self.model, BATCH, [3, size, size])
            self.golden = self.model(self.inputs).logits
        self.trials = [self._draw(random.Random(number)) for number in range(trials)]

    def _draw(self, draw: random.Random) -> Trial:
        layer = draw.randrange(len(self.names))
        if self.what == "weight":
            shape = self._theirs.get_weights_size(layer)
        else:
            shape = (BATCH, *self._theirs.get_layer_shape(layer)[1:])
        index = tuple(draw.randrange(each) for each in shape)
        value = draw.uniform(-1, 1)
        if draw.random() < 0.5:
            value = float(flip_bit(torch.tensor(value), 30))
        return Trial(layer, index, value)

    def ours(self) -> list[torch.Tensor]:
        """Run all trials as a campaign; return the outputs of each."""
        outputs: list[torch.Tensor] = []

        def keep(golden: Any, faulty: Any) -> bool:
            outputs.append(faulty.logits)
            return OUTCOMES["argmax"](golden, faulty) is True

        faults = [
            Faults(f"value={t.value!r}", self.what, self.names[t.layer], index=t.index)
            for t in self.trials
        ]
        campaign(self.model, self.inputs, faults=faults, trials=len(faults), outcome=keep)
        return outputs[-len(faults) :]  # the first is of the second run without a fault

    def theirs(self) -> list[torch.Tensor]:
        """Run all trials with PyTorchFI; return the outputs of each."""
        with torch.no_grad():
            return [self._declared(trial)(self.inputs).logits for trial in self.trials]

    def _declared(self, trial: Trial) -> nn.Module:
        first = "k" if self.what == "weight" else "batch"
        places = dict(zip((first, "dim1", "dim2", "dim3"), ([i] for i in trial.index), strict=True))
        declare = (
            self._theirs.declare_weight_fi
            if self.what == "weight"
            else self._theirs.declare_neuron_fi
        )
        return declare(layer_num=[trial.layer], value=[trial.value], **places)


def agreement(sides: Sides) -> dict[str, int]:
    """Count the trials in which both have the same outcome, and the same bits."""
    same = OUTCOMES["argmax"]
    pairs = list(zip(sides.ours(), sides.theirs(), strict=True))
    verdicts = [(same(sides.golden, a), same(sides.golden, b)) for a, b in pairs]
    return {
        "trials": len(pairs),
        "same_outcome": sum(a == b for a, b in verdicts),
        "same_bits": sum(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs),
        "silent": sum(not a for a, _ in verdicts),
    }


def measured(sides: Sides, pairs: int) -> dict[str, Any]:
    """Compare the outcomes, then the times of all trials; ratios below 1 favour holdfast."""
    return agreement(sides) | paired(sides.theirs, sides.ours, pairs=pairs, warmup=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--size", type=int, default=64, help="of the images")
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    args = parser.parse_args()
    try:
        peer = version("pytorchfi")
    except PackageNotFoundError:
        parser.error("PyTorchFI is not installed: pip install --no-deps pytorchfi==0.6.0")
    torch.set_num_threads(1)
    for what in ("activation", "weight"):
        sides = Sides(what, args.trials, args.size, args.width)
        row = measured(sides, args.pairs)
        record("pytorchfi", {"what": what, "pytorchfi": peer, "size": args.size, **row})
        if row["same_outcome"] < row["trials"]:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
