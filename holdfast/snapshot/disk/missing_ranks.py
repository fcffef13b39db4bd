"""Steps of which the states of some ranks are in no folder: to come, removed by the run, or lost.

The nodes of a run write the same steps in one order, and then remove their oldest. So a step that a
node lacks may come if no node has a newer one, and was removed if the node has newer ones only.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from holdfast import config
from holdfast.errors import SnapshotCorrupt
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.checkpoints import SLOWEST_BYTES_S, Checkpoints

Run = tuple[str, int]  # the id, empty if it has none, and the number of ranks


class Held(NamedTuple):
    """What a node holds of a step, and the Unix time by which the others should have it, too."""

    run: Run
    ranks: frozenset[int]
    due_s: float


def held(at: Checkpoints, step: int) -> Held | None:
    """Return what a node holds of a step; None if that is nothing or its index is damaged."""
    with suppress(OSError, SnapshotCorrupt):
        index = persist_format.read_index(at.path(step))
        run = str(index.get("run", {}).get("id", "")), index["world_size"]
        limit_s = config.timeout_s() + sum(r["bytes"] for r in index["ranks"]) / SLOWEST_BYTES_S
        written_s = (at.path(step) / persist_format.INDEX_NAME).stat().st_mtime
        return Held(run, frozenset(r["rank"] for r in index["ranks"]), written_s + limit_s)
    return None


def missing(nodes: Iterable[Checkpoints], step: int) -> dict[Run, set[int]]:
    """Return, for each run that has written a step, the ranks that no node holds."""
    found = dict[Run, set[int]]()
    for each in filter(None, (held(at, step) for at in nodes)):
        found.setdefault(each.run, {*range(each.run[1])}).difference_update(each.ranks)
    return {run: ranks for run, ranks in found.items() if ranks}


def is_recent(at: Checkpoints, step: int, now_s: float) -> bool:
    """Return whether a node wrote a step so late that others may still be at it."""
    found = held(at, step)
    return found is not None and now_s < found.due_s


def was_removed(at: Checkpoints, step: int, others: Iterable[Checkpoints], now_s: float) -> bool:
    """Return whether a node seems to have removed a step, and those that hold it soon will."""
    own, holders = at.steps(), [(each, each.steps()) for each in others]
    last = {each: steps[-1] for each, steps in holders if step in steps}
    removed = bool(own) and own[0] > step
    return removed and all(n < own[-1] or is_recent(each, n, now_s) for each, n in last.items())


def excuse(nodes: Iterable[Checkpoints], step: int, run: str, now_s: float) -> str:
    """Return why ranks of a run may be missing from a step; empty if their states are lost."""
    told = {at: held(at, max(at.steps(), default=-1)) for at in nodes}
    mine = [at for at, newest in told.items() if newest and newest.run[0] == run]
    newer = any(later > step for at in mine for later in at.steps())
    if not newer and any(is_recent(at, step, now_s) for at in mine):
        return "it may still be being written"
    lacking = [at for at in mine if step not in at.steps()]
    removed = lacking and all(was_removed(at, step, mine, now_s) for at in lacking)
    return "the run is removing it" if removed else ""
