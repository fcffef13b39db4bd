"""What the SMP decides about readers and about steps from disk, without any process."""

import pytest
from snapshot_shell import KEEP, RANKS, Shell

from holdfast.snapshot.protocol import messages as m

READER = 7
LAST = 10**6


def test_a_held_step_stays_as_it_is_and_no_snapshot_waits_for_it(shell: Shell) -> None:
    shell.commit(1, 2)
    shell.do(m.Lease(READER, LAST))
    assert shell.reading(READER) == 2
    shell.commit(*range(3, 20))
    assert shell.clean() == [[18, 19]] * RANKS
    assert not shell.overwritten(READER)
    assert shell.with_memory() == [KEEP + 2] * RANKS
    held = shell.held[READER]
    assert shell.release(READER)
    # Its memory is written over now: of what is not held the test would see it.
    shell.commit(*range(20, 40))
    shell.held[READER] = held
    assert shell.overwritten(READER)


def test_memory_that_is_being_written_is_shown_to_a_reader_and_stays_the_trainers(
    shell: Shell,
) -> None:
    shell.commit(1)
    shell.do(m.Begin(0, 2, 10))
    shell.do(m.Begin(1, 2, 10))
    shell.protocol.handle(shell.written(1, 2), 0.0)
    for step, shown in ((2, [0, 1]), (1, [0, 1]), (3, [])):
        first, *parts = shell.protocol.handle(m.Copied(READER, step), 0.0)
        assert (first.verb, first.fields["step"], first.fields["ranks"]) == (
            "leased",
            step,
            len(parts),
        )
        assert [part.fields["rank"] for part in parts] == shown
        places = [(part.rank, part.slot) for part in parts]
        steps = [shell.protocol.node.ranks[rank].slots[slot].step for rank, slot in places]
        assert steps == [step] * len(shown)
    assert not any(slot.pins for rank in shell.protocol.node.ranks for slot in rank.slots)
    shell.write(0, 2)
    assert shell.clean() == [[1, 2]] * RANKS
    shell.do(m.Gone(READER))


def test_extra_memory_stays_between_two_reads_and_goes_with_the_last_reader(shell: Shell) -> None:
    shell.commit(1, 2)
    shell.do(m.Lease(READER, LAST))
    shell.commit(3, 4, 5)
    shell.release(READER)
    shell.commit(6, 7)
    assert shell.with_memory() == [KEEP + 2] * RANKS
    shell.do(m.Lease(READER, LAST))
    assert shell.protocol.status()["leased"] == [7]
    shell.do(m.Gone(READER))
    assert shell.protocol.status()["leased"] == []
    assert not any(slot.pins for rank in shell.protocol.node.ranks for slot in rank.slots)
    assert shell.with_memory() == [KEEP + 1] * RANKS
    shell.commit(8, 9, 10)
    assert shell.with_memory() == [KEEP + 1] * RANKS
    assert shell.clean() == [[9, 10]] * RANKS


def test_what_a_user_asked_for_is_not_forgotten_with_the_persister_that_dies(shell: Shell) -> None:
    shell.commit(1)
    shell.do(m.Due(READER, 1000, 0))
    shell.do(m.PersistRequested())
    assert shell.reading(READER) == 1
    shell.do(m.Gone(READER))
    shell.do(m.Due(READER + 1, 1000, 0))
    assert shell.reading(READER + 1) == 1
    shell.do(m.Persisted(READER + 1, 1, ""))
    shell.do(m.Gone(READER + 1))
    shell.do(m.Due(READER + 2, 1000, 0, [1]))
    assert shell.reading(READER + 2) is None


def test_short_of_memory_an_older_step_goes_before_a_snapshot_fails(shell: Shell) -> None:
    shell.commit(1, 2)
    shell.do(m.Lease(READER, LAST))
    shell.commit(3, 4)
    shell.room = False
    for step in (5, 6, 7):
        assert shell.verbs(m.Begin(0, step, 10)) == [(0, "granted", step)]
        assert shell.verbs(m.Begin(1, step, 10)) == [(1, "granted", step)]
        shell.write(0, step)
        shell.write(1, step)
        assert not shell.overwritten(READER)
    assert shell.clean() == [[6, 7]] * RANKS or shell.clean() == [[7]] * RANKS
    assert shell.release(READER)


def test_with_nothing_older_left_the_reader_loses_its_step_and_is_told() -> None:
    shell = Shell(keep=1)
    shell.hello()
    shell.commit(1)
    shell.do(m.Lease(READER, LAST))
    shell.commit(2)
    shell.room = False
    shell.commit(3)
    assert shell.clean() == [[3]] * RANKS
    assert not shell.release(READER)
    shell.do(m.Lease(READER, LAST))
    assert shell.release(READER)


