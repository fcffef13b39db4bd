"""The files of a checkpoint: a safetensors file and a manifest for each rank, and one JSON file.

Tensors that a rank has in common with the first one of its node are stored once, in its file, if
they are most of the state. Every byte has a digest: those of tensors are in the manifest, those of
the manifest and the safetensors header in ``checkpoint.json``, which has its own. Reading gives the
same manifest and buffer as the SMP's memory, so that the same code verifies and loads both.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch
from safetensors.torch import save_file

from holdfast import digest
from holdfast.digest.tensors import tensor_bytes
from holdfast.errors import SnapshotCorrupt
from holdfast.snapshot.layout import identity, manifest
from holdfast.snapshot.layout.dtensors import leaves
from holdfast.snapshot.layout.flat_buffer import aligned, as_tensor
from holdfast.snapshot.layout.manifest import Entry, Manifest, ShardRef, TensorRef

FORMAT = 2
DIVIDED_FORMAT = 3  # some rank's tensors are in another's file, which older releases do not know
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


class Piece(NamedTuple):
    """A range of bytes in a file of a checkpoint that has a digest of its own."""

    file: str
    start: int
    nbytes: int
    digest: str
    what: str = ""

    def chunks(self, folder: Path) -> Iterator[bytes]:
        """Yield the bytes as they are now; they end early if the file does."""
        with _opened(folder / self.file) as file:
            # Read from the disk, and leave the page cache to the training.
            os.posix_fadvise(file.fileno(), self.start, self.nbytes, os.POSIX_FADV_DONTNEED)
            file.seek(self.start)
            left = self.nbytes
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                left -= len(chunk)
                yield chunk
            os.posix_fadvise(file.fileno(), self.start, self.nbytes, os.POSIX_FADV_DONTNEED)

    def matches(self, chunks: Iterable[bytes]) -> bool:
        """Return true if these are the right bytes."""
        return digest_of(chunks) == self.digest


def digest_of(chunks: Iterable[bytes]) -> str:
    """Compute the digest of bytes that come in chunks."""
    hasher = digest.Hasher()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.digest().hex()


class Stored(TypedDict):
    """A safetensors file."""

    tensors: str
    bytes: int
    header_digest: str


class Row(Stored):
    """The two files of one rank; ``base`` has the tensors that its own file lacks, if it does."""

    rank: int
    base: NotRequired[Stored]
    manifest: str
    manifest_digest: str
    aliases: dict[str, str]


class Index(TypedDict):
    """The content of ``checkpoint.json`` without its own digest.

    ``run`` is the identity of the run (``RunIdentity.encode``); early releases wrote none.
    """

    format: int
    step: int
    world_size: int
    ranks: list[Row]
    run: NotRequired[Mapping[str, object]]


def names_of(described: Manifest) -> list[str]:
    """Return every entry's name in the safetensors file: its path, made unique by ``#2``, …."""
    seen, names = Counter[str](), []
    for entry in described.entries:
        seen[entry.path] += 1
        number = f"#{seen[entry.path]}" if seen[entry.path] > 1 else ""
        names.append(entry.path + number)
    return names


def aliases_of(described: Manifest) -> dict[str, str]:
    """Return every further path of a tied tensor, with the name under which it is stored."""
    names, found, stored = names_of(described), dict[str, str](), set[int]()
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


def write_ranks(folder: Path, parts: Sequence[Part], first_rank: int) -> list[Row]:
    """Write the files of all ranks, durably; return their rows of ``checkpoint.json``."""
    rows, first = list[Row](), dict[str, Entry]()
    for part in parts:
        described = manifest.decode(part.manifest, part.digest, opaque=True)
        entries = dict(zip(names_of(described), described.entries, strict=True))
        shared = {n for n, e in entries.items() if n in first and _kind(e) == _kind(first[n])}
        total = sum(entry.nbytes for entry in described.entries)
        if 2 * sum(entries[name].nbytes for name in shared) <= total:
            shared = set()
        rank, base = first_rank + part.rank, rows[0] if shared else None
        rows.append(_write_rank(folder, part, described, rank, shared, base))
        first = first or entries
    return rows


def _kind(entry: Entry) -> tuple[object, ...]:
    return entry.dtype, entry.shape, entry.digest


