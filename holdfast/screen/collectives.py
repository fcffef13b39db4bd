"""The collective test: sums and copies between the workers of all units, over gloo.

The data are whole numbers so small that every sum is exact in fp32 in any order. Each rank
therefore knows every right result, and compares all bits. Copies show which rank sent and which one
received wrong data, so that a rank or a link can be named.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from holdfast import config
from holdfast.screen.difference import difference, merged
from holdfast.screen.emulation import FaultyUnit, pass_site
from holdfast.screen.judge import Finding
from holdfast.screen.messages import Compared, Meet, Met

OPS = tuple(
    f"collective.{op}" for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
)
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST = OPS
FINDER, ROUNDS = "collective", 4
_MODULUS = 4096  # the sum of as many ranks' numbers is below 2²⁴


def take_part(meet: Meet, faulty: FaultyUnit) -> Met:
    """Run every collective with the other ranks, and compare what this rank received."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Half of the runner's patience, so that a rank says why it ends before it is given up.
    limit, ranks = timedelta(seconds=config.timeout_s() / 2), len(meet.units)
    try:
        dist.init_process_group("gloo", f"file://{meet.store}", limit, ranks, meet.rank)
        turns = product(range(ROUNDS), OPS)
        found = [each for turn in turns for each in _compared(*turn, meet, faulty)]
    except (RuntimeError, OSError) as error:
        return Met((), str(error).strip().splitlines()[0])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return Met(tuple(found))


def contribution(rank: int, number: int, elements: int) -> torch.Tensor:
    """Return the whole numbers that a rank sends in a round, fp32 [elements]."""
    counted = torch.arange(elements, dtype=torch.int64)
    return ((counted * (2 * rank + 3) + 977 * number + 31 * rank) % _MODULUS).float()


def _compared(number: int, op: str, meet: Meet, faulty: FaultyUnit) -> Iterator[Compared]:
    ranks, me = range(len(meet.units)), meet.rank
    sent = [contribution(rank, number, meet.elements) for rank in ranks]
    mine = sent[me].clone()
    with faulty.computing(op):
        pass_site(op, mine)
    pairs: list[tuple[int, torch.Tensor, torch.Tensor]] = [(me, sent[me], mine.clone())]
    total = torch.stack(sent).sum(0)
    if op == ALL_REDUCE:
        dist.all_reduce(mine)
        pairs.append((-1, total, mine))
    elif op == REDUCE_SCATTER:
        pieces = list(mine.tensor_split(len(ranks)))
        received = torch.empty_like(pieces[me])
        dist.reduce_scatter(received, pieces)
        pairs.append((-1, total.tensor_split(len(ranks))[me], received))
    elif op == ALL_GATHER:
        gathered = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(gathered, mine)
        pairs += zip(ranks, sent, gathered, strict=True)
    else:
        for root in ranks:
            received = mine.clone() if root == me else torch.empty_like(mine)
            dist.broadcast(received, root)
            pairs.append((root, sent[root], received))
    for source, right, got in pairs:
        yield Compared(op, source, me, difference("received", right, got))


def findings(found: Sequence[Compared], units: Sequence[str], after_s: float) -> list[Finding]:
    """Name the ranks and links whose data were wrong, by collective."""
    named = []
    for op in OPS:
        compared = [each for each in found if each.op == op]
        wrong = [each for each in compared if each.difference is not None]
        differences = merged(each.difference for each in wrong if each.difference is not None)
        for unit in blamed({(each.source, each.receiver) for each in wrong}, units):
            counts = len(wrong), len(compared)
            named.append(Finding(unit, op, (FINDER,), *counts, differences, (), after_s))
    return named


def blamed(wrong: Collection[tuple[int, int]], units: Sequence[str]) -> list[str]:
    """Name the units or links that explain pairs of a sender and a receiver of wrong data.

    The sender of a sum is -1. A rank is named if its own data were wrong before they were sent, or
    if all others received them wrong, or if it received everything wrong; otherwise the link.
    """
    ranks = set(range(len(units)))
    copies = {(source, receiver) for source, receiver in wrong if source >= 0}
    bad = {source for source, receiver in copies if source == receiver}
    for rank in ranks - bad:
        others = ranks - bad - {rank}
        sent, received = ({(rank, to) for to in others}, {(of, rank) for of in others})
        if len(others) > 1 and (sent <= copies or received <= copies):
            bad.add(rank)
    names = [units[rank] for rank in sorted(bad)]
    names += [
        f"link {units[source]} → {units[receiver]}"
        for source, receiver in sorted(copies)
        if not {source, receiver} & bad
    ]
    sums = [units[receiver] for source, receiver in sorted(wrong) if source < 0]
    return names or ([" or ".join(sums)] if sums else [])
