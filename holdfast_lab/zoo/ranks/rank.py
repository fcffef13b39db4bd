"""What one rank does: the runs of a loop one after the other, each with one line about its end."""

import faulthandler
import gc
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast import Snapshots, config, events, protect
from holdfast.errors import ConfigError
from holdfast_lab.zoo.ranks.loops import LOOPS, STEPS, Loop
from holdfast_lab.zoo.ranks.strikes import Strike

PATIENCE_S = 30.0
HANG_S = 240.0  # after which a rank says where it hangs, and ends


@dataclass(frozen=True)
class Scenario:
    """One run of a loop: bare or under a Guard, struck or not."""

    name: str
    strike: Strike | None
    guarded: bool

    @property
    def kind(self) -> str:
        """What happens to the run."""
        return self.strike.kind if self.strike else "calm"

    def options(self) -> dict[str, Any]:
        """Return the settings of the Guard."""
        return {"audit": 1.0} if self.kind == "audited" else {}


@dataclass(frozen=True)
class Work:
    """The runs that every rank of a job makes.

    Attributes:
        loop, seed: Which loop.
        scenarios: The runs, in this order.
        folder: Where the job keeps its files.
        attempt: Number of times that the job was started before.
    """

    loop: str
    seed: int
    scenarios: tuple[Scenario, ...]
    folder: Path
    attempt: int = 0

    def said(self, rank: int) -> Path:
        """Return the file in which a rank says how its runs ended."""
        return self.folder / f"rank-{rank}-{self.attempt}.jsonl"

    def run_dir(self, scenario: Scenario, node: int) -> Path:
        """Return the run directory of a node."""
        return self.folder / f"{scenario.name}-{node}"

    def log(self, rank: int) -> Path:
        """Return the file of what a rank prints."""
        return self.folder / f"rank-{rank}-{self.attempt}.log"


def main(work: Work, rank: int) -> None:
    """Be one rank of a job."""
    descriptor = os.open(work.log(rank), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    _be_told(rank, LOOPS[work.loop])
    faulthandler.enable()
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{work.folder}/rendezvous-{work.attempt}",
        rank=rank,
        world_size=LOOPS[work.loop].ranks,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    try:
        for scenario in work.scenarios:
            said = _ended(work, scenario)
            with work.said(rank).open("a") as file:
                file.write(json.dumps({"name": scenario.name, **said}) + "\n")
    finally:
        gc.collect()
        dist.destroy_process_group()


def _be_told(rank: int, loop: type[Loop]) -> None:
    """Set the environment that torchrun gives a rank."""
    local = loop.ranks // loop.nodes
    os.environ.update(
        {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK": str(rank),
            "WORLD_SIZE": str(loop.ranks),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            config.TIMEOUT_VARIABLE: str(PATIENCE_S),
        }
    )


def _ended(work: Work, scenario: Scenario) -> dict[str, Any]:
    """Run a scenario; return the digest of its end, and what was found or refused."""
    events.clear()
    loop, first, refused = LOOPS[work.loop](work.seed), 0, ""
    try:
        with _protected(loop, scenario):
            first = _guarded(work, loop, scenario) if scenario.guarded else _bare(loop, scenario)
    except ConfigError as error:
        refused = str(error)
    kinds = [event.kind for event in events.recent()]
    return {"digest": loop.digest(), "events": kinds, "first": first, "refused": refused}


@contextmanager
def _protected(loop: Loop, scenario: Scenario) -> Iterator[None]:
    """Verify the products of a guarded run; only name them in a bare one."""
    if scenario.kind in ("forward", "backward"):
        with protect(loop.net, verify=scenario.guarded):
            yield
    else:
        yield


def _bare(loop: Loop, scenario: Scenario) -> int:
    if scenario.strike is not None:
        scenario.strike.strike(loop, lambda: None)
    for step, batch in zip(range(STEPS), loop.loader, strict=False):
        events.set_step(step)
        if not step:
            loop.begin_bare(batch)
        loop.bare_step(batch)
        loop.between_steps(step)
    events.set_step(-1)
    return 0


def _guarded(work: Work, loop: Loop, scenario: Scenario) -> int:
    """Run under a Guard; return the step at which it began."""
    settle, options = (lambda: None), scenario.options()
    if scenario.kind in ("calm", "rest", "kill"):
        snapshots = Snapshots(
            loop.model,
            loop.optimizer,
            scheduler=loop.scheduler,
            loader=loop.loader,
            run_dir=work.run_dir(scenario, loop.rank * loop.nodes // loop.ranks),
            parities=int(loop.nodes > 1),
            mesh=loop.mesh,
        )
        settle = partial(_until_clean, snapshots) if scenario.kind == "kill" else snapshots.finish
        options |= {"snapshots": snapshots, "at_rest": 1.0}
    else:
        options |= {"scheduler": loop.scheduler}
    if scenario.strike is not None and not (scenario.kind == "kill" and work.attempt):
        scenario.strike.strike(loop, settle)
    with loop.guard(**options) as guard:
        first = guard.steps_done
        for batch in guard.batches(loop.loader, steps=STEPS):
            loop.guarded_step(guard, batch)
            loop.between_steps(batch[0])
    return first


def _until_clean(snapshots: Snapshots) -> None:
    """Wait until a step after the first is clean here, so that a restart has lost less than all."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(step for steps in snapshots.status()["clean"] for step in steps):
        assert time.monotonic() < deadline, "no step is committed"
        time.sleep(0.01)
