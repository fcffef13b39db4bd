"""Scrubbing: checkpoints at rest are read again, and what is damaged or missing is rebuilt.

Once all nodes of a run hold a step intact, two files are added to each one's folder, in groups of
up to eight: ``parity.json`` lists the pieces of the group's files (``persist_format.Piece``),
and ``parity`` is the XOR of what other nodes hold (``parity.stripes``), without pieces that two of
them have alike. Wrong bytes are copied from a piece with the same digest, of another node or of
another copy of the checkpoints, or decoded, and put in place only if they match their digest.
"""

import os
import shutil
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import accumulate, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from holdfast.errors import ConfigError, SnapshotCorrupt
from holdfast.planner.parity_groups import GROUP_NODES
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.disk.export import checkpoints_of
from holdfast.snapshot.disk.missing_ranks import Run, excuse, held, missing, was_removed
from holdfast.snapshot.disk.persist_format import INDEX_NAME, Piece
from holdfast.snapshot.layout import manifest
from holdfast.snapshot.node.locks import locked
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.parity.isal import Bytes
from holdfast.snapshot.parity.stripes import Fragment, Striping

NOTE_NAME, PARITY_NAME = "parity.json", "parity"
REPAIRED, REPAIRABLE, BEYOND = "repaired", "repairable", "beyond repair"
REMOVED, INCOMPLETE, UNPROTECTED = "removed meanwhile", "incomplete", "unprotected"
_CHUNK_BYTES = 4 * 2**20


class Finding(NamedTuple):
    """Something wrong with a step, and what became of it.

    ``verdict`` is ``repaired``, from the ``source``; ``repairable`` if nothing is to be written;
    ``beyond repair``; ``removed meanwhile`` by the run; ``incomplete``: some node does not have the
    step yet, or not any more; or ``unprotected``: here is one node only, and so no parity.
    """

    where: str
    step: int
    problem: str
    verdict: str
    source: str = ""


class _Member:
    """One node's folder of a step; ``pieces`` are what it must hold, if that is known."""

    def __init__(self, at: Checkpoints, step: int) -> None:
        self.at, self.step, self.folder, self.inode = at, step, at.path(step), at.inode(step)
        self.name, self.pieces, self.why = Path(at.address).name, list[Piece](), ""

    def plan(self, folder: Path) -> bool:
        try:
            self.pieces = persist_format.pieces(folder)
        except (OSError, SnapshotCorrupt) as error:
            self.why = self.why or str(error)
        return bool(self.pieces)

    def finding(self, name: str, problem: str, verdict: str, source: str = "") -> Finding:
        where = f"{self.at.address}/step-{self.step}/{name}".rstrip("/")
        return Finding(where, self.step, problem, verdict, source)


_Held = defaultdict[str, list[tuple[_Member, Piece]]]  # by the digests of pieces


