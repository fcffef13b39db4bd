"""A ResNet-18 that tells ten synthetic classes apart, as a script for a campaign.

    holdfast campaign examples/injection/resnet.py --what weight activation --trials 2000

The command line reads two names: ``model`` and ``inputs``, here functions. Layers are named as in
torchvision.
"""

import torch
from torch import nn
from torch.nn import functional

CLASSES, SIZE, STEPS, BATCH = 10, 32, 30, 16


class Block(nn.Module):
    """Two convolutions of 3 x 3 and a shortcut."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample: nn.Module | None = None
        if stride != 1 or width != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        for number, factor in enumerate((1, 2, 4, 8), 1):
            before, stride = max(1, factor // 2) * width, 1 if number == 1 else 2
            blocks = Block(before, factor * width, stride), Block(factor * width, factor * width, 1)
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        return self.fc(self.avgpool(x).flatten(1))


def images(number: int, seed: int, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw noisy images of one pattern a class, [number, 3, size, size], and their classes."""
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (number,), generator=generator)
    clean = functional.interpolate(patterns[classes], size=(size, size), mode="bilinear")
    return clean + 0.3 * torch.randn(clean.shape, generator=generator), classes


def trained(steps: int = STEPS, width: int = 64, size: int = SIZE) -> ResNet18:
    """Train for some steps, so that the outputs mean something; in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet18(width)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for step in range(steps):
        x, y = images(BATCH, seed=step + 1, size=size)
        optimizer.zero_grad()
        functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network.eval()


def model() -> ResNet18:
    return trained()


def inputs() -> torch.Tensor:
    return images(BATCH, seed=0)[0]
