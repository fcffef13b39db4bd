"""The plan of a campaign: its cells in a fixed order, their seeds, and a digest of the whole."""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import torch

from holdfast.abft.thresholds.protocol import ACCUMULATION
from holdfast.errors import ConfigError
from holdfast.inject.schedule import TILE_SITES
from holdfast_lab.campaign.models import (
    EXTREME_FAULTS,
    FAULTS,
    fault_names,
    in_class,
    undirected_flips,
)
from holdfast_lab.distributions import COHERENT, RANDOM

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
OPERATORS = {
    "mm": "A B",
    "addmm": "beta D + alpha A B",
    "bmm": "a batch of A B",
    "baddbmm": "a batch of beta D + alpha A B",
    "linear": "x Wᵀ + bias, forward",
    "linear_grad_input": "its gradient of x",
    "linear_grad_weight": "its gradient of W",
    "attention": "fused attention on CPU, forward and backward, tile by tile: by request",
}
ATTENTION = "attention"
PRODUCTS = tuple(operator for operator in OPERATORS if operator != ATTENTION)
SITES = {
    "output": "the product in memory, before it is verified",
    "accumulator": "a partial sum at a random depth k (emulated), rounded once into the product",
    "operand_a": "an element of A as the product reads it; memory keeps the right value",
    "operand_a_memory": "an element of A in memory, before the product: not covered, by request",
    "operand_b": "an element of B in memory, after its checksum was encoded",
    "checksum": "the checksum of B",
    "cached_checksum": "the checksum of a weight, kept from an earlier product",
    "statistics": "the other numbers kept of B: its statistics and the checksum's fingerprint",
}
UNCOVERED_SITES = ("operand_a_memory",)
CHECKSUM_SITES = ("checksum", "cached_checksum", "statistics")
KEEP_WEIGHT = ("linear", "linear_grad_input")  # B is a parameter, whose checksum is kept
DISTRIBUTIONS = {**RANDOM, **COHERENT}

# More INF, NaN and near-INF run end to end, because the claim is that all of them are repaired.
EXTREME_FACTOR = 50

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Cell:
    """A combination of the campaign's axes; every rate is measured within one cell.

    ``shape`` is (m, k, n) of the operator ``A [m, k] B [k, n]``. A linear layer has m inputs, k in
    and n out features, and its gradients are products of (m, n, k) and (k, m, n). Attention has m
    queries and n keys of k elements each.
    """

    operator: str
    dtype: str
    shape: Shape
    distribution: str
    site: str
    fault: str

    @property
    def key(self) -> str:
        """The cell's name, unique in every plan."""
        sizes = "x".join(map(str, self.shape))
        return "/".join(
            (self.operator, self.dtype, sizes, self.distribution, self.site, self.fault)
        )


@dataclass(frozen=True)
class Block:
    """The axes of a part of a plan, which contains all their combinations.

    ``sites`` are those of products; ``tiles`` are those of attention, if it is asked for.
    """

    operators: Sequence[str]
    sites: Sequence[str]
    shapes: Sequence[Shape]
    distributions: Sequence[str]
    tiles: Sequence[str] = ()


@dataclass(frozen=True)
class Preset:
    """Size of a campaign: its blocks, trials per cell, and how many of them run end to end."""

    blocks: Sequence[Block]
    trials: int
    end_to_end: int


