"""EmbeddingBag in plain torch and fp64: the reference of the native kernels."""

import torch

from holdfast import native
from holdfast.abft.embedding_bag.batch import Batch, checked
from holdfast.abft.embedding_bag.rows_reference import checksums, signs
from holdfast.abft.embedding_bag.table import Table
from holdfast.abft.policy import count_false_alarms

SIGMAS = 8.0
native.agree("bag_sigmas", SIGMAS)
UNIT = 2.0**-24


def exact_bags(table: Table, batch: Batch) -> torch.Tensor:
    """Compute ``R = Σ_i w_i (α_i row_i + β_i)``, or its mean, in fp64 [bags, dim]."""
    return _bags(batch, table.values(_pooled_indices(table, batch)[0]), table)


def _pooled_indices(table: Table, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows, bags and weights of all indices that are in a bag and are no padding."""
    indices, bags = batch.indices.flatten().long(), batch.bag_of_each()
    counts = (bags >= 0) & (indices != batch.padding)
    weights = torch.ones(len(indices)) if batch.weights is None else batch.weights.flatten()
    return indices[counts], bags[counts], weights.double()[counts]


def _bags(batch: Batch, rows: torch.Tensor, table: Table) -> torch.Tensor:
    _, bags, weights = _pooled_indices(table, batch)
    count = len(batch.bounds()) - 1
    pooled = torch.zeros(count, *rows.shape[1:], dtype=torch.float64)
    pooled.index_add_(0, bags, rows * weights.view(-1, *[1] * (rows.dim() - 1)))
    if batch.mode == "mean":
        sizes = torch.bincount(bags, minlength=count).clamp(min=1)
        pooled /= sizes.view(-1, *[1] * (rows.dim() - 1))
    return pooled


def embedding_bag_reference(
    table: Table, batch: Batch, site: object = None, *, check: bool = True
) -> tuple[torch.Tensor, list[int]]:
    """Pool in fp64 and round once; return the output and the bags that failed their check.

    ``site``, if it is callable, may change the pooled rows before they are checked.
    """
    batch = checked(batch, len(table), table.dim)
    pooled = exact_bags(table, batch).float()
    if callable(site):
        site(pooled)
    if not check:
        return pooled.to(batch.dtype), []
    indices, bags, _ = _pooled_indices(table, batch)
    expected = _bags(batch, _stored_sums(table, indices), table)
    weights = signs(table.dim)
    energy = pooled.double().square().sum(-1)
    # Each element is rounded once, and the sums by 2⁻⁵³ for each row and element.
    slack = _bags(batch, table.values(indices).abs().sum(-1), table).abs()
    terms = torch.bincount(bags, minlength=len(expected)) + table.dim
    bound = SIGMAS * UNIT * (energy / 3).sqrt() + terms * (2.0**-52 * slack + 2.0**-126)
    residual = (pooled.double() @ weights - expected).abs()
    suspect = ~(residual <= bound) | ~residual.isfinite()
    suspect &= ~_beyond_numbers(table, batch, pooled, residual)
    suspect[bags[~_intact(table, indices)]] = True
    return pooled.to(batch.dtype), [int(bag) for bag in suspect.nonzero().flatten()]


def _beyond_numbers(
    table: Table, batch: Batch, pooled: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """Mark bags that weights or an overflow made NaN or INF, as pooling again gives the same."""
    beyond = ~residual.isfinite()
    if beyond.any():
        beyond &= ~differing(exact_bags(table, batch).float(), pooled).any(-1)
        count_false_alarms(table.module, int(beyond.sum()))
    return beyond


def differing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Mark the elements whose bits differ; every NaN counts as equal to every other."""
    bits = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return (left.view(bits) != right.view(bits)) & ~(left.isnan() & right.isnan())


def _intact(table: Table, rows: torch.Tensor) -> torch.Tensor:
    """Mark the rows whose bytes and checksums agree, bool [count]."""
    unique, each = rows.unique(return_inverse=True)
    data, layout = table.data[unique], table.layout
    right = checksums(data, table.dim, table.kind, unique)
    return (data[:, layout.payload : layout.used] == right).all(-1)[each]


def _stored_sums(table: Table, rows: torch.Tensor) -> torch.Tensor:
    """Read Σ_j r_j row_j from the checksums of rows, fp64 [count]."""
    layout = table.layout
    if table.kind.dtype is not None:
        stored = table.data[rows, layout.payload : layout.payload + 8]
        return stored.contiguous().view(torch.float64).squeeze(-1)
    words = table.data[rows, layout.payload : layout.payload + 4].contiguous().view(torch.int32)
    codes = (words.squeeze(-1) << 8 >> 8).double()
    scale, bias = table.parameters(rows).double().unbind(-1)  # type: ignore[arg-type]
    return scale * codes + bias * signs(table.dim).sum()
