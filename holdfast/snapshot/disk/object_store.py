"""An object store, such as S3, as the few operations that checkpoints need of it.

obstore, the Python interface of the Rust crate ``object_store``, does the work: requests, retries,
multipart uploads, and credentials from the environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``), from
the machine's role, or from a web identity.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from holdfast.errors import ConfigError

CHUNK_BYTES = 8 * 2**20
_RETRIES, _RETRY_S = 3, 20
_NUMBERS = ("keep_every", "max_mb_s")


def is_url(place: object) -> bool:
    """Return true if a ``persist_dir`` names an object store and not a folder."""
    return "://" in str(place)


def local_folder(place: str) -> Path:
    """Return the folder that a ``persist_dir`` names, or in which its uploads are staged."""
    return Path(Location.parse(place).staging if is_url(place) else place)


@dataclass(frozen=True)
class Location:
    """The address of checkpoints in an object store: ``s3://bucket/prefix?option=value&…``.

    Options:
        staging: the local folder in which checkpoints are written before they are uploaded; empty
            for a temporary one.
        keep_every: steps that are a multiple of this number are never removed; 0 for none.
        max_mb_s: the most megabytes that are uploaded in a second; 0 for no limit.
    """

    address: str
    staging: str = ""
    keep_every: int = 0
    max_mb_s: int = 0

    @classmethod
    def parse(cls, text: str) -> "Location":
        """Return the location that a text names, or raise ConfigError for an unknown option."""
        address, _, query = text.partition("?")
        options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
        if odd := sorted(options.keys() - {"staging", *_NUMBERS}):
            known = ", ".join(("staging", *_NUMBERS))
            raise ConfigError(f"{text}: there is no option {odd[0]!r}; there are {known}")
        for name in options.keys() & set(_NUMBERS):
            if not options[name].isdigit():
                raise ConfigError(f"{text}: {name} must be a whole number of at least 0")
            options[name] = int(options[name])
        return cls(address.rstrip("/"), **options)

    def inside(self, folder: str, staging: Path) -> "Location":
        """Return the location of a folder in this one; ``staging`` is used if none was given."""
        address = f"{self.address}/{folder}".rstrip("/")
        return replace(self, address=address, staging=str(Path(self.staging or staging) / folder))

    def __str__(self) -> str:
        options = {name: value for name, value in vars(self).items() if value}
        del options["address"]
        return self.address + (f"?{urlencode(options, safe='/')}" if options else "")


class ObjectStore:
    """The objects at one location; every failure of the store is an ``OSError``.

    Creating it sends nothing. A request takes at most 60 s, and is repeated for at most 20 s.

    Raises:
        ConfigError: the address cannot be used, or the extra ``storage`` is not installed.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        retries: Any = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
        # An endpoint without TLS is used only if its address begins with http:.
        client: Any = {"connect_timeout": "5s", "timeout": "60s", "allow_http": True}
        try:
            import obstore
            from obstore.store import from_url

            self._obstore: Any = obstore
            self._store: Any = from_url(
                location.address, client_options=client, retry_config=retries
            )
        except ImportError as error:
            text = "pip install 'torch-holdfast[storage]' for persist_dir"
            raise ConfigError(f"{text} {location.address}: {error}") from error
        except Exception as error:
            raise ConfigError(f"cannot use persist_dir {location.address}: {error}") from error

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except self._obstore.exceptions.BaseError as error:
            reason = str(error).partition("\n\nDebug source")[0]
            raise OSError(f"{self._location.address}/{name}: {reason}") from error

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the names of all objects in a folder and below it, with their sizes in bytes."""
        with self._failing(folder):
            pages = self._obstore.list(self._store, folder or None)
            return {found["path"]: found["size"] for page in pages for found in page}

    def put(self, name: str, content: bytes | Path) -> None:
        """Write an object, a file in parts if it is large; it appears complete or not at all."""
        limit, what = self._location.max_mb_s * 10**6, content
        paced = _paced(what, limit) if limit and isinstance(what, Path) else what
        with self._failing(name):
            self._obstore.put(self._store, name, paced, chunk_size=CHUNK_BYTES, max_concurrency=4)

    def get(self, name: str) -> bytes:
        """Return the content of a small object."""
        with self._failing(name):
            return bytes(self._obstore.get(self._store, name).bytes())

    def get_file(self, name: str, nbytes: int, path: Path) -> None:
        """Read an object of ``nbytes`` bytes into a file, in parts, each tried several times."""
        with open(path, "wb") as file:
            for start in range(0, nbytes, CHUNK_BYTES):
                file.write(self._part(name, start, min(CHUNK_BYTES, nbytes - start), _RETRIES))

    def _part(self, name: str, start: int, length: int, retries: int) -> bytes:
        try:
            with self._failing(name):
                return bytes(self._obstore.get_range(self._store, name, start=start, length=length))
        except OSError:
            if not retries:
                raise
            return self._part(name, start, length, retries - 1)

    def rename(self, name: str, other: str) -> None:
        """Copy an object, then delete it under its former name."""
        with self._failing(name):
            self._obstore.rename(self._store, name, other)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        with self._failing("".join(names[:1])):
            self._obstore.delete(self._store, names)


def _paced(path: Path, bytes_s: int) -> Iterator[bytes]:
    """Yield a file's content, not faster than a number of bytes in a second."""
    begun_s, sent = time.monotonic(), 0
    with open(path, "rb") as file:
        while chunk := file.read(min(CHUNK_BYTES, bytes_s // 4)):
            yield chunk
            sent += len(chunk)
            time.sleep(max(0.0, begun_s + sent / bytes_s - time.monotonic()))
