"""A model under study: its sizes, batch and loss, and the matmul of each attention matrix."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

GEMMS = ("Q", "K", "V", "AS", "CL", "O")

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Size:
    """The sizes of a transformer and of its batches.

    ``inner`` is the feed-forward width, ``vocabulary`` the number of tokens, ``length`` the number
    of tokens in a sequence and ``batch`` the number of sequences.
    """

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    length: int
    batch: int


@dataclass(frozen=True)
class Matrix:
    """The product that computes a matrix of an attention block.

    Attributes:
        gemm: Site of the product without its role, such as ``blocks.0.attn/bmm#2``.
        part, parts: The matrix is block number ``part`` of ``parts`` equal blocks of columns, if
            one product computes Q, K and V.
    """

    gemm: str
    part: int = 0
    parts: int = 1

    @property
    def forward(self) -> str:
        """The site of the forward product."""
        return f"{self.gemm}/forward"

    def of(self, output: torch.Tensor) -> torch.Tensor:
        """Return a view of the matrix in the product's output [.., parts · columns]."""
        return output.chunk(self.parts, -1)[self.part]


@dataclass(frozen=True)
class Subject:
    """A model in training mode with a batch and a loss.

    Attributes:
        name: Family of the model, one of ``FAMILIES``.
        matrices: Q, K, V, AS, CL and O of the first attention block, without those that are fused.
        compute: Loss function of a model and a batch.
    """

    name: str
    model: nn.Module
    batch: Batch
    matrices: Mapping[str, Matrix]
    compute: Callable[[nn.Module, Batch], torch.Tensor]

    def loss(self, batch: Batch | None = None) -> torch.Tensor:
        """Compute the loss of ``batch``, by default of the subject's own batch."""
        return self.compute(self.model, self.batch if batch is None else batch)


@dataclass(frozen=True)
class Options:
    """The settings with which a model is built; the generator draws its inputs."""

    size: Size
    attention: str
    dropout: float
    generator: torch.Generator


@dataclass(frozen=True)
class Family:
    """A family of models: ``build`` makes the module, ``inputs`` a batch for it."""

    build: Callable[[Options], nn.Module]
    inputs: Callable[[Options], Batch]
    matrices: Callable[[str], Mapping[str, Matrix]]
    compute: Callable[[nn.Module, Batch], torch.Tensor]
    attentions: tuple[str, ...] = ("eager", "sdpa")


def separate(
    block: str, names: str, op: str, last: str | None = None
) -> Callable[[str], Mapping[str, Matrix]]:
    """Return the sites of a block with separate products for Q, K, V and O, by module names."""
    *inputs, output = names.split()
    projections = {
        matrix: Matrix(f"{block}.{name}/{op}") for matrix, name in zip("QKV", inputs, strict=True)
    }
    return _around(block, projections, Matrix(f"{_absolute(block, output)}/{last or op}"))


def _absolute(block: str, name: str) -> str:
    """Return the path of a module below a block, where each leading dot goes up by one module."""
    while name.startswith("."):
        block, name = block.rpartition(".")[0], name[1:]
    return f"{block}.{name}"


def together(block: str, qkv: str, output: str) -> Callable[[str], Mapping[str, Matrix]]:
    """Return the sites of a block with one product for Q, K and V."""
    return _around(
        block, {matrix: Matrix(qkv, part, 3) for part, matrix in enumerate("QKV")}, Matrix(output)
    )


def _around(
    block: str, projections: Mapping[str, Matrix], output: Matrix
) -> Callable[[str], Mapping[str, Matrix]]:
    inner = {"AS": Matrix(f"{block}/bmm"), "CL": Matrix(f"{block}/bmm#2")}

    def matrices(attention: str) -> Mapping[str, Matrix]:
        fused = attention == "sdpa"
        return {**projections, **({} if fused else inner), "O": output}

    return matrices
