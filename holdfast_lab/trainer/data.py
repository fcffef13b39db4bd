"""The text a model is trained on, as bytes, and a loader that resumes bit for bit."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.digest.tensors import tensor_digest
from holdfast.errors import ConfigError

MAX_STDLIB_BYTES = 16 * 2**20

_SNIFF_BYTES = 8 * 2**10
# Third-party code and tests differ between installations of the same Python.
_LEFT_OUT = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
}


@dataclass(frozen=True)
class Corpus:
    """Training text: ``data`` is uint8 [bytes], and ``description`` says where it came from."""

    data: torch.Tensor
    description: str

    def __len__(self) -> int:
        return self.data.numel()


def read_corpus(folder: Path | None = None, *, max_bytes: int = MAX_STDLIB_BYTES) -> Corpus:
    """Read a corpus: the text files of a folder, or without one the standard library's sources.

    Files are joined in the order of their relative paths, so that the same files give the same
    bytes. A file with a NUL byte in its first 8 KiB is taken for binary and skipped; the
    description counts these. Links to folders are not followed.

    Args:
        folder: Folder that is read with its subfolders; None for the ``*.py`` files of the running
            Python, without tests, IDLE and installed packages.
        max_bytes: Number of bytes after which the standard library's sources are cut off.

    Raises:
        ConfigError: The folder is missing, not a directory, unreadable or without text.
    """
    if folder is None:
        return _read_stdlib(Path(sysconfig.get_path("stdlib")), max_bytes)
    with _readable(folder):
        if not folder.exists():
            raise ConfigError(f"no folder {folder}: give an existing folder of text files")
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a directory: give the folder that holds the text")
    texts, skipped = _read_texts(_files(folder, left_out=set()))
    text = b"".join(texts)
    if not text:
        raise ConfigError(f"no text in {folder} ({skipped} binary files): give a folder of text")
    origin = f"{len(texts)} text files of {folder}, {len(text)} bytes"
    return Corpus(_as_tensor(text), f"{origin}, {skipped} binary files skipped")


def _read_stdlib(folder: Path, max_bytes: int) -> Corpus:
    sources = [path for path in _files(folder, left_out=_LEFT_OUT) if path.suffix == ".py"]
    texts, _ = _read_texts(sources)
    text = b"".join(texts)[:max_bytes]
    if not text:
        raise ConfigError(f"no Python sources in {folder}: give a folder of text")
    origin = f"standard library of Python {platform.python_version()}"
    return Corpus(_as_tensor(text), f"{origin}, {len(text)} bytes")


def _files(folder: Path, *, left_out: set[str]) -> list[Path]:
    """List the regular files under a folder, ordered by their path relative to it."""
    found = []
    with _readable(folder):
        for parent, folders, names in os.walk(folder, onerror=_refuse):
            folders[:] = [name for name in folders if name not in left_out]
            found += [path for name in names if (path := Path(parent, name)).is_file()]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _refuse(error: OSError) -> None:
    raise error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise ConfigError(f"cannot read {where}: {error.strerror}; make it readable") from error


def _read_texts(paths: Iterable[Path]) -> tuple[list[bytes], int]:
    """Return the contents of the text files and the number of binary files."""
    texts, skipped = [], 0
    for path in paths:
        with _readable(path):
            content = path.read_bytes()
        if b"\0" in content[:_SNIFF_BYTES]:
            skipped += 1
        else:
            texts.append(content)
    return texts, skipped


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class ByteLoader:
    """An endless iterator of random batches of a corpus.

    Each batch is a pure function of (seed, rank, world_size, position) and the corpus. The global
    random state is neither read nor changed.

    Args:
        corpus: The text.
        context: Length of a sequence in bytes.
        batch_size: Number of sequences in a batch of this rank.
        seed: Determines the order of the data.
        rank: Number of this rank, which draws other sequences than any other rank.
        world_size: Number of ranks.

    Raises:
        ConfigError: A number is out of range, or the corpus is shorter than one sequence.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        context: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if context < 1 or batch_size < 1:
            raise ConfigError(f"context = {context} and batch_size = {batch_size} must be positive")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank = {rank} must be at least 0 and less than {world_size} ranks")
        if len(corpus) < context + 1:
            raise ConfigError(
                f"the corpus has {len(corpus)} bytes, one sequence needs {context + 1}: "
                "give more text or a shorter context"
            )
        self._corpus = corpus
        self._position = 0
        self._context = context
        self._batch_size = batch_size
        self._identity: dict[str, object] = {
            "seed": seed,
            "rank": rank,
            "world_size": world_size,
            "context": context,
            "batch_size": batch_size,
            "corpus_bytes": len(corpus),
            "corpus_digest": tensor_digest(corpus.data),
        }

    @property
    def position(self) -> int:
        """Number of batches handed out so far, which is the number of the next batch."""
        return self._position

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.batch(self._position)
        self._position += 1
        return batch

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of batch ``position``, int64 [batch_size, context] each."""
        starts = torch.randint(
            len(self._corpus) - self._context,
            (self._batch_size, 1),
            generator=self._generator(position),
        )
        windows = self._corpus.data[starts + torch.arange(self._context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _generator(self, position: int) -> torch.Generator:
        names = ("seed", "rank", "world_size")
        key = "/".join(str(self._identity[name]) for name in names) + f"/{position}"
        drawn = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(drawn, "little"))

    def state_dict(self) -> dict[str, object]:
        """Return the loader's position and what its batches depend on, as plain values.

        While batch n (from 0) is trained on, the position is n + 1.
        """
        return {"position": self._position, **self._identity}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at the position of another loader of the same data.

        Raises:
            ConfigError: The state is incomplete, or of a loader that yields other batches.
        """
        for name, mine in self._identity.items():
            if state.get(name) != mine:
                raise ConfigError(
                    f"the saved data position has {name} = {state.get(name)!r}, this run has "
                    f"{mine!r}: use the same, or start anew"
                )
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise ConfigError(f"the saved data position {position!r} is not a count of batches")
        self._position = position
