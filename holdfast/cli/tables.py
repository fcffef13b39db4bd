"""The output of the verbs: tables on the terminal, and files."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.errors import ConfigError
from holdfast.logs import printable

_UNBOUNDED_COLUMNS = 100_000
_FOLDED_ROWS = 300  # rich takes half a millisecond for a row


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
    right: Sequence[str] = (),
) -> None:
    """Print rows as a table on standard output; cells are shown by ``str``.

    On a terminal, cells of up to 300 rows are folded to its width. More rows, and all rows in a
    file or pipe, are one line each. Columns whose headings are in ``right`` are aligned right.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if len(cells) > _FOLDED_ROWS:
        _print_lines(columns, cells, title, right)
        return
    table = Table(
        title=Text(printable(title)) if title else None, box=box.SIMPLE_HEAD, title_justify="left"
    )
    for name in columns:
        side: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(Text(name), justify=side, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _natural_width(console, table)
    console.print(table)


def _print_lines(
    columns: Sequence[str], cells: Iterable[Sequence[str]], title: str, right: Sequence[str]
) -> None:
    lines = [columns, *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [">" if name in right else "<" for name in columns]
    row = "   ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    if title:
        print(printable(title))
    for line in lines:
        print(f"  {row.format(*line)}".rstrip())


def _natural_width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(width=_UNBOUNDED_COLUMNS)).maximum


def check_writable(path: Path | None) -> None:
    """Raise ConfigError if a file cannot be written; to be called before results are computed."""
    if path is None:
        return
    try:
        if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise ConfigError(
                f"cannot write {path}: {path.parent} is no writable directory; name one"
            )
        if path.is_dir():
            raise ConfigError(f"cannot write {path}: it is a directory; name a file in it")
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"cannot write {path}: it is a device or a pipe, which would be replaced by a "
                "file; name a file"
            )
        with suppress(FileNotFoundError):
            os.lstat(_draft(path))
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:  # such as a name that is too long, or a read-only file system
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def say(text: str, *, file: TextIO | None = None, flush: bool = False) -> None:
    """Print a line in which paths, names and values from files cannot write to the terminal."""
    print(printable(text), file=file, flush=flush)


def write_text(path: Path, text: str) -> None:
    """Write a text file, replacing an older one atomically; raise ConfigError if that fails."""
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a directory; name a file in it")
    draft = _draft(path)
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"cannot write {path}: {error.strerror}; name a writable file") from error


def write_json(path: Path | None, data: object) -> None:
    """Write data as a JSON file, as ``write_text`` does; do nothing without a path.

    Numbers that JSON lacks are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
    """
    if path is not None:
        write_text(path, json.dumps(_plain(data), indent=2, allow_nan=False) + "\n")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value
