"""Checkpoints in an object store: written to a local folder first, then uploaded.

The object ``step-<n>.json`` is the ``checkpoint.json`` of a step. It is written last, so that a
step exists complete or not at all; its name changes as the folder's does when the step is damaged,
void or set aside. The other files are under ``data/step-<n>-<digest of that object>/``: what an
interrupted upload has left is never read, and is completed or removed later.
"""

import math
import re
import secrets
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast import digest
from holdfast.errors import ConfigError, SnapshotCorrupt
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.disk.object_store import Location, ObjectStore, is_url
from holdfast.snapshot.disk.persist_format import INDEX_NAME, Part
from holdfast.snapshot.layout import identity
from holdfast.snapshot.node.locks import locked
from holdfast.snapshot.protocol.checkpoint_schedule import ALONE, Needed

_HEAD = re.compile(r"((?:[a-z].*-)?)step-(\d+)\.json")
_DATA = re.compile(r"data/step-(\d+)-[^/]+/.+")
_VOID, _DAMAGED = "rolled-back-", "damaged-"


def checkpoints_at(place: str | Path) -> Checkpoints:
    """Return the checkpoints in a folder, or in the object store that a URL names."""
    if is_url(place):
        return RemoteCheckpoints(Location.parse(str(place)))
    return Checkpoints(Path(place))


