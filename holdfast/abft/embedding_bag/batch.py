"""The indices, offsets and weights of a call, in the form that every implementation takes."""

from typing import NamedTuple

import torch

from holdfast.errors import ConfigError
from holdfast.memory import available_bytes

MODES = ("sum", "mean")
OUTPUTS = (torch.float32, torch.float16)
MUCH = 1 << 30  # bytes; less is not worth a look at what there is
OF_BAG = 48  # bytes beside its output: where it begins, what is expected of it


class Batch(NamedTuple):
    """Bags of indices.

    Args:
        indices: int32 or int64, [count] with offsets, else [bags, size].
        offsets: where bags begin, int32 or int64; with ``include_last`` also where the last ends.
        weights: fp32, one an index; only of sums.
        mode: one of ``MODES``.
        padding: a row that counts as absent; −1 for none.
        dtype: of the output, one of ``OUTPUTS``.
        prefetch: whether rows to come are fetched ahead.
    """

    indices: torch.Tensor
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    include_last: bool = False
    mode: str = "sum"
    padding: int = -1
    dtype: torch.dtype = torch.float32
    prefetch: bool = True

    def bounds(self) -> torch.Tensor:
        """Return where each bag begins and the last one ends, int64 [bags + 1]."""
        if self.offsets is None:
            bags, size = self.indices.shape
            return torch.arange(bags + 1) * size
        given = self.offsets.long()
        if self.include_last:
            return given
        return torch.cat((given, torch.tensor([self.indices.numel()])))

    def bag_of_each(self) -> torch.Tensor:
        """Return the bag that each index is in, int64 [count]; −1 after the last bag."""
        bounds = self.bounds()
        bags = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
        left = self.indices.numel() - len(bags)
        return torch.cat((bags, torch.full((left,), -1)))

    def only(self, bags: list[int]) -> "Batch":
        """Select some bags, in the given order."""
        bounds = self.bounds()
        spans = [torch.arange(int(bounds[bag]), int(bounds[bag + 1])) for bag in bags]
        chosen = torch.cat(spans)
        sizes = torch.tensor([0, *(len(span) for span in spans)])
        weights = None if self.weights is None else self.weights.flatten()[chosen]
        return self._replace(
            indices=self.indices.flatten()[chosen],
            offsets=sizes.cumsum(0),
            weights=weights,
            include_last=True,
        )


def check_batch(batch: Batch) -> None:
    """Refuse what no implementation takes; indices and offsets are checked where they are read.

    Raises:
        ConfigError: mode, dtype or weights are unusable.
        TypeError: what should be a tensor is none.
    """
    _check_is_tensor("indices", batch.indices)
    if batch.offsets is not None:
        _check_is_tensor("offsets", batch.offsets)
    if batch.weights is not None:
        _check_is_tensor("per_sample_weights", batch.weights)
    if batch.mode not in MODES:
        raise ConfigError(f"mode = {batch.mode!r} has no checksum: use one of {', '.join(MODES)}")
    if batch.dtype not in OUTPUTS:
        raise ConfigError(f"dtype = {batch.dtype} of the output must be float32 or float16")
    if batch.weights is not None and batch.mode != "sum":
        raise ConfigError("per_sample_weights are for mode 'sum' only, as in torch")


def _check_is_tensor(name: str, given: object) -> None:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(given).__name__}")


def plain(name: str, given: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in contiguous memory; copy only where they are not.

    Raises:
        TypeError, ValueError: it has no values, is not on the CPU, or would take too much memory.
    """
    dense = given.layout is torch.strided and not given.is_nested
    if dense and given.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, not on {given.device}")
    if not dense or torch._C._dispatch_keys(given).has(torch._C.DispatchKey.Python):
        raise TypeError(f"{name} must be a dense tensor with values, got {type(given).__name__}")
    if not given.is_contiguous():
        check_memory(name, given.numel() * given.element_size())
    return given.detach().resolve_neg().contiguous()


def check_memory(what: str, wanted: int) -> None:
    """Refuse to allocate more memory than is available.

    Raises:
        ValueError: with how much there is.
    """
    if wanted < MUCH:
        return
    available = available_bytes()
    if wanted > available:
        raise ValueError(
            f"{what} would take {wanted / 1e9:g} GB, and {available / 1e9:g} GB of memory are "
            "available: give fewer at once"
        )


def checked(batch: Batch, rows: int, dim: int) -> Batch:
    """Check a batch for the reference; return it in contiguous memory.

    Raises:
        TypeError, ValueError, IndexError: An argument is invalid, as in the native core.
    """
    offsets, weights = batch.offsets, batch.weights
    batch = batch._replace(
        indices=plain("indices", batch.indices),
        offsets=None if offsets is None else plain("offsets", offsets),
        weights=None if weights is None else plain("weights", weights),
    )
    _check_kinds(batch)
    bags = len(batch.indices if batch.offsets is None else batch.offsets)
    check_memory("the output", bags * (6 * dim + OF_BAG))
    if batch.offsets is not None:
        _check_offsets(batch, batch.offsets)
    used = batch.indices.flatten()[batch.bag_of_each() >= 0].long()
    outside = (used < 0) | (used >= rows)
    if outside.any():
        position = int(outside.nonzero()[0])
        raise IndexError(
            f"index {int(used[position])} at position {position} is outside the table's {rows} rows"
        )
    return batch


def _check_kinds(batch: Batch) -> None:
    for name, tensor in (("indices", batch.indices), ("offsets", batch.offsets)):
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if batch.indices.dim() != (2 if batch.offsets is None else 1):
        raise ValueError(
            "indices must be [count] with offsets or else [bags, count], got "
            f"{list(batch.indices.shape)}"
        )
    if batch.offsets is not None and batch.offsets.dim() != 1:
        raise ValueError(f"offsets must be a vector, got {list(batch.offsets.shape)}")
    if batch.weights is not None:
        if batch.weights.dtype != torch.float32:
            raise TypeError(f"weights must be float32, got {batch.weights.dtype}")
        if batch.weights.shape != batch.indices.shape:
            raise ValueError(
                f"weights must be one an index, {list(batch.indices.shape)}, got "
                f"{list(batch.weights.shape)}"
            )


def _check_offsets(batch: Batch, offsets: torch.Tensor) -> None:
    count = batch.indices.numel()
    if not len(offsets) and (batch.include_last or count):
        raise ValueError(
            "offsets are empty: with include_last_offset one is the least"
            if batch.include_last
            else f"offsets are empty: no bag has the {count} indices"
        )
    bounds = batch.bounds()
    if bounds[0] != 0:
        raise ValueError(f"offsets[0] = {int(bounds[0])} must be 0: bags begin there")
    if (bounds.diff() < 0).any() or bounds[-1] > count:
        raise ValueError(
            f"offsets must rise and stay within the {count} indices, got {offsets.tolist()}"
        )
