"""What ranks do that check the steps of an optimizer of divided parameters."""

from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from at_rest_cases import flip
from shadow_ranks import STEPS, STRUCK_STEP, Training

from bench.nodes_rank import say
from holdfast import events
from holdfast.errors import UncorrectableFault
from holdfast.guard import Guard
from holdfast.replay.updates import Sample


class Divided(Training):
    """A training of FSDP2 with AdamW; one rank's optimizer may err in its own shard."""

    def __init__(self, *, struck: bool) -> None:
        super().__init__("fsdp")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if struck and dist.get_rank() == 1:
            self.optimizer._optimizer_step_code = self._strike

    def _strike(self) -> None:
        if events.current_step() == STRUCK_STEP:
            flip(self.net.up.weight.detach().to_local(), 0)

    def _tensors(self) -> Any:
        yield from self.model.parameters()
        yield from self.model.buffers()
        for parameter in self.model.parameters():
            yield from self.optimizer.state[parameter].values()


def train(said: Path) -> None:
    """A bare run, and guarded ones: clean, struck, and struck without the check."""
    for struck, share in ((False, None), (False, 1.0), (True, 1.0), (True, 0.0)):
        events.clear()
        training, checked = Divided(struck=struck), 0
        if share is None:
            training.bare()
        else:
            guard = Guard(training.model, training.optimizer, optimizer_check=share)
            with guard:
                for step in range(STEPS):
                    guard.step(training.forward_backward, training.batch(step))
            checked = guard.optimizer_check.coverage()[0]["checked"]
        told = [event.as_dict() for event in events.recent()]
        say(said, state=training.digest(), events=told, checked=checked)


def ended(said: Path) -> None:
    """A clean run, and one whose last update rank 1 never computes twice alike."""
    again, numbers = Sample.again, count(1)
    for erring in (False, dist.get_rank() == 1):
        training, error = Training("ddp"), ""

        def computed(sample: Sample, erring: bool = erring) -> dict[str, Any]:
            values = again(sample)
            if erring and events.current_step() == STEPS - 1 and values["parameter"].ndim == 2:
                values["parameter"][0, 0] += next(numbers)
            return values

        with mock.patch.object(Sample, "again", computed):
            try:
                with Guard(training.model, training.optimizer, optimizer_check=1.0) as guard:
                    for step in range(STEPS):
                        guard.step(training.forward_backward, training.batch(step))
            except UncorrectableFault as fault:
                error = str(fault)
        say(said, error=error, steps=guard.steps_done)
