"""The SMP's decisions, without any process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_shell import KEEP, LINGER_S, RANKS, Shell

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.slots import SlotState
from holdfast.version import __version__


def test_a_step_that_one_rank_passed_over_is_waited_for_by_none(shell: Shell) -> None:
    shell.commit(1)
    shell.do(m.Begin(0, 2, 10))
    shell.do(m.Begin(1, 2, 10))
    shell.write(0, 2)
    assert shell.verbs(m.SkipStep(1, 2)) == [(0, "aborted", 2)]
    assert shell.verbs(m.SkipStep(0, 3)) == []
    assert shell.verbs(m.Begin(1, 3, 10)) == [(1, "skipped", 3)]
    shell.commit(4)
    assert shell.clean() == [[1, 4], [1, 4]]


def test_after_a_restore_steps_that_were_passed_over_are_written(shell: Shell) -> None:
    shell.commit(1)
    shell.do(m.SkipStep(0, 2))
    for rank in range(RANKS):
        shell.do(m.Restore(rank))
    for rank in range(RANKS):
        shell.do(m.Verified(rank, 1))
    shell.commit(2)
    assert shell.clean() == [[1, 2], [1, 2]]


def test_the_next_step_waits_for_the_commit(shell: Shell) -> None:
    assert shell.verbs(m.Begin(0, 1, 10)) == [(0, "granted", 1)]
    assert shell.verbs(m.Begin(1, 1, 10)) == [(1, "granted", 1)]
    assert shell.write(0, 1) == []
    assert shell.clean() == [[], []]
    assert shell.verbs(m.Begin(0, 2, 10)) == []
    answers = [(0, "committed", 1), (1, "committed", 1), (0, "granted", 2)]
    assert shell.write(1, 1) == answers
    assert shell.clean() == [[1], [1]]


@pytest.mark.parametrize("event", [m.Disconnected(1), m.Hello(1, RANKS, KEEP, __version__)])
@pytest.mark.parametrize("written", [False, True])
def test_a_rank_that_leaves_aborts_the_step_of_all(
    shell: Shell, event: m.Event, written: bool
) -> None:
    shell.commit(1)
    shell.do(m.Begin(0, 2, 10))
    shell.do(m.Begin(1, 2, 10))
    told = shell.write(0, 2) if written else []
    told += shell.verbs(event)
    told += [] if written else shell.write(0, 2)
    assert (0, "aborted", 2) in told
    assert shell.clean() == [[1], [1]]


@pytest.mark.parametrize("aborted_before", [False, True])
def test_memory_of_a_vanished_writer_is_not_granted_again(
    shell: Shell, aborted_before: bool
) -> None:
    shell.do(m.Begin(0, 1, 10))
    slot = shell.granted[0][0]
    if aborted_before:
        shell.do(m.Disconnected(1))
    shell.do(m.Disconnected(0))
    assert (0, slot) not in shell.memory


def test_a_rank_that_fell_behind_skips_and_one_ahead_aborts(shell: Shell) -> None:
    shell.do(m.Begin(0, 2, 10))
    assert shell.verbs(m.Begin(1, 1, 10)) == [(1, "skipped", 1)]
    assert shell.verbs(m.Begin(1, 3, 10)) == [(1, "granted", 3)]
    assert shell.write(0, 2) == [(0, "aborted", 2)]
    assert shell.verbs(m.Begin(0, 3, 10)) == [(0, "granted", 3)]
    shell.write(0, 3)
    assert shell.write(1, 3) == [(0, "committed", 3), (1, "committed", 3)]


def test_steps_of_another_run_are_not_overtaken(shell: Shell) -> None:
    shell.commit(5)
    (reply,) = shell.do(m.Begin(0, 1, 10))
    assert reply.verb == "refused"
    assert "restore() first" in reply.fields["reason"]


def test_a_refused_allocation_leaves_the_rest_usable(shell: Shell) -> None:
    shell.commit(1)
    shell.room = False
    assert shell.verbs(m.Begin(0, 2, 1000)) == [(0, "refused", 2)]
    shell.room = True
    shell.commit(3)
    assert shell.clean() == [[1, 3], [1, 3]]


def test_a_corrupt_step_is_dropped_everywhere_and_never_offered_again(shell: Shell) -> None:
    shell.commit(1, 2)
    shell.do(m.Restore(0))
    shell.do(m.Restore(1))
    assert shell.verbs(m.Corrupt(1, 2, "digest")) == [(0, "offer", 1), (1, "offer", 1)]
    assert shell.verbs(m.Verified(0, 2)) == []
    assert shell.clean() == [[1], [1]]
    assert shell.verbs(m.Corrupt(0, 1, "digest")) == [(0, "lost", -1), (1, "lost", -1)]
    shell.do(m.Restore(0))
    assert shell.verbs(m.Restore(1)) == [(0, "lost", -1), (1, "lost", -1)]


def test_a_step_that_is_of_no_use_to_a_rank_is_passed_over_and_kept(shell: Shell) -> None:
    shell.commit(1, 2)
    shell.do(m.Restore(0))
    shell.do(m.Restore(1))
    useless = [m.Corrupt(1, step, "it lacks shards", kept=True) for step in (2, 1)]
    assert shell.verbs(useless[0]) == [(0, "offer", 1), (1, "offer", 1)]
    assert shell.verbs(useless[1]) == [(0, "lost", -1), (1, "lost", -1)]
    assert shell.clean() == [[1, 2], [1, 2]]
    shell.do(m.Restore(0))
    assert shell.verbs(m.Restore(1)) == [(0, "offer", 2), (1, "offer", 2)]


def test_a_restore_aborts_what_is_in_flight(shell: Shell) -> None:
    shell.commit(1)
    shell.do(m.Begin(0, 2, 10))
    shell.do(m.Begin(1, 2, 10))
    shell.write(0, 2)
    assert shell.verbs(m.Restore(0)) == [(0, "aborted", 2)]
    assert shell.verbs(m.Restore(1)) == [(0, "offer", 1), (1, "offer", 1)]


def test_a_rank_that_dies_while_restoring_is_offered_the_step_again(shell: Shell) -> None:
    shell.commit(1)
    shell.do(m.Restore(0))
    shell.do(m.Restore(1))
    shell.do(m.Verified(0, 1))
    shell.do(m.Disconnected(1))
    shell.hello(1)
    assert shell.verbs(m.Restore(1)) == [(1, "offer", 1)]
    assert shell.verbs(m.Verified(1, 1)) == [(0, "load", 1), (1, "load", 1)]


def test_it_stops_when_all_finished_when_asked_and_when_nobody_came_back(shell: Shell) -> None:
    shell.do(m.Finished(0))
    assert not shell.stopped
    shell.do(m.Finished(1))
    assert "finished" in shell.stopped
    lingering = Shell()
    lingering.hello()
    lingering.now = 10 * LINGER_S
    lingering.do(m.Tick())
    lingering.do(m.Disconnected(0))
    lingering.do(m.Disconnected(1))
    lingering.now += 0.9 * LINGER_S
    lingering.do(m.Tick())
    assert not lingering.stopped
    lingering.now += 0.2 * LINGER_S
    lingering.do(m.Tick())
    assert "no trainer" in lingering.stopped


@pytest.mark.parametrize(
    ("hello", "word"),
    [
        (m.Hello(0, 3, KEEP, __version__), "local ranks"),
        (m.Hello(0, RANKS, 5, __version__), "keep="),
        (m.Hello(2, RANKS, KEEP, __version__), "LOCAL_RANK"),
    ],
)
def test_a_trainer_of_another_shape_is_told_why(shell: Shell, hello: m.Hello, word: str) -> None:
    assert word in shell.protocol.unfit(hello)


def test_odd_messages_are_refused() -> None:
    good = {"verb": "begin", "step": 1, "nbytes": 5}
    assert m.parse(m.FromRank, good, b"", 0) == m.Begin(0, 1, 5)
    for change in ({"step": -1}, {"step": True}, {"nbytes": None}, {"verb": []}, {"step": 2**70}):
        with pytest.raises(m.ProtocolViolation):
            m.parse(m.FromRank, good | change, b"", 0)
    with pytest.raises(m.ProtocolViolation, match="before hello"):
        m.parse(m.FromRank, good, b"", None)


READING = ("lease", "older", "due", "release", "gone", "ask")
ACTIONS = ("hello", "begin", "ahead", "write", "restore", "verify", "corrupt", "leave", "finish")
OFTEN = ("hello", "begin", "begin", "write", "write")  # or hardly a step would be committed
actions = st.tuples(
    st.sampled_from(ACTIONS + OFTEN + READING), st.integers(0, RANKS - 1), st.booleans()
)


class Storm:
    """Ranks that do anything at any time, and what must hold all the same."""

    def __init__(self) -> None:
        self.shell = Shell()
        self.steps = [0] * RANKS
        self.offered = [0] * RANKS

    def act(self, action: str, rank: int, room: bool) -> None:
        shell, protocol = self.shell, self.shell.protocol
        shell.room = room or action != "begin"
        if action in READING:
            self.read(action, holder=rank)
            return
        if not protocol.node.ranks[rank].connected and action != "hello":
            return
        commits = protocol.node.commits
        replies = shell.do(self.event(action, rank))
        for reply in replies:
            if reply.verb == "offer":
                self.offered[reply.rank] = reply.fields["step"]
        committed = {reply.rank for reply in replies if reply.verb == "committed"}
        assert committed in (set(), set(range(RANKS)))
        for memory in shell.ghosts:
            memory[0] = -2
        self.check(commits)

    def read(self, action: str, holder: int) -> None:
        """A reader does something; what it held was as it had been, or it is told otherwise."""
        shell = self.shell
        overwritten = shell.overwritten(holder)
        assert shell.refusals or not overwritten
        if action == "release":
            assert not (shell.release(holder) and overwritten)
            return
        newest = shell.protocol.node.newest() or 0
        event = {
            "lease": m.Lease(holder, newest + 1),
            "older": m.Lease(holder, newest),
            "due": m.Due(holder, 2, 0),
            "gone": m.Gone(holder),
            "ask": m.PersistRequested(),
        }[action]
        assert shell.do(event) == []

    def event(self, action: str, rank: int) -> m.Event:
        if action in ("begin", "ahead"):
            base = self.shell.protocol.node.newest() or 0
            self.steps[rank] = base + (1 if action == "begin" else 2)
            return m.Begin(rank, self.steps[rank], 10 + self.steps[rank])
        if action == "write":
            _, step, memory = self.shell.granted.pop(rank, (-1, 0, [0]))
            memory[0] = step
            return self.shell.written(rank, step)
        return {
            "hello": m.Hello(rank, RANKS, KEEP, __version__),
            "restore": m.Restore(rank),
            "verify": m.Verified(rank, self.offered[rank]),
            "corrupt": m.Corrupt(rank, self.offered[rank], "digest"),
            "leave": m.Disconnected(rank),
            "finish": m.Finished(rank),
        }[action]

    def check(self, commits: int) -> None:
        protocol = self.shell.protocol
        clean = self.shell.clean()
        assert max(self.shell.with_memory()) <= KEEP + 1 + RANKS  # as many readers as ranks
        assert all(steps == clean[0] for steps in clean)
        assert len(clean[0]) <= KEEP
        assert len({slot.step for rank in protocol.node.ranks if (slot := rank.dirty())}) <= 1
        assert protocol.node.commits - commits in (0, 1)
        dirty = (SlotState.WRITING, SlotState.WRITTEN)
        for rank in protocol.node.ranks:
            assert sum(slot.state in dirty for slot in rank.slots) < 2

    def torn(self) -> list[tuple[int, int]]:
        """Clean slots, by rank and number, that do not hold what their step wrote."""
        return [
            (index, number)
            for index, rank in enumerate(self.shell.protocol.node.ranks)
            for number, slot in enumerate(rank.slots)
            if slot.state is SlotState.CLEAN
            and (self.shell.memory[index, number], slot.manifest)
            != ([slot.step], f"m{slot.step}".encode())
        ]


@given(st.lists(actions, min_size=40, max_size=80))
def test_whatever_ranks_do_no_step_is_torn_and_the_newest_stays(sequence: list[object]) -> None:
    storm = Storm()
    storm.shell.hello()
    for action, rank, room in sequence:  # type: ignore[misc]
        newest = storm.shell.protocol.node.newest()
        storm.act(action, rank, room)
        assert storm.torn() == []
        if newest is not None and action != "corrupt":
            assert (storm.shell.protocol.node.newest() or -1) >= newest


@given(st.lists(actions, max_size=40))
def test_after_any_history_a_restart_of_all_ranks_restores_the_newest(
    sequence: list[object],
) -> None:
    storm = Storm()
    storm.shell.hello()
    storm.shell.commit(1)
    for action, rank, room in sequence:  # type: ignore[misc]
        if action != "corrupt":
            storm.act(action, rank, room)
    assert storm.torn() == []
    shell, newest = storm.shell, storm.shell.protocol.node.newest()
    assert newest is not None
    shell.hello()
    assert shell.verbs(m.Restore(0)) == []
    assert shell.verbs(m.Restore(1)) == [(0, "offer", newest), (1, "offer", newest)]
    shell.room = True
    assert shell.verbs(m.Verified(0, newest)) == []
    assert shell.verbs(m.Verified(1, newest)) == [(0, "load", newest), (1, "load", newest)]
    for reader in range(RANKS):
        shell.do(m.Gone(reader))
    shell.commit(newest + 1, newest + 2)
    assert shell.protocol.node.newest() == newest + 2
    assert shell.with_memory() == [KEEP + 1] * RANKS
