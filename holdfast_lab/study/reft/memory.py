"""``reft.memory``: the memory in which snapshots are kept, over the training state's (section 6.2).

A training saves into a real snapshot process, whose slots are counted. Of several nodes that share
a state the slots are as many, and as large as their layout with one parity says.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from holdfast import Snapshots
from holdfast.snapshot.layout import flat_buffer, shares
from holdfast.snapshot.layout.shares import Share
from holdfast_lab.study.reft import paper
from holdfast_lab.study.reft.opt import training_state
from holdfast_lab.study.registry import Progress, Row, Settings, Study, watched

TABLE, MEMORY = "memory of a node, with the copy that is being written", "× training state"
NODES = (2, 3, 6, 24)
SAVES = 4  # more than there are slots


def held_bytes(width: int, generator: torch.Generator) -> int:
    """Train a layer with snapshots; return the bytes of the snapshot process's slots."""
    layer = nn.Linear(width, width)
    optimizer = torch.optim.Adam(layer.parameters())
    with (
        tempfile.TemporaryDirectory() as folder,
        Snapshots(layer, optimizer, run_dir=Path(folder)) as snapshots,
    ):
        for step in range(1, SAVES + 1):
            snapshots.begin(step)
            optimizer.zero_grad()
            layer(torch.randn(2, width, generator=generator)).sum().backward()
            snapshots.finish()
            optimizer.step()
            snapshots.wait_committed()
        return int(snapshots.status()["bytes"])


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    width = settings.choose(256, 2048, 6144)
    held = held_bytes(width, settings.generator("memory"))
    flat = training_state([(width, width), (width,)], settings.generator("state"))
    state_bytes = sum(tensor.nbytes for tensor in flat.tensors)
    size = flat_buffer.stable_bytes(flat, shares.plan(flat))
    slots = round(held / size)
    for nodes in watched((1, *NODES), progress):
        share = Share(0, nodes, 1, 0, 1, True, (size,) * nodes)
        of_node = held if nodes == 1 else slots * share.buffer_nbytes
        yield Row(
            TABLE,
            {"nodes": nodes, "slots": slots, "MB": round(state_bytes / 1e6)},
            {MEMORY: of_node / state_bytes},
            {MEMORY: paper.MEMORY},
            "a real snapshot process" if nodes == 1 else "as its layout says, one parity",
        )


STUDY = Study(
    name="reft.memory",
    paper="REFT, section 6.2, memory",
    reproduces="memory for snapshots of at most three times the model's and optimizer's",
    run=_run,
)
