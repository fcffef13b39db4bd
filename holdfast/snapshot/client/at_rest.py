"""Checks of the state at rest: the next step uses what the optimizer has left in memory.

The copy of a snapshot digests the state after the optimizer's step; in a step without a snapshot it
is digested without a copy. Just before the next optimizer step the live tensors are digested
again. A difference is a change in memory that no program made: PyTorch counts the changes that a
program makes.
"""

import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from holdfast import config, events
from holdfast.digest.tensors import tensor_digest, tensor_digests
from holdfast.errors import ConfigError, HoldfastError
from holdfast.events import Event, EventKind
from holdfast.snapshot.client.constants import Constants
from holdfast.snapshot.client.copies import Copy
from holdfast.snapshot.client.memory_changes import (
    MOST_FAULT_BITS,
    Change,
    change_of,
    is_wide,
    mend,
)
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.layout.manifest import Entry

BUDGET = 0.01  # share of the time that checks may take unless their share is given
MOST_IN_SUCCESSION = 3
_MOST_THREADS = 4
_BYTES_FOR_THREADS = 2**20
_MODEL, _OPTIMIZER = "model.", "optimizer."
# Batch normalisation writes them without PyTorch's version counter.
_STATISTICS = (".running_mean", ".running_var", ".num_batches_tracked")
_REMEDY = (
    "if your code edits it through .data, NumPy or a collective, edit it under torch.no_grad() or "
    "call torch.autograd.graph.increment_version(tensor) afterwards; if it does not, check the "
    "memory of this host"
)


def expected_steps(share: float) -> float:
    """Return the expected number of steps until a check reads a given tensor, this step included.

    Checks read the state in rotation, so each tensor once in ``1 / share`` steps. A change of a
    value that the optimizer writes in every step is found in its own step, with probability
    ``share``, or not at all. A change that lasts, such as one of a frozen weight, is found after
    (1 / share + 1) / 2 steps on average and 1 / share at most, if tensors are small beside the
    share; and in the next step already where a copy of the whole state digests every tensor anyway.
    """
    return (1 / share + 1) / 2


class Rotation:
    """Chooses which tensors are read next, so that each check reads a share of the bytes."""

    def __init__(self) -> None:
        self._next, self._credit = 0, 0.0

    def take(self, sizes: Sequence[int], share: float) -> list[int]:
        """Return the indices to read now, of tensors with these sizes in bytes."""
        self._credit += share * sum(sizes)
        taken: list[int] = []
        while len(taken) < len(sizes) and self._credit >= sizes[self._next % len(sizes)]:
            self._next %= len(sizes)
            self._credit -= sizes[self._next]
            taken.append(self._next)
            self._next += 1
        return taken


