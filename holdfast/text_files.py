"""Reading of text files that a user names."""

import errno
import os
import stat
from pathlib import Path

# What parsers of JSON and TOML raise for a text that is none; RecursionError if it nests too deep.
UNPARSABLE = (ValueError, RecursionError)


def read_text(path: Path) -> str:
    """Read a text file in UTF-8.

    Raises:
        OSError: The file cannot be read, or it is a device or a pipe, which might never end.
        UnicodeDecodeError: It is not UTF-8.
    """
    check_ends(path)
    return path.read_text(encoding="utf-8")


def check_ends(path: Path) -> None:
    """Raise OSError if a path is a device, a pipe or a socket, except the null device."""
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or path.samefile(os.devnull):
        return
    raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", str(path))
