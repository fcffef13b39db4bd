"""Checks of the state at rest: the next step uses what the optimizer has left in memory.

The copy of a snapshot digests the state after the optimizer's step. Just before the next one the
live tensors are digested again. A difference is a change in memory that no program made: PyTorch
counts the changes that a program makes.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from holdfast import config, events
from holdfast.digest import hexdigest
from holdfast.digest.tensors import tensor_bytes, tensor_digest
from holdfast.errors import ConfigError
from holdfast.events import Event, EventKind
from holdfast.snapshot.client.copier import Copy
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.layout.flat_buffer import as_tensor, version
from holdfast.snapshot.layout.manifest import Entry

BUDGET = 0.01  # share of the time that checks may take unless their share is given
# Changes that are wider than a page, or in more tensors, are no memory faults but edits.
WIDEST_FAULT_BYTES = 4096
MOST_FAULTS = 2
MOST_IN_SUCCESSION = 3
_MOST_THREADS = 4
# Batch normalisation writes them without PyTorch's version counter.
_STATISTICS = (".running_mean", ".running_var", ".num_batches_tracked")


def expected_steps(share: float) -> float:
    """Return the expected number of steps until a check reads a given tensor, this step included.

    Checks read the state in rotation, so each tensor once in ``1 / share`` steps. A change that
    lasts, such as one of a frozen weight, is found after (1 / share + 1) / 2 steps on average and
    1 / share at most, if tensors are small beside the share. A change of a value that the optimizer
    writes in every step is found in its own step, with probability ``share``, or not at all.
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


@dataclass(frozen=True)
class _Finding:
    """A tensor whose bytes are not those that were copied; ``span`` is 0 if that is not known."""

    index: int
    span: int
    first: int


