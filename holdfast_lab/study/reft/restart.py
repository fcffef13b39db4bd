"""``reft.restart``: loading a lost node's state from the others' memory (section 6.2, restarting).

Six nodes hold replicas of one state, of which one is lost. Its shard is decoded from what the
others hold. The paper then writes the state to a checkpoint and loads that; holdfast gives the
state to the trainer from memory. Both are set against loading a checkpoint that is there already.
The nodes' work is done on this machine, one after another, and without a network.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from holdfast.snapshot.layout.flat_buffer import Flat
from holdfast_lab.study.reft import opt, paper
from holdfast_lab.study.reft.opt import training_state
from holdfast_lab.study.reft.saving import Group, room_for, seconds, write_checkpoint
from holdfast_lab.study.registry import Case, Progress, Row, Settings, Study

TABLE = "seconds to load the state"
NODES, LOST = 6, 3  # as in the paper's DP-6
CHECKPOINT, DECODED, HANDED = "a checkpoint, s", "decoded, s", "copied from memory, s"
THROUGH_DISK, FROM_MEMORY = "decoded, saved, loaded / a checkpoint", "from memory / a checkpoint"


def timed(flat: Flat, folder: Path) -> dict[str, float]:
    """Measure each part of a restart, in seconds."""
    group = Group(flat, NODES)
    for node in range(NODES):
        group.save(node)
    group.check(LOST)
    path, state = folder / "checkpoint", dict(enumerate(flat.tensors))
    saved_s = seconds(lambda: write_checkpoint(state, path))
    copies = [torch.empty_like(tensor) for tensor in flat.tensors]

    def load() -> None:
        loaded = torch.load(path, weights_only=True)
        for number, copy in enumerate(copies):
            copy.copy_(loaded[number])

    loaded_s = seconds(load)
    decoded_s = seconds(lambda: group.decoded(LOST))
    handed_s = seconds(lambda: [a.copy_(b) for a, b in zip(copies, flat.tensors, strict=True)])
    return {
        CHECKPOINT: loaded_s,
        "saving one, s": saved_s,
        DECODED: decoded_s,
        HANDED: handed_s,
        THROUGH_DISK: (decoded_s + saved_s + loaded_s) / loaded_s,
        FROM_MEMORY: (decoded_s + handed_s) / loaded_s,
    }


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    models = settings.choose([opt.TINY], [opt.OPT_125M], [opt.OPT_125M, opt.OPT_350M])
    progress.begin(float(len(models)))
    for model in models:
        case: Case = {"model": model.name, "nodes": NODES, "MB": round(model.state_bytes / 1e6)}
        if lacking := room_for(6 * model.state_bytes):
            yield Row(TABLE, case, note=f"not measured: {lacking}")
            continue
        flat = training_state(model.stages(1)[0], settings.generator(model.name))
        with tempfile.TemporaryDirectory() as folder:
            yield Row(TABLE, case, timed(flat, Path(folder)), {THROUGH_DISK: paper.RESTART})
        progress.advance(1)


def _verdict(rows: list[Row]) -> str:
    """Check that a state comes back from memory no slower than through a checkpoint."""
    for row in rows:
        if row.measured and row.measured[FROM_MEMORY] > row.measured[THROUGH_DISK]:
            return f"{row.case['model']}: slower from memory than through a checkpoint"
    return ""


STUDY = Study(
    name="reft.restart",
    paper="REFT, section 6.2, restarting",
    reproduces="a lost node's state comes back from the others' memory, in some times a load",
    run=_run,
    verdict=_verdict,
)
