"""A multiple-choice task without downloads: which of four passages continues this text?

One passage is the true continuation, the others are from elsewhere in the same text. The task
replaces the paper's CosmosQA, which has four choices too. As in the paper, a model is trained on
the right choice after its context. Its answer is the choice that it finds most likely.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from holdfast_lab.study.sdc.subjects import text
from holdfast_lab.trainer.gpt import GPT

CHOICES = 4


@dataclass(frozen=True)
class Questions:
    """Questions about text.

    Attributes:
        tokens: int64 [N, choices, length + 1], each choice after the context.
        answers: int64 [N].
        choice_bytes: Number of tokens at the end of a sequence that are the choice.
    """

    tokens: torch.Tensor
    answers: torch.Tensor
    choice_bytes: int

    def __len__(self) -> int:
        return len(self.answers)

    def some(self, which: torch.Tensor) -> "Questions":
        """Return the questions with these numbers."""
        return Questions(self.tokens[which], self.answers[which], self.choice_bytes)

    def scores(self, model: GPT) -> torch.Tensor:
        """Compute Σ log p of the bytes of each choice, given the text before: [N, choices]."""
        flat = self.tokens.flatten(0, 1)
        return self._likelihoods(model, flat).sum(-1).view(self.tokens.shape[:2])

    def loss(self, model: GPT) -> torch.Tensor:
        """Compute the mean cross entropy of the right choices' bytes, in nats."""
        right = self.tokens[torch.arange(len(self)), self.answers]
        return -self._likelihoods(model, right).mean()

    def _likelihoods(self, model: GPT, sequences: torch.Tensor) -> torch.Tensor:
        """Compute log p of each byte of the choices that end these sequences."""
        logits = model(sequences[:, :-1])[:, -self.choice_bytes :]
        choice = sequences[:, -self.choice_bytes :, None]
        return functional.log_softmax(logits, -1).gather(-1, choice).squeeze(-1)

    @torch.no_grad()
    def predictions(self, model: GPT, batch: int = 64) -> torch.Tensor:
        """Return the model's choice for each question, int64 [N]; -1 if a score is not finite."""
        found = []
        for part in torch.arange(len(self)).split(batch):
            scores = self.some(part).scores(model)
            found.append(scores.argmax(-1).where(scores.isfinite().all(-1), -1))
        return torch.cat(found)


def part_of(part: str) -> tuple[int, int]:
    """Return the ends of a part of the text: ``"train"``, or ``"test"``, its last quarter."""
    length = len(text())
    split = 3 * length // 4
    return (0, split) if part == "train" else (split, length)


def questions(count: int, context: int, choice_bytes: int, *, part: str, seed: int) -> Questions:
    """Draw questions from a part of the text.

    ``context`` is the number of tokens that the model takes. The text before a choice has ``context
    + 1 - choice_bytes`` tokens. ``part`` is ``"train"`` or ``"test"``, which are different parts of
    the text.
    """
    data, (first, last) = text().data, part_of(part)
    draw = torch.Generator().manual_seed(seed)
    length = context + 1
    starts = torch.randint(first, last - length, (count, CHOICES), generator=draw)
    windows = data[starts[..., None] + torch.arange(length)].long()
    answers = torch.randint(CHOICES, (count,), generator=draw)
    before = windows[torch.arange(count), answers, : length - choice_bytes]
    tokens = windows.clone()
    tokens[..., : length - choice_bytes] = before[:, None]
    return Questions(tokens, answers, choice_bytes)