@dataclass(frozen=True)
class Plan:
    """The complete description of a campaign.

    Attributes:
        cells: Cells in the order of the results.
        trials: Number of faults injected in each cell.
        end_to_end: Number of them that also run through interception and repair; ``EXTREME_FACTOR``
            times as many for INF, NaN and near-INF.
        seed: Seed of everything that is drawn.
    """

    cells: tuple[Cell, ...]
    trials: int
    end_to_end: int
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("end_to_end", 0)):
            if getattr(self, name) < least:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} {getattr(self, name)} must be at least {least}")
        if not self.cells:
            raise ConfigError("no cell matches: widen --operator, --site, --fault or --dtype")

    def seed_of(self, *names: object) -> int:
        """Return a 63-bit seed for one purpose: a hash of the root seed and the names."""
        text = json.dumps([self.seed, *names])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def end_to_end_of(self, cell: Cell) -> int:
        """Return how many trials of a cell run end to end."""
        factor = EXTREME_FACTOR if cell.fault in EXTREME_FAULTS else 1
        return min(self.trials, factor * self.end_to_end)

    def digest(self) -> str:
        """Return a digest of the whole plan, equal for equal plans on every machine."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


_DEFAULT_SITES = tuple(site for site in SITES if site not in UNCOVERED_SITES)

QUICK = Preset(
    blocks=(
        Block(PRODUCTS, _DEFAULT_SITES, ((32, 128, 64),), ("n01",), tuple(TILE_SITES)),
        Block(("mm",), ("output",), ((32, 128, 64),), (*RANDOM, "constant", "softmax")),
    ),
    trials=128,
    end_to_end=2,
)
FULL = Preset(
    blocks=(
        Block(PRODUCTS, _DEFAULT_SITES, ((128, 1024, 256),), ("n01",), tuple(TILE_SITES)),
        Block(
            ("mm",),
            ("output",),
            ((128, 1024, 256), (128, 4096, 256), (512, 512, 512)),
            tuple(DISTRIBUTIONS),
        ),
    ),
    trials=10_000,
    end_to_end=20,
)


@dataclass(frozen=True)
class Filters:
    """Values that replace an axis in every block; an empty one leaves the axis as it is."""

    operators: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    sites: Sequence[str] = ()
    faults: Sequence[str] = ()
    shapes: Sequence[Shape] = ()
    distributions: Sequence[str] = ()


EVERYTHING = Filters()


def make_plan(
    preset: Preset,
    filters: Filters = EVERYTHING,
    *,
    trials: int | None = None,
    end_to_end: int | None = None,
    seed: int = 0,
) -> Plan:
    """Make a plan of the cells of all blocks, with the sizes of a preset unless others are given.

    Raises:
        ConfigError: No cell is left, a number is too small, or a fault does not exist.
    """
    _check_faults(filters.faults)
    _check_sites(filters)
    cells = dict.fromkeys(cell for block in preset.blocks for cell in _cells(block, filters))
    ordered = sorted(cells, key=_order)
    return Plan(
        tuple(ordered),
        preset.trials if trials is None else trials,
        preset.end_to_end if end_to_end is None else end_to_end,
        seed,
    )


def injected_dtype(dtype: torch.dtype, site: str) -> torch.dtype:
    """Return the dtype of the values that a fault at a site changes."""
    if site in CHECKSUM_SITES:
        return torch.float64
    return ACCUMULATION[dtype] if site == "accumulator" or site in TILE_SITES else dtype


def _cells(block: Block, filters: Filters) -> Iterator[Cell]:
    for operator, dtype, shape, distribution in product(
        filters.operators or block.operators,
        filters.dtypes or DTYPES,
        filters.shapes or block.shapes,
        filters.distributions or block.distributions,
    ):
        for site in _sites(block, filters, operator):
            for fault in _faults(injected_dtype(DTYPES[dtype], site), site, filters.faults):
                yield Cell(operator, dtype, shape, distribution, site, fault)


def _sites(block: Block, filters: Filters, operator: str) -> list[str]:
    """List the wanted fault sites of an operator."""
    fused = operator == ATTENTION
    own, usual = (TILE_SITES, block.tiles) if fused else (SITES, block.sites)
    kept = operator in KEEP_WEIGHT
    wanted = [site for site in filters.sites or usual if site in own]
    return [site for site in wanted if kept or site != "cached_checksum"]


def _faults(dtype: torch.dtype, site: str, wanted: Sequence[str]) -> list[str]:
    """List the wanted faults for elements of a dtype at a site; all of them if none is named."""
    known = fault_names(dtype, matrix=site == "output")
    if not wanted:
        return known
    chosen = [fault for fault in known if any(in_class(fault, name) for name in wanted)]
    return chosen + [fault for fault in undirected_flips(dtype) if fault in wanted]


def _order(cell: Cell) -> tuple[object, ...]:
    """Return a sort key that keeps cells with the same products together."""
    return (
        list(OPERATORS).index(cell.operator),
        list(DTYPES).index(cell.dtype),
        cell.shape,
        list(DISTRIBUTIONS).index(cell.distribution),
        [*SITES, *TILE_SITES].index(cell.site),
    )


def _check_sites(filters: Filters) -> None:
    """Refuse sites that none of the operators has, which would otherwise be ignored."""
    tiles = set(TILE_SITES) if ATTENTION in filters.operators else set()
    products = set(SITES) if not filters.operators or {*filters.operators} - {ATTENTION} else set()
    for site in filters.sites:
        if site not in tiles | products:
            needed = ATTENTION if site in TILE_SITES else f"one of {', '.join(PRODUCTS)}"
            raise ConfigError(
                f"no operator asked for has the site {site!r}: add --operator {needed}"
            )


def _check_faults(wanted: Collection[str]) -> None:
    known = fault_names(torch.float64, matrix=True) + undirected_flips(torch.float64)
    for name in wanted:
        if not any(in_class(fault, name) for fault in known):
            raise ConfigError(
                f"unknown fault {name!r}; valid: {', '.join(FAULTS)}, and flip-BIT, flip-BIT-up, "
                "flip-BIT-down, flip-BIT-any"
            )