def _write_rank(
    folder: Path, part: Part, described: Manifest, rank: int, shared: Set[str], base: Row | None
) -> Row:
    tensors = folder / f"rank-{rank}.safetensors"
    blob = folder / f"rank-{rank}.manifest"
    aliases = aliases_of(described)
    save_tensors(tensors, described, part.buffer, aliases, shared)
    blob.write_bytes(part.manifest)
    for path in (tensors, blob):
        make_durable(path)
    row: Row = {
        "rank": rank,
        "tensors": tensors.name,
        "bytes": tensors.stat().st_size,
        "header_digest": digest.hexdigest(_header_bytes(tensors)),
        "manifest": blob.name,
        "manifest_digest": part.digest,
        "aliases": aliases,
    }
    if base is not None:
        held, checksum = base["tensors"], base["header_digest"]
        row["base"] = Stored(tensors=held, bytes=base["bytes"], header_digest=checksum)
    # Reading the files detects damaged slot memory as well as a faulty disk.
    _verify(folder, row, own=True)
    return row


def save_tensors(
    path: Path,
    described: Manifest,
    buffer: torch.Tensor,
    aliases: dict[str, str],
    left_out: Set[str] = frozenset(),
) -> None:
    """Write the tensors of a buffer, but for those ``left_out``, as one safetensors file."""
    pairs = zip(names_of(described), described.entries, strict=True)
    tensors = {name: _stored(entry, buffer) for name, entry in pairs if name not in left_out}
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
    number = DIVIDED_FORMAT if any("base" in row for row in rows) else FORMAT
    content: Index = {"format": number, "step": step, "world_size": world_size, "ranks": rows}
    if run is not None:
        content["run"] = run
    index = folder / INDEX_NAME
    index.write_text(rendered({**content}))
    make_durable(index)


def read_index(folder: Path) -> Index:
    """Return the content of ``checkpoint.json``; raise SnapshotCorrupt if its digest differs."""
    return parse_index(_content(folder / INDEX_NAME), folder / INDEX_NAME)


def parse_index(text: bytes, where: object) -> Index:
    """Return the content of a ``checkpoint.json`` that was read, as ``read_index``."""
    content: Index = parsed(text, where)
    if content.get("format") not in (FORMAT, DIVIDED_FORMAT):
        raise SnapshotCorrupt(f"{where} does not match format {FORMAT}")
    return content


def parsed(text: bytes, where: object) -> Any:
    """Return the content of JSON that was ``rendered``; raise SnapshotCorrupt if it changed."""
    try:
        content = json.loads(text)
        del content["digest"]
        intact = rendered(content).encode() == text
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SnapshotCorrupt(f"{where} cannot be read: {error!r}") from error
    if not intact:
        raise SnapshotCorrupt(f"{where} does not match its digest")
    return content


def run_of(part: Part) -> Mapping[str, object] | None:
    """Return the identity of the run that took a rank's state; None if it carries none."""
    skeleton = manifest.decode(part.manifest, part.digest, opaque=True).skeleton
    found = skeleton.get(identity.KEY) if isinstance(skeleton, dict) else None
    return found if isinstance(found, dict) else None


def _opened(path: Path) -> BufferedReader:
    """Open a regular file to read; anything else could block the reader for ever."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SnapshotCorrupt(f"{path} is not a regular file")
    return os.fdopen(fd, "rb")


def _content(path: Path) -> bytes:
    with _opened(path) as file:
        return file.read()


def rendered(content: Mapping[str, object]) -> str:
    """Return JSON with a digest of its own."""
    checksum = digest.hexdigest(json.dumps(content, sort_keys=True).encode())
    return json.dumps({**content, "digest": checksum}, indent=1) + "\n"


def described_of(folder: Path, row: Row, *, opaque: bool = True) -> Manifest:
    """Return one rank's manifest as it is, by default whatever types of values it has."""
    blob = _content(folder / row["manifest"])
    return manifest.decode(blob, row["manifest_digest"], opaque=opaque)


def read_rank(folder: Path, row: Row) -> tuple[Manifest, torch.Tensor]:
    """Return one rank's manifest, and a buffer with its tensors, which are not verified yet."""
    described, files = _placed(folder, row, opaque=False), _files(row)
    buffer = torch.empty(sum(_span(stored) for stored in files), dtype=torch.uint8)
    start = 0
    for stored in files:
        path = folder / stored["tensors"]
        with _opened(path) as file:
            into = buffer[start : start + stored["bytes"]]
            if (count := file.readinto(tensor_bytes(into))) < stored["bytes"]:
                raise SnapshotCorrupt(f"{path} ends at {count} of {stored['bytes']} bytes")
        start += _span(stored)
    return described, buffer


