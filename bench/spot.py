"""What spot checks cost, in CPU time and in paired steps of a Guard with the default and without.

    python -m bench.spot [--rounds N]

A GPT of 4 layers, width 256 and 1,024 tokens, and an LSTM of 2 layers, width 256, of 32 sequences
of 32 tokens, both protected. A round is 64 steps of each Guard in turns, in which each module is
computed again once. Correctness first: both have the same bits, and no step was in doubt. The row
has the CPU time of the check as a share of that of a step, the largest, and the steps' ratio.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import holdfast
from bench.rows import record
from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.guard import Guard
from holdfast.replay.module_calls import Passed
from holdfast.step import spot_check
from holdfast.step.spot_check import SHARE, SpotCheck
from holdfast_lab.trainer.gpt import GPT, GPTConfig

ROUND, WORDS, SPENT = round(1 / SHARE), 4096, {"seconds": 0.0, "depth": 0.0}


class Lstm(nn.LSTM):
    """An LSTM that returns its outputs alone."""

    def forward(self, x: torch.Tensor, hx: None = None) -> torch.Tensor:  # type: ignore[override]
        """Return the outputs."""
        outputs: torch.Tensor = super().forward(x, hx)[0]
        return outputs


def lstm(width: int = 256) -> nn.Module:
    """Return a model that predicts the next of a sequence of tokens."""
    words, layers = nn.Embedding(WORDS, width), Lstm(width, width, 2, batch_first=True)
    return nn.Sequential(
        words, nn.Dropout(0.1), layers, nn.LayerNorm(width), nn.Linear(width, WORDS)
    )


def timed(kind: Any, name: str, spent: dict[str, float]) -> None:
    """Add the CPU time of a method to ``seconds``, once where such methods call each other."""
    plain = getattr(kind, name)

    def run(*args: Any) -> Any:
        spent["depth"] += 1
        before = time.process_time()
        found = plain(*args)
        spent["depth"] -= 1
        spent["seconds"] += 0.0 if spent["depth"] else time.process_time() - before
        return found

    setattr(kind, name, run)


class Side:
    """A protected model under a Guard with a share of spot checks."""

    def __init__(self, make: Callable[[], nn.Module], share: float) -> None:
        torch.manual_seed(0)
        self.model, self.cpu_s = make(), list[float]()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.protection = holdfast.protect(self.model)
        self.guard = Guard(self.model, optimizer, spot=share, optimizer_check=0.0)

    def step(self, batch: torch.Tensor) -> None:
        """Train one step from a random state of its own number."""
        torch.manual_seed(len(self.cpu_s))
        before = time.process_time()
        self.guard.step(self._pass, batch)
        self.cpu_s.append(time.process_time() - before)

    def _pass(self, batch: torch.Tensor) -> torch.Tensor:
        scores = self.model(batch[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def measured(name: str, make: Callable[[], nn.Module], shape: tuple[int, int], rounds: int) -> None:
    """Train both sides in turns and record a row."""
    checked, plain = sides = Side(make, SHARE), Side(make, 0.0)
    spent_s = list[float]()
    for number in range(ROUND * (rounds + 1)):  # the first round warms up
        batch, SPENT["seconds"] = torch.randint(WORDS, shape), 0.0
        for side in sides if number % 2 else sides[::-1]:
            side.step(batch)
        spent_s.append(SPENT["seconds"])
    states = {state_digest(side.model.state_dict()) for side in sides}
    if events.recent() or len(states) > 1:
        raise SystemExit("steps were in doubt or gave other bits: nothing is recorded")
    step_s, coverage = statistics.median(plain.cpu_s[ROUND:]), checked.guard.spot.coverage()
    row = {"model": name, "rounds": rounds, "step_cpu_s": step_s}
    row |= {key: coverage[key] for key in ("share", "modules", "checked")}
    row["share_of_step"] = statistics.mean(spent_s[ROUND:]) / step_s
    row["largest_check_of_step"] = max(spent_s[ROUND:]) / step_s
    row["ratio"] = sum(checked.cpu_s[ROUND:]) / sum(plain.cpu_s[ROUND:])
    record("spot", row)
    for side in sides:
        side.protection.remove()


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    timed(spot_check._Hook, "__call__", SPENT)
    timed(Passed, "_noted", SPENT)
    timed(SpotCheck, "due", SPENT)
    timed(SpotCheck, "_compare_backward", SPENT)
    measured("gpt", lambda: GPT(GPTConfig(4, 4, 256, 256, WORDS, 0.1)), (4, 257), rounds)
    measured("lstm", lstm, (32, 33), rounds)


if __name__ == "__main__":
    main()
