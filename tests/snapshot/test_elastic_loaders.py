"""The state of a StatefulDataLoader goes on with other ranks at the same number of samples."""

from copy import deepcopy
from itertools import islice
from typing import Any

import pytest
from elastic_loaders import loader_of

from holdfast.snapshot.restore import elastic

pytestmark = pytest.mark.processes

States = list[dict[str, Any]]


def read(
    kind: str, rows: int, job: tuple[int, int, int], former: States
) -> tuple[list[int], States, list[int | None]]:
    """Read with (ranks, batch, steps): the rows, the states, and how many batches were drawn."""
    ranks, batch, steps = job
    found: list[int] = []
    states, drawn = [], []
    for rank in range(ranks):
        loader = loader_of(kind, rows, batch, (rank, ranks))
        if former:
            state = deepcopy(former[min(rank, len(former) - 1)])
            drawn.append(elastic._dealt_loader(state, loader, state.pop("before"), ranks * batch))
            loader.load_state_dict(state)
        for batch_of_rows in islice(loader, steps):
            found += batch_of_rows.tolist()
        states.append(loader.state_dict() | {"before": ranks * batch})
    return found, states, drawn


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads in two jobs, one after the other."""

    def go(kind: str, rows: int, *jobs: tuple[int, int, int]) -> tuple[list[int], list[int], Any]:
        first, states, _ = read(kind, rows, jobs[0], [])
        monkeypatch.setenv("WORLD_SIZE", str(jobs[1][0]))
        second, _, drawn = read(kind, rows, jobs[1], states)
        return first, second, drawn

    return go


@pytest.mark.parametrize("kind", ["plain", "plain+2", "stateful", "stateful+2", "stream"])
def test_each_row_is_read_once_or_up_to_a_batch_again(kind: str, go_on: Any) -> None:
    for batch, again in ((4, 0), (3, 6)):  # of three ranks; 24 of the 60 rows were read by two
        first, second, drawn = go_on(kind, 60, (2, 6, 2), (3, batch, 9))
        assert drawn == [2] * 3
        assert len(set(first)) == len(first) == 24
        assert len(set(second)) == len(second) == 36 + again
        assert sorted({*first, *second}) == list(range(60))


@pytest.mark.parametrize("kind", ["plain", "plain+2", "stateful"])
def test_at_the_end_of_a_pass_no_row_is_left(kind: str, go_on: Any) -> None:
    # The last batch of each rank has one row of its 17; of two ranks each has 25.
    first, second, _ = go_on(kind, 50, (3, 4, 5), (2, 6, 1))
    assert set(first) == set(range(50))
    assert second == []


@pytest.mark.parametrize("kind", ["stateful stream", "stream+2"])
def test_what_cannot_be_dealt_anew_is_said(kind: str, go_on: Any) -> None:
    assert go_on(kind, 60, (2, 6, 2), (3, 4, 0))[2] == [None] * 3