def map_rank(folder: Path, row: Row) -> tuple[Manifest, torch.Tensor]:
    """Return the same as ``read_rank``, with unknown types passed on; mapped if it is one file."""
    described = _placed(folder, row, opaque=True)
    if "base" in row:
        return described, read_rank(folder, row)[1]
    path = folder / row["tensors"]
    buffer = torch.from_file(str(path), shared=False, size=row["bytes"], dtype=torch.uint8)
    return described, buffer


def _files(row: Row) -> list[Stored]:
    """Return the files with a rank's tensors, in the order in which a buffer holds them."""
    return [row, row["base"]] if "base" in row else [row]


def _span(stored: Stored) -> int:
    return aligned(stored["bytes"])


def _verify(folder: Path, row: Row, *, own: bool = False) -> None:
    """Check one rank's files in pieces, without those of other ranks if ``own``."""
    for piece in _tensors(folder, row, own=own):
        if not piece.matches(piece.chunks(folder)):
            where = folder / piece.file
            raise SnapshotCorrupt(f"{piece.what} in {where} does not match its digest")


def _tensors(folder: Path, row: Row, *, own: bool) -> Iterator[Piece]:
    described, start = _placed(folder, row, opaque=True), 0
    for stored in _files(row)[: 1 if own else None]:
        stop = start + _span(stored)
        for entry in (e for e in described.entries if start <= e.offset < stop):
            place = entry.offset - start, entry.nbytes
            yield Piece(stored["tensors"], *place, entry.digest, entry.path)
        start = stop


def pieces(folder: Path) -> list[Piece]:
    """Return the pieces of a checkpoint, which are all bytes of its files, in their order.

    What describes them must be intact: raises OSError or SnapshotCorrupt.
    """
    found = [_whole(folder, INDEX_NAME)]
    for row in read_index(folder)["ranks"]:
        size = len(_header_bytes(folder / row["tensors"]))
        header = Piece(row["tensors"], 0, size, row["header_digest"], "the header")
        tensors = sorted(_tensors(folder, row, own=True), key=lambda each: each.start)
        found += [_whole(folder, row["manifest"]), header, *tensors]
    return found


def _whole(folder: Path, name: str) -> Piece:
    content = _content(folder / name)
    return Piece(name, 0, len(content), digest.hexdigest(content))


def damage_of(folder: Path) -> str:
    """Describe the damage to a checkpoint, of all its ranks; empty if every digest matches."""
    try:
        for row in read_index(folder)["ranks"]:
            _verify(folder, row)
    except SnapshotCorrupt as error:
        return str(error)
    return ""


def _placed(folder: Path, row: Row, opaque: bool) -> Manifest:
    """Return a rank's manifest with the offsets of its entries in ``read_rank``'s buffer."""
    described = described_of(folder, row, opaque=opaque)
    begins, start = dict[str, int](), 0
    for stored in _files(row):
        for name, begin in _begins(folder / stored["tensors"], stored).items():
            begins.setdefault(name, start + begin)
        start += _span(stored)
    try:
        pairs = zip(described.entries, map(begins.__getitem__, names_of(described)), strict=True)
        return Manifest(described.skeleton, tuple(e._replace(offset=begin) for e, begin in pairs))
    except KeyError as error:
        raise SnapshotCorrupt(f"{folder / row['tensors']} lacks {error}") from error


def _begins(path: Path, stored: Stored) -> dict[str, int]:
    """Return where each tensor begins in a safetensors file."""
    raw = _header_bytes(path)
    if digest.hexdigest(raw) != stored["header_digest"]:
        raise SnapshotCorrupt(f"the header of {path} does not match its digest")
    if path.stat().st_size != stored["bytes"]:
        raise SnapshotCorrupt(f"{path} has {path.stat().st_size} bytes, not {stored['bytes']}")
    header = json.loads(raw[_LENGTH_BYTES:])
    held = ((name, place) for name, place in header.items() if name != "__metadata__")
    return {name: len(raw) + place["data_offsets"][0] for name, place in held}


def _header_bytes(path: Path) -> bytes:
    with _opened(path) as file:
        length = file.read(_LENGTH_BYTES)
        size = int.from_bytes(length, "little")
        return length + file.read(min(size, _MAX_HEADER_BYTES))


def make_durable(path: Path) -> None:
    """Wait until a file is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        # Leave the page cache to the training.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
