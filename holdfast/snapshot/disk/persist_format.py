"""The files of a checkpoint: a safetensors file and a manifest for each rank, and one JSON file.

Every byte has a digest: those of tensors are in the manifest, those of the manifest and the
safetensors header in ``checkpoint.json``, which has its own. Reading gives the same manifest and
buffer as the SMP's memory, so that the same code verifies and loads both.
"""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from safetensors.torch import save_file

from holdfast import digest
from holdfast.digest.tensors import tensor_bytes
from holdfast.errors import SnapshotCorrupt
from holdfast.snapshot.layout import identity, manifest
from holdfast.snapshot.layout.dtensors import leaves
from holdfast.snapshot.layout.flat_buffer import as_tensor
from holdfast.snapshot.layout.manifest import Entry, Manifest, ShardRef, TensorRef

FORMAT = 2
INDEX_NAME = "checkpoint.json"
# The dtypes that safetensors knows since release 0.4; others are stored as their bytes.
_STORED_AS_THEY_ARE = frozenset(
    {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"}
    | {"bool", "float8_e4m3fn", "float8_e5m2"}
)
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 2**20
_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Part:
    """One rank's state in memory: its bytes, and the manifest that describes them."""

    rank: int
    buffer: torch.Tensor
    manifest: bytes
    digest: str


class Row(TypedDict):
    """The two files of one rank, as ``checkpoint.json`` describes them."""

    rank: int
    tensors: str
    bytes: int
    header_digest: str
    manifest: str
    manifest_digest: str
    aliases: dict[str, str]


class Index(TypedDict):
    """The content of ``checkpoint.json`` without its own digest.

    ``run`` is the identity of the run (``RunIdentity.encode``). Releases before it wrote none, and
    accept it.
    """

    format: int
    step: int
    world_size: int
    ranks: list[Row]
    run: NotRequired[Mapping[str, object]]


def names_of(described: Manifest) -> list[str]:
    """Return every entry's name in the safetensors file: its path, made unique by ``#2``, …."""
    seen: dict[str, int] = {}
    names = []
    for entry in described.entries:
        seen[entry.path] = seen.get(entry.path, 0) + 1
        count = seen[entry.path]
        names.append(entry.path if count == 1 else f"{entry.path}#{count}")
    return names


def aliases_of(described: Manifest) -> dict[str, str]:
    """Return every further path of a tied tensor, with the name under which it is stored."""
    names = names_of(described)
    found: dict[str, str] = {}
    stored: set[int] = set()
    for path, leaf in leaves(described.skeleton):
        if isinstance(leaf, TensorRef):
            if leaf.index in stored:
                found[".".join(path)] = names[leaf.index]
            stored.add(leaf.index)
    return found


def shardings_of(described: Manifest) -> dict[str, dict[str, object]]:
    """Return, by name, how the global tensor of every stored shard is divided."""
    names, found = names_of(described), {}
    for _, leaf in leaves(described.skeleton):
        if isinstance(leaf, ShardRef):
            found[names[leaf.index]] = dict(vars(leaf.sharding))
    return found


def write_rank(folder: Path, part: Part, first_rank: int) -> Row:
    """Write one rank's two files, durably; return their row of ``checkpoint.json``."""
    described = manifest.decode(part.manifest, part.digest, opaque=True)
    rank = first_rank + part.rank
    tensors = folder / f"rank-{rank}.safetensors"
    blob = folder / f"rank-{rank}.manifest"
    aliases = aliases_of(described)
    save_tensors(tensors, described, part.buffer, aliases)
    blob.write_bytes(part.manifest)
    for path in (tensors, blob):
        _make_durable(path)
    header = _header_bytes(tensors)
    row: Row = {
        "rank": rank,
        "tensors": tensors.name,
        "bytes": tensors.stat().st_size,
        "header_digest": digest.hexdigest(header),
        "manifest": blob.name,
        "manifest_digest": part.digest,
        "aliases": aliases,
    }
    # Reading the files detects damaged slot memory as well as a faulty disk.
    _verify(folder, row)
    return row


def save_tensors(
    path: Path, described: Manifest, buffer: torch.Tensor, aliases: dict[str, str]
) -> None:
    """Write the tensors of a buffer as one safetensors file."""
    pairs = zip(names_of(described), described.entries, strict=True)
    tensors = {name: _stored(entry, buffer) for name, entry in pairs}
    metadata = {"format": "pt", "aliases": json.dumps(aliases)}
    if divided := shardings_of(described):
        metadata["shardings"] = json.dumps(divided)
    try:
        save_file(tensors, path, metadata)
    except Exception as error:
        # safetensors wraps the system's error in a class of its own, without its number.
        raise OSError(f"cannot write {path}: {error}") from error


def _stored(entry: Entry, buffer: torch.Tensor) -> torch.Tensor:
    raw = buffer[entry.offset : entry.offset + entry.nbytes]
    return as_tensor(entry, raw) if entry.dtype in _STORED_AS_THEY_ARE else raw


def write_index(
    folder: Path,
    step: int,
    world_size: int,
    rows: list[Row],
    run: Mapping[str, object] | None = None,
) -> None:
    """Write ``checkpoint.json``, durably; ``run`` is the identity of the run, if it has one."""
    content: Index = {"format": FORMAT, "step": step, "world_size": world_size, "ranks": rows}
    if run is not None:
        content["run"] = run
    index = folder / INDEX_NAME
    index.write_text(_rendered(content))
    _make_durable(index)


def read_index(folder: Path) -> Index:
    """Return the content of ``checkpoint.json``, if it matches its own digest.

    Raises:
        SnapshotCorrupt: it does not match, or has another format.
        OSError: it cannot be read.
    """
    text = _content(folder / INDEX_NAME)
    try:
        stated = json.loads(text)
        del stated["digest"]
        content: Index = stated
        intact = _rendered(content).encode() == text and content["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SnapshotCorrupt(f"{folder / INDEX_NAME} cannot be read: {error!r}") from error
    if not intact:
        raise SnapshotCorrupt(
            f"{folder / INDEX_NAME} does not match its digest, or format {FORMAT}"
        )
    return content


def run_of(part: Part) -> Mapping[str, object] | None:
    """Return the identity of the run that took a rank's state; None if it carries none."""
    skeleton = manifest.decode(part.manifest, part.digest, opaque=True).skeleton
    found = skeleton.get(identity.KEY) if isinstance(skeleton, dict) else None
    return found if isinstance(found, dict) else None


def _opened(path: Path) -> BufferedReader:
    """Open a regular file to read; anything else could block the reader for ever.

    Raises:
        SnapshotCorrupt: it is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SnapshotCorrupt(f"{path} is not a regular file")
    return os.fdopen(fd, "rb")


def _content(path: Path) -> bytes:
    with _opened(path) as file:
        return file.read()


def _rendered(content: Index) -> str:
    checksum = digest.hexdigest(json.dumps(content, sort_keys=True).encode())
    return json.dumps({**content, "digest": checksum}, indent=1) + "\n"


def row_of(index: Index, rank: int) -> Row | None:
    """Return the row of a rank of the run; None if its state is not in this checkpoint."""
    return next((row for row in index["ranks"] if row["rank"] == rank), None)


def read_rank(folder: Path, row: Row) -> tuple[Manifest, torch.Tensor]:
    """Return one rank's manifest, and a buffer with its tensors, which are not verified yet."""
    described, path = _placed(folder, row, opaque=False), folder / row["tensors"]
    buffer = torch.empty(row["bytes"], dtype=torch.uint8)
    with _opened(path) as file:
        if (count := file.readinto(tensor_bytes(buffer))) < row["bytes"]:
            raise SnapshotCorrupt(f"{path} ends at {count} of {row['bytes']} bytes")
    return described, buffer


def map_rank(folder: Path, row: Row) -> tuple[Manifest, torch.Tensor]:
    """Return the same as ``read_rank``, mapped and not read, with unknown types passed on."""
    described, path = _placed(folder, row, opaque=True), folder / row["tensors"]
    buffer = torch.from_file(str(path), shared=False, size=row["bytes"], dtype=torch.uint8)
    return described, buffer


def _verify(folder: Path, row: Row) -> None:
    """Check one rank's files in pieces, without holding all of them in memory."""
    described, path = _placed(folder, row, opaque=True), folder / row["tensors"]
    with _opened(path) as file:
        for entry in described.entries:
            file.seek(entry.offset)
            hasher, left = digest.Hasher(), entry.nbytes
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                hasher.update(chunk)
                left -= len(chunk)
            if hasher.digest().hex() != entry.digest:
                raise SnapshotCorrupt(f"{entry.path} in {path} does not match its digest")


def damage_of(folder: Path) -> str:
    """Describe the damage to a checkpoint, of all its ranks; empty if every digest matches."""
    try:
        for row in read_index(folder)["ranks"]:
            _verify(folder, row)
    except SnapshotCorrupt as error:
        return str(error)
    return ""


def _placed(folder: Path, row: Row, opaque: bool) -> Manifest:
    """Return a rank's manifest with the offsets of its entries in the safetensors file."""
    blob = _content(folder / row["manifest"])
    described = manifest.decode(blob, row["manifest_digest"], opaque=opaque)
    path = folder / row["tensors"]
    raw = _header_bytes(path)
    if digest.hexdigest(raw) != row["header_digest"]:
        raise SnapshotCorrupt(f"the header of {path} does not match its digest")
    if path.stat().st_size != row["bytes"]:
        raise SnapshotCorrupt(f"{path} has {path.stat().st_size} bytes, not {row['bytes']}")
    header = json.loads(raw[_LENGTH_BYTES:])
    begins = [len(raw) + header[name]["data_offsets"][0] for name in names_of(described)]
    pairs = zip(described.entries, begins, strict=True)
    return Manifest(described.skeleton, tuple(e._replace(offset=begin) for e, begin in pairs))


def _header_bytes(path: Path) -> bytes:
    with _opened(path) as file:
        length = file.read(_LENGTH_BYTES)
        size = int.from_bytes(length, "little")
        return length + file.read(min(size, _MAX_HEADER_BYTES))


def _make_durable(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        # Leave the page cache to the training.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
