"""Which rank the others wait for, by what all ranks say."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.liveness.answers import Answer
from holdfast.liveness.collectives import Entered

EXCUSES = ("busy", "paused")


class Verdict(NamedTuple):
    """The ranks that are behind, each with the reason, and what the others wait in."""

    behind: Mapping[int, str]
    waiting_in: str


def excused(answers: Mapping[int, Answer]) -> bool:
    """Return true if a rank does something that may take this long."""
    return any(answer["state"] in EXCUSES for answer in answers.values())


def judge(answers: Mapping[int, Answer], world_size: int, states: Mapping[int, str]) -> Verdict:
    """Name the ranks that are behind at a step that does not end.

    A rank is behind if it does not answer; if none is, those that have not entered a collective in
    which others wait and do not wait themselves; if none is, those that have entered another
    collective than most.

    Args:
        answers: The answer of every rank that has given one since the step was half late.
        world_size: Number of ranks.
        states: States of processes of this host (``process.state``), by rank.
    """
    left = {r: "it has left the Guard" for r, said in answers.items() if said["state"] == "ended"}
    silent = {
        rank: states.get(rank, "no answer from its host")
        for rank in range(world_size)
        if rank not in answers
    }
    groups = {
        rank: {name: Entered(*fields) for name, fields in answer["groups"].items()}
        for rank, answer in answers.items()
    }
    waiting = {r: [each for each in found.values() if each.waits] for r, found in groups.items()}
    newest = max((each for found in waiting.values() for each in found), default=None)
    shown = str(newest) if newest else ""
    behind = silent or left or _not_entered(groups, waiting) or _others(groups)
    return Verdict(behind, shown)


Groups = Mapping[int, Mapping[str, Entered]]


def _not_entered(groups: Groups, waiting: Mapping[int, list[Entered]]) -> dict[int, str]:
    found = {}
    for rank, entered in groups.items():
        for name, own in entered.items():
            ahead = [g[name] for g in groups.values() if name in g and g[name].number > own.number]
            if ahead:
                found[rank] = f"it has not entered {max(ahead)}"
    # A rank that waits in another group is held up itself.
    return {rank: why for rank, why in found.items() if not waiting[rank]} or found


def _others(groups: Groups) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in {name for entered in groups.values() for name in entered}:
        own = {r: g[name] for r, g in groups.items() if name in g and g[name].waits}
        count = Counter((each.operation, each.sizes) for each in own.values())
        if len(count) > 1:
            usual = count.most_common(1)[0][0]
            odd = {r: e for r, e in own.items() if (e.operation, e.sizes) != usual}
            words = " ".join(usual)
            found |= {r: f"it has entered {e}, and most others {words}" for r, e in odd.items()}
    return found
