"""Loops that train language models: nanoGPT, Hugging Face without its Trainer, changing shapes."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader

from holdfast import Guard, Snapshots, protect
from holdfast_lab.trainer.gpt import GPT, GPTConfig, loss, make_optimizer
from holdfast_lab.zoo.loop import Form, Loop, draw_tokens

VOCABULARY, CONTEXT, BATCH = 32, 12, 4
SMALL = GPTConfig(layers=1, heads=2, width=16, context=CONTEXT, vocabulary=VOCABULARY, dropout=0.1)

Batch = tuple[torch.Tensor, torch.Tensor]


class _Ahead:
    """The batch that was fetched before its step, so that a restart has it."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the batch."""
        return {"x": self.batch[0], "y": self.batch[1]}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take a batch that was saved."""
        self.batch = state["x"], state["y"]


class NanoGpt(Loop):
    """The loop of nanoGPT."""

    name = "nanogpt"
    like = "nanoGPT: gradient accumulation, learning rate by hand, clipping, the next batch fetched"
    form = Form.MICRO_STEP
    repeated = "all micro-steps of the step"
    remember = "a batch that is fetched before its step is part of the state: `extra=`"

    steps, accumulation, evaluate_every = 12, 3, 5

    def __init__(self) -> None:
        torch.manual_seed(1337)
        self.data = torch.randint(VOCABULARY, (600,))
        self.model = GPT(SMALL)
        self.optimizer = make_optimizer(self.model, 1e-2, 0.1)
        self.optimizers = (self.optimizer,)
        self.losses: list[float] = []

    def get_batch(self) -> Batch:
        """Draw sequences at random places of the text."""
        starts = torch.randint(len(self.data) - CONTEXT - 1, (BATCH,)).tolist()
        x = torch.stack([self.data[i : i + CONTEXT] for i in starts])
        y = torch.stack([self.data[i + 1 : i + 1 + CONTEXT] for i in starts])
        return x, y

    def get_lr(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then a cosine."""
        if step < 3:
            return 1e-2 * (step + 1) / 4
        return 1e-3 + 0.5 * (1 + math.cos(math.pi * (step - 3) / (self.steps - 3))) * 9e-3

    @torch.no_grad()
    def estimate_loss(self) -> float:
        """Return the mean loss of two batches without dropout."""
        self.model.eval()
        losses = [loss(self.model, *self.get_batch()).item() for _ in range(2)]
        self.model.train()
        return sum(losses) / 2

    def bare(self) -> None:
        """Train as ``train.py`` does."""
        x, y = self.get_batch()
        for step in range(self.steps):
            lr = self.get_lr(step)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if step % self.evaluate_every == 0:
                self.losses.append(self.estimate_loss())
            for _ in range(self.accumulation):
                part = loss(self.model, x, y) / self.accumulation
                x, y = self.get_batch()
                part.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Run one micro-step."""
        part = loss(self.model, *batch) / self.accumulation
        part.backward()
        return part

    def finish_step(self) -> None:
        """Clip and apply the gradients."""
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def guarded(self) -> None:
        """Train with the micro-steps in the Guard's hands."""
        self.protection = protect(self.model)
        ahead = _Ahead(self.get_batch())
        self.snapshots = Snapshots(self.model, self.optimizer, extra=ahead)
        with Guard(
            self.model, self.optimizer, snapshots=self.snapshots, apply_again=self.finish_step
        ) as guard:
            for step in range(guard.steps_done, self.steps):
                lr = self.get_lr(step)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                if step % self.evaluate_every == 0:
                    self.losses.append(self.estimate_loss())
                for part in range(self.accumulation):
                    last = part == self.accumulation - 1
                    guard.micro_step(self.forward_backward, ahead.batch, last=last)
                    ahead.batch = self.get_batch()
                self.finish_step()
                guard.after_optimizer_step()


class HuggingFace(Loop):
    """The loop of Hugging Face's course, without its Trainer."""

    name = "huggingface"
    like = "a Hugging Face loop without Trainer: BERT of `transformers`, linear schedule, epochs"
    form = Form.STEP
    repeated = "the pass"
    remember = "nothing: a shuffling `DataLoader` is resumed by `guard.batches`"

    epochs = 3

    def __init__(self) -> None:
        from transformers import BertConfig, BertForSequenceClassification, get_scheduler

        torch.manual_seed(7)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=CONTEXT,
        )
        config._attn_implementation = "eager"
        self.model = BertForSequenceClassification(config)
        tokens = draw_tokens(20, CONTEXT, below=VOCABULARY, seed=7)
        rows = [
            {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2}
            for row in tokens
        ]
        self.loader: DataLoader[Any] = DataLoader(
            rows,  # type: ignore[arg-type]
            batch_size=4,
            shuffle=True,
        )
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)
        self.optimizers = (self.optimizer,)
        self.steps = self.epochs * len(self.loader)
        self.scheduler = get_scheduler(
            "linear", self.optimizer, num_warmup_steps=2, num_training_steps=self.steps
        )
        self.model.train()
        self.losses: list[float] = []

    def parts(self) -> tuple[Any, ...]:
        """Return the schedule."""
        return (self.scheduler,)

    def bare(self) -> None:
        """Train as the course does."""
        for _ in range(self.epochs):
            for batch in self.loader:
                outputs = self.model(**batch)
                outputs.loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.losses.append(outputs.loss.item())

    def forward_backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run one pass."""
        found: torch.Tensor = self.model(**batch).loss
        found.backward()
        return found

    def guarded(self) -> None:
        """Train with the steps in the Guard's hands."""
        self.protection = protect(self.model)
        self.snapshots = Snapshots(self.model, self.optimizer, scheduler=self.scheduler)
        with Guard(self.model, self.optimizer, snapshots=self.snapshots) as guard:
            for batch in guard.batches(self.loader, steps=self.steps):
                self.losses.append(guard.step(self.forward_backward, batch).item())


