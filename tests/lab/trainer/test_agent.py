"""How an agent's end is told: by a signal, or by an error of its own."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from holdfast.launch.service import Standby
from holdfast_lab.trainer import agent
from holdfast_lab.trainer.settings import Settings


def timed_before_it_began() -> None:
    """Fail as torch's timing of its own calls does."""
    try:
        raise SignalException("a signal", sigval=signal.SIGTERM)
    finally:
        raise UnboundLocalError("start")


def failing() -> None:
    raise UnboundLocalError("a defect")


@pytest.mark.parametrize(
    ("end", "told"), [(timed_before_it_began, KeyboardInterrupt), (failing, UnboundLocalError)]
)
def test_a_signal_that_torch_turns_into_an_error_is_an_interruption(
    end: Callable[[], None],
    told: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent, "elastic_launch", lambda *_: lambda *_: end())
    place = agent.Place(tmp_path, "127.0.0.1:0", "run", "127.0.0.1", serves=True)
    with pytest.raises(told):
        agent.launch(tmp_path, Settings(), place, Standby())
