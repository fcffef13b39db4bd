"""A state machine that fails says by which events it came there, and what caused them."""

import pytest
from snapshot_shell import Shell

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import InvariantError
from holdfast.snapshot.protocol.state_machine import HISTORY_EVENTS


@pytest.fixture
def shell() -> Shell:
    """The protocol with one rank, which is connected."""
    shell = Shell(ranks=1)
    shell.hello()
    return shell


def test_an_invariant_error_lists_the_last_events_with_their_causes(shell: Shell) -> None:
    shell.do(m.Begin(0, 5, 10))
    shell.do(m.Tick())
    shell.write(0, 5)
    shell.protocol.node.ranks[0].slots.clear()
    with pytest.raises(InvariantError) as caught:
        shell.do(m.Digested(0, 0, b"digest"))
    lines = str(caught.value).splitlines()
    assert "IndexError" in lines[0]
    assert [line.split(":")[1].split("(")[0].strip() for line in lines[1:]] == [
        "Hello",
        "Begin",
        "Allocated",
        "Written",
        "Digested",
    ]
    assert "step=5" in lines[2]
    assert "→ Allocate(rank=0" in lines[2]
    assert "(answers #2) → Reply(rank=0, verb=granted" in lines[3]
    assert "manifest=<2 bytes>" in lines[4]


def test_the_history_is_bounded_and_holds_no_manifest(shell: Shell) -> None:
    shell.commit(*range(3 * HISTORY_EVENTS))
    shell.protocol.node.ranks[0].slots.clear()
    with pytest.raises(InvariantError) as caught:
        shell.do(m.Allocated(0, 7, 1))
    assert len(str(caught.value).splitlines()) == 1 + HISTORY_EVENTS


def test_a_violation_of_the_protocol_is_the_peers_and_has_no_history(shell: Shell) -> None:
    shell.do(m.Begin(0, 1, 10))
    with pytest.raises(m.ProtocolViolation, match="ParityPlan cannot be read"):
        shell.do(m.Written(0, 1, "d", b"m", parity_plan={"ranges": 7}))
    shell.do(m.Disconnected(0))
    shell.hello()
    shell.commit(1)
    assert shell.protocol.node.newest() == 1