class _RotaryAttention(nn.Module):
    """Causal attention whose table of rotations grows with the longest sequence seen so far."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self._grow(4, width // heads)

    def _grow(self, length: int, size: int) -> None:
        frequencies = 1e4 ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        left, right = x.chunk(2, -1)
        return x * self.cos[:length] + torch.cat([-right, left], -1) * self.sin[:length]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each position of x [B, T, width] with earlier ones."""
        batch, length, width = x.shape
        size = width // self.heads
        if length > len(self.cos):
            self._grow(length, size)
        query, key, value = (
            part.view(batch, length, self.heads, size).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = self._rotated(query) @ self._rotated(key).mT / math.sqrt(size)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ value
        found: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return found


class _Llama(nn.Module):
    """A block of a Llama: rotary attention, RMS norms, a gated MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = _RotaryAttention(width, 2)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of tokens [B, T]."""
        x = self.embed(tokens)
        x = x + self.attention(self.norm_1(x))
        h = self.norm_2(x)
        found: torch.Tensor = self.head(x + self.down(functional.silu(self.gate(h)) * self.up(h)))
        return found


class Rope(Loop):
    """A Llama whose rotary tables grow within the forward pass."""

    name = "rope"
    like = "Llama-like models: rotary tables that grow in the forward pass as sequences get longer"
    form = Form.STEP
    repeated = "the pass, from the tables before it"
    remember = "keep such a cache in a buffer: a plain attribute is not put back"

    lengths = (4, 3, 6, 6, 5, 9, 4, 11, 8, 12, 7, 12)

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = _Llama()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.optimizers = (self.optimizer,)
        self.scheduler = CosineAnnealingLR(self.optimizer, len(self.lengths))
        self.batches = [
            draw_tokens(BATCH, length + 1, below=VOCABULARY, seed=step)
            for step, length in enumerate(self.lengths)
        ]

    def parts(self) -> tuple[Any, ...]:
        """Return the schedule."""
        return (self.scheduler,)

    def forward_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one pass."""
        found = loss(self.model, tokens[:, :-1], tokens[:, 1:])
        found.backward()
        return found

    def bare(self) -> None:
        """Train with longer and longer sequences."""
        for tokens in self.batches:
            self.optimizer.zero_grad()
            self.forward_backward(tokens)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()

    def guarded(self) -> None:
        """Train with the steps in the Guard's hands."""
        self.protection = protect(self.model)
        self.snapshots = Snapshots(self.model, self.optimizer, scheduler=self.scheduler)
        with Guard(
            self.model, self.optimizer, snapshots=self.snapshots, clip_grad_norm=1.0
        ) as guard:
            for tokens in guard.batches(self.batches, steps=len(self.batches)):
                guard.step(self.forward_backward, tokens)


class _Buckets:
    """Batches of sentences of about the same length, in an order drawn anew in each epoch."""

    def __init__(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, CONTEXT, (20,), generator=drawn).sort().values.tolist()
        rows = draw_tokens(20, CONTEXT, below=VOCABULARY, seed=seed)
        self._rows = [row[: length + 1] for row, length in zip(rows, lengths, strict=True)]

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in torch.randperm(5).tolist():
            rows = self._rows[4 * number : 4 * number + 4]
            yield nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


class ChangingShapes(Loop):
    """Batches whose shape differs from step to step."""

    name = "shapes"
    like = "fairseq-like: batches of sentences of one length, padded, of another shape in each step"
    form = Form.STEP
    repeated = "the pass"
    remember = "nothing"

    epochs = 3

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.loader = _Buckets(11)
        self.model = GPT(SMALL)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3, betas=(0.9, 0.98))
        self.optimizers = (self.optimizer,)
        self.scheduler = LambdaLR(self.optimizer, lambda n: min((n + 1) / 4, 2 / (n + 1) ** 0.5))
        self.steps = self.epochs * len(self.loader)

    def parts(self) -> tuple[Any, ...]:
        """Return the schedule."""
        return (self.scheduler,)

    def forward_backward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run one pass; padding counts for nothing."""
        logits = self.model(rows[:, :-1].clamp_min(0))
        targets = rows[:, 1:].reshape(-1)
        found = functional.cross_entropy(
            logits.flatten(0, 1), targets, ignore_index=-1, label_smoothing=0.1, reduction="sum"
        )
        found = found / (targets >= 0).sum()
        found.backward()
        return found

    def bare(self) -> None:
        """Train in epochs."""
        for _ in range(self.epochs):
            for rows in self.loader:
                self.optimizer.zero_grad()
                self.forward_backward(rows)
                clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()

    def guarded(self) -> None:
        """Train with the steps in the Guard's hands."""
        self.protection = protect(self.model)
        self.snapshots = Snapshots(self.model, self.optimizer, scheduler=self.scheduler)
        with Guard(
            self.model, self.optimizer, snapshots=self.snapshots, clip_grad_norm=0.5
        ) as guard:
            for rows in guard.batches(self.loader, steps=self.steps):
                guard.step(self.forward_backward, rows)