class _Stripes:
    """The parity of a step over the nodes of a group, of pieces that no two of them have alike."""

    def __init__(self, members: Sequence[_Member]) -> None:
        held = Counter(found for m in members for found in {each.digest for each in m.pieces})
        self._own = [[each for each in m.pieces if held[each.digest] == 1] for m in members]
        self._starts = [[*accumulate((p.nbytes for p in own), initial=0)] for own in self._own]
        self._striping = Striping.of_shards([starts[-1] for starts in self._starts])
        pairs = zip(self._own, self._starts, strict=True)
        self._places = [dict(zip(own, starts, strict=False)) for own, starts in pairs]
        self._folders = [member.folder for member in members]

    def parity(self, node: int) -> Iterator[bytes]:
        """Yield the parity that a node keeps: of the stripe with its own number."""
        for first in range(0, length := self.length(node), _CHUNK_BYTES):
            yield bytes(self._others(node, node, first, min(first + _CHUNK_BYTES, length)))

    def length(self, node: int) -> int:
        """Return the length of the parity that a node keeps."""
        return self._striping.fragment(node, node).nbytes

    def decoded(self, node: int, piece: Piece) -> Iterator[bytes]:
        """Yield a piece of a node as the bytes and parities of the others give it."""
        if piece in self._places[node]:
            at, left = self._places[node][piece], piece.nbytes
            while left:
                block, first = divmod(at, self._striping.block_nbytes)
                count = min(left, self._striping.block_nbytes - first, _CHUNK_BYTES)
                stripe = (node + 1 + block) % len(self._own)
                yield bytes(self._others(stripe, node, first, first + count))
                at, left = at + count, left - count

    def _others(self, stripe: int, but: int, first: int, last: int) -> Bytes:
        """Return the XOR of a stripe's columns on all nodes but one."""
        total = np.zeros(last - first, np.uint8)
        for fragment in self._striping.stripe(stripe):
            at = 0
            for chunk in () if fragment.node == but else self._column(fragment, first, last):
                erasure_code.accumulate(total[at:], np.frombuffer(chunk, np.uint8), 1)
                at += len(chunk)
        return total

    def _column(self, fragment: Fragment, first: int, last: int) -> Iterator[bytes]:
        """Yield a part of what a node has of a stripe; after its end come zeros."""
        node, start, last = fragment.node, fragment.offset + first, min(last, fragment.nbytes)
        if node == fragment.stripe:
            parity = Piece(PARITY_NAME, first, max(0, last - first), "")
            yield from parity.chunks(self._folders[node])
            return
        own, starts = self._own[node], self._starts[node]
        for number in range(max(0, bisect_right(starts, start) - 1), len(own)):
            low = max(start, starts[number])
            nbytes = min(fragment.offset + last, starts[number + 1]) - low
            if nbytes < 0:
                return
            place = own[number].start + low - starts[number]
            told = own[number]._replace(start=place, nbytes=nbytes)
            for chunk in told.chunks(self._folders[node]):
                nbytes -= len(chunk)
                yield chunk
            if nbytes:
                raise SnapshotCorrupt(f"{self._folders[node] / told.file} is shorter than it was")


