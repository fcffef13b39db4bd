"""The SMP's slots from outside: their memfds, and bits flipped in them."""

import os
from pathlib import Path
from typing import Any


def target(link: Path) -> str:
    # The SMP closes other descriptors meanwhile: one that is gone points nowhere.
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


def slot_files(pid: int) -> list[Path]:
    links = Path(f"/proc/{pid}/fd").iterdir()
    return [link for link in links if target(link).startswith("/memfd:holdfast-")]


def slot_file(status: dict[str, Any], step: int, rank: int = 0) -> Path:
    number = status["steps"][rank].index(step)
    name = f"/memfd:holdfast-{rank}-{number} "
    return next(f for f in slot_files(status["pid"]) if target(f).startswith(name))


def flip_a_bit(file: Path, at: int = 5) -> None:
    with open(file, "r+b", buffering=0) as memory:
        byte = os.pread(memory.fileno(), 1, at)[0]
        os.pwrite(memory.fileno(), bytes([byte ^ 1]), at)
