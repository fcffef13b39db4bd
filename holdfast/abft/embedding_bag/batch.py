"""The indices, offsets and weights of a call, in the form that every implementation takes."""

from typing import NamedTuple

import torch

from holdfast.errors import ConfigError
from holdfast.memory import available_bytes

MODES = ("sum", "mean")
OUTPUTS = (torch.float32, torch.float16)
MUCH = 1 << 30  # bytes below which an allocation is not compared with the available memory
OF_BAG = 48  # bytes that the reference needs for each bag besides its output


class Batch(NamedTuple):
    """Bags of indices, and how they are pooled.

    Args:
        indices: int32 or int64, [count] with offsets, else [bags, size].
        offsets: Index at which each bag begins, int32 or int64; with ``include_last`` also the
            index at which the last one ends.
        weights: fp32, one for each index; for sums only.
        mode: ``"sum"`` or ``"mean"``.
        padding: Row that is skipped; −1 for none.
        dtype: Dtype of the output, fp32 or fp16.
        prefetch: True if rows are fetched ahead.
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
        """Return the index at which each bag begins and the last one ends, int64 [bags + 1]."""
        if self.offsets is None:
            bags, size = self.indices.shape
            return torch.arange(bags + 1) * size
        given = self.offsets.long()
        if self.include_last:
            return given
        return torch.cat((given, torch.tensor([self.indices.numel()])))

    def bag_of_each(self) -> torch.Tensor:
        """Return the bag of each index, int64 [count]; −1 for indices after the last bag."""
        bounds = self.bounds()
        bags = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
        left = self.indices.numel() - len(bags)
        return torch.cat((bags, torch.full((left,), -1)))

    def on(self, device: torch.device | str) -> "Batch":
        """Move the tensors to a device."""
        offsets, weights = (
            None if each is None else each.to(device) for each in (self.offsets, self.weights)
        )
        return self._replace(indices=self.indices.to(device), offsets=offsets, weights=weights)

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
    """Raise ConfigError or TypeError for a batch that no implementation takes.

    The values of indices and offsets are checked where they are read.
    """
    given = {"offsets": batch.offsets, "per_sample_weights": batch.weights}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, tensor in ({"indices": batch.indices} | tensors).items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if batch.mode not in MODES:
        raise ConfigError(f"mode = {batch.mode!r} has no checksum: use one of {', '.join(MODES)}")
    if batch.dtype not in OUTPUTS:
        raise ConfigError(f"dtype = {batch.dtype} of the output must be float32 or float16")
    if batch.weights is not None and batch.mode != "sum":
        raise ConfigError("per_sample_weights are for mode 'sum' only, as in torch")


def plain(name: str, given: torch.Tensor) -> torch.Tensor:
    """Return a dense CPU tensor, copied if it is not contiguous; raise if it is no such tensor."""
    dense = given.layout is torch.strided and not given.is_nested
    if dense and given.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, not on {given.device}")
    if not dense or torch._C._dispatch_keys(given).has(torch._C.DispatchKey.Python):
        raise TypeError(f"{name} must be a dense tensor with values, got {type(given).__name__}")
    if not given.is_contiguous():
        check_memory(name, given.numel() * given.element_size())
    return given.detach().resolve_neg().contiguous()


def check_memory(what: str, wanted: int) -> None:
    """Raise ValueError if an allocation of so many bytes exceeds the available memory."""
    if wanted < MUCH:
        return
    available = available_bytes()
    if wanted > available:
        raise ValueError(
            f"{what} would take {wanted / 1e9:g} GB, and {available / 1e9:g} GB of memory are "
            "available: give fewer at once"
        )


def checked(batch: Batch, rows: int, dim: int) -> Batch:
    """Return a batch in contiguous memory; raise for invalid arguments as the native core does."""
    offsets, weights = batch.offsets, batch.weights
    batch = batch._replace(
        indices=plain("indices", batch.indices),
        offsets=None if offsets is None else plain("offsets", offsets),
        weights=None if weights is None else plain("weights", weights),
    )
    check_kinds(batch)
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


def check_kinds(batch: Batch) -> None:
    """Raise TypeError or ValueError for tensors of a wrong dtype or shape."""
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
