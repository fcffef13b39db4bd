"""JSON files that carry a format, a schema version and the digest of their content."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError


def write_document(path: Path, form: str, schema: int, name: str, content: object) -> None:
    """Write ``content`` under ``name``, replacing an older file in a single step.

    Guarantees: the old file stays, whole, on any failure.

    Raises:
        ConfigError: it cannot be written, with the reason.
    """
    content = json.loads(json.dumps(content, allow_nan=False))
    document = {"format": form, "schema": schema, "digest": state_digest(content)}
    text = json.dumps(document | {name: content}, indent=1) + "\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def read_document(path: Path, form: str, schema: int, name: str, *, what: str, again: str) -> Any:
    """Read the content of a file that ``write_document`` wrote.

    Args:
        path: the file.
        form: the format that it must state.
        schema: the version of the format.
        name: the name under which the content is kept.
        what: the kind of file, for messages.
        again: the remedy, for messages.

    Raises:
        ConfigError: it cannot be read, is damaged, of another kind or another schema version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {again}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); {again}") from error
    if not isinstance(document, dict) or document.get("format") != form:
        raise ConfigError(f"{path} is no {what}; {again}")
    if document.get("schema") != schema:
        version = document.get("schema")
        raise ConfigError(f"{path} has schema version {version!r}, not {schema}; {again}")
    content = document.get(name)
    stored, actual = document.get("digest"), state_digest(content)
    if stored != actual:
        raise ConfigError(f"{path} is damaged (digest {actual}, not {stored}); {again}")
    return content


def check_replaceable(path: Path, form: str, what: str) -> None:
    """See that ``write_document`` may write there, before the work that it is to keep.

    Raises:
        ConfigError: no file can be made there, or one is there that is of another kind.
    """
    ancestor = next(parent for parent in path.absolute().parents if parent.exists())
    if not (ancestor.is_dir() and os.access(ancestor, os.W_OK)):
        raise ConfigError(f"cannot write {path}: {ancestor} is no writable directory; name another")
    try:
        if path.exists() and form.encode() not in path.read_bytes():
            raise ConfigError(f"{path} is there and no {what}; name another file")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name another file") from error
