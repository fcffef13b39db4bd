"""GPT-2 of 0.9 million parameters in Hugging Face's Trainer, for ``bench.integrations``."""

import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from holdfast.digest.tensors import state_digest
from holdfast.integrations.transformers import attach
from holdfast.protection import protect

WORDS, LENGTH = 1024, 64


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        words = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        return {"input_ids": words, "labels": words}


def gpt2() -> GPT2LMHeadModel:
    """Seed all generators, and return a model."""
    set_seed(1)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def train(steps: int, run_dir: Path | None) -> str:
    """Train, with the adapter if there is a run directory; return the digest of the result."""
    model = gpt2()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, settings, train_dataset=Rows())
        if run_dir is not None:
            attach(trainer, run_dir=run_dir)
        with protect(model) if run_dir is None else nullcontext():
            trainer.train()
    return state_digest([model.state_dict(), trainer.optimizer.state_dict()])
