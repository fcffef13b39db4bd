"""Real transformer models, built from configurations with random weights; nothing is downloaded.

The paper's four models classify sequences, as in the paper; the others are trained as is usual for
them. Each family also names the six products of an attention block.
"""

from collections.abc import Callable
from importlib import import_module
from math import isqrt
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast_lab.study.attnchecker import configurations
from holdfast_lab.study.attnchecker.configurations import PAD
from holdfast_lab.study.attnchecker.subjects import (
    Batch,
    Family,
    Options,
    Size,
    Subject,
    separate,
    together,
)

PAPER_MODELS = ("bert", "gpt2", "gpt-neo", "roberta")
FIRST_WORD = 4  # smaller numbers are special tokens
INSTALL = "pip install 'torch-holdfast[lab]'"

TINY = Size(layers=2, width=32, heads=4, inner=48, vocabulary=61, length=9, batch=2)
SMALL = Size(layers=2, width=128, heads=4, inner=512, vocabulary=2048, length=64, batch=4)
BASE = Size(layers=12, width=768, heads=12, inner=3072, vocabulary=30522, length=128, batch=8)


def library() -> object:
    """Import the ``transformers`` package, or raise ConfigError with how to install it."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"the models need transformers ({error}); {INSTALL}") from error


def subject(
    name: str,
    size: Size = TINY,
    *,
    attention: str = "eager",
    dropout: float = 0.0,
    seed: int = 0,
) -> Subject:
    """Build a model with random weights and a batch of random inputs with some padding.

    Args:
        name: One of ``FAMILIES``.
        size: Sizes of the model and the batch.
        attention: ``"eager"`` for matrix products, ``"sdpa"`` for torch's fused attention.
        dropout: Probability of every dropout of the model.
        seed: Seed of weights and inputs. The global generator keeps its state.

    Raises:
        ConfigError: There is no such model, it has no such attention, or transformers is not
            installed.
    """
    family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(f"there is no model {name!r}; known: {', '.join(FAMILIES)}")
    if attention not in family.attentions:
        known = " or ".join(family.attentions)
        raise ConfigError(f"{name} has no {attention!r} attention; give {known}")
    options = Options(size, attention, dropout, torch.Generator().manual_seed(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family.build(options)
    return Subject(
        name, model.train(), family.inputs(options), family.matrices(attention), family.compute
    )


def _pretrained(model: str, settings: Callable[[Options], dict[str, Any]]) -> Any:
    """Make a builder of a transformers model from a function that returns its configuration."""

    def build(options: Options) -> nn.Module:
        built = getattr(library(), model)
        shared = {"attn_implementation": options.attention, "pad_token_id": PAD}
        built_of: nn.Module = built(built.config_class(**shared, **settings(options)))
        return built_of

    return build


def _tokens(options: Options) -> dict[str, torch.Tensor]:
    """Draw random tokens; the last third of the last sequence is padding."""
    size = options.size
    shape = (size.batch, size.length)
    words = torch.randint(FIRST_WORD, size.vocabulary, shape, generator=options.generator)
    mask = torch.ones_like(words)
    if size.batch > 1:
        mask[-1, -(size.length // 3) :] = 0
    return {"input_ids": words.masked_fill(mask == 0, PAD), "attention_mask": mask}


def _classes(options: Options) -> Batch:
    return {**_tokens(options), "labels": torch.arange(options.size.batch) % 2}


def _next_words(options: Options) -> Batch:
    tokens = _tokens(options)
    return {
        **tokens,
        "labels": tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100),
    }


def _pixels(options: Options) -> Batch:
    side = configurations.PATCH * isqrt(options.size.length)
    shape = (options.size.batch, 3, side, side)
    pixels = torch.randn(shape, generator=options.generator)
    return {"pixel_values": pixels, "labels": torch.arange(options.size.batch) % 2}


def _hidden(options: Options) -> Batch:
    shape = (options.size.batch, options.size.length, options.size.width)
    return {"x": torch.randn(shape, generator=options.generator).requires_grad_()}


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _output_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return weighed(model(batch["x"]))


def weighed(output: torch.Tensor) -> torch.Tensor:
    """Compute a loss in which every element has a different weight."""
    return (output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).square().mean()


class _Heads(nn.Module):
    """Torch's multi-head attention of a sequence to itself."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        size = options.size
        self.attention = nn.MultiheadAttention(
            size.width, size.heads, options.dropout, batch_first=True
        )
        self._unfused = options.attention == "eager"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # With need_weights torch uses unfused attention, as it has to return the probabilities.
        output: torch.Tensor = self.attention(x, x, x, need_weights=self._unfused)[0]
        return output


def _layer(options: Options) -> nn.Module:
    size = options.size
    kind = _Unfused if options.attention == "eager" else nn.TransformerEncoderLayer
    return kind(size.width, size.heads, size.inner, options.dropout, batch_first=True)


class _Unfused(nn.TransformerEncoderLayer):
    """Torch's encoder layer with torch's unfused attention."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            output: torch.Tensor = super().forward(*args, **kwargs)
        return output


_BERT_NAMES = "query key value .output.dense"
_PROJECTIONS = "q_proj k_proj v_proj"
_SELF = "layer.0.attention.self"

FAMILIES: dict[str, Family] = {
    "bert": Family(
        _pretrained("BertForSequenceClassification", configurations.bert),
        _classes,
        separate(f"bert.encoder.{_SELF}", _BERT_NAMES, "addmm"),
        _own_loss,
    ),
    "roberta": Family(
        _pretrained("RobertaForSequenceClassification", configurations.bert),
        _classes,
        separate(f"roberta.encoder.{_SELF}", _BERT_NAMES, "addmm"),
        _own_loss,
    ),
    "gpt2": Family(
        _pretrained("GPT2ForSequenceClassification", configurations.gpt2),
        _classes,
        together(
            "transformer.h.0.attn",
            "transformer.h.0.attn.c_attn/addmm",
            "transformer.h.0.attn.c_proj/addmm",
        ),
        _own_loss,
    ),
    "gpt-neo": Family(
        _pretrained("GPTNeoForSequenceClassification", configurations.gpt_neo),
        _classes,
        separate("transformer.h.0.attn.attention", f"{_PROJECTIONS} out_proj", "mm", "addmm"),
        _own_loss,
        ("eager",),
    ),
    "opt": Family(
        _pretrained("OPTForCausalLM", configurations.opt),
        _next_words,
        separate("model.decoder.layers.0.self_attn", f"{_PROJECTIONS} out_proj", "addmm"),
        _own_loss,
    ),
    "llama": Family(
        _pretrained("LlamaForCausalLM", configurations.llama),
        _next_words,
        separate("model.layers.0.self_attn", f"{_PROJECTIONS} o_proj", "mm"),
        _own_loss,
    ),
    "t5": Family(
        _pretrained("T5ForConditionalGeneration", configurations.t5),
        _next_words,
        separate("encoder.block.0.layer.0.SelfAttention", "q k v o", "mm"),
        _own_loss,
    ),
    "vit": Family(
        _pretrained("ViTForImageClassification", configurations.vit),
        _pixels,
        separate("vit.layers.0.attention", f"{_PROJECTIONS} o_proj", "addmm"),
        _own_loss,
    ),
    "MultiheadAttention": Family(
        _Heads,
        _hidden,
        together("attention", "attention/mm", "attention/addmm"),
        _output_loss,
    ),
    "TransformerEncoderLayer": Family(
        _layer,
        _hidden,
        together("self_attn", "self_attn/mm", "self_attn/addmm"),
        _output_loss,
    ),
}