def test_what_is_due(shell: Shell) -> None:
    shell.do(m.Due(READER, 3, 0))
    shell.commit(1, 2)
    assert shell.reading(READER) is None
    shell.commit(3)
    assert shell.reading(READER) == 3
    shell.release(READER)
    shell.do(m.Persisted(READER, 3, ""))
    shell.do(m.Due(READER, 3, 3, [3]))
    shell.do(m.PersistRequested())
    assert shell.reading(READER) is None  # it is on disk already
    shell.commit(4)
    assert shell.reading(READER) is None
    shell.do(m.PersistRequested())
    assert shell.reading(READER) == 4


def test_a_busy_reader_gets_the_newest_when_it_asks_again(shell: Shell) -> None:
    shell.do(m.Due(READER, 3, 0))
    shell.commit(1, 2, 3, 4, 5, 6, 7)
    assert shell.reading(READER) == 3
    shell.do(m.Due(READER, 3, 3))
    assert shell.reading(READER) == 7


@pytest.mark.parametrize("persisted", [False, True])
def test_when_all_trainers_died_the_newest_is_due_at_once(shell: Shell, persisted: bool) -> None:
    shell.do(m.Due(READER, 1000, 0))
    shell.commit(5)
    if persisted:
        shell.do(m.Persisted(READER, 5, ""))
        shell.do(m.Due(READER, 1000, 5, [5]))
    shell.do(m.Disconnected(0))
    assert shell.reading(READER) is None
    shell.do(m.Disconnected(1))
    assert shell.reading(READER) == (None if persisted else 5)


def test_a_step_that_failed_is_tried_again_on_demand_only(shell: Shell) -> None:
    shell.commit(3)
    shell.do(m.Persisted(READER, 3, "disk full"))
    shell.do(m.Persisted(READER, 2, ""))
    assert shell.protocol.status()["persist_failed"] == {"step": 3, "error": "disk full"}
    shell.do(m.Due(READER, 3, 3))
    assert shell.reading(READER) is None
    shell.do(m.PersistRequested())
    assert shell.reading(READER) == 3
    assert shell.protocol.status()["persist_failed"] is None
    shell.do(m.Persisted(READER, 4, "disk full"))
    shell.do(m.Persisted(READER, 6, ""))
    assert shell.protocol.status()["persist_failed"] is None
    assert shell.protocol.status()["persisted"] == 6


def propose(shell: Shell, *steps: int | None) -> list[tuple[int, str, int | None]]:
    answers = []
    for rank, step in enumerate(steps):
        answers += shell.verbs(m.Recall(rank, step or 0, step is not None))
    return answers


def test_ranks_load_the_newest_step_that_all_of_them_propose(shell: Shell) -> None:
    assert propose(shell, 9, 9) == [(0, "load", 9), (1, "load", 9)]
    assert propose(shell, 9, 6) == [(0, "older", 6), (1, "older", 6)]
    assert propose(shell, 3, 6) == [(0, "older", 3), (1, "older", 3)]
    assert propose(shell, 3, 3) == [(0, "load", 3), (1, "load", 3)]
    assert propose(shell, 3, None) == [(0, "nothing", -1), (1, "nothing", -1)]


def test_a_rank_that_began_anew_joins_those_that_wait_for_its_proposal(shell: Shell) -> None:
    assert shell.verbs(m.Restore(0)) == []
    assert shell.verbs(m.Restore(1)) == [(0, "fresh", -1), (1, "fresh", -1)]
    assert shell.verbs(m.Recall(0, 9, True)) == []
    shell.do(m.Disconnected(1))
    shell.hello(1)
    assert shell.verbs(m.Restore(1)) == [(1, "fresh", -1)]
    assert shell.verbs(m.Recall(1, 9, True)) == [(0, "load", 9), (1, "load", 9)]


def test_odd_reader_messages_are_refused() -> None:
    assert m.FromReader.by_verb.keys() == {"lease", "copied", "due", "release", "persisted"}
    assert m.parse(m.FromReader, {"verb": "lease", "before": 3}, b"", 1) == m.Lease(1, 3)
    for header in ({"verb": "lease"}, {"verb": "lease", "before": -1}, {"verb": "due", "every": 1}):
        with pytest.raises(m.ProtocolViolation):
            m.parse(m.FromReader, header, b"", 1)
