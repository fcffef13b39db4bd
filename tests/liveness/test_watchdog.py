"""When the watchdog names a rank that computes all the time, on a clock that the tests set."""

import os
from pathlib import Path

import pytest
from torch import nn

from holdfast import events
from holdfast.events import Event, EventKind
from holdfast.liveness import watchdog
from holdfast.liveness.answers import ANSWER_S, Answer, Exchange
from holdfast.liveness.verdict import Entered
from holdfast.liveness.watchdog import (
    BUSY_BYTES_S,
    LONGEST_LOOK_S,
    SETTLED,
    UNSETTLED,
    UNSURE,
    Hang,
    Use,
    Watchdog,
)

FLOOR_S = 1.0
AHEAD = Entered(5, "gloo:all_reduce", "[]", True)
BEHIND = Entered(4, "gloo:all_reduce", "[]", False)
# Half late, late, and late for a rank that computes.
HALF_S, LATE_S, NEARLY_S, TOO_LATE_S = (
    FLOOR_S * n for n in (0.6, 1.1, 0.99 * UNSETTLED, 1.01 * UNSETTLED)
)


class Pair(Exchange):
    """Rank 0 of two, which computes for a share of the time, and what rank 1 says to it."""

    def __init__(self, folder: Path, share: float, newest: Entered, other: str) -> None:
        super().__init__(folder, 0, 1)
        self.watchdog, self.stacks = Watchdog(nn.Linear(1, 1), Hang(floor_s=FLOOR_S)), folder / "s"
        self.watchdog._took_s.extend([FLOOR_S / 100] * SETTLED)
        self.watchdog._at_s, self.watchdog._world_size = 0.0, 2
        self.share, self.other, self.newest, self.now_s = share, other, newest, 0.0
        self.busy_until_s, self.moved_s, self.below = 1e9, 0.0, 0.0

    def others(self) -> dict[int, Answer]:
        """What rank 1 says, anew each time; nothing if it is silent."""
        if self.other == "silent":
            return {}
        theirs = BEHIND if self.newest is AHEAD else AHEAD
        answer = self.watchdog._answer(self.other, {"world": theirs})
        return {1: {**answer, "rank": 1, "host": "another", "at_s": self.now_s}}

    def use(self) -> Use:
        """What rank 0 has computed and moved by now; it stops at ``busy_until_s``."""
        busy_s = min(self.now_s, self.busy_until_s)
        moved, below_s = round(self.moved_s * busy_s), self.below * busy_s
        return Use(self.now_s, self.share * busy_s, moved, below_s)

    def named(self, *at_s: float) -> list[Event]:
        """Look so long after the last step; what was recorded."""
        with self.stacks.open("w") as stacks:
            for self.now_s in at_s:
                self.watchdog._look(self, stacks, self.now_s)
        return [event for event in events.recent() if event.kind == EventKind.RANK_HUNG]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Pair:
    """Two ranks whose clock and whose use of the processor are the test's."""
    found = Pair(tmp_path, *request.param)
    monkeypatch.setattr(Use, "now", lambda **_: found.use())
    monkeypatch.setattr(watchdog, "entered", lambda: {"world": found.newest})
    events.clear()
    return found


@pytest.mark.parametrize("pair", [(1.0, BEHIND, "stalled")], indirect=True)
def test_a_rank_that_computes_names_itself_after_ten_times_the_limit(pair: Pair) -> None:
    assert pair.named(HALF_S, LATE_S, NEARLY_S) == []
    (found,) = pair.named(TOO_LATE_S)
    assert found.detail["behind"].keys() == {"0"}
    assert found.detail["waited_s"] == TOO_LATE_S


@pytest.mark.parametrize("pair", [(0.0, AHEAD, "busy")], indirect=True)
def test_a_rank_that_waits_names_one_that_computes_after_ten_times_the_limit(pair: Pair) -> None:
    assert pair.named(HALF_S, LATE_S, NEARLY_S) == []
    (found,) = pair.named(TOO_LATE_S)
    assert found.detail["behind"].keys() == {"1"}


@pytest.mark.parametrize("pair", [(0.0, AHEAD, "stalled")], indirect=True)
def test_a_rank_that_does_not_compute_is_named_at_once(pair: Pair) -> None:
    (found,) = pair.named(HALF_S, LATE_S)
    assert found.detail["behind"].keys() == {"1"}


