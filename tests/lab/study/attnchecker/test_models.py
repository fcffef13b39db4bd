"""Models by name: reproducible, of the size asked for, and clear errors where there is none."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from holdfast.digest.tensors import tensors_digest
from holdfast.errors import ConfigError
from holdfast_lab.study.attnchecker import models
from holdfast_lab.study.attnchecker.models import BASE, FAMILIES, FIRST_WORD, TINY, subject
from holdfast_lab.study.attnchecker.subjects import Matrix

TORCHS_OWN = ("MultiheadAttention", "TransformerEncoderLayer")


def test_without_transformers_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(models, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[models\]'"):
        subject("bert")
    for name in TORCHS_OWN:
        assert subject(name).loss().isfinite()


def test_models_and_attentions_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="no model 'gpt-5'; known: bert, roberta"):
        subject("gpt-5")
    with pytest.raises(ConfigError, match="gpt-neo has no 'sdpa' attention; give eager"):
        subject("gpt-neo", attention="sdpa")


def test_importing_the_studies_does_not_import_transformers() -> None:
    # `holdfast study list` must neither wait for it nor need it.
    script = "import sys, holdfast_lab.study; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_seed_decides_weights_and_batch_and_nothing_else_changes(name: str) -> None:
    if name not in TORCHS_OWN:
        pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")

    def digest(seed: int) -> str:
        case = subject(name, seed=seed)
        return tensors_digest([*case.model.parameters(), *case.batch.values()])

    before = torch.random.get_rng_state()
    assert digest(0) == digest(0) != digest(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert subject(name).model.training


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in TORCHS_OWN])
def test_a_model_has_the_size_asked_for(name: str) -> None:
    pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")
    small = subject(name, replace(TINY, width=16, layers=1, length=16))
    wide = subject(name, replace(TINY, width=32, layers=1, length=16))
    deep = subject(name, replace(TINY, width=16, layers=2, length=16))
    counts = [sum(p.numel() for p in case.model.parameters()) for case in (small, wide, deep)]
    assert counts[1] > 1.5 * counts[0]
    assert counts[2] > counts[0]


def test_some_of_a_batch_is_padding_and_padding_is_masked() -> None:
    pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")
    batch = subject("bert").batch
    words = batch["input_ids"] >= FIRST_WORD
    assert torch.equal(words.long(), batch["attention_mask"])
    assert 0 < int((~words).sum()) < words.numel() / 2


def test_a_part_of_a_product_shares_its_memory() -> None:
    product = torch.zeros(2, 6)
    Matrix("m/mm", 1, 3).of(product).fill_(1)
    assert product.tolist() == [[0, 0, 1, 1, 0, 0]] * 2
    assert Matrix("m/mm").forward == "m/mm/forward"


def test_the_published_size_is_bert_base() -> None:
    assert (BASE.layers, BASE.width, BASE.heads, BASE.inner) == (12, 768, 12, 3072)
