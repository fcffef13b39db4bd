"""Faults in the all-reduces of two ranks, by which they average their gradients.

As in ``trials.py``, but that the ranks put back the state themselves, and that harm to one rank is
harm. A rank gives something else than it has noted, or gets something else than was sent; lines
that are stuck are left out.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import UncorrectableFault
from holdfast.inject.run_state import RunState
from holdfast.inject.worker_pool import WorkerFailed
from holdfast_lab.campaign.collectives import collective_fault
from holdfast_lab.step_faults.calls import DURATIONS, INTERMITTENT, TRANSIENT
from holdfast_lab.step_faults.judge import NOISE_RUNS, STEPS, WARMUP, Judge, alarms, round_anew
from holdfast_lab.step_faults.operators import COLLECTIVE
from holdfast_lab.step_faults.training import State, Subject, Training

RANKS, TIMEOUT_S = 2, 60.0
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "collectives": {"collectives": True},
    "strict": {"audit": 1.0, "collectives": True},
}
KINDS = {"flip": "flip-{}", "zeros": "lost", "stale": "stale"}
Row = dict[str, Any]


def rows(numbers: Sequence[int], make: Callable[[], Subject], seed: int) -> Iterator[Row]:
    """Run trials in two processes; yield their rows.

    Raises:
        WorkerFailed: A rank ended, or a trial took too long.
    """
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with TemporaryDirectory() as folder:
        given = folder, numbers, make, seed, theirs
        ranks = [context.Process(target=_rank, args=(r, *given)) for r in range(RANKS)]
        for each in ranks:
            each.start()
        theirs.close()
        try:
            for number in numbers:
                if not ours.poll(2 * TIMEOUT_S):
                    raise WorkerFailed(f"trial {number} of the ranks took too long")
                yield ours.recv()
        except EOFError as error:
            raise WorkerFailed("a rank ended") from error
        finally:
            for each in ranks:
                each.kill()
                each.join()


def _rank(
    rank: int, folder: str, numbers: Sequence[int], make: Any, seed: int, pipe: Connection
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    where, wait = f"file://{folder}/store", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", where, rank=rank, world_size=RANKS, timeout=wait)
    trials = _Trials(make(), rank, seed)
    for number in numbers:
        row = trials.run(number)
        if rank == 0:
            pipe.send(row)


class _Trials:
    """The trials as one rank makes them."""

    def __init__(self, made: Subject, rank: int, seed: int) -> None:
        model, batches = DistributedDataParallel(made.model), made.batches
        own = [*batches[rank:], *batches[:rank]]
        self._subject = Subject(made.name, model, made.optimizer, own, made.loss)
        self._rank, self._seed = rank, seed
        self._size = sum(each.numel() for each in model.parameters())
        training = Training(self._subject, {})
        for number in range(WARMUP):
            training.step(number)
        self._state = RunState(model, made.optimizer, parameters=True)
        clean, *noise = [self._clean(number) for number in range(1 + NOISE_RUNS)]
        self._judge = Judge(clean, noise)

    def _clean(self, number: int) -> State:
        """Do the steps without a fault, with other roundings for each number above 0."""
        torch.manual_seed(0)
        if number:
            round_anew(self._subject.model, number)
        training = Training(self._subject, {})
        state = self._subject.state([training.step(WARMUP + step) for step in range(STEPS)])
        self._state.restore()
        return state

    def run(self, number: int) -> Row:
        """Run a trial; return its row, which is the same on all ranks."""
        draw, mode = Random(f"{self._seed}/ranks/{number}"), list(MODES)[number % len(MODES)]
        duration = draw.choices(DURATIONS, (3, 1, 1))[0]
        damage = "flip" if duration == INTERMITTENT else draw.choice([*KINDS])
        struck, given, executions = draw.randrange(RANKS), draw.random() < 0.5, 0

        def fault() -> AbstractContextManager[None]:
            nonlocal executions
            executions += 1
            if self._rank != struck or (executions > 1 and duration == TRANSIENT):
                return nullcontext()
            place = Random(f"{number}/{executions if duration == INTERMITTENT else 0}")
            kind, index = KINDS[damage].format(place.randrange(32)), place.randrange(self._size)
            return collective_fault("all_reduce", kind, given=given, index=index)

        torch.manual_seed(0)
        training, losses = Training(self._subject, MODES[mode], around=fault), list[float]()
        refused, detail = False, ""
        with alarms() as heard:
            try:
                for step in range(STEPS):
                    losses.append(training.step(WARMUP + step))
            except UncorrectableFault as error:
                refused, detail = True, str(error)
        state = self._subject.state(losses)
        self._state.restore()
        every: list[Any] = [None] * RANKS
        told = self._judge.is_equal(state), self._judge.is_harmful(state), set(heard)
        dist.all_gather_object(every, told)
        kinds = sorted(set[str]().union(*(each[2] for each in every)))
        equal = not refused and all(each[0] for each in every)
        outcome = "silent" if any(each[1] for each in every) else "masked" if equal else "rounding"
        if kinds or refused:
            outcome = "corrected" if equal else "detected"
        known = {"class": COLLECTIVE, "op": "all_reduce", "direction": "backward", "call": 0}
        known |= {"model": "ranks", "mode": mode, "trial": number, "damage": damage}
        known |= {"duration": duration, "outcome": outcome, "named": 0, "events": kinds}
        return known | {"detail": detail or ("given" if given else "got")}
