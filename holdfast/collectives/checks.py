"""Checks of a step's collectives, by one small exchange in each process group at its end."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast import config, events
from holdfast.collectives import interception
from holdfast.collectives.transfers import Transfer
from holdfast.errors import HoldfastError
from holdfast.events import Event, EventKind


class Collectives:
    """Compares what ranks sent with what has arrived, and sums over ranks with their signed sums.

    All ranks construct and use it together; with ``wanted=False`` it checks nothing. Guarantees,
    and what is not covered: ``docs/fault_model.md``.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.wanted, self._thread = wanted and several, 0
        self._noted = defaultdict[str, list[tuple[str, Transfer]]](list)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._failed, self._off = dict[str, str](), set[str]()
        if self.wanted:
            try:
                interception.install()
            except (AttributeError, RuntimeError) as error:  # another torch
                self.wanted = False
                self._stop("all", repr(error))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the collectives of a pass: of this thread and of the autograd engine's threads."""
        before = interception.watcher, self._thread
        if self.wanted:
            interception.watcher, self._thread = self._note, threading.get_ident()
        try:
            yield
        except BaseException:
            self._noted.clear()
            for work in list(interception.pending):
                work.forget()
            raise
        finally:
            interception.watcher, self._thread = before

    def _note(
        self, name: str, group: dist.ProcessGroup, transfers: Callable[[], list[Transfer]]
    ) -> interception.Arrived | None:
        key, made = group.group_name, list[Transfer]()
        if not self._is_of_pass() or group.size() < 2 or key in self._off:
            return None

        self._groups[key] = group
        self._try(key, lambda: made.extend(transfers()))
        self._try(key, *(each.note_given for each in made))
        self._noted[key] += [(name, each) for each in made]
        return lambda: self._try(key, *(each.note_got for each in made))

    def _try(self, key: str, *notes: Callable[[], None]) -> None:
        try:
            for note in notes:
                note()
        except Exception as error:
            self._failed[key] = repr(error)

    def _is_of_pass(self) -> bool:
        if threading.get_ident() == self._thread:
            return True
        # Threads of the autograd engine are not started by Python.
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        return foreign and torch._C._current_graph_task_id() != -1

    def check(self) -> list[Event]:
        """Return what went wrong with what this rank got since the last check; all ranks call it.

        Not every rank may see it: a result of a step may only be used if none does.

        Raises:
            HoldfastError: A rank of a gloo group was not there within ``config.timeout_s()``.
        """
        for work in list(interception.pending) if self._noted else ():
            work.wait()
        noted, self._noted = self._noted, defaultdict(list)
        # In one order on all ranks, as each group's ranks wait for each other.
        return [event for key in sorted(noted) for event in self._compared(key, noted[key])]

    def _compared(self, key: str, noted: list[tuple[str, Transfer]]) -> Iterator[Event]:
        group, transfers = self._groups[key], [each for _, each in noted]
        shapes = [f"{name} {each.shape}" for name, each in noted]
        sums = [torch.zeros(0)]

        def prepare() -> None:
            device: Any = min(group._device_types, key=lambda each: each.type != "cpu")
            sums[0] = torch.cat([each.sums.cpu().view(-1) for each in transfers]).to(device)

        self._try(key, prepare)
        told = self._failed.get(key, ""), shapes, [each.digests for each in transfers]
        every: list[Any] = [None] * group.size()
        _meet(group)
        dist.all_gather_object(every, told, group=group)
        if any(each[:2] != ("", shapes) for each in every):
            self._stop(key, max(error for error, *_ in every))
            return
        sizes = [each.sums.numel() for each in transfers]
        dist.all_reduce(sums[0], group=group)
        totals = sums[0].cpu().split(sizes)
        for number, (name, each) in enumerate(noted):
            digests = [told[number] for *_, told in every]
            detail = each.verdict(group.rank(), digests, totals[number].view_as(each.sums))
            if detail:
                yield _event(group, name, {"number": number, **detail})

    def _stop(self, key: str, error: str) -> None:
        """Check the collectives of a group no more; all of its ranks do so."""
        self._off.add(key)
        detail = {"group": key, "error": error or "ranks issued different ones"}
        events.record(EventKind.CHECK_FAILED, op="collectives", detector="digest", detail=detail)


def _meet(group: dist.ProcessGroup) -> None:
    """Wait for all ranks of a group, not as long as the trainer waits for its collectives.

    NCCL, which would end the process at a barrier's limit, keeps the limit of its group.
    """
    if dist.get_backend(group) != "gloo":
        return
    limit = timedelta(seconds=config.timeout_s())
    try:
        group.barrier(timeout=limit).wait(limit)
    except RuntimeError as error:
        raise HoldfastError(
            f"not all of ranks {dist.get_process_group_ranks(group)} came to the check of their "
            f"collectives within {config.timeout_s():g} s: one hangs, has ended, or issued none in "
            f"its pass; see its log and `holdfast events` ({error})"
        ) from error


def _event(group: dist.ProcessGroup, name: str, detail: dict[str, Any]) -> Event:
    """Make an event of this rank, or of no rank if the same is wrong on all, or nobody knows."""
    ranks = dist.get_process_group_ranks(group)
    nobody = detail.get("right_copies", 1) < 1
    if "sent_by" in detail:
        detail["sent_by"] = [ranks[place] for place in detail["sent_by"]]
    rank, detail = -1 if nobody else ranks[group.rank()], {**detail, "group": ranks}
    # If it is nobody's, the first rank of the group records it.
    make: Callable[..., Event] = Event if nobody and group.rank() else events.record
    return make(EventKind.COLLECTIVE_FAULT, op=name, rank=rank, detector="notes", detail=detail)