@pytest.mark.parametrize("pair", [(0.0, AHEAD, "silent")], indirect=True)
@pytest.mark.parametrize("floor_s", [FLOOR_S, 60 * FLOOR_S])
def test_a_rank_that_only_has_not_answered_is_named_a_third_later(
    pair: Pair, floor_s: float
) -> None:
    pair.watchdog._hang = Hang(floor_s=floor_s)
    late_s, longer_s = 1.1 * floor_s, max(UNSURE * floor_s, ANSWER_S)
    assert pair.named(0.6 * floor_s, late_s, late_s + 0.9 * longer_s) == []
    (found,) = pair.named(late_s + 1.1 * longer_s)
    assert found.detail["behind"].keys() == {"1"}


@pytest.mark.parametrize("pair", [(0.0, AHEAD, "silent")], indirect=True)
def test_nobody_is_named_for_a_step_that_ends_within_that_third(pair: Pair) -> None:
    assert pair.named(HALF_S, LATE_S) == []
    pair.watchdog._at_s = LATE_S  # of a step that ends now; the next one is late in its turn
    assert pair.named(LATE_S + 0.1, LATE_S + HALF_S, 2 * LATE_S) == []
    assert len(pair.named(2 * LATE_S + 1.1 * ANSWER_S)) == 1


@pytest.mark.parametrize("pair", [(1.0, BEHIND, "stalled")], indirect=True)
def test_what_a_late_rank_did_in_the_last_half_of_the_limit_counts(pair: Pair) -> None:
    """Not what it does at the moment of a look, nor what it did long ago."""
    pair.busy_until_s = 0.9 * FLOOR_S
    assert pair.named(0.6 * FLOOR_S, 0.9 * FLOOR_S, 1.05 * FLOOR_S) == []
    (found,) = pair.named(1.6 * FLOOR_S)
    assert found.detail["behind"].keys() == {"0"}


@pytest.mark.parametrize("pair", [(0.0, BEHIND, "stalled")], indirect=True)
@pytest.mark.parametrize(
    ("moved_s", "below", "is_busy"),
    [
        (1.1 * BUSY_BYTES_S * LONGEST_LOOK_S / FLOOR_S, 0.0, True),
        (0.4 * BUSY_BYTES_S, 0.0, False),
        (0.0, 0.5, True),
        (0.0, 0.05, False),
    ],
)
def test_a_rank_works_that_reads_or_waits_for_a_compiler_and_not_one_that_hardly_does(
    pair: Pair, moved_s: float, below: float, is_busy: bool
) -> None:
    """The window of half a second counts as two, and so do 1.1 MB in the whole second."""
    pair.moved_s, pair.below = 2 * moved_s, below
    assert (pair.named(0.55 * FLOOR_S, LATE_S) == []) == is_busy


@pytest.mark.parametrize("pair", [(0.0, BEHIND, "stalled")], indirect=True)
@pytest.mark.parametrize(
    ("named", "before_s", "at_s"),
    [
        ([1], [HALF_S], LATE_S),
        ([], [HALF_S, LATE_S, LATE_S + 1.9 * ANSWER_S], LATE_S + 2.1 * ANSWER_S),
    ],
)
def test_a_rank_ends_others_only_once_the_first_has_recorded_who_is_behind(
    pair: Pair,
    named: list[int],
    before_s: list[float],
    at_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or once the first has had the time to: an end of a rank changes what the others answer."""
    ended = list[int]()
    monkeypatch.setattr(watchdog.os, "kill", lambda pid, number: ended.append(pid))
    pair.watchdog._rank, pair.watchdog._hang = 1, Hang(floor_s=FLOOR_S, restart=True)
    first = pair.watchdog._answer("stalled", {"world": AHEAD})
    first |= {"rank": 0, "host": "far", "named": named}
    monkeypatch.setattr(pair, "others", lambda: {0: {**first, "at_s": pair.now_s}})
    assert pair.named(*before_s) == []
    assert ended == []
    assert pair.named(at_s) == []  # the first one records it
    assert ended == [os.getpid()]


@pytest.mark.parametrize("pair", [(0.0, AHEAD, "stalled")], indirect=True)
def test_the_first_rank_tells_the_others_whom_it_has_recorded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = list[Answer]()
    monkeypatch.setattr(pair, "publish", published.append)
    (found,) = pair.named(HALF_S, LATE_S)
    assert published[-1]["named"] == [1] == [int(rank) for rank in found.detail["behind"]]
    assert published[0]["named"] == []
