"""Train a tiny GPT-2 with Hugging Face's Trainer, under a Guard.

    python -m examples.trainer [--steps N] [--run-dir DIR] [--kill-at STEP]

The model is made from a configuration and the data are random, so that nothing is downloaded. With
``--kill-at`` the program kills itself; started again without it, it continues at that step.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from holdfast.integrations.transformers import attach, register_attention

WORDS, LENGTH = 256, 64


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sequences in which each word follows from the one before: a rule that can be learnt."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number >= len(self):
            raise IndexError(number)
        words = (number + 7 * torch.arange(LENGTH)) % WORDS
        return {"input_ids": words, "labels": words}


class Kill(TrainerCallback):
    """Kills the program at a step, as a lost machine does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        if getattr(state, "global_step", -1) == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny GPT-2 under a Guard.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--run-dir", type=Path, default=Path("holdfast-run"))
    parser.add_argument("--kill-at", type=int, default=-1)
    options = parser.parse_args()

    set_seed(1)
    register_attention()
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="holdfast",
    )
    settings = TrainingArguments(
        output_dir=str(options.run_dir / "checkpoints"),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=Sentences())
    trainer.add_callback(Kill(options.kill_at))
    guarded = attach(trainer, run_dir=options.run_dir, audit=0.05, snapshots={"run_id": "example"})
    trainer.train()
    print(f"continued from {guarded.guard.snapshots.restored_from or 'nothing'}")
    print(guarded.protection.report())


if __name__ == "__main__":
    main()