class RemoteCheckpoints(Checkpoints):
    """The checkpoints at an address of an object store, and those that wait for their upload.

    While the store cannot be reached, checkpoints stay in the local folder; with a later one they
    are uploaded. One node writes to an address at a time. Without a staging folder a temporary one
    is used, and every step is downloaded.
    """

    def __init__(self, location: Location) -> None:
        staging = location.staging
        if not staging:
            staging = tempfile.mkdtemp(prefix="holdfast-")
            weakref.finalize(self, shutil.rmtree, staging, ignore_errors=True)
        super().__init__(Path(staging))
        self.address, self._keep_every = location.address, location.keep_every
        self._store = ObjectStore(location)

    def steps(self) -> list[int]:
        """Return the steps in the local folder, and in the store if it can be reached."""
        try:
            return sorted({*self._staged(), *self._heads()})
        except OSError as error:
            text = f"only the checkpoints in {self.folder} are considered: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return self._staged()

    def folders(self) -> list[str]:
        """Return the names of the folders at this address."""
        return sorted({name.split("/")[0] for name in self._store.sizes() if "/" in name})

    def _heads(self, prefix: str = "", objects: Sequence[str] | None = None) -> dict[int, str]:
        """Return the names of the objects ``<prefix>step-<n>.json`` by step."""
        found = map(_HEAD.fullmatch, self._store.sizes() if objects is None else objects)
        return {int(m[2]): m[0] for m in found if m and prefix in ("*", m[1])}

    def write(
        self, step: int, parts: Sequence[Part], *, keep: int, needed: Needed = ALONE, **more: Any
    ) -> int:
        """Write a step to the local folder, then upload it and those whose upload failed earlier.

        An OSError of the store leaves the step in the local folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        nbytes = super().write(step, parts, keep=keep, needed=needed, **more)
        try:
            newest = self._check_owner(self._make_void(), step, parts[0])
            for missing in self._staged():
                if missing > newest:
                    self._upload(missing)
            self._clean(keep, needed)
        except OSError as error:
            raise OSError(f"{error}; step {step} is only in {self.folder}") from error
        return nbytes

    def _check_owner(self, heads: dict[int, str], step: int, part: Part) -> int:
        """Return the newest step in the store, if it is of this run and not newer than ``step``."""
        newest, run = max(heads, default=-1), persist_format.run_of(part)
        head, whose = self._store.get(heads[newest]) if heads else b"", ""
        if newest >= step and head != self._index(step):
            whose = "another run, or of a later part of this one"
        elif heads and run is not None:
            with suppress(SnapshotCorrupt):
                told = persist_format.parse_index(head, self.address).get("run")
                whose = identity.parse(run).differs(told)
        if whose:
            raise ConfigError(
                f"{self.address} holds step {newest} of {whose}: nothing is uploaded; give each "
                "run its own persist_dir, or restore() to go on from there"
            )
        return newest

    def _index(self, step: int) -> bytes:
        return (self.path(step) / INDEX_NAME).read_bytes()

    def _upload(self, step: int) -> None:
        index, head = self._index(step), f"step-{step}.json"
        there = self._store.sizes(data := _data_of(step, index))
        for path in sorted(self.path(step).iterdir()):
            name = f"{data}/{path.name}"
            if path.name != INDEX_NAME and there.get(name) != path.stat().st_size:
                self._store.put(name, path)
        self._store.put(head, index)
        if not self.path(step).exists():  # the run went back meanwhile
            self._store.rename(head, _VOID + head)

    def _clean(self, keep: int, needed: Needed) -> None:
        """Remove steps that nobody needs, and what interrupted uploads have left."""
        objects = list(self._store.sizes())
        heads, every = self._heads("", objects), self._keep_every
        gone = [step for step in needed.removable(sorted(heads), keep) if not every or step % every]
        void = {s: name for s, name in self._heads(_VOID, objects).items() if s <= max(heads)}
        kept = self._heads("*", objects).keys() - set(gone) - (void.keys() - heads.keys())
        data = ((name, int(m[1])) for name in objects if (m := _DATA.fullmatch(name)))
        names = [heads[step] for step in gone] + list(void.values())
        names += [name for name, step in data if step not in kept and step <= max(heads)]
        self._store.delete(names)

    def fetch(self, step: int) -> Path:
        """Download a step into the local folder, unless it is there; return its folder."""
        goal, draft = self.path(step), self.folder / f".fetching-step-{step}"
        self.folder.mkdir(parents=True, exist_ok=True)
        # The ranks of a node wait for the one that downloads.
        with locked(self.folder / ".fetch-lock", TimeoutError(), limit_s=math.inf):
            if goal.exists():
                return goal
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            index = self._store.get(f"step-{step}.json")
            for name, nbytes in self._store.sizes(_data_of(step, index)).items():
                self._store.get_file(name, nbytes, draft / Path(name).name)
            (draft / INDEX_NAME).write_bytes(index)
            try:
                return draft.rename(goal)
            except OSError:
                if goal.exists():  # a scrub has put it there
                    return goal
                raise

    def quarantine(self, step: int) -> bool:
        """Set a damaged step aside; return true if a sound copy from the store took its place."""
        super().quarantine(step)
        with suppress(OSError):
            if not persist_format.damage_of(self.fetch(step)):
                return True
            super().quarantine(step)
        with suppress(OSError):
            self._store.rename(f"step-{step}.json", f"{_DAMAGED}step-{step}.json")
        return False

    def go_back(self, step: int) -> None:
        """Make newer steps void; in the store with the next upload if it cannot be reached now."""
        with suppress(OSError):
            for newer in self._staged():
                if newer > step:
                    (self.folder / f".void-{newer}").touch()
            super().go_back(step)
            self._make_void(step)

    def _make_void(self, above: float = math.inf) -> dict[int, str]:
        """Rename the steps in the store that were left, or that are newer than ``above``."""
        heads, marks = self._heads(), {int(p.name[6:]): p for p in self.folder.glob(".void-*")}
        for step in [step for step in heads if step > above or step in marks]:
            self._store.rename(heads[step], _VOID + heads.pop(step))
        for mark in marks.values():
            mark.unlink(missing_ok=True)
        return heads

    def set_aside(self) -> None:
        """Rename all checkpoints, as in a folder, there and in the store."""
        super().set_aside()
        mark = f"set-aside-{secrets.token_hex(3)}-"
        try:
            for name in self._heads().values():
                self._store.rename(name, mark + name)
        except OSError as error:
            text = f"cannot set checkpoints aside: {error}; give another persist_dir"
            raise ConfigError(text) from error

    def unloadable(self) -> str:
        """Return what checkpoints are or were at the address; empty if none was ever damaged."""
        try:
            objects = list(self._store.sizes())
        except OSError as error:
            return str(error)
        found = [*self._heads("", objects).values(), *self._heads(_DAMAGED, objects).values()]
        return ", ".join(filter(None, [super().unloadable(), *found]))


def _data_of(step: int, index: bytes) -> str:
    return f"data/step-{step}-{digest.hexdigest(index)[:16]}"
