"""Bounded waits, one thread, and run directories whose SMP is stopped."""

import pytest

from holdfast import config
from holdfast.snapshot.client.copier import Copier
from holdfast.snapshot.client.copies import Copy


@pytest.fixture(autouse=True)
def _bounded(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, "20")


@pytest.fixture
def partly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the memory of no snapshot hold the whole state, as with parities."""
    read = Copier.read

    def without_room(copier: Copier) -> Copy | None:
        copy = read(copier)
        if copy is not None:
            copy.room = None
            copy.digests = {n: copy.digests[n] for n in copy.watched}
        return copy

    monkeypatch.setattr(Copier, "read", without_room)