class AtRest:
    """Finds tensors of a training state that changed between two optimizer steps.

    Args:
        snapshots: The snapshots that supply the digests and the right bytes; None checks nothing.
        share: Share of the state, 0 to 1, that each check reads; None reads as much as takes 1 % of
            the time (``share`` tells how much that is).

    Guarantees: with share 1 and a snapshot after every step, any change of a parameter, of the
    optimizer's state or of a constant persistent buffer, after the snapshot has copied it and
    before the check, is found before ``optimizer.step``. If the snapshot holds the whole state,
    parameters and the optimizer's state are repaired bit for bit; otherwise training rolls back.

    Not covered: changes between the optimizer's write and the copier's read; steps without a
    snapshot; buffers that a pass writes or that are not in the ``state_dict``; edits by the program
    that bypass PyTorch's version counter. These are reported as ``weight_changed_unseen`` and kept
    if they are wider than 4096 bytes, in more than two tensors, or made again in the repeated pass
    or in three checks in succession. Narrower ones are undone, as they look like faults.

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
        self._adapts, self._snapshots = share is None, snapshots
        self._rotation = Rotation()
        self._pool = ThreadPoolExecutor(max(1, min(_MOST_THREADS, torch.get_num_threads())))
        self._before: dict[str, str] = {}  # digests of the buffers in the latest copy
        self._constant: dict[str, str] = {}  # the same of the copy before it
        self._found: dict[str, tuple[int, int]] = {}  # step and number in succession, by path
        self._edited: set[str] = set()
        self._beyond: Event | None = None
        self._copy: Copy | None = None
        self._ended_s = 0.0
        if snapshots is not None and self.share:
            snapshots.watch(self._watched)

    def _watched(self, entries: Sequence[Entry]) -> list[int]:
        """Return the indices of the tensors that the check after this copy reads."""
        known = [
            index
            for index, entry in enumerate(entries)
            if entry.nbytes
            and entry.path.startswith(("model.", "optimizer."))
            and not entry.path.endswith(_STATISTICS)
            and entry.path not in self._edited
        ]
        taken = self._rotation.take([entries[index].nbytes for index in known], self.share)
        return [known[number] for number in taken]

    def check(self, step: int) -> list[Event]:
        """Compare the state with the snapshot of ``step``; call it before ``optimizer.step``.

        Returns:
            The faults for which the pass must be repeated. While one of them cannot be repaired
            here, every check returns it, until the state was rolled back.
        """
        if self._snapshots is None or not self.share:
            return []
        copy = self._snapshots.copied(step)
        if copy is None:
            self._beyond = None
            return []
        if copy is not self._copy:
            self._begin(copy)
        if self._beyond is not None:
            return [self._beyond]
        started_s = time.perf_counter()
        changed = self._changed(copy)
        self._adapt(copy, started_s)
        return self._handled(copy, step, changed) if changed else []

    def _begin(self, copy: Copy) -> None:
        flat, self._copy, self._beyond = copy.flat, copy, None
        self._constant = self._before
        self._before = {
            flat.paths[index]: digest
            for index, digest in copy.digests.items()
            if not flat.stable[index]
        }

    def _changed(self, copy: Copy) -> list[int]:
        due = [index for index in copy.watched if self._is_comparable(copy, index)]
        digests = self._pool.map(tensor_digest, (copy.flat.live[index] for index in due))
        return [n for n, digest in zip(due, digests, strict=True) if digest != copy.digests[n]]

    def _is_comparable(self, copy: Copy, index: int) -> bool:
        """Return whether nothing but a fault can have changed the tensor since it was copied."""
        path = copy.flat.paths[index]
        if path in self._edited or copy.is_edited(index):
            return False
        # A buffer that was the same after two steps is taken for constant.
        return copy.flat.stable[index] or self._constant.get(path) == copy.digests[index]

    def _adapt(self, copy: Copy, started_s: float) -> None:
        ended_s, since_s = time.perf_counter(), self._ended_s
        self._ended_s = ended_s
        if not self._adapts or not since_s or not copy.watched:
            return
        read = sum(copy.entries[index].nbytes for index in copy.watched)
        whole_s = (ended_s - started_s) * sum(entry.nbytes for entry in copy.entries) / read
        self.share = min(1.0, BUDGET * (started_s - since_s) / whole_s)

    def _handled(self, copy: Copy, step: int, changed: list[int]) -> list[Event]:
        findings = [_finding(copy, index) for index in changed]
        wide = len(findings) > MOST_FAULTS or any(f.span > WIDEST_FAULT_BYTES for f in findings)
        faults: list[Event] = []
        for finding in findings:
            path = copy.flat.paths[finding.index]
            if wide or self._is_repeated(path, step):
                self._accept(path, finding)
            else:
                faults += self._repaired(copy, path, finding)
        return faults

    def _is_repeated(self, path: str, step: int) -> bool:
        """Return whether a change comes back after every repair, as an edit by the program does."""
        before, count = self._found.get(path, (-2, 0))
        count = count + 1 if step == before + 1 else 1
        self._found[path] = step, count
        return step == before or count >= MOST_IN_SUCCESSION

    def _accept(self, path: str, finding: _Finding) -> None:
        self._edited.add(path)
        remedy = "edit it under torch.no_grad(); it is not checked at rest any more"
        detail = {"path": path, "bytes": finding.span, "remedy": remedy}
        events.record(EventKind.WEIGHT_CHANGED_UNSEEN, op=path, detector="at rest", detail=detail)

    def _repaired(self, copy: Copy, path: str, finding: _Finding) -> list[Event]:
        started_s = time.perf_counter()
        # A repeated pass begins with buffers that were saved at its start: they cannot be mended.
        mended = copy.flat.stable[finding.index] and _mend(copy, finding.index)
        event = events.record(
            EventKind.STATE_FAULT,
            op=path,
            detector="digest",
            rung="correct" if mended else "",
            duration_s=time.perf_counter() - started_s,
            detail={"first_byte": finding.first, "bytes": finding.span},
        )
        if not mended:
            self._beyond = event
        return [] if mended and path.startswith("optimizer.") else [event]


def _stored(copy: Copy, index: int) -> torch.Tensor | None:
    """Return a tensor as the snapshot holds it; None if it does not, or not intact."""
    entry = copy.entries[index]
    if copy.room is None:
        return None
    raw = copy.room[entry.offset : entry.offset + entry.nbytes]
    return as_tensor(entry, raw) if hexdigest(raw.numpy()) == copy.digests[index] else None


def _finding(copy: Copy, index: int) -> _Finding:
    right = _stored(copy, index)
    if right is None:
        return _Finding(index, 0, 0)
    now = np.frombuffer(tensor_bytes(copy.flat.live[index]), np.uint8)
    places = np.flatnonzero(now != np.frombuffer(tensor_bytes(right), np.uint8))
    if not len(places):  # it differed when it was digested, and does not when it is read again
        return _Finding(index, 0, 0)
    return _Finding(index, int(places[-1] - places[0]) + 1, int(places[0]))


def _mend(copy: Copy, index: int) -> bool:
    right, live = _stored(copy, index), copy.flat.live[index]
    if right is None:
        return False
    with torch.no_grad():
        live.copy_(right)
    copy.versions[index] = version(live)
    return tensor_digest(live) == copy.digests[index]
