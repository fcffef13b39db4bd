"""What the checks of convolutions cost a training step of a ResNet-50, against the bare loop.

    python -m bench.convolutions [--share S] [--batch N] [--size PIXELS] [--dtype bf16] [--pairs N]

The layers are those of ResNet-50 with batch norm, trained by SGD with momentum. Correctness first:
the protected steps must leave the bare loop's bits. A sample is eight steps.
"""

import argparse
from itertools import cycle

import torch
from torch import nn
from torch.nn import functional

from bench.paired import paired
from bench.rows import record
from holdfast import events
from holdfast.abft.policy import CONVOLUTIONS
from holdfast.digest.tensors import state_digest
from holdfast.protection import protect

STEPS_PER_SAMPLE = 8
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks and width


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        layers: list[nn.Module] = []
        for before, after, kernel, step in sizes:
            convolution = nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers[:-1])
        self.beside = nn.Sequential()
        if stride > 1 or inputs != 4 * width:
            self.beside.append(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False))
            self.beside.append(nn.BatchNorm2d(4 * width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(images) + self.beside(images))


def resnet50() -> nn.Sequential:
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers, inputs = [*layers, nn.MaxPool2d(3, 2, 1)], 64
    for stage, (blocks, width) in enumerate(STAGES):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Step:
    """A training step, always on the same images."""

    def __init__(self, batch: int, size: int, bf16: bool) -> None:
        torch.manual_seed(0)
        self.model, self.bf16 = resnet50(), bf16
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.images, self.labels = torch.randn(batch, 3, size, size), torch.arange(batch)

    def run(self, steps: int = STEPS_PER_SAMPLE) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                loss = functional.cross_entropy(self.model(self.images), self.labels)
            loss.backward()
            self.optimizer.step()

    def digest(self) -> str:
        return state_digest([self.model.state_dict(), self.optimizer.state_dict()])


def main() -> None:
    """Compare the bits, time, and record a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=CONVOLUTIONS)
    for name, default in (("--batch", 16), ("--size", 128), ("--pairs", 7)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    plain, candidate = (Step(args.batch, args.size, args.dtype == "bf16") for _ in range(2))
    plain.run()
    with protect(candidate.model, convolutions=args.share) as protection:
        candidate.run()
        if plain.digest() != candidate.digest() or events.recent():
            raise SystemExit("not the bare loop's bits: nothing was timed")
        found = protection.report()
        sites = [site for site in found.sites if "/convolution/" in site.site]

    held, sides = [], cycle((False, True))

    def turn() -> None:
        if next(sides):
            held.append(protect(candidate.model, convolutions=args.share))
            candidate.run(1)  # the first call of each site is checked in any case
        elif held:
            held.pop().remove()

    row = paired(plain.run, candidate.run, pairs=args.pairs, warmup=1, before=turn)
    held.pop().remove()
    shown = {name: getattr(args, name) for name in ("share", "batch", "size", "dtype")}
    checks = {
        "sites": len(sites),
        "covered": sum(site.covered for site in sites),
        "sums": sum(site.rows for site in sites),
        "false_alarms": found.false_alarms,
        "check_s": sum(site.verify_s for site in sites),
        "convolutions_s": sum(site.product_s for site in sites),
    }
    record("convolutions", shown | {"steps_per_sample": STEPS_PER_SAMPLE} | checks | row)


if __name__ == "__main__":
    main()
