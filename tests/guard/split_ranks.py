"""What ranks do that accumulate gradients in micro-steps: DDP's ``no_sync``, FSDP2's deferral."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from shadow_ranks import STEPS, Training, strikes_of
from torch import nn

from bench.nodes_rank import say
from holdfast import events
from holdfast.guard import Guard

PARTS = 3


class SplitTraining(Training):
    """A training whose optimizer is applied by its loop, after three micro-steps."""

    def micro(self, batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        """One micro-step; whether gradients are reduced is the caller's to say."""
        step, inputs = batch
        self.net.middle.struck = self.strikes(step, self.passes)
        self.passes += 1
        loss = self.model(inputs).square().mean() / PARTS
        if self.net.middle.struck == "infinite":
            loss = loss * torch.inf
        loss.backward()
        return loss

    def split(self, guard: Guard | None) -> None:
        """Train; under a guard if there is one."""
        for step in range(STEPS):
            for number, inputs in enumerate(self.batch(step)):
                last = number == PARTS - 1
                with self.reducing(last):
                    if guard is None:
                        self.micro((step, inputs))
                    else:
                        guard.micro_step(self.micro, (step, inputs), last=last)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if guard is not None:
                guard.after_optimizer_step()

    def reducing(self, last: bool) -> Any:
        """The context in which a framework runs a micro-step."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            return nullcontext() if last else self.model.no_sync()
        self.model.set_requires_gradient_sync(last)
        return nullcontext()


def train(said: Path, scenarios: list[dict[str, Any]]) -> None:
    """One training after the other; each rank says how each of them ended."""
    for scenario in scenarios:
        events.clear()
        training = SplitTraining(scenario["layout"], PARTS)
        training.strikes = strikes_of(scenario.get("fault"))
        options = scenario.get("guard")
        if options is None:
            training.split(None)
        else:
            with Guard(training.model, training.optimizer, **options) as guard:
                training.split(guard)
        found = [event.as_dict() for event in events.recent()]
        say(said, state=training.digest(), events=found, passes=training.passes)
