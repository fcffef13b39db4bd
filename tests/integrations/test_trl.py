"""The adapter to Hugging Face's Trainer, in TRL's trainer for supervised fine-tuning."""

from pathlib import Path
from typing import Any

import pytest
from contract import INF, Striker, kinds, outcome
from transformers import PreTrainedTokenizerFast, set_seed
from transformers_program import TrainerProgram, arguments, gpt2

from holdfast import events

trl = pytest.importorskip("trl", "0.29", reason="trl is not installed (extra 'integrations')")
pytestmark = pytest.mark.processes


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(61)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w1", pad_token="w2")


class FineTuning(TrainerProgram):
    """It sums tokens and accuracies in its passes, which are logged."""

    def __init__(self, folder: Path) -> None:
        from datasets import Dataset

        set_seed(5)
        self.model = gpt2()
        self.struck = self.model.transformer.h[0].ln_2
        self.weight = self.model.transformer.h[1].mlp.c_fc.weight
        settings = arguments(folder, eval_strategy="no").to_dict() | {"max_length": 16}
        known = trl.SFTConfig.__dataclass_fields__
        rows = [
            {"text": " ".join(f"w{(7 * n + k) % 61}" for k in range(5 + n % 4))} for n in range(24)
        ]
        self.trainer = trl.SFTTrainer(
            model=self.model,
            args=trl.SFTConfig(**{k: v for k, v in settings.items() if k in known}),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
        )

    def result(self) -> dict[str, Any]:
        return super().result() | {"tokens": self.trainer._total_train_tokens}


def test_fine_tuning_has_the_bits_and_the_logs_of_the_bare_run(
    run_dir: Path, tmp_path: Path
) -> None:
    clean = outcome(FineTuning(tmp_path / "bare"))

    class Stop(Exception):
        pass

    strike = Striker({(2, 0): INF})

    def on_pass(place: tuple[int, int]) -> float | None:
        if place == (6, 1):
            raise Stop
        return strike(place)

    with pytest.raises(Stop):
        outcome(FineTuning(tmp_path / "guarded"), on_pass, run_dir=run_dir)
    assert kinds("rerun") == [("rerun", 2)]
    events.clear()
    assert outcome(FineTuning(tmp_path / "guarded"), run_dir=run_dir) == clean
