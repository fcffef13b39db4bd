"""A multiple-choice task without downloads: which of four passages continues this text?

One passage is the true continuation, the others are from elsewhere in the same text. The task
replaces the paper's CosmosQA, which has four choices too. A model's answer is the choice that it
finds most likely.
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
        tokens: int64 [N, 4, length + 1], each choice after the context.
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
        """Compute Σ log p of the bytes of each choice, given the text before them: [N, 4]."""
        flat = self.tokens.flatten(0, 1)
        logits = model(flat[:, :-1])[:, -self.choice_bytes :]
        likelihoods = functional.log_softmax(logits, -1)
        picked = likelihoods.gather(-1, flat[:, -self.choice_bytes :, None]).sum((1, 2))
        return picked.view(-1, CHOICES)

    def loss(self, model: GPT) -> torch.Tensor:
        """Compute the mean cross entropy of the answers, in nats."""
        return functional.cross_entropy(self.scores(model), self.answers)

    @torch.no_grad()
    def predictions(self, model: GPT, batch: int = 64) -> torch.Tensor:
        """Return the model's choice for each question, int64 [N]."""
        parts = torch.arange(len(self)).split(batch)
        return torch.cat([self.some(part).scores(model).argmax(-1) for part in parts])


def questions(count: int, context: int, choice_bytes: int, *, part: str, seed: int) -> Questions:
    """Draw questions from a part of the text.

    ``context`` is the number of tokens that the model takes. The text before a choice has ``context
    + 1 - choice_bytes`` tokens. ``part`` is ``"train"`` or ``"test"``, which are different parts of
    the text.
    """
    data = text().data
    split = 3 * len(data) // 4
    first, last = (0, split) if part == "train" else (split, len(data))
    draw = torch.Generator().manual_seed(seed)
    length = context + 1
    starts = torch.randint(first, last - length, (count, CHOICES), generator=draw)
    windows = data[starts[..., None] + torch.arange(length)].long()
    answers = torch.randint(CHOICES, (count,), generator=draw)
    before = windows[torch.arange(count), answers, : length - choice_bytes]
    tokens = windows.clone()
    tokens[..., : length - choice_bytes] = before[:, None]
    return Questions(tokens, answers, choice_bytes)
