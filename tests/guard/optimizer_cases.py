"""Optimizers of torch whose steps are checked, alone, and what strikes them."""

from collections.abc import Callable
from typing import Any

import torch
from at_rest_cases import flip
from torch import nn
from torch.nn.utils import clip_grad_norm_

from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.step.optimizer_check import OptimizerCheck

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Strike = tuple[int, int, str, int]  # step, parameter, name of the value, bit

SHAPES = ((40, 17), (64,), (23, 9))


def _of(kind: str, **options: Any) -> Make:
    return lambda parameters: getattr(torch.optim, kind)(
        [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.05}], **options
    )


def _muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-2)


MOMENTUM: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9}
OPTIMIZERS: dict[str, Make] = {
    "SGD plain": _of("SGD", lr=1e-2),
    **{
        f"{kind} {how}": _of(kind, **options, **{how: True})
        for how in ("foreach", "fused")
        for kind, options in {
            "SGD": MOMENTUM | {"nesterov": True},
            "Adam": {"lr": 1e-3, "amsgrad": True},
            "AdamW": {"lr": 1e-3},
        }.items()
    },
    "SGD single": _of("SGD", **MOMENTUM, foreach=False),
    "Adam single": _of("Adam", lr=1e-3, foreach=False),
    "AdamW single": _of("AdamW", lr=1e-3, foreach=False),
    "AdamW default": _of("AdamW", lr=1e-3),
    "AdamW tensor lr": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(1e-3), fused=True
    ),
    "Adafactor single": _of("Adafactor", lr=1e-2, foreach=False),
    "Adafactor foreach": _of("Adafactor", lr=1e-2, foreach=True),
    "Muon": _muon,
    **{kind: _of(kind) for kind in ("RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax")},
}


class Stepped:
    """Parameters that an optimizer moves by random gradients, clipped, under a schedule."""

    def __init__(
        self,
        make: Make,
        share: float,
        *,
        shapes: tuple[tuple[int, ...], ...] = SHAPES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.draw = torch.Generator().manual_seed(0)
        self.model = nn.ParameterList(
            torch.randn(shape, generator=self.draw).to(dtype) for shape in shapes
        )
        self.optimizer = make(list(self.model))
        self.held = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.check = OptimizerCheck(self.model, self.optimizer, share)
        self.check.watch()
        self.strikes: Callable[[int], None] = lambda step: None

    def values(self, number: int) -> dict[str, torch.Tensor]:
        """What a step leaves of a parameter."""
        parameter = self.held[number]
        held = self.optimizer.state.get(parameter, {})
        state = {n: v for n, v in held.items() if v.numel() > 1}
        return {"parameter": parameter.detach(), **state}

    def run(self, steps: int, first: int = 0) -> "Stepped":
        """Train; what strikes does so as the optimizer has written, before any hook after it."""
        for step in range(first, first + steps):
            events.set_step(step)
            for parameter in self.model:
                scale = 10 ** (3 * torch.rand((), generator=self.draw) - 3)
                gradient = scale * torch.randn(parameter.shape, generator=self.draw)
                parameter.grad = gradient.to(parameter.dtype)
            clip_grad_norm_(self.model, 1.0)
            self.optimizer._optimizer_step_code = lambda step=step: self.strikes(step)
            self.optimizer.step()
            self.schedule.step()
        return self

    def struck(self, strikes: list[Strike]) -> "Stepped":
        """The same, in which bits flip."""
        by_step = {strike[0]: strike for strike in strikes}

        def strike(step: int) -> None:
            if step in by_step:
                _, number, name, bit = by_step[step]
                flip(self.values(number)[name], bit, 5)

        self.strikes = strike
        return self

    def digest(self) -> str:
        """Of the parameters and all that the optimizer keeps."""
        return state_digest([self.model.state_dict(), self.optimizer.state_dict()])
