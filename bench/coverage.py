"""The share of a training step that is verified, of eight models in small.

    python -m bench.coverage [--models gpt2 bert …]

Each model runs forward and backward once under ``protect``; ``Protection.measure`` counts the FLOPs
and bytes of each operator. One row a model: the verified shares, and the largest operators that are
not verified with their share of the FLOPs and of the bytes. All calls of convolutions are checked
(``convolutions=1.0``; by default one in eight is).
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

import holdfast
from bench.rows import record
from holdfast.abft.step_share import OperatorShare, StepShare

TOKENS, WORDS, IMAGE = 128, 512, 64
LISTED = 5


class UNet(nn.Module):
    """Two levels of convolutions with group norm, strided ones down and transposed ones up."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.first = self._block(3, channels)
        self.down = nn.Conv2d(channels, 2 * channels, 2, stride=2)
        self.middle = self._block(2 * channels, 2 * channels)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.last = nn.Sequential(self._block(2 * channels, channels), nn.Conv2d(channels, 3, 1))

    @staticmethod
    def _block(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.SiLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the size of x."""
        skipped = self.first(x)
        up = self.up(self.middle(self.down(skipped)))
        found: torch.Tensor = self.last(torch.cat([skipped, up], 1))
        return found


class Dlrm(nn.Module):
    """Embedding bags and dense features, their products of pairs, and a network on top."""

    def __init__(self, tables: int = 8, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, width) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width))
        self.top = nn.Sequential(
            nn.Linear((tables + 1) ** 2 + width, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a score for each sample."""
        x = self.dense(dense)
        features = torch.stack([x, *(table(rows) for table in self.tables)], 1)
        pairs = features @ features.transpose(1, 2)
        score: torch.Tensor = self.top(torch.cat([pairs.flatten(1), x], 1))
        return score


def language(kind: Any, config: Any) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a language model and its loss on a few random tokens."""
    tokens = torch.randint(WORDS, (4, TOKENS))
    return kind(config), lambda model: model(input_ids=tokens, labels=tokens).loss


def images(kind: Any, config: Any) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a classifier of images and its loss on a few random images."""
    pixels, labels = torch.randn(16, 3, IMAGE, IMAGE), torch.randint(8, (16,))
    return kind(config), lambda model: model(pixel_values=pixels, labels=labels).loss


def models() -> dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]]]:
    """Return for each name what makes a model and its loss."""
    small = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    wide = small | {"intermediate_size": 1024}
    words = {"vocab_size": WORDS, "max_position_embeddings": TOKENS}
    t = transformers
    resnet = {"embedding_size": 32, "hidden_sizes": [64, 128, 256, 512], "depths": [3, 4, 6, 3]}
    return {
        "gpt2": lambda: language(
            t.GPT2LMHeadModel,
            t.GPT2Config(vocab_size=WORDS, n_positions=TOKENS, n_embd=256, n_layer=4, n_head=4),
        ),
        "bert": lambda: language(t.BertForMaskedLM, t.BertConfig(**wide, **words)),
        "llama": lambda: language(t.LlamaForCausalLM, t.LlamaConfig(**wide, **words)),
        "mixtral": lambda: language(
            t.MixtralForCausalLM,
            t.MixtralConfig(**wide, **words, num_key_value_heads=2),
        ),
        "vit": lambda: images(
            t.ViTForImageClassification,
            t.ViTConfig(**wide, image_size=IMAGE, patch_size=8, num_labels=8),
        ),
        "resnet50": lambda: images(
            t.ResNetForImageClassification, t.ResNetConfig(**resnet, num_labels=8)
        ),
        "unet": lambda: (
            UNet(),
            lambda model: functional.mse_loss(
                model(torch.randn(16, 3, IMAGE, IMAGE)), torch.zeros(16, 3, IMAGE, IMAGE)
            ),
        ),
        "dlrm": lambda: (
            Dlrm(),
            lambda model: model(torch.randn(256, 13), torch.randint(1000, (256, 20))).mean(),
        ),
    }


def largest(share: StepShare, what: str) -> dict[str, float]:
    """Return the operators with most unverified ``flops`` or ``bytes``, and their share of all."""

    def left(each: OperatorShare) -> int:
        if what == "flops":
            return each.flops - each.verified_flops
        return each.nbytes - each.verified_bytes

    total = sum(e.flops if what == "flops" else e.nbytes for e in share.operators) or 1
    ranked = sorted(share.operators, key=left, reverse=True)[:LISTED]
    return {each.name: round(left(each) / total, 5) for each in ranked if left(each)}


def measured(name: str) -> dict[str, Any]:
    """Run one model's step and return its row."""
    torch.manual_seed(0)
    model, loss = models()[name]()
    with holdfast.protect(model, frequency=1.0, convolutions=1.0) as protection:
        share = protection.measure(lambda: loss(model).backward())
    return {
        "model": name,
        "flops": round(share.flops, 6),
        "bytes": round(share.nbytes, 4),
        "giga_flops": round(sum(each.flops for each in share.operators) / 1e9, 3),
        "flops_left": largest(share, "flops"),
        "bytes_left": largest(share, "bytes"),
        "flops_unknown": [each.name for each in share.operators if each.uncounted],
    }


def main() -> None:
    """Measure the chosen models and record a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*models()], default=[*models()])
    for name in parser.parse_args().models:
        record("coverage", measured(name))


if __name__ == "__main__":
    main()
