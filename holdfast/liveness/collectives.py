"""The collectives that this process has entered, as torch's flight recorder has recorded them."""

import json
from typing import NamedTuple

import torch
import torch.distributed as dist


class Entered(NamedTuple):
    """The newest collective of a process group.

    Attributes:
        number: Its number in the group; ranks that have entered the same ones have equal numbers.
        operation: Its name, for example ``gloo:all_reduce``.
        sizes: The sizes of its inputs.
        waits: True if it has not ended on this rank.
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
