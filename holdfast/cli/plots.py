"""Writing plots with matplotlib, which is optional, and checks before results are computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.tables import check_writable
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def available() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_drawable(path: Path) -> None:
    """Raise ConfigError if a plot cannot be written to this file."""
    check_writable(path)
    if path.suffix not in FORMATS:
        raise ConfigError(f"cannot draw {path}: name a file that ends in {', '.join(FORMATS)}")
    if not available():
        raise ConfigError("--plot needs matplotlib: pip install 'torch-holdfast[plot]'")


@contextmanager
def drawn(path: Path, size: tuple[float, float]) -> "Iterator[Figure]":
    """Make a figure of this size in inches, and save it when the context ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    """Write a figure into a file, in the format of its ending."""
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name a writable file") from error
