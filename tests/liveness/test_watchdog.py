"""When the watchdog names a rank that computes all the time, on a clock that the tests set."""

from pathlib import Path

import pytest
from torch import nn

from holdfast import events
from holdfast.events import Event, EventKind
from holdfast.liveness import watchdog
from holdfast.liveness.answers import Answer, Exchange
from holdfast.liveness.verdict import Entered
from holdfast.liveness.watchdog import SETTLED, UNSETTLED, Hang, Use, Watchdog

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

    def others(self) -> dict[int, Answer]:
        """What rank 1 says, anew each time."""
        theirs = BEHIND if self.newest is AHEAD else AHEAD
        answer = self.watchdog._answer(self.other, {"world": theirs})
        return {1: {**answer, "rank": 1, "host": "another", "at_s": self.now_s}}

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
    monkeypatch.setattr(Use, "now", lambda **_: Use(found.now_s, found.share * found.now_s))
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
