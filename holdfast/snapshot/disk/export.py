"""Snapshots and checkpoints as files that stock tools load: safetensors, torch.save, DCP."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError, SnapshotError
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.disk.remote_checkpoints import checkpoints_at
from holdfast.snapshot.layout import flat_buffer, manifest
from holdfast.snapshot.layout.dtensors import LocalShard
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.manifest import Manifest, Opaque
from holdfast.snapshot.restore.reader import Leased

ALL_RANKS = "all-ranks"
# A rank's number, its manifest and its buffer.
State = tuple[int, Manifest, torch.Tensor]


def states_of(leased: Leased, first_rank: int) -> Iterable[State]:
    """Yield every rank's number, manifest and buffer of a step in memory."""
    for part in leased.parts:
        described = manifest.decode(part.manifest, part.digest, opaque=True)
        yield first_rank + part.rank, described, part.buffer


def states_in(folder: Path) -> Iterable[State]:
    """Yield every rank's number, manifest and buffer of a checkpoint on disk."""
    for row in persist_format.read_index(folder)["ranks"]:
        yield int(row["rank"]), *persist_format.map_rank(folder, row)


def checkpoints_of(persist_dir: str | Path) -> list[Checkpoints]:
    """Return the checkpoint folders in a persist_dir: those of all nodes, or itself."""
    there = checkpoints_at(persist_dir)
    names = [name for name in there.folders() if re.fullmatch(r"node-\d+", name)]
    names.sort(key=lambda name: int(name[5:]))
    return [checkpoints_at(f"{there.address}/{name}") for name in names] or [there]


def export(states: Iterable[State], step: int, goal: Path, form: str) -> list[Path]:
    """Write one file (``dcp``: one folder) for each rank, and ``export.json``.

    Every tensor is verified. A model that is divided among ranks becomes a single ``dcp`` folder
    for all of them. ``form`` is one of ``FORMATS``; ``goal`` appears when all is written.

    Raises:
        ConfigError: ``goal`` exists or cannot be written, or ranks that hold a part are missing.
        SnapshotCorrupt: a tensor is damaged.
    """
    if goal.exists():
        raise ConfigError(f"{goal} exists: name a folder that does not")
    draft = goal.with_name(f".{goal.name}.writing")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        names = list(FORMATS[form](draft, states))
        note = {"step": step, "format": form, "files": names}
        (draft / "export.json").write_text(json.dumps(note, indent=1) + "\n")
        draft.rename(goal)
    except (OSError, ConfigError, SnapshotError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"cannot write {goal}: {error}; name another folder") from error
        raise
    return [goal / name for name in names]


def _to_safetensors(folder: Path, states: Iterable[State]) -> Iterator[str]:
    for rank, described, buffer in states:
        flat_buffer.read(described.entries, buffer)
        name = f"rank-{rank}.safetensors"
        aliases = persist_format.aliases_of(described)
        persist_format.save_tensors(folder / name, described, buffer, aliases)
        yield name


def _to_torch(folder: Path, states: Iterable[State]) -> Iterator[str]:
    for rank, described, buffer in states:
        name, tree = f"rank-{rank}.pt", _tree(described, buffer)
        if divided := persist_format.shardings_of(described):
            tree["shardings"] = divided
        torch.save(tree, folder / name)
        yield name


def _to_dcp(folder: Path, states: Iterable[State]) -> Iterator[str]:
    # Imported here, because the import is slow and other formats do not need it.
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from holdfast.snapshot.disk import dcp

    held = list(states)
    if any(persist_format.shardings_of(described) for _, described, _ in held):
        dcp.write(folder / ALL_RANKS, held)
        yield ALL_RANKS
        return
    for rank, described, buffer in held:
        name = f"rank-{rank}"
        writer = FileSystemWriter(folder / name)
        save(_tree(described, buffer), storage_writer=writer, no_dist=True)
        yield name


FORMATS: dict[str, Callable[[Path, Iterable[State]], Iterator[str]]] = {
    "safetensors": _to_safetensors,
    "torch": _to_torch,
    "dcp": _to_dcp,
}


def _tree(described: Manifest, buffer: torch.Tensor) -> Tree:
    """Return the state tree in types that ``torch.load(weights_only=True)`` accepts."""
    tensors = flat_buffer.read(described.entries, buffer)
    tree: Tree = stock(flat_buffer.unflatten(described.skeleton, tensors))
    return tree


def stock(value: Any) -> Any:
    """Return a value in types that ``torch.load(weights_only=True)`` accepts."""
    if isinstance(value, Opaque):
        value = value.arguments[0] if len(value.arguments) == 1 else value.arguments
    if isinstance(value, LocalShard):
        return value.tensor
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, dict):
        return type(value)((key, stock(item)) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        items = [stock(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value
