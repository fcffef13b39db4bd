"""Which rank the others wait for, by what all ranks say, and by torch's record of collectives."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from holdfast.liveness.answers import Answer

EXCUSES = ("busy", "paused")


class Entered(NamedTuple):
    """The newest collective of a process group, the ``number``-th one, with its inputs' sizes.

    ``waits`` is true if it has not ended on this rank.
    """

    number: int
    operation: str
    sizes: str
    waits: bool

    def __str__(self) -> str:
        return f"{self.operation} {self.sizes}, the group's {self.number}th"


def entered() -> dict[str, Entered]:
    """Return the newest collective of each process group of this rank, by the group's name.

    It takes up to a second and no part of the collectives themselves. Collectives that DDP and
    FSDP issue are among them, those of other libraries than ``torch.distributed`` are not.
    """
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None or not dist.is_initialized():
        return {}
    record = json.loads(dump(includeCollectives=True, onlyActive=False))
    ended = {
        group: int(status["last_completed_collective"])
        for group, status in record.get("pg_status", {}).items()
    }
    found = {}
    for entry in record.get("entries", ()):
        if not entry["is_p2p"]:
            number = entry["collective_seq_id"]
            sizes = json.dumps(entry["input_sizes"])
            waits = number > ended.get(str(entry["pg_id"]), number)
            name = " ".join(entry["process_group"])
            found[name] = Entered(number, entry["profiling_name"], sizes, waits)
    return found


class Verdict(NamedTuple):
    """The ranks that are behind, each with the reason, and what the others wait in.

    ``is_sure`` is false if nobody is behind, or a rank only because it has not answered so far.
    """

    behind: Mapping[int, str]
    waiting_in: str
    is_sure: bool


def excused(answers: Mapping[int, Answer]) -> bool:
    """Return true if a rank does something that may take this long."""
    return any(answer["state"] in EXCUSES for answer in answers.values())


def judge(answers: Mapping[int, Answer], world_size: int, states: Mapping[int, str]) -> Verdict:
    """Name the ranks that are behind at a step that does not end.

    A rank is behind if it does not answer; if none is, those that have not entered a collective in
    which others wait and do not wait themselves; if none is, those that have entered another
    collective than most. ``answers`` are those since the step was half late, ``states`` those of
    processes of this host that cannot answer, by rank.
    """
    left = {r: "it has left the Guard" for r, said in answers.items() if said["state"] == "ended"}
    missing = (rank for rank in range(world_size) if rank not in answers)
    silent = {rank: states.get(rank, "it does not answer") for rank in missing}
    groups = {
        rank: {name: Entered(*fields) for name, fields in answer["groups"].items()}
        for rank, answer in answers.items()
    }
    waiting = {r: [each for each in found.values() if each.waits] for r, found in groups.items()}
    newest = max((each for found in waiting.values() for each in found), default="")
    behind = silent or left or _not_entered(groups, waiting) or _others(groups)
    is_sure = bool(behind) and silent.keys() <= states.keys()
    return Verdict(behind, str(newest), is_sure)


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
