"""The share of a training step that is verified, of eight models in small.

    python -m bench.coverage [--models gpt2 bert …]

Each model runs forward and backward once under ``protect``; ``Protection.measure`` counts the FLOPs
and bytes of each operator. One row a model: the verified shares, and the largest operators that are
not verified with their share of the FLOPs and of the bytes. All calls of convolutions are checked
(``convolutions=1.0``; by default one in eight is).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

import holdfast
from bench.rows import record
from holdfast.abft.step_share import OperatorShare, StepShare

LISTED = 5
Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]
Made = tuple[nn.Module, Callable[[], Batch], Loss]  # a model, what draws a batch, and its loss


@dataclass(frozen=True)
class Size:
    """How large the models and their batches are."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    words: int = 512
    tokens: int = 128
    texts: int = 4
    image: int = 64
    patch: int = 8
    images: int = 16
    channels: int = 32
    tables: int = 8
    samples: int = 256
    depths: tuple[int, ...] = (3, 4, 6, 3)
    attention_dropout: float = 0.1


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


def language(kind: Any, config: Any, size: Size) -> Made:
    """Return a language model and its loss on a few random tokens."""

    def batch() -> Batch:
        tokens = torch.randint(size.words, (size.texts, size.tokens))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return kind(config), batch, lambda model, batch: model(**batch).loss


def images(kind: Any, config: Any, size: Size) -> Made:
    """Return a classifier of images and its loss on a few random images."""

    def batch() -> Batch:
        pixels = torch.randn(size.images, 3, size.image, size.image)
        return {"pixel_values": pixels, "labels": torch.randint(8, (size.images,))}

    return kind(config), batch, lambda model, batch: model(**batch).loss


def unet(size: Size) -> Made:
    """Return a UNet and its loss on a few random images."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        restored = model(batch["pixels"])
        return functional.mse_loss(restored, torch.zeros_like(restored))

    draw = lambda: {"pixels": torch.randn(size.images, 3, size.image, size.image)}  # noqa: E731
    return UNet(size.channels), draw, loss


def dlrm(size: Size) -> Made:
    """Return a DLRM and its mean probability for random samples."""

    def batch() -> Batch:
        rows = torch.randint(1000, (size.samples, 20))
        return {"dense": torch.randn(size.samples, 13), "rows": rows}

    return (
        Dlrm(size.tables, size.width // 4),
        batch,
        lambda model, batch: model(**batch).sigmoid().mean(),
    )


def models(size: Size = Size()) -> dict[str, Callable[[], Made]]:
    """Return for each name what makes a model, its batches and its loss."""
    wide = {"hidden_size": size.width, "num_hidden_layers": size.layers}
    wide |= {"num_attention_heads": size.heads, "intermediate_size": 4 * size.width}
    words = {"vocab_size": size.words, "max_position_embeddings": size.tokens}
    t, dropout, narrow = transformers, size.attention_dropout, size.channels
    gpt2 = t.GPT2Config(
        vocab_size=size.words,
        n_positions=size.tokens,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        attn_pdrop=dropout,
    )
    bert = t.BertConfig(**wide, **words, attention_probs_dropout_prob=dropout)
    mixtral = t.MixtralConfig(**wide, **words, num_key_value_heads=size.heads // 2)
    vit = t.ViTConfig(**wide, image_size=size.image, patch_size=size.patch, num_labels=8)
    resnet = t.ResNetConfig(
        embedding_size=narrow,
        hidden_sizes=[2 * narrow, 4 * narrow, 8 * narrow, 16 * narrow],
        depths=list(size.depths),
        num_labels=8,
    )
    return {
        "gpt2": lambda: language(t.GPT2LMHeadModel, gpt2, size),
        "bert": lambda: language(t.BertForMaskedLM, bert, size),
        "llama": lambda: language(t.LlamaForCausalLM, t.LlamaConfig(**wide, **words), size),
        "mixtral": lambda: language(t.MixtralForCausalLM, mixtral, size),
        "vit": lambda: images(t.ViTForImageClassification, vit, size),
        "resnet50": lambda: images(t.ResNetForImageClassification, resnet, size),
        "unet": lambda: unet(size),
        "dlrm": lambda: dlrm(size),
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
    model, draw, loss = models()[name]()
    batch = draw()
    with holdfast.protect(model, frequency=1.0, convolutions=1.0) as protection:
        share = protection.measure(lambda: loss(model, batch).backward())
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
