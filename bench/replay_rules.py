"""What two rules of repeating a step see of the same faults: torchtitan's, and a Guard's audit.

    python -m bench.replay_rules

After its release 0.3 torchtitan repeats the first accumulation group of a step and compares loss,
gradients and buffers by ``torch.hash_tensor``; a difference ends the run. That rule is written here
from its published description. A Guard with ``audit=1.0`` repeats the whole step, compares digests
that depend on the order of the bytes, and applies what two runs agree on. Each fault strikes one
step of three micro-batches; ``changes_weights`` says whether it changes the weights of a loop
without either. ``steps`` is the number of steps struck, one in each run, with other data each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from bench.rows import record
from holdfast import Guard, UncorrectableFault, events
from holdfast.digest.tensors import state_digest

PARTS, STEPS = 3, 50


@dataclass(frozen=True)
class Case:
    """A change of the first weight's gradient in one micro-batch, in the first run or in all."""

    name: str
    change: Callable[[torch.Tensor], None]
    part: int = 0
    repeats: bool = False


def _one_element(gradient: torch.Tensor) -> None:
    gradient.view(-1)[5] *= 1.01


def _exchanged(gradient: torch.Tensor) -> None:
    flat = gradient.view(-1)
    flat[[5, 9]] = flat[[9, 5]]


CASES = (
    Case("one element changed", _one_element),
    Case("two elements exchanged", _exchanged),
    Case("one element changed in a later micro-batch", _one_element, part=1),
    Case("one element changed, alike in every run", _one_element, repeats=True),
)


class Step:
    """A step of a small model, struck by a fault."""

    def __init__(self, seed: int, case: Case | None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 4)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.parts = torch.randn(PARTS, 6, 8)
        self.case, self.runs = case, [0] * PARTS

    def micro_step(self, part: int) -> torch.Tensor:
        """Forward and backward of one micro-batch."""
        loss = self.model(self.parts[part]).square().mean() / PARTS
        loss.backward()
        case, self.runs[part] = self.case, self.runs[part] + 1
        if case is not None and part == case.part and (case.repeats or self.runs[part] == 1):
            assert self.model[0].weight.grad is not None
            case.change(self.model[0].weight.grad)
        return loss.detach()

    def weights(self) -> str:
        """Apply the gradients; return a digest of the weights."""
        self.optimizer.step()
        return state_digest(self.model.state_dict())

    def bare(self) -> str:
        """The weights without a rule."""
        for part in range(PARTS):
            self.micro_step(part)
        return self.weights()

    def published_rule_sees(self) -> bool:
        """Repeat the first accumulation group and compare hashes."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        first = self._hashes(self.micro_step(0))
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        self.optimizer.zero_grad()
        return first != self._hashes(self.micro_step(0))

    def _hashes(self, loss: torch.Tensor) -> list[int]:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        compared = [loss, *gradients, *self.model.buffers()]
        return [int(torch.hash_tensor(tensor).item()) for tensor in compared]

    def audited(self) -> tuple[bool, str]:
        """Whether a Guard saw the fault, and the weights that it let through."""
        events.clear()
        try:
            with Guard(self.model, self.optimizer, audit=1.0) as guard:
                for part in range(PARTS):
                    guard.micro_step(self.micro_step, part, last=part == PARTS - 1)
                weights = self.weights()
                guard.after_optimizer_step()
        except UncorrectableFault:
            return True, ""
        return any(event.kind == "rerun" for event in events.recent()), weights


def main() -> None:
    """Strike each step in turn; record one row a fault."""
    torch.set_num_threads(1)
    right = [Step(seed, None).bare() for seed in range(STEPS)]
    clean = [Step(seed, None) for seed in range(STEPS)]
    assert not any(step.published_rule_sees() for step in clean)
    assert all(Step(n, None).audited() == (False, right[n]) for n in range(STEPS))
    for case in CASES:
        audited = [Step(seed, case).audited() for seed in range(STEPS)]
        record(
            "replay_rules",
            {
                "fault": case.name,
                "steps": STEPS,
                "changes_weights": sum(Step(n, case).bare() != right[n] for n in range(STEPS)),
                "published_rule_sees": sum(
                    Step(n, case).published_rule_sees() for n in range(STEPS)
                ),
                "audit_sees": sum(seen for seen, _ in audited),
                "audit_repairs": sum(
                    seen and weights == right[n] for n, (seen, weights) in enumerate(audited)
                ),
            },
        )


if __name__ == "__main__":
    main()
