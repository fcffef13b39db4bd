"""Sources, which return rows of stored data that their checksums cannot repair."""

from collections.abc import Callable

import torch

from holdfast.errors import ConfigError

Source = Callable[[int], torch.Tensor]


def row_from(
    source: Source,
    row: int,
    *,
    of: str,
    stored: tuple[torch.dtype, int],
    count: int,
    pack: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Ask a source for a row, and return it in the form in which it is stored.

    Args:
        source: Function that returns a row by its number, as stored or as floats.
        row: Number of the row.
        of: Name of the data, for messages.
        stored: Dtype and number of elements of a stored row.
        count: Number of floats of a row.
        pack: Converts finite floats [count] to the stored form.

    Raises:
        ConfigError: The source returned something else.
    """
    given = source(row)
    if not isinstance(given, torch.Tensor):
        raise ConfigError(f"the source of {of} gave {given!r} for row {row}: give a tensor")
    given, (dtype, size) = given.detach().cpu(), stored
    if given.dtype is dtype and given.shape == (size,):
        return given
    if given.is_floating_point() and given.shape == (count,) and bool(given.isfinite().all()):
        return pack(given)
    raise ConfigError(
        f"the source of {of} gave {given.dtype} {list(given.shape)} for row {row}: give {count} "
        f"finite floats, or {size} elements of {dtype} as stored"
    )
