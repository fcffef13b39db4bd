"""A tiny training run with everything that must be restored; also a script that tests can kill."""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast import config, events
from holdfast.digest.tensors import state_digest
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.layout import flat_buffer

HANG_S = 60.0


class Tiny:
    """Model, optimizer and scheduler whose steps depend on every random number generator."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(),
            torch.nn.Linear(16, 1),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        batch = torch.randn(4, 8) + random.random() + float(np.random.rand())
        self.model(batch).square().sum().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def digest(self) -> str:
        parts: list[Any] = [self.model, self.optimizer, self.scheduler]
        generators = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
        return state_digest([[part.state_dict() for part in parts], generators])

    def model_digest(self) -> str:
        """Return the digest of what a rank has alone; generators are the whole process's."""
        return state_digest([self.model.state_dict(), self.optimizer.state_dict()])

    def snapshots(self, run_dir: Path, **options: Any) -> Snapshots:
        return Snapshots(
            self.model, self.optimizer, scheduler=self.scheduler, run_dir=run_dir, **options
        )

    def train(self, steps: range, snapshots: Snapshots | None = None) -> dict[int, str]:
        """Train; the digest of the state after each step."""
        digests = {}
        for step in steps:
            self.forward_backward()
            if snapshots is not None:
                snapshots.finish()
            self.update()
            digests[step] = self.digest()
            if snapshots is not None:
                snapshots.begin(step)
        return digests


def other_model() -> Tiny:
    """Return a run whose snapshots do not fit ``Tiny``'s."""
    other = Tiny(seed=1)
    other.model = torch.nn.Sequential(torch.nn.Linear(8, 17))
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    other.scheduler = torch.optim.lr_scheduler.StepLR(other.optimizer, 2)
    return other


def kinds() -> list[str]:
    """Return the kinds of the events so far, in order."""
    return [event.kind for event in events.recent()]


def say(*words: object) -> None:
    # In one write: two threads say something.
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def pause_copy_of(step: int, tensors: int, snapshots: Snapshots) -> None:
    """Let the copy of ``step`` hang after so many tensors."""
    original = flat_buffer.copy_tensors

    def copy_tensors(held: Any, entries: Any, *arguments: Any) -> Any:
        if snapshots.step == step:
            original(held[:tensors], entries[:tensors], *arguments)
            say("paused")
            time.sleep(HANG_S)
        return original(held, entries, *arguments)

    flat_buffer.copy_tensors = copy_tensors


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause-at", type=int, default=-1)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--unfinished", action="store_true")
    parser.add_argument("--persist-dir", type=Path)
    parser.add_argument("--persist-every", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = Tiny(seed=config.local_rank())
    snapshots = run.snapshots(
        arguments.run_dir,
        persist_dir=arguments.persist_dir,
        persist_every=arguments.persist_every,
    )
    start = snapshots.restore() or 0
    say("start", start, run.digest())
    if arguments.pause_at >= 0:
        pause_copy_of(arguments.pause_at, 3, snapshots)
    for step in range(start + 1, arguments.steps + 1):
        digests = run.train(range(step, step + 1), snapshots)
        say("step", step, digests[step])
        time.sleep(arguments.delay_s)
    snapshots.wait_committed()
    snapshots.close(finished=not arguments.unfinished)
    say("end", run.digest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
