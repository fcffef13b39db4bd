"""A tiny GPT-2 that Hugging Face's Trainer trains, evaluates and saves."""

import os
from pathlib import Path
from typing import Any, ClassVar

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from contract import Program
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from holdfast.integrations.transformers import attach

TIMES = ("runtime", "per_second")


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same for each number."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number >= self.rows:
            raise IndexError(number)
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 61, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=61,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 5,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**settings | changed)


class TrainerProgram(Program):
    """Two epochs of four steps of three micro-steps."""

    rows = 24
    changed: ClassVar[dict[str, Any]] = {}

    def __init__(self, folder: Path) -> None:
        set_seed(5)
        self.model = gpt2()
        self.struck = self.model.transformer.h[0].ln_2
        self.weight = self.model.transformer.h[1].mlp.c_fc.weight
        self.trainer = Trainer(
            model=self.model,
            args=arguments(folder, **self.changed),
            train_dataset=self.data(),
            eval_dataset=Rows(4),
        )

    def data(self) -> Any:
        return Rows(self.rows)

    def attach(self, run_dir: Path | None, **settings: Any) -> None:
        self.guarded = attach(self.trainer, run_dir=run_dir, **settings)

    def train(self) -> None:
        self.trainer.train()

    def steps_done(self) -> int:
        return int(self.trainer.state.global_step)

    def result(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.trainer.optimizer.optimizer.state_dict(),
            "schedule": self.trainer.lr_scheduler.state_dict(),
            "logs": [
                {k: v for k, v in entry.items() if not any(word in k for word in TIMES)}
                for entry in self.trainer.state.log_history
            ],
        }

    def internals(self) -> list[tuple[object, str]]:
        names = ["_tr_loss", "_globalstep_last_logged"]
        names += ["_clip_grad_norm"]
        gradient_state = self.trainer.accelerator.gradient_state
        others = [(gradient_state, "_set_sync_gradients"), (GPTNeoSelfAttention, "_attn")]
        return [*((self.trainer, n) for n in names), *others]
