"""JSON files that state their format, a schema version and a digest of their content."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.text_files import UNPARSABLE, read_text


def write_document(path: Path, form: str, schema: int, name: str, content: object) -> None:
    """Write a JSON file with ``content`` under the key ``name``, replacing an older one atomically.

    Guarantees: if writing fails, the older file is unchanged.

    Raises:
        ConfigError: The file cannot be written; the message states the reason.
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
        path: Path of the file.
        form: Format that the file must state.
        schema: Schema version that the file must state.
        name: Key of the content in the file.
        what: Kind of file, as error messages call it.
        again: Advice for an unusable file, which ends error messages.

    Raises:
        ConfigError: The file cannot be read, is damaged, or has another format or schema version.
    """
    try:
        document = json.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {again}") from error
    except UNPARSABLE as error:
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
    """Check, before results are computed, that ``write_document`` will be able to store them.

    Raises:
        ConfigError: The file cannot be created, or a file of another format has this path.
    """
    ancestor = next(parent for parent in path.absolute().parents if parent.exists())
    if not (ancestor.is_dir() and os.access(ancestor, os.W_OK)):
        raise ConfigError(f"cannot write {path}: {ancestor} is no writable directory; name another")
    try:
        if path.exists() and not (path.is_file() and form.encode() in path.read_bytes()):
            raise ConfigError(f"{path} is there and no {what}; name another file")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name another file") from error
