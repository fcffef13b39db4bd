"""Models by name: reproducible, of the size asked for, and clear errors where there is none."""

import subprocess
import sys

import pytest
import torch
from case_loops import for_each

from holdfast.digest.tensors import tensors_digest
from holdfast.errors import ConfigError
from holdfast_lab.study.attnchecker import models
from holdfast_lab.study.attnchecker.models import FAMILIES, FIRST_WORD, subject

TORCHS_OWN = ("MultiheadAttention", "TransformerEncoderLayer")


def test_without_transformers_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(models, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'torch-holdfast\[lab\]'"):
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


@for_each("name", FAMILIES)
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


def test_some_of_a_batch_is_padding_and_padding_is_masked() -> None:
    pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")
    batch = subject("bert").batch
    words = batch["input_ids"] >= FIRST_WORD
    assert torch.equal(words.long(), batch["attention_mask"])
    assert 0 < int((~words).sum()) < words.numel() / 2