class Successions:
    """Counts in how many checks in succession each tensor, and any tensor of a model, had changed.

    Memory faults are rare; what a program edits, it edits again.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, int]] = {}  # step and number, by path
        self._any = -1, 0

    def note(self, step: int, changed: Sequence[str], unchanged: Sequence[str]) -> None:
        """Note which of the tensors that a check read had changed."""
        self._of = {
            path: found
            for path, found in self._of.items()
            if found[0] == step or path not in unchanged
        }
        if any(path.startswith(_MODEL) for path in changed):
            self._any = _counted(self._any, step)
        elif self._any[0] != step and any(path.startswith(_MODEL) for path in unchanged):
            self._any = -1, 0

    def repeats(self, step: int, path: str, *, anywhere: bool) -> bool:
        """Return whether a change that was noted comes back as an edit by the program does.

        ``anywhere`` counts the changes of other tensors too, which is for changes of unknown size:
        if a program edits all weights, a check sees only those that it reads.
        """
        before = self._of.get(path, (-1, 0))
        self._of[path] = _counted(before, step)
        counts = self._of[path][1], self._any[1] if anywhere else 0
        return step == before[0] or MOST_IN_SUCCESSION in counts


def _counted(found: tuple[int, int], step: int) -> tuple[int, int]:
    return step, min(MOST_IN_SUCCESSION, found[1] + (step != found[0]))


class AtRest:
    """Finds tensors of a training state that changed between two optimizer steps.

    Args:
        snapshots: The snapshots that supply the digests and the right bytes; None checks nothing.
        share: Share of the state, 0 to 1, that each check reads; None reads as much as takes 1 % of
            the time (``share`` tells how much that is).

    Attributes:
        share: The share that the next check reads.
        lost: The fault that cannot be repaired here, until the state was rolled back.

    Guarantees: with share 1, any change of a parameter, of the optimizer's state or of a constant
    persistent buffer, after it was digested at the end of a step and before the check, is found
    before the next ``optimizer.step``. If this node's memory holds the whole state of this step, in
    one copy or in the parts of ranks that divide it, parameters and the optimizer's state are
    repaired bit for bit; otherwise training rolls back.
    With a smaller share, changes of what is trained are found with this probability, and those of
    frozen weights and constant buffers in a later step at the latest (``expected_steps``), which
    rolls back.

    What a program edits without PyTorch's version counter (through ``.data``) looks like a fault,
    and no rule tells them apart in every case. No change passes without an event:

    - In the optimizer's state every change is a fault, as programs do not edit it.
    - In weights a change of one bit, or of two, is a fault and undone. With a share that was given,
      so is any change of weights and buffers of at most 4096 bytes (a page), or in at most two
      tensors.
    - Any other change of weights and buffers is kept, because undoing it would undo an edit such as
      clamped or loaded weights. It is reported as ``weight_changed_unseen`` with a warning, and
      the tensor is checked again after the next step; after three such changes it is not.
    - A change that comes back in the repeated pass, or three times in succession, is an edit,
      whatever its size: kept, reported, and its tensor not checked any more.

    Without a share, states of which there is no snapshot are digested only as often as 1 % of the
    time allows. If a check itself fails, no further one is made (``check_failed``).

    Not covered: changes between the optimizer's write and the digest; wide changes of weights, and
    changes of frozen ones that every kept snapshot holds, which are only reported; the steps
    that are applied again on the way back from a roll-back; steps while snapshots are suspended;
    buffers that a pass writes or that are not in the ``state_dict``.

    Raises:
        ConfigError: The share is out of range, or there are no snapshots to check with.
    """

    def __init__(self, snapshots: Snapshots | None, share: float | None = None) -> None:
        share = config.value("guard.at_rest", share, None)
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"at_rest = {share!r} must be a share of the state between 0 and 1")
        if share and snapshots is None:
            raise ConfigError(f"at_rest = {share!r} needs snapshots, whose digests it compares")
        self.share = 1.0 if share is None else share
        self.lost: Event | None = None
        self._adapts, self._snapshots = share is None, snapshots
        self._rotation, self._successions = Rotation(), Successions()
        self._pool: ThreadPoolExecutor | None = None
        self._constants = Constants()
        self._edited: set[str] = set()
        self._kept: Counter[str] = Counter()  # how often a change of each tensor was kept
        self._credit_s = self._listing_s = self._asked_s = self._listed_s = 0.0
        self._copy: Copy | None = None
        self._ended_s, self._sides, self._warned = 0.0, 1, False
        if snapshots is not None and self.share:
            snapshots.watch(self._watched, self._wants_digests)

    def _wants_digests(self) -> bool:
        """Return whether the state after a step without a snapshot is to be digested.

        Listing its tensors takes time too, of which little is to be spent unless the share is
        given.
        """
        now_s = time.perf_counter()
        self._credit_s += BUDGET * (now_s - (self._asked_s or now_s))
        self._asked_s = now_s
        if not self.share or (self._adapts and self._credit_s < self._listing_s):
            return False
        self._credit_s, self._listed_s = 0.0, now_s
        return True

    def close(self) -> None:
        """End the threads that compute digests."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _watched(self, entries: Sequence[Entry]) -> list[int]:
        """Return the indices of the tensors that the check of this state reads."""
        if self._listed_s:
            self._listing_s, self._listed_s = time.perf_counter() - self._listed_s, 0.0
        try:
            return self._chosen(entries) if self.share else []
        except Exception as error:
            self._fail(error)
            return []

    def _fail(self, error: Exception) -> None:
        """Say that a check could not be made, and make no other one: it costs no training."""
        self.share, self._adapts = 0.0, False
        detail = {"error": repr(error)}
        op, detector = "state at rest", "digest"
        events.record(EventKind.CHECK_FAILED, op=op, detector=detector, detail=detail)
        warnings.warn(
            f"the state at rest is not checked any more, because a check failed: {error!r}",
            stacklevel=2,
        )

    def _chosen(self, entries: Sequence[Entry]) -> list[int]:
        known = [
            index
            for index, entry in enumerate(entries)
            if entry.nbytes
            and entry.path.startswith((_MODEL, _OPTIMIZER))
            and not entry.path.endswith(_STATISTICS)
            and entry.path not in self._edited
        ]
        taken = self._rotation.take([entries[index].nbytes for index in known], self.share)
        owed = {index for index in known if entries[index].path in self._constants.owed}
        return sorted({known[number] for number in taken} | owed)

    def check(self, step: int) -> list[Event]:
        """Compare the state with the digests after ``step``; call it before ``optimizer.step``.

        Returns:
            The faults for which the pass must be repeated. While one of them cannot be repaired
            here, every check returns it, until the state was rolled back.
        """
        if self._snapshots is None or not self.share:
            return []
        try:
            return self._checked(self._snapshots, step)
        except HoldfastError:
            raise
        except Exception as error:
            self._fail(error)
            return []

    def _checked(self, snapshots: Snapshots, step: int) -> list[Event]:
        copy = snapshots.copied(step)
        if copy is None:
            self.lost = None
            return []
        if copy is not self._copy:
            self._begin(snapshots, copy)
        if self.lost is not None:
            return [self.lost]
        started_s = time.perf_counter()
        changed = self._changed(copy)
        self._adapt(copy, started_s)
        return self._handled(snapshots, copy, changed) if changed else []

    def _begin(self, snapshots: Snapshots, copy: Copy) -> None:
        self._copy, self.lost = copy, None
        paths = copy.flat.paths
        changed, left = self._constants.take(copy, self._edited)
        wide = is_wide([Change(index) for index in changed])
        often = {n for n in changed if self._constants.times[paths[n]] >= MOST_IN_SUCCESSION}
        self._edited |= {paths[index] for index in often}
        kept = set(changed) if wide else often | {n for n in changed if self._is_edit(copy, n)}
        older = bool(left) and snapshots.holds_before(copy.step)
        kept |= set() if older else set(left)
        for index in sorted({*changed, *left} - kept):
            # The copy of this step holds the change too: it is given up in the roll-back.
            self.lost = _recorded(paths[index], Change(index), rung="")
        for index in kept:
            self._constants.forget(paths[index])
        if kept:
            self._keep(copy, [Change(index) for index in sorted(kept)])

    def _changed(self, copy: Copy) -> list[int]:
        due = [index for index in copy.watched if self._is_comparable(copy, index)]
        now, paths = self._digests(copy, due), copy.flat.paths
        changed = [index for index in due if now[index] != copy.digests[index]]
        unchanged = [paths[index] for index in due if now[index] == copy.digests[index]]
        self._successions.note(copy.step, [paths[index] for index in changed], unchanged)
        return changed

    def _digests(self, copy: Copy, due: Sequence[int]) -> dict[int, str]:
        """Compute the digests of live tensors, in several threads if that is worth it."""
        live = copy.flat.live

        def digested(indices: Sequence[int]) -> Iterable[tuple[int, str]]:
            return zip(indices, tensor_digests([live[index] for index in indices]), strict=True)

        if sum(copy.entries[index].nbytes for index in due) < _BYTES_FOR_THREADS:
            return dict(digested(due))
        threads = max(1, min(_MOST_THREADS, torch.get_num_threads()))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, "holdfast-at-rest")
        by_size = sorted(due, key=lambda index: copy.entries[index].nbytes, reverse=True)
        parts = self._pool.map(digested, (by_size[start::threads] for start in range(threads)))
        return dict(pair for part in parts for pair in part)

    def _is_comparable(self, copy: Copy, index: int) -> bool:
        """Return whether nothing but a fault can have changed the tensor since it was digested."""
        path = copy.flat.paths[index]
        if path in self._edited or copy.is_edited(index):
            return False
        # A buffer that was the same after two steps is taken for constant.
        return copy.flat.stable[index] or path in self._constants

    def _adapt(self, copy: Copy, started_s: float) -> None:
        ended_s, since_s = time.perf_counter(), self._ended_s
        self._ended_s = ended_s
        if not self._adapts or not since_s or not copy.watched:
            return
        if copy.room is None:  # the digests were not those of a copy, so that they cost as much
            self._sides = 2
        read = sum(copy.entries[index].nbytes for index in copy.watched)
        whole_s = (ended_s - started_s) * sum(entry.nbytes for entry in copy.entries) / read
        self.share = min(1.0, BUDGET * (started_s - since_s) / (self._sides * whole_s))

    def _handled(self, snapshots: Snapshots, copy: Copy, changed: list[int]) -> list[Event]:
        changes = [change_of(copy, index) for index in changed]
        paths = {change.index: copy.flat.paths[change.index] for change in changes}
        again = {
            change.index
            for change in changes
            if self._successions.repeats(copy.step, paths[change.index], anywhere=not change.span)
        }
        self._edited |= {paths[index] for index in again}
        of_model = [change for change in changes if paths[change.index].startswith(_MODEL)]
        edits = of_model if is_wide(of_model) else [c for c in of_model if self._is_edit(copy, c)]
        kept = again | {change.index for change in edits}
        if kept:
            self._keep(copy, [change for change in changes if change.index in kept])
        faults: list[Event] = []
        for change in changes:
            if change.index not in kept:
                faults += self._repaired(snapshots, copy, paths[change.index], change)
        return faults

    def _is_edit(self, copy: Copy, change: Change | int) -> bool:
        """Return whether a change of a weight or buffer, however narrow, is taken for an edit."""
        if not self._adapts:
            return False
        if isinstance(change, int):  # of a constant tensor, found in a later step
            change = Change(change)
        # Collectives and batch normalisation write buffers without PyTorch's version counter.
        return not copy.flat.stable[change.index] or change.bits > MOST_FAULT_BITS

    def _keep(self, copy: Copy, kept: Sequence[Change]) -> None:
        """Report changes that are taken for edits, and compare with what they left from now on."""
        for change in kept:
            copy.digests[change.index] = tensor_digest(copy.flat.live[change.index])
            path = copy.flat.paths[change.index]
            self._kept[path] += 1
            if self._kept[path] >= MOST_IN_SUCCESSION:
                self._edited.add(path)
        first = copy.flat.paths[kept[0].index]
        detail: dict[str, object] = {"tensors": len(kept), "not_checked": sorted(self._edited)}
        detail |= {"bytes": max(change.span for change in kept), "remedy": _REMEDY}
        events.record(EventKind.WEIGHT_CHANGED_UNSEEN, op=first, detector="at rest", detail=detail)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{first} changed in memory between two optimizer steps without PyTorch's version "
                f"counter ({len(kept)} in all did in this step), which is kept: {_REMEDY}",
                stacklevel=2,
            )

    def _repaired(self, snapshots: Snapshots, copy: Copy, path: str, change: Change) -> list[Event]:
        started_s = time.perf_counter()
        # A repeated pass begins with buffers that were saved at its start: they cannot be mended.
        mended = copy.flat.stable[change.index] and mend(copy, change.index)
        event = _recorded(path, change, rung="correct" if mended else "", started_s=started_s)
        if not mended:
            self.lost = event
            # The copy was made of the right bytes: training rolls back to it.
            snapshots.hand_over()
        return [] if mended and path.startswith(_OPTIMIZER) else [event]


def _recorded(path: str, change: Change, *, rung: str, started_s: float | None = None) -> Event:
    return events.record(
        EventKind.STATE_FAULT,
        op=path,
        detector="digest",
        rung=rung,
        duration_s=0.0 if started_s is None else time.perf_counter() - started_s,
        detail={"first_byte": change.first, "bytes": change.span},
    )
