"""The collective test: silent between healthy units; names the rank or the link of wrong data."""

from collections.abc import Callable

import pytest
import torch
from case_loops import for_each

from holdfast.screen.collectives import (
    ALL_GATHER,
    BROADCAST,
    FINDER,
    OPS,
    ROUNDS,
    blamed,
    contribution,
    findings,
)
from holdfast.screen.difference import difference
from holdfast.screen.emulation import Emulated
from holdfast.screen.messages import Compared
from holdfast.screen.units import Unit
from holdfast.screen.verdict import Verdict

Screen = Callable[..., Verdict]
ABC = ("a", "b", "c")


def test_sums_of_contributions_are_exact_in_any_order() -> None:
    ranks = range(4096)  # as many as there may be
    parts = torch.stack([contribution(rank, 3, 16) for rank in ranks])
    assert len(set(map(tuple, parts.tolist()))) == len(ranks)
    exact = parts.long().sum(0)
    for order in (parts, parts.flip(0), parts[torch.randperm(len(ranks))]):
        total = torch.zeros(16)
        for part in order:
            total += part
        assert torch.equal(total.long(), exact)


@for_each(
    ("wrong", "units", "named"),
    [
        (set(), ABC, []),
        ({(0, 0), (0, 1), (0, 2)}, ABC, ["a"]),  # wrong before it was sent
        ({(0, 1), (0, 2)}, ABC, ["a"]),  # wrong at all others
        ({(0, 2), (1, 2)}, ABC, ["c"]),  # everything that c received
        ({(0, 2)}, ABC, ["link a → c"]),
        ({(0, 1), (1, 2), (2, 0)}, ABC, ["link a → b", "link b → c", "link c → a"]),
        ({(1, 1), (1, 0), (2, 0)}, ABC, ["b", "link c → a"]),
        ({(0, 1)}, ABC[:2], ["link a → b"]),  # of two nobody else can tell
        ({(-1, 1)}, ABC, ["b"]),
        ({(-1, 0), (-1, 1), (-1, 2)}, ABC, ["a or b or c"]),
        ({(1, 1), (-1, 0), (-1, 1), (-1, 2)}, ABC, ["b"]),
    ],
)
def test_wrong_pairs_name_a_rank_or_a_link(
    wrong: set[tuple[int, int]], units: tuple[str, ...], named: list[str]
) -> None:
    assert blamed(wrong, units) == named


def test_a_finding_has_the_collective_the_bits_and_the_counts() -> None:
    right, wrong = torch.tensor([3.0, 5.0]), torch.tensor([3.0, 7.0])
    received = [Compared(op, 0, to, None) for op in OPS for to in (1, 2)]
    received[0] = Compared(OPS[0], 0, 1, difference("received", right, wrong))
    (finding,) = findings(received, ABC, 2.5)
    assert (finding.unit, finding.op, finding.finders) == ("link a → b", OPS[0], (FINDER,))
    assert (finding.wrong, finding.executions, finding.first_s) == (1, 2, 2.5)
    assert finding.differences[0].index == (1,)


@pytest.mark.processes
@pytest.mark.representative
def test_a_rank_that_sends_wrong_data_is_named_by_every_collective(
    three_units: list[Unit], screened: Screen
) -> None:
    faults = [Emulated("unit 1", op, 20) for op in OPS]
    verdict = screened(three_units, faults=faults, finders=(FINDER,), rounds=2)
    assert (verdict.exit_code, verdict.suspects()) == (1, ["unit 1"])
    assert {finding.op for finding in verdict.findings} == set(OPS)
    for finding in verdict.findings:
        assert finding.finders == (FINDER,)
        assert finding.wrong >= 2 * ROUNDS  # the unit's own data, and what came of them
        if finding.op in (ALL_GATHER, BROADCAST):
            assert (set(finding.differences[0].bits), finding.wrong) == ({20}, 4 * ROUNDS)
    blind = ("repetition", "comparison")
    assert screened(three_units, faults=faults, finders=blind, rounds=2).state == "healthy"


@pytest.mark.processes
def test_clean_units_agree_and_one_alone_has_nobody_to_meet(
    three_units: list[Unit], screened: Screen
) -> None:
    verdict = screened(three_units, finders=(FINDER,), rounds=2)
    assert (verdict.state, verdict.findings) == ("healthy", [])
    assert verdict.comparisons[FINDER] > 0
    alone = screened(three_units[:1], finders=(FINDER,), rounds=2)
    assert alone.comparisons[FINDER] == 0
