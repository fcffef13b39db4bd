"""A ResNet-18 that tells ten synthetic classes apart, as a script for a campaign.

    holdfast campaign examples/injection/resnet.py --what weight activation --trials 2000

The command line reads two names: ``model`` and ``inputs``, here functions.
"""

import torch
from torch import nn
from torch.nn import functional
from transformers import ResNetConfig, ResNetForImageClassification

CLASSES, SIZE, STEPS, BATCH = 10, 32, 30, 16


def images(number: int, seed: int, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw noisy images of one pattern a class, [number, 3, size, size], and their classes."""
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (number,), generator=generator)
    clean = functional.interpolate(patterns[classes], size=(size, size), mode="bilinear")
    return clean + 0.3 * torch.randn(clean.shape, generator=generator), classes


def trained(steps: int = STEPS, width: int = 64, size: int = SIZE) -> nn.Module:
    """Train for some steps, so that the outputs mean something; in evaluation mode."""
    sizes = [factor * width for factor in (1, 2, 4, 8)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNetForImageClassification(
            ResNetConfig(
                embedding_size=width,
                hidden_sizes=sizes,
                depths=[2, 2, 2, 2],
                layer_type="basic",
                num_labels=CLASSES,
            )
        )
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    network.train()
    for step in range(steps):
        x, y = images(BATCH, seed=step + 1, size=size)
        optimizer.zero_grad()
        functional.cross_entropy(network(x).logits, y).backward()
        optimizer.step()
    return network.eval()


def model() -> nn.Module:
    return trained()


def inputs() -> torch.Tensor:
    return images(BATCH, seed=0)[0]
