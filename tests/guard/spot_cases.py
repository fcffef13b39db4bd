"""Small models of many kinds of modules, trained under spot checks, and what strikes a module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.guard import Guard
from holdfast.inject.faults import write_element
from holdfast.protection import protect
from holdfast.rng import rng_state

WORDS, WIDTH, SPOT_STEPS, SPOT_STRUCK = 40, 16, 6, 4


class Gpt(nn.Module):
    """One block, attention written out, which is recomputed in backward if this is asked for."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.words, self.reentrant = nn.Embedding(WORDS, WIDTH), reentrant
        self.norm, self.soft, self.act = nn.LayerNorm(WIDTH), nn.Softmax(-1), nn.GELU()
        self.qkv, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(0.1)
        self.up, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape; ``norm`` and ``drop`` are called twice."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(self.soft(q @ k.transpose(1, 2)) @ v)
        return x + self.drop(self.act(self.up(self.norm(x))))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores of the next words."""
        x = self.words(words)
        if self.reentrant is None:
            return self.last(self.block(x))
        return self.last(checkpoint(self.block, x, use_reentrant=self.reentrant))


class Recurrent(nn.Module):
    """An LSTM, which one fused kernel computes, and a GRU, of which torch computes each product."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(WORDS, WIDTH), nn.EmbeddingBag(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)
        self.gru, self.last = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores of the next words; the GRU's last state is used beside its results."""
        x, _ = self.lstm(self.words(words))
        x, state = self.gru(x + self.bags(words).unsqueeze(1))
        return self.last(x + state.transpose(0, 1))


def images() -> nn.Module:
    """Convolutions with batch norm and an activation in place."""
    layers = [nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8)]
    layers += [nn.ReLU(inplace=True), nn.Dropout1d(0.2), nn.Conv1d(8, 4, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, WORDS))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": Gpt,
    "recomputed": lambda: Gpt(reentrant=False),
    "recomputed reentrantly": lambda: Gpt(reentrant=True),
    "recurrent": Recurrent,
    "images": images,
}


def flip(tensor: torch.Tensor) -> None:
    """Flip a bit of the largest element without PyTorch's knowledge, whatever the strides."""
    index = tuple(int(n) for n in torch.unravel_index(tensor.detach().argmax(), tensor.shape))
    word = tensor.detach()[index].reshape(1).view(torch.int32)
    write_element(tensor, index, (word ^ (1 << 20)).view(torch.float32))


class SpotRun:
    """A training run of one of the models, or of a sequence of layers."""

    def __init__(self, make: str | Callable[[], nn.Module], how: str = "") -> None:
        torch.manual_seed(0)
        self.model = MODELS[make]() if isinstance(make, str) else make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.how, self.struck = how, False

    def batch(self, step: int) -> torch.Tensor:
        """The words, or for a sequence of layers the values, of a step."""
        words = torch.randint(WORDS, (6, 4), generator=torch.Generator().manual_seed(step))
        return words if isinstance(self.model, Gpt | Recurrent) else words / WORDS

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        """One pass, in one part or in two."""
        losses = []
        for part in batch.chunk(2 if self.how == "accumulated" else 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.how == "autocast"):
                scores = self.model(part).flatten(0, -2).float()
                targets = torch.full(scores.shape[:-1], 3)
                losses.append(functional.cross_entropy(scores, targets))
            losses[-1].backward()
        return torch.stack(losses).sum().detach()

    def guarded(self, steps: int = SPOT_STEPS, **options: Any) -> Guard:
        """Train under a Guard."""
        protection = protect(self.model) if self.how == "protected" else None
        with Guard(self.model, self.optimizer, optimizer_check=0.0, **options) as guard:
            for step in range(steps):
                guard.step(self.forward_backward, self.batch(step))
        if protection is not None:
            protection.remove()
        return guard

    def strike(self, module: str, direction: str) -> "SpotRun":
        """Flip a bit once: of what a module returns, or of a gradient that leaves its last node."""

        def returned(_: nn.Module, __: object, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if events.current_step() == SPOT_STRUCK and not self.struck:
                if direction == "forward":
                    self.struck = True
                    flip(first)
                else:
                    first.grad_fn.register_hook(left)

        def left(inputs: Any, _: object) -> Any:
            place = next((n for n, each in enumerate(inputs) if each is not None), None)
            if self.struck or place is None:
                return None
            self.struck, changed = True, inputs[place].clone()
            flip(changed)
            return (*inputs[:place], changed, *inputs[place + 1 :])

        self.model.get_submodule(module).register_forward_hook(returned)
        return self

    def digest(self) -> str:
        """Of model, optimizer and random state."""
        parts = [self.model.state_dict(), self.optimizer.state_dict(), rng_state()["torch"]]
        return state_digest(parts)
