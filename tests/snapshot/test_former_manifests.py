"""How a rank reads the manifests of the ranks before, of which there may be thousands."""

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.snapshot.protocol.roster import Stamp
from holdfast.snapshot.restore import cluster_restore
from holdfast.snapshot.restore.choose_step import Candidate

NODES, LOCAL = 3, 4


def test_each_is_read_once_and_the_ranks_of_a_node_over_one_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, closed, asked = list[int](), list[int](), list[int]()

    def reach(node: int) -> Any:
        opened.append(node)
        return SimpleNamespace(node=node, close=lambda: closed.append(node))

    def read(remote: Any, rank: int, stamp: Stamp, opaque: bool) -> Any:
        assert (remote.node, opaque) == (rank // LOCAL, True)
        asked.append(rank)
        return SimpleNamespace(share=SimpleNamespace(replicated=True), manifest=rank)

    monkeypatch.setattr(cluster_restore, "_manifest", read)
    ranks = range(NODES * LOCAL)
    holders = {rank: [rank // LOCAL] for rank in ranks}
    manifests = cluster_restore._Manifests(Candidate(Stamp(1, 3), {}, holders), reach)
    assert [manifests.of(rank) for rank in (*ranks, *ranks)] == [*ranks, *ranks]
    assert (asked, opened) == ([*ranks], [*range(NODES)])
    manifests.close()
    assert closed == opened