class Scrub:
    """Verifies all checkpoints in a folder, of all nodes, and repairs them.

    Args:
        place: The folder of the checkpoints, or of the folders ``node-<n>``.
        now_s: The Unix time, which tells a step that a node may still write from one that is lost.
        copies: Folders or object stores with copies of the same checkpoints.
        repair: False to write nothing, and only say what could be repaired.
        bytes_s: The most bytes that are read in a second; 0 for no limit.
        progress: Called with the number of bytes read so far.

    Guarantees: a file is put in place only if its every byte matched a digest. A step that the run
    removes meanwhile, or goes back behind, does not come back.

    Raises:
        ConfigError: There is no checkpoint; from ``run``: another scrub is at work there.
    """

    def __init__(
        self,
        place: Path,
        *,
        now_s: float,
        copies: Sequence[str | Path] = (),
        repair: bool = True,
        bytes_s: int = 0,
        progress: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self._root, self._repair, self._now_s = place, repair, now_s
        self._bytes_s, self._progress = bytes_s, progress
        self._at = {Path(each.address).name: each for each in checkpoints_of(place)}
        self._others = [each for copy in copies for each in checkpoints_of(copy)]
        self._held, self._copies, self._asked = _Held(list), list[_Member](), False
        self._begun_s, self.nbytes, self._lacking = time.monotonic(), 0, list[int]()
        self.steps = sorted({step for at in self._at.values() for step in at.steps()})
        if not self.steps:
            raise ConfigError(f"no checkpoint is in {place}: give --persist-dir")

    def total_bytes(self) -> int:
        """Return the size of all checkpoints in bytes."""
        folders = (at.path(step) for step in self.steps for at in self._at.values())
        paths = (path for folder in folders for path in folder.glob("*"))
        with suppress(OSError):  # the run removes some
            return 1 + sum(path.stat().st_size for path in paths)
        return 1

    def run(self) -> Iterator[Finding]:
        """Scrub all steps, the newest first, and yield what is wrong."""
        busy = ConfigError(f"another scrub is at work in {self._root}: wait for it")
        with locked(self._root / ".scrub-lock", busy, 0.0) if self._repair else nullcontext():
            try:
                for at in self._at.values() if self._repair else ():
                    for draft in at.folder.glob(".scrub-*"):  # what a killed scrub has left
                        shutil.rmtree(draft, ignore_errors=True)
                for step in reversed(self.steps):
                    yield from self._step(step)
                for step in self._lacking:  # now that all nodes are known, and the run has gone on
                    yield from self._missing(step)
            except OSError as error:
                raise ConfigError(f"cannot write into {self._root}: {error}") from error

    def _step(self, step: int) -> Iterator[Finding]:
        left = {name: _Member(at, step) for name, at in self._at.items() if at.inode(step)}
        there, groups, wrong = {*left}, list[tuple[list[_Member], str]](), list[str]()
        self._held, self._copies, self._asked = _Held(list), [], False
        for text, noted in _notes(left.values()).items():
            if others := [n for n in noted if n in there and not _is_of(noted[n], left.get(n))]:
                wrong += others
                problem = f"{', '.join(others)} has another step than its parity is of"
                yield Finding(str(self._root), step, problem, BEYOND)
                continue
            self._at |= {n: Checkpoints(self._root / n) for n in noted if n not in self._at}
            group = [left.pop(n) if n in left else _Member(self._at[n], step) for n in noted]
            for member in group:
                member.pieces = noted[member.name]
            groups.append((group, text))
        for member in left.values():
            if not member.plan(member.folder):  # a copy has a file of its own in common with it
                wrong.append(member.name)
                for copy in self._copied(step):
                    if any(self._is_intact(member, p) for p in copy.pieces if not p.what):
                        member.plan(copy.folder)
        runs, sound = defaultdict[Run | None, list[_Member]](list), []
        for name in sorted(left, key=lambda name: (len(name), name)):
            told = held(left[name].at, step)
            runs[told and told.run].append(left[name])
        for members in runs.values():
            count = -(-len(members) // GROUP_NODES)
            groups += [(members[n::count], "") for n in range(count)]
        for member in (member for group, _ in groups for member in group):
            self._hold(member)
        for group, _ in groups:
            sound.append((yield from self._group(group)))
        gaps = missing(self._at.values(), step)
        self._lacking += [step] if gaps and all(sound) else []
        for (group, text), intact in zip(groups, sound, strict=True):
            complete = not wrong and not any(group[0] in runs[run] for run in gaps)
            if intact and len(group) > 1 and (text or complete):
                yield from self._parity(group, text)

    def _copied(self, step: int) -> list[_Member]:
        """Return the copies of a step; those in an object store are downloaded."""
        others, self._asked = () if self._asked else self._others, True
        for at in others:
            with suppress(OSError):
                if step in at.steps() and (folder := at.fetch(step)):
                    self._copies.append(_Member(at, step))
                    self._copies[-1].plan(folder)
                    self._hold(self._copies[-1])
        return self._copies

    def _hold(self, member: _Member) -> None:
        for piece in member.pieces:
            self._held[piece.digest].append((member, piece))

    def _missing(self, step: int) -> Iterator[Finding]:
        """Say of which ranks no folder has the states of a step, and whether for good."""
        for (run, _), ranks in missing(self._at.values(), step).items():
            verdict, why = INCOMPLETE, excuse(self._at.values(), step, run, self._now_s)
            if len(self._at) == 1:
                verdict, why = UNPROTECTED, "this is the folder of one node only"
            elif not why:
                verdict, why = (
                    BEYOND,
                    "no restart can use it; put back what is missing or delete it",
                )
            said = f"the states of ranks {sorted(ranks)} are in no folder: {why}"
            yield Finding(str(self._root), step, said, verdict)

    def _group(self, group: list[_Member]) -> Generator[Finding, None, bool]:
        """Verify the folders of a group and repair them; return whether all are intact then."""
        stripes, peers = _Stripes(group) if len(group) > 1 else None, [each.at for each in group]
        waiting, intact = list[tuple[_Member, str, list[Piece], str]](), True
        for member in group:
            if not member.pieces:
                intact = False
                yield member.finding("", member.why, _hopeless(group))
            elif not member.inode and was_removed(member.at, member.step, peers, self._now_s):
                intact = False
                yield member.finding("", "its node has newer steps only", INCOMPLETE)
            elif not member.inode:
                waiting.append((member, "", member.pieces, "it is missing"))
            for name, own in _files(member.pieces) if member.inode else ():
                if problem := self._damage(member, name, own):
                    waiting.append((member, name, own, problem))
        before = len(waiting) + 1
        while len(waiting) < before:  # what is repaired may help to repair another
            again, before, waiting = waiting, len(waiting), []
            for member, name, own, problem in again:
                verdict, source = self._mended(member, own, group, stripes)
                if verdict == BEYOND:
                    waiting.append((member, name, own, problem))
                else:
                    intact = intact and verdict == REPAIRED
                    yield member.finding(name, problem, verdict, source)
        for member, name, _, problem in waiting:
            yield member.finding(name, problem, _hopeless(group))
        return intact and not waiting

    def _damage(self, member: _Member, name: str, pieces: list[Piece]) -> str:
        wrong = [piece for piece in pieces if not self._is_intact(member, piece)]
        with suppress(FileNotFoundError):
            size, wanted = (member.folder / name).stat().st_size, sum(p.nbytes for p in pieces)
            if size != wanted:
                return f"it has {size} bytes, not {wanted}"
            return f"{wrong[0].what or 'all'} of it does not match its digest" if wrong else ""
        return "it is missing"

    def _is_intact(self, member: _Member, piece: Piece) -> bool:
        return piece.matches(self._read(piece.chunks(member.folder)))

    def _read(self, chunks: Iterable[bytes], times: int = 1) -> Iterator[bytes]:
        """Pass on chunks of files, not too fast; they end early if one cannot be read."""
        with suppress(OSError, SnapshotCorrupt):
            for chunk in chunks:
                self.nbytes += times * len(chunk)
                self._progress(self.nbytes)
                due_s = self._begun_s + self.nbytes / self._bytes_s if self._bytes_s else 0.0
                time.sleep(max(0.0, due_s - time.monotonic()))
                yield chunk

    def _mended(
        self, member: _Member, pieces: list[Piece], group: list[_Member], stripes: _Stripes | None
    ) -> tuple[str, str]:
        """Rebuild files of a folder, or the whole folder, and put them in place."""
        used = set[str]()
        with self._draft(member) as draft:
            for name, own in _files(pieces):
                with open(draft / name if draft else os.devnull, "wb") as out:
                    for piece in own:
                        for source, chunks in self._sources(member, piece, group, stripes):
                            out.seek(piece.start)
                            if piece.matches(_written(chunks, out)):
                                used.add(source)
                                break
                        else:
                            return BEYOND, ""
            source = ", ".join(sorted(used - {""})) or "its own bytes"
            if draft is None:
                gone = _hopeless([member]) == REMOVED
                return REMOVED if gone else REPAIRABLE, source
            return (REPAIRED if self._placed(member, draft, group) else REMOVED), source

    def _sources(
        self, member: _Member, piece: Piece, group: list[_Member], stripes: _Stripes | None
    ) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Yield the bytes of a piece as they are in several places, with the places."""
        yield "", self._read(piece.chunks(member.folder))
        if stripes is not None:
            decoded = stripes.decoded(group.index(member), piece)
            yield "parity", self._read(decoded, len(group))
        tried = 0
        for fetch in (lambda: None, lambda: self._copied(member.step)):
            fetch()
            for other, alike in self._held[piece.digest][tried:]:
                tried += 1
                yield other.at.address, self._read(alike.chunks(other.folder))

    @contextmanager
    def _draft(self, member: _Member) -> Iterator[Path | None]:
        """Yield a folder beside the step for what is to be put in its place; None to write none."""
        if not self._repair:
            yield None
            return
        member.at.folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".scrub-", dir=member.at.folder) as folder:
            draft = Path(folder, "step")
            draft.mkdir()
            yield draft

    def _placed(self, member: _Member, draft: Path, group: list[_Member]) -> bool:
        """Put the files of a draft in place, as old as others of the step, if all is as it was."""
        there = [each for each in (member, *group) if each.inode]
        with suppress(FileNotFoundError, IndexError):
            indexes = [each.folder / INDEX_NAME for each in there]
            times = next(filter(Path.exists, indexes), indexes[0]).stat()
            for path in draft.iterdir():
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
                persist_format.make_durable(path)
            if _hopeless(there) == BEYOND:
                done = member.at.mend(member.step, draft, member.inode)
                member.inode = member.at.inode(member.step)
                return done
        return False

    def _parity(self, group: list[_Member], text: str) -> Iterator[Finding]:
        """Add parity to an intact step, or make it anew if some of it is damaged or missing."""
        told = persist_format.parsed(text.encode(), NOTE_NAME)["parity"] if text else {}
        damaged = [m for m in group if not text or not self._is_protected(m, text, told)]
        problem = "it is not intact"
        with ExitStack() as stack:
            drafts = [stack.enter_context(self._draft(m)) for m in group if damaged]
            stripes, rows = _Stripes(group), dict[str, Piece]()
            for node, draft in enumerate(filter(None, drafts)):
                with open(draft / PARITY_NAME, "wb") as out:
                    chunks = self._read(stripes.parity(node), len(group))
                    found = persist_format.digest_of(_written(chunks, out))
                if os.stat(out.name).st_size == stripes.length(node):  # else it could not be read
                    rows[group[node].name] = Piece(PARITY_NAME, 0, stripes.length(node), found)
            known = {name: Piece(*row) for name, row in told.items()} or rows
            sound = len(rows) == len(group) and rows == known
            lists = {member.name: member.pieces for member in group}
            note = text or persist_format.rendered({"members": lists, "parity": rows})
            for member, draft in zip(group, filter(None, drafts), strict=False):
                placed = False
                if sound and member in damaged:
                    (draft / NOTE_NAME).write_text(note)
                    placed = self._placed(member, draft, group)
                if text and member in damaged:
                    verdict = REPAIRED if placed else _hopeless([member])
                    yield member.finding(PARITY_NAME, problem, verdict, "the intact files")
        for member in damaged if text and not self._repair else ():
            yield member.finding(PARITY_NAME, problem, REPAIRABLE, "the intact files")

    def _is_protected(self, member: _Member, text: str, told: dict[str, list[Any]]) -> bool:
        wrong = self._damage(member, PARITY_NAME, [Piece(*told[member.name])])
        return not wrong and text in _notes([member])


def _hopeless(group: list[_Member]) -> str:
    """Return the verdict on what cannot be repaired: unless the run has removed it meanwhile."""
    return BEYOND if all(m.at.inode(m.step) == m.inode for m in group) else REMOVED


def _files(pieces: Iterable[Piece]) -> list[tuple[str, list[Piece]]]:
    return [(name, list(own)) for name, own in groupby(pieces, lambda each: each.file)]


def _written(chunks: Iterable[bytes], out: Any) -> Iterator[bytes]:
    for chunk in chunks:
        out.write(chunk)
        yield chunk


def _notes(members: Iterable[_Member]) -> dict[str, dict[str, list[Piece]]]:
    """Return the pieces of the members of each intact ``parity.json``, by its text."""
    found = dict[str, dict[str, list[Piece]]]()
    for member in members:
        with suppress(OSError, SnapshotCorrupt, UnicodeDecodeError):
            text = (member.folder / NOTE_NAME).read_text()
            lists = persist_format.parsed(text.encode(), member.folder)["members"]
            found[text] = {name: [Piece(*row) for row in rows] for name, rows in lists.items()}
    return found


def _is_of(pieces: list[Piece], member: _Member | None) -> bool:
    """Return whether a folder's ``checkpoint.json`` is the one that is listed, or is damaged."""
    with suppress(OSError, SnapshotCorrupt):
        if member is not None and persist_format.read_index(member.folder):
            listed = next(piece for piece in pieces if piece.file == INDEX_NAME)
            return listed.matches(listed.chunks(member.folder))
    if member is None:
        return False
    for piece in (each for each in pieces if each.file.endswith(".manifest")):
        with suppress(OSError, SnapshotCorrupt):
            data = (member.folder / piece.file).read_bytes()
            manifest.decode(data, manifest.digest_of(data), opaque=True)  # raises if it is damaged
            return piece.matches([data])
    return True
